"""Copies inside the storage: whole blocks, the first rows of a block, single tokens, moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from devicekit import host
from reference_storage import KINDS
from storagekit import (
    BY_ROW,
    FORMATS,
    LAYOUTS,
    QUANTIZED,
    Pair,
    make_storage,
    raw_slab,
    snapshot,
    write_slab,
)

from pagedcache.errors import BlockError, InvalidPositionError, ShapeError, SlotError
from pagedcache.spec import CacheSpec


def mixed_pair(fmt: str, layout: str, **sizes: Any) -> Pair:
    """K in ``fmt``, V in the format after it, every slot of three layers filled."""
    other = FORMATS[(FORMATS.index(fmt) + 1) % len(FORMATS)]
    pair = Pair(fmt, other, layout=layout, layers=3, **sizes)
    pair.fill_random()
    return pair


# SPEC F28, F40: whole blocks byte for byte, part of a block row for row, in order, every layer.
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("block_size", [1, 2, 16, 31])
def test_copied_blocks(fmt: str, layout: str, block_size: int) -> None:
    rng = np.random.default_rng(block_size)
    pair = mixed_pair(fmt, layout, block_size=block_size, num_blocks=6, heads=3)
    pair.storage.copy_blocks(*(np.empty(0, np.int32),) * 3)
    pair.assert_equal()
    for _ in range(4):
        src, dst = rng.integers(0, 6, (2, 8)).astype(np.int32)  # chains and self-copies too
        rows = rng.integers(0, block_size + 1, 8).astype(np.int32)
        pair.copy_blocks(src, dst, rows)
        pair.assert_equal()


# SPEC F40: only the matched rows are copied; every other byte of the block stays what it was.
# (Open slots: test_open_storage.py.)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", BY_ROW)
def test_part_of_a_block_touches_nothing_else(fmt: str, layout: str) -> None:
    pair = Pair(fmt, layout=layout, block_size=16, dim=80)
    pair.fill_random()
    before = {kind: raw_slab(pair.storage, 0, kind).copy() for kind in KINDS}
    pair.storage.copy_blocks(*(np.array([x], np.int32) for x in (0, 1, 5)))
    for kind in KINDS:
        after = raw_slab(pair.storage, 0, kind)
        places = [pair.reference.maps[kind][h, t] for h in range(2) for t in range(5)]
        copied = np.zeros(after.shape[1], bool)
        copied[np.concatenate(places)] = True
        np.testing.assert_array_equal(after[1][copied], before[kind][0][copied])
        np.testing.assert_array_equal(after[1][~copied], before[kind][1][~copied])
        np.testing.assert_array_equal(after[[0, 2, 3]], before[kind][[0, 2, 3]])


# CASE C47: one token of a quantised block goes elsewhere with its quants and its scales only.
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", [name for name in QUANTIZED if name in BY_ROW])
def test_one_token_moves_its_quants_and_scale(fmt: str, layout: str) -> None:
    pair = Pair(fmt, layout=layout, block_size=4, dim=64)
    x = np.ones((3, 2, 64), np.float32) * np.array([1, 10, 100], np.float32)[:, None, None]
    pair.store(0, x, -x, [4, 5, 6])
    pair.storage.copy_tokens(np.array([5]), np.array([15]))
    k, v = map(host, pair.storage.gather(0, np.array([3, 1], np.int32), 0, 8, np.float32))
    for values, sign in ((k, 1), (v, -1)):
        tokens = sign * np.abs(values).max(axis=(1, 2)) * np.sign(values[:, 0, 0])
        np.testing.assert_allclose(tokens, [0, 0, 0, 10, 1, 10, 100, 0], rtol=1e-3)
    pair.reference.copy_tokens([5], [15])
    pair.assert_equal()
    for kind in KINDS:  # beside the token's own bytes block 3 is as empty as it was
        other = np.ones(pair.reference.blocks[kind].shape[2], bool)
        other[np.concatenate([pair.reference.maps[kind][head, 3] for head in range(2)])] = False
        assert not raw_slab(pair.storage, 0, kind)[3][other].any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_many_tokens_move_in_order(fmt: str, layout: str) -> None:
    pair = mixed_pair(fmt, layout, block_size=5)
    src, dst = np.random.default_rng(8).integers(0, 20, (2, 30))
    pair.copy_tokens(src, dst)
    pair.assert_equal()


# CASE C56: blocks move as bytes, never re-quantised; cycles turn over the scratch block.
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_moved_blocks(fmt: str, layout: str) -> None:
    pair = mixed_pair(fmt, layout, num_blocks=6)
    before = {kind: pair.reference.blocks[kind].copy() for kind in KINDS}
    moves = [(5, -1), (2, 5), (0, 2), (-1, 0), (3, 4), (1, 1)]
    pair.storage.move_blocks(np.array(moves, np.int32))
    pair.reference.move_blocks(moves)
    pair.assert_equal()
    for kind in KINDS:
        after = pair.reference.blocks[kind]
        for new, old in ((0, 5), (5, 2), (2, 0), (4, 3), (3, 3), (1, 1)):
            np.testing.assert_array_equal(after[:, new], before[kind][:, old])
    pair.storage.move_blocks(np.empty((0, 2), np.int32))
    pair.assert_equal()


# SPEC 7: bad ids, slots and counts are refused before any byte moves.
def test_refused_copies_change_nothing() -> None:
    storage = make_storage(CacheSpec(2, 2, 32, 4, "q8"), 3)
    for kind in KINDS:
        write_slab(storage, 0, kind, np.arange(3, dtype=np.uint8)[:, None])
    before = snapshot(storage)

    def ints(*values: int) -> Any:
        return np.array(values, np.int32)

    with pytest.raises(BlockError, match="block 3: outside 0…2"):
        storage.copy_blocks(ints(0, 3), ints(1, 0), ints(4, 4))
    with pytest.raises(BlockError, match="block -1"):
        storage.copy_blocks(ints(0, 1), ints(1, -1), ints(4, 4))
    with pytest.raises(InvalidPositionError) as caught:
        storage.copy_blocks(ints(0, 1), ints(1, 2), ints(4, 5))
    assert (caught.value.position, caught.value.length) == (5, 4)
    with pytest.raises(InvalidPositionError):
        storage.copy_blocks(ints(0), ints(1), ints(-1))
    with pytest.raises(ShapeError):
        storage.copy_blocks(ints(0, 1), ints(1), ints(4, 4))
    with pytest.raises(SlotError, match="slot 12: outside 0…11"):
        storage.copy_tokens(np.array([0, 12]), np.array([4, 5]))
    with pytest.raises(SlotError, match="slot -1"):
        storage.copy_tokens(np.array([0, 1]), np.array([4, -1]))
    with pytest.raises(ShapeError):
        storage.copy_tokens(np.array([0, 1]), np.array([4]))
    with pytest.raises(BlockError, match="block -2"):
        storage.move_blocks(np.array([[0, 1], [-2, 1]], np.int32))
    with pytest.raises(BlockError, match="block 3"):
        storage.move_blocks(np.array([[0, 1], [1, 3]], np.int32))
    for shape in ((2,), (2, 3), (1, 2, 2)):
        with pytest.raises(ShapeError):
            storage.move_blocks(np.zeros(shape, np.int32))
    assert snapshot(storage) == before
