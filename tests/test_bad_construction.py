"""Bad specs, bad caches, slabs that do not fit; copies and use after close."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from badvalues import (
    HUGE,
    NEGATIVE,
    NOT_INTEGERS,
    Odd,
    World,
)

import pagedcache as pc
from pagedcache.errors import CopyRefusedError, PagedCacheError

GOOD_SPEC: dict[str, Any] = {
    "num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "block_size": 4, "kv_format": "float16",
}


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim", "block_size"])
def test_bad_sizes_of_a_spec(field):
    # SPEC F11
    for value in [*NOT_INTEGERS, *NEGATIVE, *HUGE[1:], 0]:
        with pytest.raises(PagedCacheError):
            pc.CacheSpec(**{**GOOD_SPEC, field: value})


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("kv_format", [5, "no such", "float64", b"q8", [], np.float64]),
        ("k_format", [5, "no such", "float64", []]),
        ("layout", [None, 5, "hnd ", "NDH", b"HND", []]),
        ("max_seq_len", [0, -1, 1.0, True, "5", []]),
        ("on_nonfinite", [None, 5, "ignore", b"raise", []]),
        ("no_such_field", [1]),
    ],
)
def test_bad_fields_of_a_spec(field, values):
    # SPEC F7 F11
    for value in values:
        with pytest.raises((PagedCacheError, TypeError) if field == "no_such_field"
                           else PagedCacheError):
            pc.CacheSpec(**{**GOOD_SPEC, field: value})
            print(field, value)


def test_bad_arguments_of_a_cache():
    # SPEC F11 F15
    spec = pc.CacheSpec(**GOOD_SPEC)
    bad: list[dict[str, Any]] = [
        {},
        {"num_blocks": 4, "memory": 10**6},
        *({"num_blocks": v} for v in [*NOT_INTEGERS[1:], *NEGATIVE, *HUGE, 0]),
        *({"memory": v} for v in
          ["", "2 parsecs", "-1GiB", -1, 0, 1, spec.block_nbytes - 1, True, 1.5, [], Odd(),
           {}, {"cuda:0": 10**6}, {"cpu": "x"}, {5: 5}]),
        *({"num_blocks": 4, "device": v} for v in
          [None, 5, "", "gpu9000x", "tpu", "cuda", "cuda:0", ["cpu"], ["cpu", "cuda:0"],
           ["cpu"] * 3, [None, None], Odd()]),
        *({"num_blocks": 4, "storage": v} for v in
          [5, "mine", (), ([],), ([], []), ([None] * 2, [None] * 2), Odd(), {}]),
        *({"num_blocks": 4, "partial_block_reuse": v} for v in [-1, 1.0, True, "1", [], 2**64]),
        *({"num_blocks": 4, "prefault": v} for v in [np.zeros(2)]),
        *({"num_blocks": 4, "eviction": v} for v in [None, "fifo", "LRU", 5, []]),
    ]
    for arguments in bad:
        with pytest.raises(PagedCacheError):
            pc.PagedKVCache(spec, **arguments)
            print(arguments)
    for not_a_spec in (None, 5, "spec", GOOD_SPEC, pc.CacheSpec):
        with pytest.raises(PagedCacheError):
            pc.PagedKVCache(not_a_spec, 4)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_slabs_that_do_not_fit(layout):
    # SPEC F48
    spec = pc.CacheSpec(**{**GOOD_SPEC, "layout": layout})
    shape = (4, 2, 4, 8) if layout == "HND" else (4, 4, 2, 8)
    good = [np.zeros(shape, np.float16) for _ in range(4)]
    frozen = np.zeros(shape, np.float16)
    frozen.flags.writeable = False
    wrong = [
        np.zeros((3, *shape[1:]), np.float16),
        np.zeros((*shape[:3], 7), np.float16),
        np.zeros(shape[1:], np.float16),
        np.zeros(shape, np.float32),
        np.zeros(shape, np.int16),
        np.zeros(shape, ">f2"),
        np.zeros((*shape[:3], 16), np.float16)[..., ::2],
        np.zeros(shape[::-1], np.float16).T,
        np.broadcast_to(np.zeros(shape[1:], np.float16), shape),
        np.zeros(256 * 2 + 1, np.uint8)[1:].view(np.float16).reshape(shape),
        frozen,
        good[1],  # the same memory twice
        None,
        good[0].tolist(),
    ]
    for bad in wrong:
        for where in range(4):
            slabs = list(good)
            slabs[where] = bad if bad is not good[1] else good[(where + 1) % 4]
            with pytest.raises(PagedCacheError):
                pc.PagedKVCache(spec, 4, storage=(slabs[:2], slabs[2:]))
    with pytest.raises(PagedCacheError):
        pc.PagedKVCache(spec, 4, storage=(good[:1], good[2:]))
    cache = pc.PagedKVCache(spec, 4, storage=(good[:2], good[2:]))
    assert not any(g.any() for g in good)
    cache.check()


def test_handles_are_not_copied_or_pickled():
    # SPEC F11
    world = World()
    before = world.shot()
    for thing in (world.cache, world.seq, world.cache.pool, world.mapping):
        for use in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(PagedCacheError):
                use(thing)
    for thing in (world.cache, world.seq):
        with pytest.raises(CopyRefusedError):
            copy.copy(thing)
    assert world.shot() == before
    again = pickle.loads(pickle.dumps(world.cache.spec))
    assert again == world.cache.spec and hash(again) == hash(world.cache.spec)


def test_a_closed_cache():
    # SPEC F11
    world = World()
    cache, seq = world.cache, world.seq
    cache.close()
    cache.close()
    assert "closed" in repr(cache)
    rows = world.rows
    for call in (
        lambda: cache.open([1]),
        lambda: cache.probe([1]),
        lambda: cache.blocks_needed([1]),
        lambda: cache.stats(),
        lambda: cache.check(),
        lambda: cache.defragment(),
        lambda: cache.fragmentation(),
        lambda: cache.reset_prefix_cache(),
        lambda: cache.pool,
        lambda: cache.num_free_blocks,
        lambda: cache.utilization,
        lambda: cache.allocate_sequence(1),
        lambda: cache.sequence(seq.seq_id),
        lambda: cache.block_tables([]),
        lambda: cache.prepare([], []),
        lambda: cache.store(0, rows, rows, [-1]),
        lambda: cache.take_block_copies(),
        lambda: cache.layout_epoch,
        lambda: cache.__enter__(),
        lambda: seq.append(0, rows, rows),
        lambda: seq.gather(0),
        lambda: seq.views(0),
        lambda: seq.commit(0),
        lambda: seq.block_table,
        lambda: seq.fork(),
    ):
        with pytest.raises(pc.FreedHandleError):
            call()
    seq.free()  # nothing happens
    assert "freed" in repr(seq)


def test_slabs_and_bits_that_are_no_lists_of_arrays():
    # SPEC section 7, CASE C44
    spec = pc.CacheSpec(num_layers=1, num_kv_heads=1, head_dim=1)
    for slabs in ((np.array(3), np.array(3)), (3, 3), ("k", "v"), ([], [])):
        with pytest.raises(pc.PagedCacheError):
            pc.PagedKVCache(spec, 4, storage=slabs)
    for bits in ([1, [2]], [2**70], "bits", [1.5]):
        with pytest.raises(pc.FormatError):
            pc.float16_bits_to_float32(bits)
