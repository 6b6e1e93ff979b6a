"""What deferred streams of the emulation stand for: kernels that really run at the same time, a
driver that really captures, and handles that really are gone. Everything here needs a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cachekit import expected, rows
from devicekit import host
from gpukit import Capture, Foreign, append, device_rows, finish, on_gpu, read_on, streams_of
from processkit import assert_clean, run_program
from profiles import scaled

from pagedcache._cuda.memory import DeviceMemory
from pagedcache.checks.devices import upload

pytestmark = pytest.mark.skipif(
    bool(os.environ.get("PAGEDCACHE_CUDA_EMULATION")),
    reason="only a GPU shows this, and here is its emulation",
)

TESTS = str(Path(__file__).resolve().parent.parent)
ROUNDS = scaled(100, 20)
SHAPE: dict[str, Any] = {"B": 16, "layers": 2, "heads": 4, "dim": 64}


@pytest.fixture
def streams(cuda: Any) -> Iterator[list[Any]]:
    with streams_of(cuda, 4) as made:
        yield made


class Busy:
    """Work that keeps a stream busy for some milliseconds, so that what follows is late."""

    HALF_NBYTES, COPIES = 128 << 20, 20

    def __init__(self, device: Any) -> None:
        self.device = device
        self.memory = DeviceMemory(device, 2 * self.HALF_NBYTES, "work")

    def keep(self, stream: Any) -> None:
        start = self.memory.address
        for _ in range(self.COPIES):
            self.device.call(
                "pc_cuda_copy", start, start + self.HALF_NBYTES, self.HALF_NBYTES, stream.handle
            )


@pytest.fixture
def busy(cuda: Any) -> Busy:
    return Busy(cuda)


def is_done(device: Any, stream: Any) -> bool:
    with device.current():
        return bool(stream.is_done())


def some_marks(turn: int, count: int) -> list[int]:
    return [(37 * turn + i) % 300 for i in range(count)]


def assert_reads(cache: Any, seq: Any, marks: Any, stream: Any) -> None:
    for layer in range(cache.spec.num_layers):
        got = read_on(seq, layer, len(marks), stream)
        for array, want in zip(got, expected(cache.spec, layer, marks), strict=True):
            np.testing.assert_array_equal(array, want)


# ---- kernels at the same time ----------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["float32", "q8"])
def test_a_hit_on_another_stream_while_the_store_is_under_way(
    fmt: str, cuda: Any, streams: Any, busy: Busy
) -> None:
    # SPEC F49
    one, two = streams[:2]
    late = 0
    with on_gpu(64, fmt=fmt, **SHAPE) as cache:
        for turn in range(ROUNDS):
            prompt, marks = range(1000 * turn, 1000 * turn + 33), some_marks(turn, 33)
            seq = cache.open(prompt, stream=one)
            given = [device_rows(cache, layer, marks) for layer in range(2)]
            busy.keep(one)
            for layer in range(2):
                seq.append(layer, *given[layer], stream=one)
            seq.commit(33)
            hit = cache.open(prompt, stream=two)
            late += not is_done(cuda, one)
            assert hit.num_cached_tokens == 32
            assert_reads(cache, hit, marks[:32], two)
            seq.free()
            hit.free()
    assert late > 0, "the store was never under way"


def test_a_freed_block_is_written_after_its_readers(
    cuda: Any, streams: Any, busy: Busy
) -> None:
    # SPEC F49: a foreign kernel on a third stream still reads what the next owner overwrites
    one, two, three = streams[:3]
    late = 0
    with on_gpu(1, **SHAPE) as cache:
        for turn in range(ROUNDS):
            marks, others = some_marks(turn, 16), some_marks(turn + 7, 16)
            seq = cache.open(stream=one)
            append(cache, seq, marks, one)
            before = [read_on(seq, layer, 16, one) for layer in range(2)]
            views = [seq.views(layer, stream=three) for layer in range(2)]
            given = [device_rows(cache, layer, others) for layer in range(2)]
            busy.keep(three)
            copies = [Foreign(cuda, three).read(cache.slabs(layer)[0][0]) for layer in range(2)]
            for view in views:
                view.release()
            seq.free(stream=three)
            owner = cache.open(stream=two)
            for layer in range(2):
                owner.append(layer, *given[layer], stream=two)
            late += not is_done(cuda, three)
            assert_reads(cache, owner, others, two)
            for copy, (k, _) in zip(copies, before, strict=True):
                np.testing.assert_array_equal(host(copy).transpose(1, 0, 2), k)
            owner.free()
    assert late > 0, "the reader was never under way"


@pytest.mark.parametrize("fmt", ["float32", "q8"])
def test_threads_with_streams_of_their_own(fmt: str, cuda: Any, streams: Any) -> None:
    # SPEC F34 F49: prompts that share a prefix, opened, written, forked and freed at once
    with on_gpu(200, fmt=fmt, **SHAPE) as cache:
        with cache.open(range(33), stream=streams[0]) as seq:
            append(cache, seq, some_marks(0, 33), streams[0])
            seq.commit(33)

        def work(number: int) -> None:
            stream = streams[number]
            for turn in range(ROUNDS):
                tokens = [*range(32), *range(1000 * number + 40 * turn, 1000 * number + 41 * turn)]
                with cache.open([*tokens, 7, 8], stream=stream) as seq:
                    known = seq.num_cached_tokens
                    marks = some_marks(0, 32) + some_marks(number + turn, len(tokens) - 30)
                    append(cache, seq, marks[known:], stream)
                    seq.commit(len(marks) - known)
                    with seq.fork() as twin:
                        append(cache, twin, [5], stream)  # copies the last block
                        assert_reads(cache, twin, [*marks, 5], stream)
                    assert_reads(cache, seq, marks, stream)

        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(work, number) for number in range(4)]:
                done.result()
        cache.check()
        cache.synchronize()


def test_host_rows_and_host_arrays_on_busy_streams(cuda: Any, streams: Any, busy: Busy) -> None:
    # SPEC F43 F49: the pinned ring is filled again only after its copies
    one, two = streams[:2]
    with on_gpu(64, **SHAPE) as cache:
        for turn in range(ROUNDS):
            marks = some_marks(turn, 200)
            with cache.open(stream=one) as seq:
                busy.keep(one)
                for layer in range(2):
                    k, v = rows(cache.spec, layer, marks)
                    seq.append(layer, k, v, stream=one)
                    k[:], v[:] = -1, -1  # ours again at once
                seq.commit(200)
                out = [np.zeros((200, 4, 64), np.float32) for _ in "kv"]
                for layer in range(2):
                    seq.gather(layer, 0, 200, out=out, stream=two)
                    for array, want in zip(out, expected(cache.spec, layer, marks), strict=True):
                        np.testing.assert_array_equal(array, want)


# ---- graphs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_the_first_kernels_of_a_process_are_captured(mode: int, cuda: Any) -> None:
    # SPEC F49: kernels are loaded at their first launch, which a capture must survive
    done = run_program(
        f"""
        import sys
        sys.path.insert(0, {TESTS!r})
        import numpy as np
        from cachekit import expected
        from gpukit import Capture, device_rows, finish, on_gpu, read_on, streams_of
        from pagedcache._cuda.driver import get_device
        from pagedcache.checks.devices import upload

        device = get_device(0)
        with streams_of(device, 1) as (stream,), on_gpu(4, B=16, dim=64, fmt="q8") as cache:
            seq = cache.open(stream=stream)
            slots = upload(seq.prepare(20, stream=stream).slots, "cuda:0")
            given = device_rows(cache, 0, range(20))
            with Capture(device, stream, {mode}) as graph:
                cache.store(0, *given, slots, "saturate", stream=stream)
            graph.launch()
            seq.commit(20, stream=stream)
            got, want = read_on(seq, 0, 20, stream), expected(cache.spec, 0, range(20))
            print(all(np.array_equal(a, b) for a, b in zip(got, want)))
            finish(stream, device)
            graph.close()
        """
    )
    assert_clean(done, "True")


def test_a_captured_step_is_replayed(cuda: Any, streams: Any) -> None:
    # SPEC F33 F49: raw slots and rows in device memory are read anew by each run
    one = streams[0]
    with on_gpu(8, fmt="q8", **SHAPE) as cache:
        seq = cache.open(stream=one)
        slots = seq.prepare(40, stream=one).slots
        place = upload(slots[:1].copy(), "cuda:0")
        given = [device_rows(cache, layer, [0]) for layer in range(2)]
        with Capture(cuda, one) as graph:
            for layer in range(2):
                cache.store(layer, *given[layer], place, "saturate", stream=one)
        for step in range(40):
            fresh = [(place, slots[step : step + 1])]
            for layer in range(2):
                fresh += zip(given[layer], rows(cache.spec, layer, [100 + step]), strict=True)
            for array, values in fresh:
                cuda.call(
                    "pc_cuda_copy", array.address, np.ascontiguousarray(values).ctypes.data,
                    array.nbytes, one.handle,
                )  # fmt: skip
                finish(one, cuda)
            graph.launch()
        seq.commit(40, stream=one)
        assert_reads(cache, seq, range(100, 140), one)
        cache.synchronize()
        graph.close()


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_another_thread_waits_and_takes_memory_beside_a_capture(
    mode: int, cuda: Any, streams: Any
) -> None:
    # SPEC F34 F49: no call of ours spoils a capture that somebody else has begun
    one, two = streams[:2]
    with on_gpu(32, **SHAPE) as cache:
        mine = upload(np.zeros(1000, np.float32), "cuda:0")

        def work() -> None:
            for turn in range(5):
                marks = some_marks(turn, 33)
                with cache.open(range(50 * turn, 50 * turn + 34), stream=two) as seq:
                    for layer in range(2):
                        seq.append(layer, *rows(cache.spec, layer, marks), stream=two)
                    seq.commit(33)
                    assert_reads(cache, seq, marks, two)  # takes memory, waits, frees it

        with Capture(cuda, one, mode) as graph:
            cuda.call("pc_cuda_fill", mine.address, 0x41, mine.nbytes, one.handle)
            with ThreadPoolExecutor(1) as pool:
                pool.submit(work).result()
        graph.launch()
        finish(one, cuda)
        assert set(host(mine).view(np.uint8)) == {0x41}
        graph.close()


# ---- handles ---------------------------------------------------------------------------------


def test_the_work_of_a_destroyed_stream_is_not_lost(cuda: Any) -> None:
    # SPEC F49, 7: in a process of its own, as a driver need not survive a stale handle
    done = run_program(
        f"""
        import sys
        sys.path.insert(0, {TESTS!r})
        import numpy as np
        from cachekit import expected
        from gpukit import append, on_gpu, read_on, streams_of
        from pagedcache._cuda.driver import get_device

        device = get_device(0)
        with streams_of(device, 2) as streams, on_gpu(4, B=16, dim=64) as cache:
            seq = cache.open(stream=streams[1])
            handle = streams[0].handle
            append(cache, seq, range(20), handle)
            with device.current():
                del streams[0]
            got, want = read_on(seq, 0, 20, streams[0]), expected(cache.spec, 0, range(20))
            print(all(np.array_equal(a, b) for a, b in zip(got, want)), device.broken)
            seq.free()
        """
    )
    assert_clean(done, "True None")
