"""Many threads on one cache of a GPU, each on a stream of its own, every value checked."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from cachekit import assert_holds, by_profile, empty, expected
from devicekit import host
from gpukit import append, device_rows, on_gpu, read_on, streams_of
from threadkit import run_threads
from threadworker import Worker

SECONDS = by_profile(2.0, 20.0, 120.0)
THREADS = 5


@pytest.mark.parametrize("asynchronous", [0, 1, 7], ids=["at once", "late", "at random"])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_threads_on_streams_of_their_own(
    layout: str, asynchronous: int, cuda: Any, emulated: Any
) -> None:
    # SPEC F34, F49: hits, forks and moves meet other threads' blocks on other streams
    emulated.set("async", asynchronous)
    with streams_of(cuda, THREADS) as streams:
        cache = on_gpu(48, B=3, layers=2, dim=8, layout=layout, partial_block_reuse=1)
        until = time.monotonic() + SECONDS
        workers = [
            Worker(cache, seed, until, {"stream": stream} if seed else {})
            for seed, stream in enumerate(streams)
        ]
        run_threads(list(workers))
        cache.synchronize()
        empty(cache)
        stats = cache.stats()
        assert all(worker.steps > 5 for worker in workers)
        assert stats.hit_tokens > 0 and stats.cow_copies > 0
        cache.close()
        del workers


def test_threads_on_one_stream(cuda: Any, emulated: Any) -> None:
    # SPEC F34: a stream may be used from several threads
    emulated.set("async", 1)
    with streams_of(cuda, 1) as (stream,):
        cache = on_gpu(48, B=3, layers=2, dim=4, partial_block_reuse=1)
        until = time.monotonic() + SECONDS / 2
        workers = [Worker(cache, seed, until, {"stream": stream}) for seed in range(4)]
        run_threads(list(workers))
        empty(cache)
        assert emulated.get("calls:cuStreamWaitEvent") == 0
        cache.close()
        del workers


def test_readers_on_their_streams_beside_one_writer(cuda: Any, emulated: Any) -> None:
    # SPEC F34, F49: who reads a committed length sees its values, whatever stream wrote them
    emulated.set("async", 1)
    with streams_of(cuda, 3) as streams:
        cache = on_gpu(200, B=4, layers=1, dim=4)
        seq = cache.open(stream=streams[0])
        given = [device_rows(cache, 0, [mark]) for mark in range(60)]
        done = threading.Event()
        seen = [0, 0]

        def write() -> None:
            try:
                for pair in given:
                    seq.append(0, *pair, stream=streams[0])
                    seq.commit(1)
            finally:
                done.set()

        def reader(index: int) -> Any:
            def read() -> None:
                while not done.is_set() or seen[index] < 60:
                    length = seq.seq_len
                    k, v = read_on(seq, 0, length, streams[1 + index])
                    want_k, want_v = expected(cache.spec, 0, range(length))
                    assert np.array_equal(k, want_k) and np.array_equal(v, want_v)
                    seen[index] = max(seen[index], length)

            return read

        run_threads([write, reader(0), reader(1)])
        assert seen == [60, 60]
        seq.free()
        cache.close()


def test_arrays_and_handles_go_in_threads_that_never_had_the_context(
    cuda: Any, emulated: Any
) -> None:
    # SPEC F42, F46: what is released on another thread is released all the same
    for _ in range(3):
        cache = on_gpu(16, B=4, layers=1, dim=4)
        seq = cache.open(range(9))
        append(cache, seq, range(1, 10))
        things: list[Any] = [seq.gather(0), seq.views(0)[0].k, seq.layer_device_ptr_tables(0), seq]
        want, _ = expected(cache.spec, 0, range(1, 5))
        np.testing.assert_array_equal(host(things[1])[0], want[:, 0])
        del seq

        def let_go(things: list[Any] = things, cache: Any = cache) -> None:
            things.clear()
            cache.close()

        del cache
        thread = threading.Thread(target=let_go)
        thread.start()
        thread.join()
        del things, let_go, thread


def test_close_while_others_work(cuda: Any, emulated: Any) -> None:
    # SPEC F11, F34: calls in flight end well or with a typed error; nothing crashes or stays
    import pagedcache as pc

    emulated.set("async", 1)
    with streams_of(cuda, 3) as streams:
        for _ in range(3):
            cache = on_gpu(32, B=4, layers=1, dim=4)
            began = threading.Event()

            def work(stream: Any, cache: Any = cache, began: Any = began) -> Any:
                def run() -> None:
                    try:
                        while True:
                            with cache.open(stream=stream) as seq:
                                append(cache, seq, range(1, 6), stream)
                                seq.commit(5)
                                read_on(seq, 0, 5, stream)
                                began.set()
                    except pc.FreedHandleError:
                        pass

                return run

            def close(cache: Any = cache, began: Any = began) -> None:
                began.wait(30)
                cache.close()

            run_threads([*(work(stream) for stream in streams), close])
            assert cache.closed
            del cache, work, close


def test_a_cache_made_in_one_thread_works_in_another(cuda: Any, emulated: Any) -> None:
    # SPEC F42: no thread needs a context of its own
    made: list[Any] = []

    def make() -> None:
        cache = on_gpu(8, B=4, dim=4)
        seq = cache.open(range(6))
        append(cache, seq, range(1, 7))
        seq.commit(6)
        made.extend([cache, seq])

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    cache, seq = made
    assert_holds(cache, seq, range(1, 7))
    seq.free()
    cache.close()
    made.clear()
