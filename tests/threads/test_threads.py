"""Many threads on one pool and one cache, and use after fork()."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from cachekit import by_profile, empty, expected, make_cache, rows

import pagedcache as pc
from pagedcache.errors import BlockError, ForkedProcessError, OutOfBlocksError, PagedCacheError

THREADS = 8
SECONDS = by_profile(3.0, 30.0, 120.0)


def run_threads(workers: list[Callable[[], None]]) -> None:
    """Run all to the end; the first error of any of them is raised here."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=guarded, args=(w,), daemon=True) for w in workers]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for t in threads:
            t.start()
        for t in threads:
            t.join(timeout=SECONDS + 240)
        assert not any(t.is_alive() for t in threads), "deadlock"
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]


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
            for i in range(rounds):
                with cache.open(range(1000 * i, 1000 * i + 8)) as seq:
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


class Worker:
    """One thread's own sequences in a shared cache, every value checked."""

    def __init__(self, cache: pc.PagedKVCache, seed: int, until: float) -> None:
        self.cache, self.rng, self.until = cache, random.Random(seed), until
        self.live: list[tuple[pc.Sequence, list[int], list[int]]] = []
        self.base = (seed + 1) * 10_000
        self.mark = 0
        self.steps = 0

    def marks(self, n: int) -> list[int]:
        self.mark += n
        return [self.base + (self.mark + i) % 9_000 for i in range(n)]

    def __call__(self) -> None:
        while time.monotonic() < self.until:
            try:
                self.step()
            except OutOfBlocksError:
                if self.live:
                    self.live.pop(self.rng.randrange(len(self.live)))[0].free()
            self.steps += 1
        for seq, _, marks in self.live:
            self.verify(seq, marks)
            seq.free()

    def verify(self, seq: pc.Sequence, marks: list[int]) -> None:
        spec = self.cache.spec
        for layer in range(spec.num_layers):
            k, v = seq.gather(layer, 0, len(marks), dtype=np.float32)
            want_k, want_v = expected(spec, layer, marks)
            assert np.array_equal(k, want_k)
            assert np.array_equal(v, want_v)

    def step(self) -> None:
        rng, cache, spec = self.rng, self.cache, self.cache.spec
        action = rng.random()
        if action < 0.3 or not self.live:
            # prompts are shared by all threads, so hits are on other threads' bytes
            tokens = [rng.randint(0, 1) for _ in range(rng.randint(1, 14))]
            seq = cache.open(tokens)
            hit = seq.num_cached_tokens
            found = self.identify(seq, hit)
            marks = found + self.marks(len(tokens) - hit)
            self.live.append((seq, tokens, marks))
            for layer in range(spec.num_layers):
                seq.append(layer, *rows(spec, layer, marks[hit:]))
            seq.commit(len(tokens) - hit)
            return
        i = rng.randrange(len(self.live))
        seq, tokens, marks = self.live[i]
        if action < 0.45:
            new = self.marks(rng.randint(1, 5))
            for layer in range(spec.num_layers):
                seq.append(layer, *rows(spec, layer, new))
            seq.commit(len(new))
            marks += new
        elif action < 0.55 and len(self.live) < 6:
            self.live.append((seq.fork(), list(tokens), list(marks)))
        elif action < 0.65:
            n = rng.randint(0, len(marks))
            seq.truncate(n)
            del marks[n:], tokens[n:]
        elif action < 0.75:
            slots = cache.prepare([seq], [2])
            new = self.marks(2)
            try:
                for layer in range(spec.num_layers):
                    cache.store(layer, *rows(spec, layer, new), slots)
            except pc.StaleMappingError:
                return  # another thread defragmented between the calls: not committed
            seq.commit(2)
            marks += new
        elif action < 0.85:
            with seq.views(0) as views:
                shown = [(v.k, v.start, v.length) for v in views]
                want = expected(spec, 0, marks)[0]
                for _ in range(3):
                    for k, start, length in shown:
                        got = k.transpose(1, 0, 2).astype(np.float32)
                        assert np.array_equal(got, want[start : start + length])
        elif action < 0.87:
            cache.defragment()
        elif action < 0.89:
            cache.compact_sequence(seq)
        elif action < 0.9:
            cache.reset_prefix_cache()
        elif action < 0.93:
            cache.stats()
            cache.fragmentation()
            cache.block_tables([seq])
        elif action < 0.95:
            cache.check()
        else:
            self.verify(seq, marks)
            seq.free()
            del self.live[i]
            return
        self.verify(seq, marks)

    def identify(self, seq: pc.Sequence, hit: int) -> list[int]:
        """The marks another thread wrote, the same in every layer, in K and in V."""
        if not hit:
            return []
        k, _ = seq.gather(0, 0, hit, dtype=np.float32)
        marks = np.rint(k[:, 0, 0] / 64).astype(int).tolist()
        self.verify(seq, marks)
        return marks


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
                k, v = seq.gather(1, 0, n)
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


def test_the_gil_is_released_while_bytes_move():
    # SPEC F34
    cache = make_cache(2_048, B=16, heads=8, dim=128, fmt="float32")
    n = 4_096
    seq = cache.open(range(n))
    data = np.ones((n, 8, 128), np.float32)
    seq.append(0, data, data)
    seq.commit(n)
    out = (np.empty_like(data), np.empty_like(data))
    progress = 0
    stop = threading.Event()

    def counter() -> None:
        nonlocal progress
        while not stop.is_set():
            progress += 1
            time.sleep(0)

    thread = threading.Thread(target=counter, daemon=True)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1_000)  # nobody is made to give the GIL up
    thread.start()
    try:
        time.sleep(0.05)
        before = progress
        for _ in range(20):
            seq.gather(0, 0, n, out=out)
        assert progress > before
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        thread.join(timeout=60)


def test_dropping_handles_in_other_threads_never_deadlocks():
    # SPEC F29 F34
    cache = make_cache(64, B=2)
    end = time.monotonic() + SECONDS / 5

    def dropper(seed: int) -> Callable[[], None]:
        def work() -> None:
            rng = random.Random(seed)
            while time.monotonic() < end:
                try:
                    seq = cache.open([rng.randint(0, 3) for _ in range(5)])
                except OutOfBlocksError:
                    continue
                seq.append(0, *rows(cache.spec, 0, range(5 - seq.num_cached_tokens)))
                views = seq.views(0)
                loop = [seq, views]
                loop.append(loop)  # only the garbage collector can free these
                del seq, views, loop

        return work

    run_threads([dropper(i) for i in range(4)])
    import gc

    gc.collect()
    cache.check()
    empty(cache)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork() on this system")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_use_in_a_forked_child_is_refused():
    # SPEC F34
    cache = make_cache(8, B=4)
    pool = pc.BlockPool(4, 4)
    seq = cache.open(range(6))
    seq.append(0, *rows(cache.spec, 0, range(1, 7)))
    seq.commit(6)
    view = seq.views(0)[0]
    k = view.k
    seq_id = cache.allocate_sequence(2)
    calls = [
        lambda: cache.open(range(3)),
        lambda: cache.probe(range(3)),
        lambda: cache.stats(),
        lambda: cache.check(),
        lambda: cache.defragment(),
        lambda: cache.allocate_sequence(1),
        lambda: cache.free_sequence(seq_id),
        lambda: cache.block_tables([seq]),
        lambda: cache.prepare([seq], [1]),
        lambda: seq.append_token(1),
        lambda: seq.commit(0),
        lambda: seq.gather(0),
        lambda: seq.views(0),
        lambda: seq.block_table,
        lambda: seq.fork(),
        lambda: seq.truncate(0),
        lambda: seq.free(),
        lambda: pool.allocate(1),
        lambda: pool.allocate_one(),
        lambda: pool.check(),
    ]
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = b"ok"
        try:
            for i, call in enumerate(calls):
                try:
                    call()
                    status = b"call %d was accepted" % i
                    break
                except ForkedProcessError:
                    pass
            own = make_cache(4, B=4)  # a new cache in the child works
            with own.open(range(5)) as mine:
                mine.append(0, *rows(own.spec, 0, range(1, 6)))
                mine.commit(5)
            own.check()
            repr(cache), repr(seq), repr(pool)
            cache.close()
            del view, k
            import gc

            gc.collect()
        except BaseException as e:
            status = repr(e).encode()[:500]
        os.write(w, status)
        os._exit(0)
    os.close(w)
    got = b""
    while chunk := os.read(r, 1000):
        got += chunk
    os.close(r)
    _, code = os.waitpid(pid, 0)
    assert got == b"ok" and code == 0, got.decode()
    # the parent is as it was
    cache.check()
    assert seq.seq_len == 6 and cache.stats().pinned == 1
    del view, k
    cache.free_sequence(seq_id)
    seq.free()
    empty(cache)
