"""Device and pinned memory, regions that are used again, and copies through the pinned ring."""

from __future__ import annotations

import ctypes
import gc
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedcache._cuda.memory import DeviceMemory, PinnedMemory
from pagedcache._cuda.order import Order
from pagedcache._cuda.scratch import KEPT_NBYTES, Scratch, size_class
from pagedcache._cuda.staging import Staging, as_bytes
from pagedcache._cuda.streams import Stream, Streams
from pagedcache.errors import (
    CudaCallError,
    DeviceError,
    FormatError,
    StorageMemoryError,
)

FIXTURES = HealthCheck.function_scoped_fixture


@pytest.fixture
def streams(cuda: Any) -> Streams:
    return Streams(cuda)


@pytest.fixture
def stream(cuda: Any, streams: Streams) -> Any:
    """A stream of its own that waits for no other one."""
    with cuda.current():
        return streams.resolve(cuda.pycuda.Stream(1))


@pytest.fixture
def scratch(cuda: Any) -> Any:
    made = Scratch(cuda, Order(cuda, 4))
    yield made
    made.close()
    made.order.close()


@pytest.fixture
def staging(cuda: Any, scratch: Scratch) -> Any:
    made = Staging(cuda, scratch, ring_nbytes=4096)
    yield made
    made.close()


def read(staging: Staging, address: int, nbytes: int, stream: Stream) -> np.ndarray:
    out = np.empty(nbytes, np.uint8)
    staging.read(address, out, stream)
    return out


def pattern(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


# ---- allocations --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [DeviceMemory, PinnedMemory])
def test_taken_and_given_back(cuda: Any, emulated: Any, kind: Any) -> None:  # SPEC F42
    counter = {DeviceMemory: "live_allocations", PinnedMemory: "live_pinned"}[kind]
    before = emulated.get(counter)
    memory = kind(cuda, 1000, "a test")
    assert emulated.get(counter) == before + 1
    assert (memory.nbytes, memory.what, memory.device) == (1000, "a test", cuda)
    assert f"1,000 bytes at {memory.address:#x}" in repr(memory)
    memory.free()
    memory.free()
    assert emulated.get(counter) == before
    assert emulated.get("bad_frees") == 0
    assert repr(memory) == f"<{kind.__name__} for a test: freed>"
    kind(cuda, 0, "nothing").free()  # CUDA refuses to allocate nothing
    dropped = kind(cuda, 10, "a test")
    del dropped
    gc.collect()
    assert emulated.get(counter) == before


def test_zeroed(cuda: Any, staging: Staging, streams: Streams) -> None:  # SPEC F42
    memory = DeviceMemory(cuda, 1000, "a test").zeroed()
    assert not read(staging, memory.address, 1000, streams.default).any()
    memory.free()


def test_zeros_are_there_for_every_stream(
    cuda: Any, emulated: Any, staging: Staging, stream: Stream
) -> None:  # SPEC F49
    emulated.set("async", 1)
    memory = DeviceMemory(cuda, 1000, "a test").zeroed()
    assert not read(staging, memory.address, 1000, stream).any()
    memory.free()


def test_pinned_memory_is_an_array(cuda: Any) -> None:  # SPEC F42
    memory = PinnedMemory(cuda, 1000, "a test")
    memory.array[:] = 7
    assert (memory.array.shape, memory.array.dtype) == ((1000,), np.uint8)
    assert memory.array.ctypes.data == memory.address
    kind, ordinal = ctypes.c_int(), ctypes.c_int()
    cuda.call("pc_cuda_pointer", ctypes.byref(kind), ctypes.byref(ordinal), memory.address)
    assert kind.value == 1
    memory.free()


@pytest.mark.parametrize(
    ("kind", "call"), [(DeviceMemory, "cuMemAlloc"), (PinnedMemory, "cuMemHostAlloc")]
)
def test_no_room(cuda: Any, emulated: Any, kind: Any, call: str) -> None:  # SPEC F46
    emulated.fail(call, 1, 2, 0)
    with pytest.raises(StorageMemoryError) as caught:
        kind(cuda, 1 << 20, "K of layer 3")
    assert (caught.value.nbytes, caught.value.what) == (1 << 20, "K of layer 3")
    assert cuda.driver.current() == 0
    emulated.fail(call, 0)
    kind(cuda, 1 << 20, "K of layer 3").free()


def test_a_failure_that_passes_is_not_seen(cuda: Any, emulated: Any) -> None:  # SPEC F46
    """PyCUDA collects garbage and asks once more when there is no room."""
    emulated.fail("cuMemAlloc", 1, 2, 1)
    DeviceMemory(cuda, 100, "a test").free()


@pytest.mark.parametrize("code", [1, 201, 700, 999])
def test_an_allocation_that_fails_otherwise(cuda: Any, emulated: Any, code: int) -> None:
    emulated.fail("cuMemAlloc", 1, code, 0)  # SPEC F46
    with pytest.raises(CudaCallError) as caught:
        DeviceMemory(cuda, 100, "a test")
    assert (caught.value.call, caught.value.code) == ("cuMemAlloc", code)
    assert (cuda.broken is caught.value) == (code == 700)


def test_more_than_there_is(cuda: Any, emulated: Any) -> None:  # SPEC F46
    emulated.set("total_memory", 1 << 20)
    held = DeviceMemory(cuda, 1 << 19, "a test")
    with pytest.raises(StorageMemoryError, match="1,048,576 bytes for another"):
        DeviceMemory(cuda, 1 << 20, "another")
    held.free()
    DeviceMemory(cuda, 1 << 20, "another").free()


def test_freed_on_another_thread(cuda: Any, emulated: Any) -> None:  # SPEC F34, F42
    """PyCUDA leaks what is released on a thread that has not the context."""
    memory, pinned = DeviceMemory(cuda, 100, "a test"), PinnedMemory(cuda, 100, "a test")
    dropped = [DeviceMemory(cuda, 100, "a test")]
    before = emulated.get("live_allocations")

    def work() -> None:
        memory.free()
        pinned.free()
        dropped.clear()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert emulated.get("live_allocations") == before - 2
    assert emulated.get("live_pinned") == 0


def test_freed_once_by_many_threads(cuda: Any, emulated: Any) -> None:  # SPEC F34
    for _ in range(20):
        memory = DeviceMemory(cuda, 100, "a test")
        threads = [threading.Thread(target=memory.free) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert emulated.get("bad_frees") == 0


@pytest.mark.parametrize("kind", [DeviceMemory, PinnedMemory])
@pytest.mark.parametrize("call", ["cuCtxPushCurrent", "cuCtxPopCurrent", "cuCtxSetCurrent"])
def test_freed_whatever_the_context_does(
    cuda: Any, emulated: Any, kind: Any, call: str
) -> None:  # SPEC F46
    memory = kind(cuda, 100, "a test")
    emulated.fail(call, 1, 999, 1)
    thread = threading.Thread(target=memory.free)  # where PyCUDA would not free it by itself
    thread.start()
    thread.join()
    emulated.fail(call, 0)
    del memory
    gc.collect()
    assert emulated.get("live_allocations") == emulated.get("live_pinned") == 0
    assert emulated.get("bad_frees") == 0
    assert cuda.driver.current() == 0


def test_memory_goes_and_comes_under_capture(cuda: Any, emulated: Any) -> None:  # SPEC F49
    """A finaliser may run at any time; it must not spoil a capture."""
    memory = DeviceMemory(cuda, 100, "a test")
    with cuda.current():
        stream = cuda.pycuda.Stream()
        handle, graph = ctypes.c_void_p(stream.handle), ctypes.c_void_p()
        assert emulated.library.cuStreamBeginCapture_v2(handle, 0) == 0
        memory.free()
        DeviceMemory(cuda, 100, "a test").free()
        PinnedMemory(cuda, 100, "a test").free()
        assert emulated.library.cuStreamEndCapture(handle, ctypes.byref(graph)) == 0
        assert emulated.library.cuGraphDestroy(graph) == 0
    assert emulated.get("capture_violations") == 0
    assert emulated.get("live_allocations") == 0


# ---- scratch ------------------------------------------------------------------------------------


def test_sizes() -> None:
    assert [size_class(n) for n in (0, 1, 512, 513, 640, 641, 1024, 1025)] == [
        512, 512, 512, 640, 640, 768, 1024, 1280,
    ]  # fmt: skip


@given(st.integers(1, 2**50))
def test_a_size_wastes_little(nbytes: int) -> None:
    size = size_class(nbytes)
    assert nbytes <= size < max(1.25 * nbytes, 513)
    assert size_class(size) == size


def test_the_same_stream_has_a_region_again(
    cuda: Any, scratch: Scratch, stream: Stream, emulated: Any
) -> None:  # SPEC F49
    first = scratch.take(1000, stream)
    first.used(stream)
    address = first.address
    assert first.nbytes >= 1000
    second = scratch.take(1000, stream)
    assert second.address != address
    first.release()
    first.release()
    again = scratch.take(900, stream)
    assert again.address == address
    assert scratch.take(1000, stream).address not in (address, second.address)
    assert emulated.get("event_records") == 0


def test_another_stream_waits_on_the_device(
    cuda: Any, scratch: Scratch, staging: Staging, streams: Streams, stream: Stream, emulated: Any
) -> None:  # SPEC F49, CASE C52
    emulated.set("async", 1)
    with cuda.current():
        other = streams.resolve(cuda.pycuda.Stream(1))
    source, target = DeviceMemory(cuda, 1000, "a test"), DeviceMemory(cuda, 1000, "a test")
    cuda.call("pc_cuda_fill", source.address, 1, 1000, stream.handle)
    region = scratch.take(1000, stream)
    cuda.call("pc_cuda_copy", region.address, source.address, 1000, stream.handle)
    cuda.call("pc_cuda_copy", target.address, region.address, 1000, stream.handle)
    region.used(stream)
    region.release()
    again = scratch.take(1000, other)
    assert again.address == region.address
    assert (emulated.get("event_records"), emulated.get("stream_waits")) == (1, 1)
    cuda.call("pc_cuda_fill", again.address, 9, 1000, other.handle)
    other.synchronize()
    assert (read(staging, target.address, 1000, stream) == 1).all()
    source.free()
    target.free()


def test_a_region_of_the_same_stream_comes_first(
    scratch: Scratch, streams: Streams, emulated: Any, stream: Stream
) -> None:  # SPEC F49
    taken = [scratch.take(1000, stream) for _ in range(3)]
    for region, where in zip(taken, (stream, streams.default, stream), strict=True):
        region.used(where)
        region.release()
    assert scratch.take(1000, streams.default).address == taken[1].address
    assert emulated.get("event_records") == 0


def test_a_small_array_takes_no_large_region(scratch: Scratch, stream: Stream) -> None:
    large = scratch.take(1 << 20, stream)
    large.release()
    assert scratch.take(1000, stream).nbytes == 1024
    assert scratch.take(1 << 20, stream).address == large.address


def test_a_region_that_nobody_holds_comes_back(scratch: Scratch, stream: Stream) -> None:
    region = scratch.take(1000, stream)
    address = region.address
    del region
    gc.collect()
    assert scratch.take(1000, stream).address == address


def test_idle_regions_make_room(
    cuda: Any, scratch: Scratch, stream: Stream, emulated: Any
) -> None:  # SPEC F46
    emulated.set("total_memory", 3 << 20)
    emulated.set("async", 1)
    for nbytes in (1 << 20, 1 << 19):
        region = scratch.take(nbytes, stream)
        cuda.call("pc_cuda_fill", region.address, 1, nbytes, stream.handle)
        region.used(stream)
        region.release()
    with pytest.raises(StorageMemoryError, match="temporary device memory"):
        scratch.take(4 << 20, stream)
    assert scratch.take(3 << 20, stream).nbytes == 3 << 20
    assert emulated.get("freed_in_use") == 0


def test_no_room_and_nothing_idle(scratch: Scratch, stream: Stream, emulated: Any) -> None:
    emulated.fail("cuMemAlloc", 1, 2, 0)  # SPEC F46
    with pytest.raises(StorageMemoryError):
        scratch.take(1000, stream)
    assert emulated.get("calls:cuMemAlloc") == 2  # PyCUDA's second try, no third


@pytest.mark.parametrize("call", ["cuEventCreate", "cuEventRecord", "cuStreamWaitEvent"])
def test_a_wait_that_fails_leaves_the_region(
    scratch: Scratch, streams: Streams, stream: Stream, emulated: Any, call: str
) -> None:  # SPEC F46
    region = scratch.take(1000, stream)
    region.used(stream)
    region.release()
    emulated.fail(call, 1, 999, 1)
    with pytest.raises(CudaCallError):
        scratch.take(1000, streams.default)
    assert scratch.take(1000, streams.default).address == region.address
    assert emulated.get("live_allocations") == 1


def test_large_regions_are_not_kept(
    cuda: Any, scratch: Scratch, stream: Stream, emulated: Any
) -> None:  # SPEC F49
    emulated.set("async", 1)
    region = scratch.take(KEPT_NBYTES + 1, stream)
    cuda.call("pc_cuda_fill", region.address, 1, 1000, stream.handle)
    region.used(stream)
    assert (emulated.get("live_allocations"), emulated.get("pending")) == (1, 1)
    region.release()
    assert (emulated.get("live_allocations"), emulated.get("pending")) == (0, 0)
    assert emulated.get("freed_in_use") == 0  # its stream was waited for, by name


def test_a_large_region_of_a_stream_that_cannot_be_waited_for(
    scratch: Scratch, stream: Stream, emulated: Any
) -> None:  # SPEC F46
    region = scratch.take(KEPT_NBYTES + 1, stream)
    region.used(stream)
    emulated.fail("cuStreamSynchronize", 1, 999, 1)
    region.release()
    assert emulated.get("live_allocations") == 1
    assert scratch.take(KEPT_NBYTES + 1, stream).address == region.address


def test_closed_while_regions_are_out(cuda: Any, emulated: Any, stream: Stream) -> None:
    scratch = Scratch(cuda, Order(cuda, 4))
    out = scratch.take(1000, stream)
    scratch.take(5000, stream).release()
    assert emulated.get("live_allocations") == 2
    scratch.close()
    assert emulated.get("live_allocations") == 1
    out.release()
    assert emulated.get("live_allocations") == 0
    scratch.close()


# ---- staging ------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 63, 64, 1000, 1024, 1025, 4096, 4097, 50_000])
def test_there_and_back(staging: Staging, stream: Stream, nbytes: int, emulated: Any) -> None:
    emulated.set("async", 1)  # SPEC F43
    values = pattern(nbytes)
    kept = values.copy()
    region = staging.upload(values, stream)
    values[:] = 0  # it may be changed at once
    assert (read(staging, region.address, nbytes, stream) == kept).all()
    region.release()


def test_an_upload_is_a_use_of_its_region(
    cuda: Any, staging: Staging, scratch: Scratch, streams: Streams, stream: Stream, emulated: Any
) -> None:  # SPEC F49, CASE C52
    """Given up at once, the region is not another stream's before the copy has been made."""
    emulated.set("async", 1)
    staging.upload(np.ones(1000, np.uint8), stream).release()
    again = scratch.take(1000, streams.default)
    cuda.call("pc_cuda_fill", again.address, 2, 1000, None)
    streams.default.synchronize()
    stream.synchronize()
    assert (read(staging, again.address, 1000, streams.default) == 2).all()


def test_copies_under_way_end_before_the_ring_goes(
    cuda: Any, staging: Staging, stream: Stream, emulated: Any
) -> None:  # SPEC F49
    emulated.set("async", 1)
    memory = DeviceMemory(cuda, 2000, "a test")
    staging.write(memory.address, pattern(2000), stream)
    staging.close()
    assert emulated.get("events_destroyed_in_use") == emulated.get("freed_in_use") == 0
    assert (read(staging, memory.address, 2000, stream) == pattern(2000)).all()
    memory.free()


def test_any_dtype_and_shape(staging: Staging, stream: Stream) -> None:  # SPEC F43
    for array in (
        np.arange(60, dtype=np.float64).reshape(3, 4, 5),
        np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3),
        np.array(7, np.int32),
        np.empty((0, 3), np.float16),
    ):
        region = staging.upload(array, stream)
        out = np.zeros_like(array)
        staging.read(region.address, out, stream)
        assert out.tobytes() == array.tobytes()
        assert out.dtype == array.dtype


def test_only_dense_arrays(staging: Staging, stream: Stream) -> None:  # SPEC 7
    array = np.zeros((4, 4), np.float32)[:, ::2]
    for call in (
        lambda: staging.upload(array, stream),
        lambda: staging.write(0, array, stream),
        lambda: staging.read(0, array, stream),
    ):
        with pytest.raises(FormatError, match="a C-contiguous array"):
            call()
    shared = np.arange(4, dtype=np.int16)
    as_bytes(shared)[0] = 5
    assert shared[0] == 5


def test_uploading_needs_scratch(cuda: Any, stream: Stream) -> None:
    with pytest.raises(TypeError, match="no scratch memory"):
        Staging(cuda).upload(np.zeros(3), stream)


def test_the_host_waits_only_when_the_ring_is_full(
    cuda: Any, staging: Staging, stream: Stream, emulated: Any
) -> None:  # SPEC F49
    emulated.set("async", 1)
    memory = DeviceMemory(cuda, 8192, "a test")
    values = pattern(8192)
    for start in range(0, 4096, 512):
        staging.write(memory.address + start, values[start : start + 512], stream)
    assert emulated.get("calls:cuEventSynchronize") == 0
    assert emulated.get("pending") == 2 * 8
    for start in range(4096, 8192, 512):
        staging.write(memory.address + start, values[start : start + 512], stream)
    assert emulated.get("calls:cuEventSynchronize") == 8
    assert (read(staging, memory.address, 8192, stream) == values).all()
    assert emulated.get("calls:cuStreamSynchronize") == 0
    memory.free()


def test_events_are_used_again(cuda: Any, staging: Staging, stream: Stream, emulated: Any) -> None:
    memory = DeviceMemory(cuda, 100_000, "a test")  # SPEC F46
    staging.write(memory.address, pattern(100_000), stream)
    assert emulated.get("live_events") <= 5
    staging.close()
    assert emulated.get("live_events") == emulated.get("live_pinned") == 0
    staging.close()
    staging.write(memory.address, pattern(100), stream)  # a new ring
    assert emulated.get("live_pinned") == 1
    memory.free()


def test_what_another_stream_reads_is_not_overwritten(
    cuda: Any, staging: Staging, streams: Streams, stream: Stream, emulated: Any
) -> None:  # SPEC F49
    """Room in the ring goes round; each copy keeps its bytes until it has been made."""
    emulated.set("async", 1)
    parts = [DeviceMemory(cuda, 900, "a test") for _ in range(24)]
    for index, part in enumerate(parts):
        where = stream if index % 3 else streams.default
        staging.write(part.address, np.full(900, index, np.uint8), where)
    for index, part in enumerate(parts):
        where = stream if index % 3 else streams.default
        assert (read(staging, part.address, 900, where) == index).all()
        part.free()


@settings(suppress_health_check=[*settings().suppress_health_check, FIXTURES])
@given(
    st.lists(st.tuples(st.integers(1, 2500), st.booleans(), st.booleans()), max_size=25),
    st.integers(0, 2),
)
def test_any_sequence_of_copies(
    cuda: Any, emulated: Any, copies: list[tuple[int, bool, bool]], asynchronous: int
) -> None:  # SPEC F43, F49
    emulated.set("async", asynchronous)
    order = Order(cuda, 1)
    scratch = Scratch(cuda, order)
    staging = Staging(cuda, scratch, ring_nbytes=2048)
    streams = Streams(cuda)
    with cuda.current():
        other = streams.resolve(cuda.pycuda.Stream(1))
    held = []
    for seed, (nbytes, elsewhere, release) in enumerate(copies):
        where = other if elsewhere else streams.default
        values = pattern(nbytes, seed)
        region = staging.upload(values, where)
        if release:
            out = read(staging, region.address, nbytes, where)
            assert (out == values).all()
            region.used(where)
            region.release()
        else:
            held.append((region, values, where))
    for region, values, where in held:
        assert (read(staging, region.address, len(values), where) == values).all()
        region.release()
    staging.close()
    scratch.close()
    order.close()


@pytest.mark.parametrize("nth", range(1, 13))
@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("cuMemAlloc", 2),
        ("cuMemHostAlloc", 2),
        ("cuMemcpyAsync", 1),
        ("cuEventCreate", 2),
        ("cuEventRecord", 999),
        ("cuEventSynchronize", 999),
    ],
)
def test_a_failure_half_way_gives_everything_back(
    cuda: Any, emulated: Any, stream: Stream, call: str, code: int, nth: int
) -> None:  # SPEC F46
    """The call fails from the nth time on; then all is well again and the same copies work."""
    emulated.set("async", 1)
    order = Order(cuda, 4)
    scratch = Scratch(cuda, order)
    staging = Staging(cuda, scratch, ring_nbytes=2048)
    values = pattern(5000)
    emulated.fail(call, nth, code, 0)
    failed = False
    try:
        region = staging.upload(values, stream)
        out = read(staging, region.address, 5000, stream)
    except (CudaCallError, StorageMemoryError) as error:
        failed = True
        if isinstance(error, CudaCallError):
            assert error.code == code
    else:
        assert (out == values).all()
    emulated.fail(call, 0)
    assert failed == (emulated.get(f"calls:{call}") >= nth)
    region = staging.upload(values, stream)
    assert (read(staging, region.address, 5000, stream) == values).all()
    region.release()
    staging.close()
    scratch.close()
    order.close()
    assert emulated.get("live_allocations") == emulated.get("live_pinned") == 0
    assert emulated.get("live_events") == 0


def test_refused_under_capture(
    cuda: Any, staging: Staging, scratch: Scratch, emulated: Any
) -> None:  # SPEC F49
    memory = DeviceMemory(cuda, 100, "a test")
    with cuda.current():
        made = cuda.pycuda.Stream()
    stream = Streams(cuda).resolve(made)
    values = np.zeros(100, np.uint8)
    handle, graph = ctypes.c_void_p(made.handle), ctypes.c_void_p()
    allocations = emulated.get("allocations")
    with cuda.current():
        assert emulated.library.cuStreamBeginCapture_v2(handle, 0) == 0
        for call in (
            lambda: staging.upload(values, stream),
            lambda: staging.write(memory.address, values, stream),
            lambda: staging.read(memory.address, values, stream),
        ):
            with pytest.raises(DeviceError, match="a stream that is not being captured"):
                call()
        assert emulated.library.cuStreamEndCapture(handle, ctypes.byref(graph)) == 0
        assert emulated.library.cuGraphDestroy(graph) == 0
    assert emulated.get("capture_violations") == 0
    assert emulated.get("allocations") == allocations
    memory.free()


def test_readers_do_not_wait_for_each_other(cuda: Any, staging: Staging) -> None:  # SPEC F34
    """Each holds half of the ring and needs more: they must empty their own half first."""
    staging._most = 2048
    meet, copy = threading.Barrier(2, timeout=30), staging._copy
    met = threading.local()

    def first_meet(*arguments: Any) -> None:
        if not hasattr(met, "done"):
            met.done = True
            meet.wait()
        copy(*arguments)

    staging._copy = first_meet  # type: ignore[method-assign]
    memory = DeviceMemory(cuda, 6000, "a test").zeroed()
    found: list[np.ndarray] = []
    threads = [
        threading.Thread(
            target=lambda: found.append(read(staging, memory.address, 6000, Streams(cuda).default)),
            daemon=True,
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 2 and not any(out.any() for out in found)
    memory.free()


def test_threads_share_the_ring(cuda: Any, staging: Staging, emulated: Any) -> None:  # SPEC F34
    """Small ring, large arrays, reads and writes at once: no deadlock and no mixed bytes."""
    streams = Streams(cuda)
    with cuda.current():
        own = [streams.resolve(cuda.pycuda.Stream(1)) for _ in range(6)]
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            memory = DeviceMemory(cuda, 6000, "a test")
            for turn in range(15):
                values = pattern(6000, 100 * index + turn)
                staging.write(memory.address, values, own[index])
                assert (read(staging, memory.address, 6000, own[index]) == values).all()
            memory.free()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not errors


def test_the_devices_own_staging(cuda: Any) -> None:  # SPEC F42
    assert cuda.staging is cuda.staging
