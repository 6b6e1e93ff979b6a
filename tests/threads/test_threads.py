"""Many threads on one pool and one cache, every value checked."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from cachekit import by_profile, empty, expected, make_cache, read, rows
from threadkit import SECONDS, THREADS, run_threads
from threadworker import Worker

import pagedcache as pc
from pagedcache.errors import BlockError, OutOfBlocksError, PagedCacheError


def test_allocate_and_free_against_touch_and_free():
    # CASE C8
    # SPEC F13 F34
    rounds = by_profile(20_000, 500_000, 2_000_000)
    pool = pc.BlockPool(64, 4)
    shared: list[int] = [0]
    stop = threading.Event()
    touched = 0

    def owner() -> None:
        rng = random.Random(1)
        try:
            for _ in range(rounds):
                ids = pool.allocate(rng.randint(1, 4))
                shared[0] = int(ids[0])
                pool.free(ids)
        finally:
            stop.set()

    def toucher() -> None:
        nonlocal touched
        while not stop.is_set():
            b = [shared[0]]
            try:
                pool.touch(b)
            except BlockError:
                continue
            touched += 1
            assert pool.ref_count(b[0]) >= 1
            pool.free(b)

    run_threads([owner, toucher])
    pool.check()
    assert pool.num_free_blocks == 64 and pool.num_used_blocks == 0
    assert [pool.ref_count(b) for b in range(64)] == [0] * 64
    assert touched > 0


def test_hits_against_eviction():
    # CASE C8
    # SPEC F34 F14
    rounds = by_profile(2_000, 30_000, 300_000)
    cache = make_cache(12, B=2, storage=None)
    stop = threading.Event()
    hits = 0

    def churn() -> None:
        try:
            for i in range(50 * rounds):
                if i >= rounds and hits:  # a busy machine may not have let the other thread run
                    break
                start = 1000 * (i % 2_000_000)
                with cache.open(range(start, start + 8)) as seq:
                    seq.commit(8)
        finally:
            stop.set()

    def hitter() -> None:
        nonlocal hits
        while not stop.is_set():
            with cache.open([5, 6, 7, 8, 9]) as seq:
                hits += seq.num_cached_tokens > 0
                assert seq.num_cached_tokens in (0, 1, 2, 3, 4)
                for pairs, ticket in iter(lambda: cache.take_block_copies(), None):
                    if not len(pairs):
                        break
                    cache.copies_done(ticket)
                seq.commit(5 - seq.num_cached_tokens)

    run_threads([churn, hitter])
    empty(cache)
    assert hits > 0


def test_statistics_during_churn_are_one_moment():
    # CASE C9
    # SPEC F16 F34
    cache = make_cache(32, B=2)
    stop = threading.Event()
    snapshots = 0

    def churn(seed: int) -> Callable[[], None]:
        def work() -> None:
            rng = random.Random(seed)
            end = time.monotonic() + SECONDS / 5
            while time.monotonic() < end:
                tokens = [rng.randint(0, 1) for _ in range(rng.randint(1, 12))]
                try:
                    with cache.open(tokens, resumed=rng.random() < 0.2) as seq:
                        n = len(tokens) - seq.num_cached_tokens
                        seq.append(0, *rows(cache.spec, 0, range(1, n + 1)))
                        seq.commit(n)
                        twin = seq.fork()
                        twin.append(0, *rows(cache.spec, 0, [7]))
                        twin.free()
                except OutOfBlocksError:
                    pass
            stop.set()

        return work

    def reader() -> None:
        nonlocal snapshots
        last = None
        while not stop.is_set():
            s = cache.stats()
            values = s.to_dict()
            assert all(v >= 0 for v in values.values()), values
            assert s.sequences_allocated - s.sequences_freed == s.sequences_active
            assert s.blocks_allocated - s.blocks_freed == s.blocks_used
            assert s.blocks_used <= 32
            assert s.hit_tokens + s.miss_tokens == s.query_tokens
            assert s.hit_tokens <= s.query_tokens and s.prefix_hits <= s.prefix_queries
            assert s.tokens_saved == s.hit_tokens + s.resumed_hit_tokens
            assert 0.0 <= s.hit_rate <= 1.0
            if last is not None:
                for name in ("sequences_allocated", "blocks_allocated", "query_tokens", "steps"):
                    assert values[name] >= last[name]
            last = values
            f = cache.fragmentation()
            assert f.used_blocks + f.free_blocks == 32
            snapshots += 1

    run_threads([churn(1), churn(2), reader])
    empty(cache)
    assert snapshots > 10


@pytest.mark.parametrize("fmt", ["float32"])
def test_eight_threads_on_one_cache(fmt):
    # SPEC F34 F19 F20
    cache = make_cache(64, B=3, layers=2, heads=1, dim=4, fmt=fmt, partial_block_reuse=1)
    until = time.monotonic() + SECONDS
    workers = [Worker(cache, seed, until) for seed in range(THREADS)]
    run_threads(list(workers))
    empty(cache)
    stats = cache.stats()
    assert all(w.steps > 20 for w in workers)
    assert stats.hit_tokens > 0 and stats.cow_copies > 0 and stats.evicted_blocks > 0
    assert sorted(cache.pool.allocate(64).tolist()) == list(range(64))


def test_readers_of_one_handle_see_committed_states():
    # SPEC F34
    cache = make_cache(3_000, B=4, layers=2)
    seq = cache.open()
    stop = threading.Event()
    reads = 0

    def writer() -> None:
        rng = random.Random(5)
        end = time.monotonic() + SECONDS / 3
        n = 0
        try:
            while time.monotonic() < end:
                if n > 2_000:
                    seq.truncate(0)
                    n = 0
                c = rng.randint(1, 5)
                for layer in range(2):
                    seq.append(layer, *rows(cache.spec, layer, range(n + 1, n + c + 1)))
                seq.commit(c)
                n += c
        finally:
            stop.set()

    def reader() -> None:
        nonlocal reads
        while not stop.is_set():
            n = seq.seq_len
            try:
                k, v = read(seq, 1, 0, n)
                table = seq.block_table
                list(seq.views(0, 0, n))
            except PagedCacheError:
                assert seq.seq_len < n  # truncated in between
                continue
            want_k, want_v = expected(cache.spec, 1, range(1, n + 1))
            assert np.array_equal(k, want_k) and np.array_equal(v, want_v)
            assert len(table) * 4 >= 0
            reads += 1

    run_threads([writer, reader, reader])
    seq.free()
    empty(cache)
    assert reads > 10
