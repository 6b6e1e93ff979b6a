"""Counted work per operation: flat in everything that it must not depend on."""

from __future__ import annotations

import numpy as np
import pytest
from cachekit import by_profile, make_cache

import pagedcache as pc

SIZES = by_profile((10**3, 10**5), (10**3, 10**4, 10**5, 10**6, 10**7))


def steps(pool: pc.BlockPool, call) -> int:
    before = pool.steps
    call()
    return pool.steps - before


@pytest.mark.parametrize("n", [1, 100])
def test_a_pool_of_any_size_does_the_same_work(n):
    # CASE C7
    # SPEC F12
    counted = {}
    for size in SIZES:
        pool = pc.BlockPool(size, 16)
        held = pool.allocate(size // 2)
        ids: list[np.ndarray] = []
        counted[size] = (
            steps(pool, lambda p=pool, out=ids: out.append(p.allocate(n))),
            steps(pool, lambda p=pool, out=ids: p.touch(out[0])),
            steps(pool, lambda p=pool, out=ids: p.free(out[0])),
            steps(pool, lambda p=pool, out=ids: p.free(out[0][::-1].copy())),
            # from the middle of what is held, far apart
            steps(pool, lambda p=pool, h=held: p.free(h[:: max(1, len(h) // n)][:n].copy())),
        )
    assert len(set(counted.values())) == 1, counted
    assert all(0 < s <= 4 * n for s in counted[SIZES[0]])


def test_a_full_pool_does_the_same_work():
    # CASE C7
    # SPEC F12
    counted = set()
    for size in SIZES:
        pool = pc.BlockPool(size, 16)
        ids = pool.allocate(size)
        pool.free(ids[-100:].copy())
        counted.add(steps(pool, lambda p=pool: p.allocate(100)))
        with pytest.raises(pc.OutOfBlocksError):
            pool.allocate(1)
    assert len(counted) == 1


def test_eviction_among_many_cached_blocks():
    # CASE C7
    # SPEC F14
    per_block = []
    for size in by_profile((10**3, 10**4), (10**3, 10**5, 10**6)):
        cache = make_cache(size, B=1, storage=None)
        for start in range(0, size, size // 4):
            with cache.open(np.arange(start, start + size // 4, dtype=np.uint32)) as seq:
                seq.commit(size // 4)
        assert cache.num_cached_blocks == size
        per_block.append(steps(cache.pool, lambda c=cache: c.pool.allocate(500)) / 500)
        assert cache.stats().evicted_blocks == 500
    assert max(per_block) <= 2 * min(per_block), per_block


def sequence_work(cache: pc.PagedKVCache, seq: pc.Sequence) -> list[int]:
    """Steps of one decode step of one sequence."""
    pool = cache.pool
    return [
        steps(pool, lambda: seq.append_token(9)),
        steps(pool, lambda: seq.prepare(1)),
        steps(pool, lambda: seq.commit(1)),
        steps(pool, lambda: seq.block_for_position(3)),
        steps(pool, lambda: seq.slot_mapping(4, 5)),
        steps(pool, lambda: cache.page_table([seq])),
    ]


def test_a_decode_step_costs_the_same_at_every_length():
    # CASE C62
    # SPEC F31
    work = []
    for length in by_profile((64, 1024), (64, 1024, 65536)):
        cache = make_cache(length // 16 + 64, B=16, storage=None)
        seq = cache.open(range(length))
        seq.commit(length)
        work.append(sequence_work(cache, seq)[:5])
    assert all(w == work[0] for w in work), work


def test_a_decode_step_costs_the_same_beside_many_sequences():
    # CASE C62
    # SPEC F12
    work = []
    for others in by_profile((1, 1000), (1, 100, 10_000)):
        cache = make_cache(others + 16, B=16, storage=None)
        held = [cache.open([7, 8, 9]) for _ in range(others)]
        seq = cache.open(range(40))
        seq.commit(40)
        work.append(sequence_work(cache, seq))
        assert len(held) == others
    assert all(w == work[0] for w in work), work


def test_opening_is_linear_in_the_prompt():
    # CASE C65
    # SPEC F35
    per_block = []
    for length in by_profile((1 << 10, 1 << 12), (1 << 10, 1 << 13, 1 << 16)):
        blocks = length // 16
        cache = make_cache(2 * blocks + 8, B=16, storage=None)
        tokens = np.arange(length, dtype=np.uint32)
        cold: list[pc.Sequence] = []
        row = [
            steps(cache.pool, lambda c=cache, t=tokens, out=cold: out.append(c.open(t))),
            steps(cache.pool, lambda n=length, out=cold: out[0].commit(n)),
            steps(cache.pool, lambda out=cold: out[0].free()),
            steps(cache.pool, lambda c=cache, t=tokens, out=cold: out.append(c.open(t))),
            steps(cache.pool, lambda out=cold: out[1].fork()),
            steps(cache.pool, lambda out=cold: out[1].free()),
        ]
        assert cold[1].freed
        per_block.append([s / blocks for s in row])
    for first, other in zip(per_block, per_block[1:], strict=False):
        for a, b in zip(first, other, strict=True):
            assert b <= 1.5 * a + 0.5, per_block


def test_steps_are_in_the_statistics():
    # CASE C7
    # SPEC F16
    cache = make_cache(8, B=4, storage=None)
    before = cache.stats().steps
    seq = cache.open(range(8))
    assert cache.stats().steps > before
    assert cache.pool.steps >= cache.stats().steps
    seq.free()
