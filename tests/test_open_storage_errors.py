"""What places and open slots refuse, and that they refuse it before any byte is written."""

from __future__ import annotations

import numpy as np
import pytest
from openkit import fill_all, ints, rows
from storagekit import Pair, make_storage, snapshot

from pagedcache.errors import (
    BlockError,
    FormatError,
    InvalidArgumentError,
    InvalidPositionError,
    PagedCacheError,
    SlotError,
)
from pagedcache.spec import CacheSpec


# SPEC 7: what a format by channel cannot take is refused before any byte of K or V is written.
@pytest.mark.parametrize(("k_format", "v_format"), [("q4k", "q4_1"), ("float32", "q4k")])
def test_sealed_blocks_by_channel_are_written_whole(k_format: str, v_format: str) -> None:
    pair = Pair(k_format, v_format, block_size=4, layers=2)
    fill_all(pair, np.random.default_rng(5))
    storage, before = pair.storage, snapshot(pair.storage)
    k, v = rows(np.random.default_rng(6), pair, 8)
    for bad, at in (
        ([0], 0),
        ([0, 1, 2], 0),
        ([1, 2, 3, 4], 1),
        ([0, 1, 3, 2], 0),
        ([4, 5, 6, 7, 0], 0),
        ([0, 1, 2, 3, 4, 5, -1, 7], 4),
        ([16, 17, 8, 9, 10], 8),
        ([0, 1, 2, 3, 0, 1], 0),
        ([-1, -1, 3], 3),
        ([15], 15),
    ):
        ready = storage.check_rows(0, k[: len(bad)], v[: len(bad)], len(bad))
        with pytest.raises(SlotError, match="whole") as caught:
            storage.store(0, *ready, np.array(bad))
        assert caught.value.slot == at
    for bad in ([32], [-2], [0, 1, 2, 3, 2**62]):
        ready = storage.check_rows(0, k[: len(bad)], v[: len(bad)], len(bad))
        with pytest.raises(SlotError, match="outside"):
            storage.store(0, *ready, np.array(bad))
    for src, dst, count in ((4, 0, 3), (0, 1, 1), (1, 1, 2)):
        with pytest.raises(InvalidPositionError, match="whole") as error:
            storage.copy_blocks(ints(4, src), ints(5, dst), ints(4, count))
        assert (error.value.position, error.value.length) == (count, 4)
    for src, dst in ((0, 1), (16, 15), (5, 5)):
        with pytest.raises(FormatError, match=f"slot {dst} of a sealed block"):
            storage.copy_tokens(np.array([16, src]), np.array([17, dst]))
    assert snapshot(storage) == before
    # what is allowed beside: whole blocks in any order, open slots in any order, skipped tokens
    pair.store_at(0, k, v, [8, 9, 10, 11, 4, 5, 6, 7])
    pair.store_at(1, k[:7], v[:7], [20, -1, 0, 1, 2, 3, 17])
    pair.copy_places([0, 1], [5, 4], [3, 0])
    pair.copy_places([0, 4], [1, 2], [0, 4])
    pair.assert_equal()


@pytest.mark.parametrize("fmt", ["q4k", "q8"])
def test_places_out_of_range(fmt: str) -> None:
    pair = Pair(fmt, block_size=4, num_blocks=3, open_blocks="float16")
    storage, before = pair.storage, snapshot(pair.storage)
    assert (storage.num_blocks, storage.num_open, storage.num_places) == (3, 3, 6)
    for bad in (-1, 6, 2**31 - 1):
        for call in (
            lambda bad=bad: storage.gather(0, ints(5, bad), 0, 8, np.float32),
            lambda bad=bad: storage.copy_blocks(ints(0, bad), ints(1, 1), ints(4, 4)),
            lambda bad=bad: storage.copy_blocks(ints(0, 1), ints(1, bad), ints(4, 4)),
            lambda bad=bad: storage.block_array(0, "k", bad),
            lambda bad=bad: storage.fill_blocks(ints(0, bad), 7),
        ):
            with pytest.raises(BlockError, match="outside 0…5"):
                call()
    with pytest.raises(BlockError):  # only sealed blocks move
        storage.move_blocks(np.array([[0, 3]], np.int32))
    with pytest.raises(SlotError, match="outside -1…23"):
        storage.store(0, *storage.check_rows(0, *rows(np.random.default_rng(1), pair, 1), 1),
                      np.array([24]))  # fmt: skip
    assert snapshot(storage) == before


def test_numbers_of_open_slots() -> None:
    q4k, q8 = CacheSpec(2, 2, 32, 4, "q4k"), CacheSpec(2, 2, 32, 4, "q8")
    assert make_storage(q4k, 3).num_places == 3 == make_storage(q8, 3).num_places
    storage = make_storage(q4k, 3, num_open=2)
    assert storage.nbytes == q4k.storage_nbytes(3, 2)
    with pytest.raises(InvalidArgumentError, match="num_open"):
        make_storage(q8, 3, num_open=1)
    for spec in (q4k, q8, CacheSpec(2, 2, 32, 4)):
        assert make_storage(spec, 3).open_slab_array(1, "v").shape == (0, 2, 4, 32)
    for bad in (-1, 1.5, "2", None, 2**31 - 3, True):
        with pytest.raises(PagedCacheError):
            make_storage(q4k, 3, num_open=bad)  # type: ignore[arg-type]
    # q4k without open slots: whole blocks only
    bare = make_storage(q4k, 3)
    x = np.ones((4, 2, 32), np.float32)
    bare.store(0, *bare.check_rows(0, x, x, 4), np.arange(4))
    with pytest.raises(SlotError):
        bare.store(0, *bare.check_rows(0, x[:1], x[:1], 1), np.array([4]))
