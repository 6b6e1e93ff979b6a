"""Cases C66-C69: stale mappings, views and tables, and copies left to the engine."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from cachekit import (
    assert_holds,
    empty,
    expected,
    fill,
    make_cache,
    refused,
    rows,
    whole,
    write,
)
from devicekit import ON_CPU, host

import pagedcache as pc
from pagedcache.errors import (
    FreedHandleError,
    InvalidArgumentError,
    OutOfBlocksError,
    PagedCacheError,
    PendingCopyError,
    SlotError,
    StaleMappingError,
)

B = 4


@pytest.mark.parametrize("fmt", ["float32", "q8"])
def test_a_mapping_for_reading_writes_nothing(fmt):
    # CASE C66
    # SPEC F28a F33
    cache = make_cache(8, B=B, fmt=fmt, layers=2)
    parent = cache.open(range(7))
    write(parent, cache.spec, range(1, 7))
    parent.commit(6)
    child = parent.fork()
    reading = child.slot_mapping(6, 7)
    k, v = rows(cache.spec, 0, [50])
    refused(cache, lambda: cache.store(0, k, v, reading), SlotError, parent, child)
    # a cached block is refused too, even by its only holder
    with cache.open([*range(4), 9]) as holder:
        assert holder.num_cached_tokens == 4
        refused(
            cache, lambda: cache.store(0, k, v, holder.slot_mapping(3, 4)), SlotError, parent
        )
    slots = child.prepare(1)
    assert slots.slots[0] != reading[0]
    for layer in range(2):
        cache.store(layer, *rows(cache.spec, layer, [50]), slots)
    child.commit(1)
    assert_holds(cache, child, [1, 2, 3, 4, 5, 6, 50])
    assert_holds(cache, parent, range(1, 7))
    fill(cache, parent, [60])
    assert_holds(cache, child, [1, 2, 3, 4, 5, 6, 50])
    assert_holds(cache, parent, [1, 2, 3, 4, 5, 6, 60])
    child.free()
    parent.free()
    empty(cache)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("fmt", ["float32", "bfloat16", "q8", "q4"])
def test_views_and_tables_kept_across_growth_free_and_reuse(fmt, packed):
    # CASE C67
    # SPEC F30 F31
    cache = make_cache(6, B=B, fmt=fmt, heads=2)
    seq = cache.open(range(6))
    fill(cache, seq, range(1, 7))
    table = seq.block_table
    ids = table.tolist()
    with pytest.raises(ValueError):
        table[0] = 5
    views = seq.packed_views(0) if packed else seq.views(0)
    arrays = [(v.k, v.v, v.start, v.length) for v in views]
    shown = [(host(k).copy(), host(v).copy()) for k, v, _, _ in arrays]
    assert [(s, n) for _, _, s, n in arrays] == [(0, 4), (4, 2)]
    if fmt == "float32":
        want = expected(cache.spec, 0, range(1, 7))
        for k, v, start, length in arrays:
            span = slice(start, start + length)
            np.testing.assert_array_equal(host(k).transpose(1, 0, 2), want[0][span])
            np.testing.assert_array_equal(host(v).transpose(1, 0, 2), want[1][span])
    for k, v, _, _ in arrays:
        for array in (k, v):
            with pytest.raises(ValueError if ON_CPU else TypeError):
                array[...] = 0
    assert cache.stats().pinned == 2
    fill(cache, seq, range(7, 15))  # growth
    seq.truncate(5)
    fill(cache, seq, range(31, 34))  # other values behind the cut
    dense = fmt in ("float32", "bfloat16")

    def same():
        for (k, v, _, _), (old_k, old_v) in zip(arrays, shown, strict=True):
            if dense:
                np.testing.assert_array_equal(k, old_k)
                np.testing.assert_array_equal(v, old_v)

    same()
    assert_holds(cache, seq, [1, 2, 3, 4, 5, 31, 32, 33])
    seq.free()
    whole(cache)
    same()
    assert cache.stats().pinned == 2
    with pytest.raises(OutOfBlocksError):
        cache.open(range(500, 524))  # six blocks: two are pinned
    other = cache.open(range(500, 516))
    assert not set(other.block_table.tolist()) & set(ids)
    fill(cache, other, range(101, 117))
    same()
    assert cache.defragment() >= 0
    same()
    assert table.tolist() == ids  # the snapshot is stale but valid
    cache.reset_prefix_cache()
    same()
    other.free()
    arrays.clear()
    del views, k, v, array
    gc.collect()
    empty(cache)


def test_an_array_outlives_view_sequence_and_cache():
    # CASE C67
    # SPEC F11 F30
    cache = make_cache(2, B=B)
    seq = cache.open(range(4))
    fill(cache, seq, range(1, 5))
    k = seq.views(0)[0].k[:, 1:3, :]
    want = host(k).copy()
    seq.free()
    gc.collect()
    assert cache.stats().pinned == 1
    with pytest.raises(OutOfBlocksError):
        cache.open(range(90, 98))
    with cache.open(range(90, 94)) as other:
        fill(cache, other, range(61, 65))
        np.testing.assert_array_equal(k, want)
    cache.close()
    gc.collect()
    np.testing.assert_array_equal(k, want)
    with pytest.raises(FreedHandleError):
        cache.open(range(2))


def test_a_released_view_frees_its_block():
    # CASE C67
    # SPEC F30
    cache = make_cache(2, B=B)
    seq = cache.open(range(8))
    fill(cache, seq, range(1, 9))
    views = seq.views(0)
    assert cache.stats().pinned == 2
    first = views[0]
    views.release()
    assert cache.stats().pinned == 0
    with pytest.raises(FreedHandleError):
        _ = first.k
    with seq.views(0, 5, 7) as part:
        assert [(v.start, v.length) for v in part] == [(5, 2)]
        assert cache.stats().pinned == 1
    assert cache.stats().pinned == 0
    seq.free()
    empty(cache)


@pytest.mark.parametrize("fmt", ["float32", "q4"])
def test_a_slot_mapping_is_stale_after_a_defragment(fmt):
    # CASE C68
    # SPEC F19 F33
    cache = make_cache(8, B=B, fmt=fmt, layers=2)
    low = cache.open(range(300, 308))
    seq = cache.open(range(6))
    fill(cache, seq, range(1, 7))
    slots = seq.prepare(3)
    made = np.array(slots.slots)
    low.free()
    epoch = cache.layout_epoch
    assert cache.defragment() == 3
    assert cache.layout_epoch > epoch
    k, v = rows(cache.spec, 0, [7, 8, 9])
    refused(cache, lambda: cache.store(0, k, v, slots), StaleMappingError, seq)
    refused(cache, lambda: cache.store(0, k, v, made), (SlotError, StaleMappingError), seq)
    fresh = seq.prepare(3)
    for layer in range(2):
        cache.store(layer, *rows(cache.spec, layer, [7, 8, 9]), fresh)
    seq.commit(3)
    assert_holds(cache, seq, range(1, 10))
    # moved by compact_sequence, freed, or shared since: stale as well
    slots = seq.prepare(1)
    twin = seq.fork()
    refused(cache, lambda: cache.store(0, k[:1], v[:1], slots), PagedCacheError, seq, twin)
    twin.free()
    slots = seq.prepare(1)
    seq.free()
    with pytest.raises(PagedCacheError):
        cache.store(0, k[:1], v[:1], slots)
    empty(cache)


def run_copies(cache: pc.PagedKVCache, memory: np.ndarray) -> int:
    """Play the engine: run the copies in parallel and in order, which must agree."""
    done = 0
    while True:
        pairs, ticket = cache.take_block_copies()
        if not len(pairs):
            return done
        assert pairs.dtype == np.int32 and pairs.shape[1] == 2
        src, dst = pairs[:, 0].tolist(), pairs[:, 1].tolist()
        assert len(set(dst)) == len(dst)
        assert not set(dst) & set(src)
        memory[dst] = memory[src]
        cache.copies_done(ticket)
        done += len(pairs)


@pytest.mark.parametrize("taken_before", [False, True])
def test_a_pending_copy_keeps_both_ends(taken_before):
    # CASE C69
    # SPEC F48
    cache = make_cache(6, B=B, storage=None)
    memory = np.zeros((6, B), np.int64)

    def put(slots, marks):
        memory.reshape(-1)[np.asarray(slots)] = marks

    def marks_of(seq, n):
        return memory.reshape(-1)[seq.slot_mapping(0, n)].tolist()

    parent = cache.open(range(6))
    put(parent.prepare(6), [1, 2, 3, 4, 5, 6])
    parent.commit(6)
    child = parent.fork()
    slots = child.prepare(1)
    assert cache.stats().cow_copies == 1
    source, target = parent.block_table[1], child.block_table[1]
    assert source != target
    taken = cache.take_block_copies() if taken_before else None
    if taken_before:
        assert taken[0].tolist() == [[source, target]]
    refused(cache, lambda: child.commit(1), PendingCopyError, parent, child)
    parent.free()
    whole(cache)
    # everything else is taken and written: neither end is among it
    rest = cache.open(range(700, 700 + 4 * cache.num_free_blocks))
    assert not {int(source), int(target)} & set(rest.block_table.tolist())
    put(rest.prepare(rest.num_tokens), range(100, 100 + rest.num_tokens))
    try:
        cache.defragment()
    except PendingCopyError:
        pass
    assert int(child.block_table[1]) == int(target)
    if taken_before:
        for src, dst in taken[0]:
            memory[dst] = memory[src]
        cache.copies_done(taken[1])
        with pytest.raises(InvalidArgumentError):
            cache.copies_done(taken[1])
    run_copies(cache, memory)
    put(slots, [50])
    child.commit(1)
    assert marks_of(child, 7) == [1, 2, 3, 4, 5, 6, 50]
    assert marks_of(rest, rest.num_tokens) == list(range(100, 100 + rest.num_tokens))
    whole(cache)
    rest.free()
    moved = cache.defragment()
    run_copies(cache, memory)
    assert marks_of(child, 7) == [1, 2, 3, 4, 5, 6, 50], moved
    child.free()
    empty(cache)


def test_a_cache_without_bytes_says_so():
    # SPEC F48
    cache = make_cache(4, B=B, storage=None)
    seq = cache.open(range(5))
    k = np.zeros((1, 1, 4), np.float32)
    for call in (
        lambda: seq.append(0, k, k),
        lambda: seq.append_kv(0, k, k, 0),
        lambda: cache.store(0, k, k, np.array([0])),
        lambda: seq.gather(0),
        lambda: seq.views(0),
        lambda: seq.packed_views(0),
    ):
        refused(cache, call, pc.FormatError, seq)
    seq.prepare(5)
    seq.commit(5)
    seq.free()
    assert cache.probe(range(5)) == 4
    empty(cache)
