"""The stub driver keeps CUDA's promises and no others, and fails where a test tells it to."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def drv(cuda: Any, emulated: Any) -> Iterator[Any]:
    """PyCUDA's driver module, with the context current."""
    with cuda.current():
        yield cuda.pycuda


def test_every_symbol_of_pycuda_is_there(drv: Any) -> None:
    import pycuda._driver

    # Bound at once, not when first called: a missing function is an error here.
    ctypes.CDLL(pycuda._driver.__file__, mode=os.RTLD_NOW)
    with pytest.raises(drv.Error, match="not supported"):
        drv.module_from_buffer(b"no module")


# ---- memory ----------------------------------------------------------------------------------


def test_an_allocation_fails_from_the_nth_on(drv: Any, emulated: Any) -> None:
    emulated.fail("cuMemAlloc", 3, 2)
    keep = [drv.mem_alloc(10), drv.mem_alloc(10)]
    with pytest.raises(drv.MemoryError, match="cuMemAlloc failed: out of memory"):
        drv.mem_alloc(10)  # PyCUDA collects garbage and tries again: that fails too
    emulated.fail("cuMemAlloc", 0)
    keep.append(drv.mem_alloc(10))
    assert len({int(each) for each in keep}) == 3


def test_a_failure_that_happens_once(drv: Any, emulated: Any) -> None:
    emulated.fail("cuMemAlloc", 1, 2, times=1)
    before = emulated.get("calls:cuMemAlloc")
    drv.mem_alloc(10).free()  # the second try of PyCUDA
    assert emulated.get("calls:cuMemAlloc") == before + 2


def test_total_memory_and_peak(drv: Any, emulated: Any) -> None:
    emulated.set("total_memory", 1 << 20)
    free, total = drv.mem_get_info()
    assert total == 1 << 20
    half = drv.mem_alloc(free // 2)
    assert drv.mem_get_info()[0] == free - free // 2
    with pytest.raises(drv.MemoryError):
        drv.mem_alloc(free)
    half.free()
    drv.mem_alloc(free).free()
    assert emulated.get("peak_bytes") >= free


def test_fresh_memory_is_not_zero(drv: Any) -> None:
    memory, found = drv.mem_alloc(64), np.zeros(64, np.uint8)
    drv.memcpy_dtoh(found, memory)
    assert (found == 0xCD).all()


def test_copies_are_checked(drv: Any) -> None:
    memory = drv.mem_alloc(100)
    with pytest.raises(drv.LogicError, match="invalid argument"):
        drv.memcpy_htod(memory, np.zeros(101, np.uint8))
    with pytest.raises(drv.LogicError):
        drv.memset_d8(int(memory) + 50, 0, 51)
    address = int(memory)
    memory.free()
    for attempt in (
        lambda: drv.memcpy_dtoh(np.zeros(4, np.uint8), address),
        lambda: drv.memcpy_htod_async(address, np.zeros(4, np.uint8), None),
        lambda: memory.free(),
    ):
        with pytest.raises(drv.LogicError):
            attempt()


def test_a_free_of_no_allocation_is_counted(drv: Any, emulated: Any) -> None:
    memory = drv.mem_alloc(100)
    assert emulated.library.cuMemFree_v2(ctypes.c_uint64(int(memory) + 1)) == 1
    assert emulated.get("bad_frees") == 1
    emulated.reset()  # not for the check after this test


# ---- pointers and devices --------------------------------------------------------------------

MEMORY_TYPE, IS_MANAGED, ORDINAL, RANGE_SIZE = 2, 8, 9, 12


def attribute(emulated: Any, which: int, address: int) -> int | None:
    found = ctypes.c_uint64(0)
    code = emulated.library.cuPointerGetAttribute(
        ctypes.byref(found), which, ctypes.c_uint64(address)
    )
    return found.value if code == 0 else None


def test_memory_belongs_to_a_device(drv: Any, emulated: Any) -> None:
    emulated.set("devices", 2)
    assert drv.Device.count() == 2
    first = drv.mem_alloc(1000)
    context = drv.Device(1).retain_primary_context()
    context.push()
    try:
        second = drv.mem_alloc(500)
        pinned = drv.pagelocked_empty(16, np.uint8)
        free, total = drv.mem_get_info()
        for memory, ordinal, size in ((first, 0, 1000), (second, 1, 500)):
            address = int(memory)
            assert attribute(emulated, ORDINAL, address + size - 1) == ordinal
            assert attribute(emulated, RANGE_SIZE, address) == size
            assert attribute(emulated, MEMORY_TYPE, address) == 2
            assert attribute(emulated, IS_MANAGED, address) == 0
            assert attribute(emulated, ORDINAL, address + size) is None
        assert attribute(emulated, MEMORY_TYPE, pinned.ctypes.data) == 1
        assert attribute(emulated, MEMORY_TYPE, np.zeros(9).ctypes.data) is None
        assert free == total - 500  # of this device
        second.free()
        del pinned
    finally:
        drv.Context.pop()
        context.detach()


def test_pointers_as_the_library_sees_them(cuda: Any, drv: Any, emulated: Any) -> None:
    kind, ordinal = ctypes.c_int(), ctypes.c_int()

    def ask(address: int) -> tuple[int, int]:
        cuda.call("pc_cuda_pointer", ctypes.byref(kind), ctypes.byref(ordinal), address)
        return kind.value, ordinal.value

    memory, pinned = drv.mem_alloc(64), drv.pagelocked_empty(16, np.uint8)
    managed = drv.managed_empty(16, np.uint8, mem_flags=drv.mem_attach_flags.GLOBAL)
    assert ask(int(memory) + 63) == (2, 0)
    assert ask(pinned.ctypes.data) == (1, 0)
    assert ask(managed.ctypes.data) == (3, 0)
    assert ask(np.zeros(4).ctypes.data)[0] == 0
    memory.free()
    assert ask(int(memory))[0] == 0


# ---- order: what happens when nothing waits ---------------------------------------------------


@pytest.fixture
def late(drv: Any, emulated: Any) -> Any:
    """Streams that work only when something waits for them."""
    emulated.set("async", 1)
    return drv


def test_a_missing_synchronise_is_seen(late: Any, emulated: Any) -> None:
    stream, memory = late.Stream(), late.mem_alloc(16)
    late.memset_d8_async(memory, 7, 16, stream)
    found = late.pagelocked_empty(16, np.uint8)
    found[:] = 0
    late.memcpy_dtoh_async(found, memory, stream)
    assert emulated.get("pending") == 2 and not found.any()
    stream.synchronize()
    assert emulated.get("pending") == 0 and (found == 7).all()


def test_the_default_stream_is_late_too(late: Any, emulated: Any) -> None:
    memory, found = late.mem_alloc(16), late.pagelocked_empty(16, np.uint8)
    found[:] = 0
    late.memset_d8_async(memory, 7, 16)
    late.memcpy_dtoh_async(found, memory)
    assert not found.any()
    late.Context.synchronize()
    assert (found == 7).all()


def test_a_pinned_source_changed_too_early_is_seen(late: Any) -> None:
    stream, memory = late.Stream(), late.mem_alloc(16)
    source, found = late.pagelocked_empty(16, np.uint8), np.empty(16, np.uint8)
    source[:] = 1
    late.memcpy_htod_async(memory, source, stream)
    source[:] = 2  # the bug
    stream.synchronize()
    late.memcpy_dtoh(found, memory)
    assert (found == 2).all()
    source[:] = 1
    late.memcpy_htod_async(memory, source, stream)
    late.Event().record(stream).synchronize()
    source[:] = 2
    late.memcpy_dtoh(found, memory)
    assert (found == 1).all()


def test_a_pageable_source_is_read_at_once(late: Any) -> None:
    stream, memory, found = late.Stream(), late.mem_alloc(16), np.empty(16, np.uint8)
    source = np.ones(16, np.uint8)
    late.memcpy_htod_async(memory, source, stream)
    source[:] = 2
    late.memcpy_dtoh_async(found, memory, stream)  # and a pageable target is written before it ends
    assert (found == 1).all()


NON_BLOCKING = 1


@pytest.mark.parametrize("with_event", [False, True])
def test_streams_need_an_event_between_them(late: Any, with_event: bool) -> None:
    writer, reader = late.Stream(NON_BLOCKING), late.Stream(NON_BLOCKING)
    memory, copy, found = late.mem_alloc(16), late.mem_alloc(16), np.empty(16, np.uint8)
    late.memset_d8(memory, 0, 16)
    late.Context.synchronize()
    late.memset_d8_async(memory, 7, 16, writer)
    if with_event:
        reader.wait_for_event(late.Event().record(writer))
    late.memcpy_dtod_async(copy, memory, 16, reader)
    reader.synchronize()
    late.memcpy_dtoh(found, copy)
    assert (found == (7 if with_event else 0)).all()


def test_a_wait_keeps_its_meaning_when_the_event_is_used_again(late: Any) -> None:
    writer, reader = late.Stream(NON_BLOCKING), late.Stream(NON_BLOCKING)
    memory, found = late.mem_alloc(4), late.pagelocked_empty(4, np.uint8)
    late.memset_d8_async(memory, 1, 4, writer)
    event = late.Event().record(writer)
    reader.wait_for_event(event)
    late.memset_d8_async(memory, 2, 4, writer)
    event.record(writer)  # later than what the reader waits for
    late.memcpy_dtoh_async(found, memory, reader)
    reader.synchronize()
    assert (found == 1).all()


def test_the_legacy_stream_orders_blocking_streams(late: Any) -> None:
    blocking, free = late.Stream(), late.Stream(NON_BLOCKING)
    memory, found = late.mem_alloc(4), late.pagelocked_empty(4, np.uint8)
    late.memset_d8_async(memory, 1, 4, blocking)
    late.memset_d8_async(memory, 2, 4)  # the legacy stream: after the blocking one
    late.memcpy_dtoh_async(found, memory, blocking)  # after the legacy one
    blocking.synchronize()
    assert (found == 2).all()
    late.memset_d8_async(memory, 3, 4)
    late.memcpy_dtoh_async(found, memory, free)  # waits for nobody
    free.synchronize()
    assert (found == 2).all()


def test_work_at_random_times_keeps_the_order_of_a_stream(drv: Any, emulated: Any) -> None:
    emulated.set("async", 12345)
    memory, found = drv.mem_alloc(4), drv.pagelocked_empty(4, np.uint8)
    streams = [drv.Stream(NON_BLOCKING) for _ in range(3)]
    done_early = set()
    for value in range(60):
        stream = streams[value % 3]
        drv.memset_d8_async(memory, value, 4, stream)
        streams[(value + 1) % 3].wait_for_event(drv.Event().record(stream))
        done_early.add(emulated.get("pending"))
    drv.memcpy_dtoh_async(found, memory, streams[0])
    streams[0].synchronize()
    assert (found == 59).all() and len(done_early) > 3


def test_a_full_queue_makes_the_caller_wait(late: Any, emulated: Any) -> None:
    emulated.set("queue_length", 8)
    stream, memory = late.Stream(), late.mem_alloc(4)
    for value in range(20):
        late.memset_d8_async(memory, value, 4, stream)
    assert emulated.get("pending") == 8


def test_a_question_makes_progress(late: Any, emulated: Any) -> None:
    stream, memory = late.Stream(), late.mem_alloc(4)
    for value in range(3):
        late.memset_d8_async(memory, value, 4, stream)
    event = late.Event().record(stream)
    answers = [event.query() for _ in range(5)]
    assert answers == [False, False, False, False, True]
    assert stream.is_done() and emulated.get("calls:cuEventQuery") == 5


# ---- given back too early ----------------------------------------------------------------------


def test_memory_freed_in_use_is_counted_and_safe(late: Any, emulated: Any) -> None:
    stream, memory = late.Stream(), late.mem_alloc(16)
    late.memset_d8_async(memory, 1, 16, stream)
    memory.free()
    assert emulated.get("freed_in_use") == 1
    stream.synchronize()


def test_a_free_that_does_not_wait_breaks_the_context(late: Any, emulated: Any) -> None:
    emulated.set("free_waits", 0)
    stream, memory = late.Stream(), late.mem_alloc(16)
    late.memset_d8_async(memory, 1, 16, stream)
    memory.free()
    with pytest.raises(late.LogicError, match="illegal memory access"):
        stream.synchronize()
    emulated.sticky(0)


def test_events_and_streams_destroyed_in_use(late: Any, emulated: Any) -> None:
    stream, memory = late.Stream(), late.mem_alloc(4)
    reader, found = late.Stream(NON_BLOCKING), late.pagelocked_empty(4, np.uint8)
    found[:] = 0
    handle = stream.handle
    late.memset_d8_async(memory, 9, 4, stream)
    event = late.Event().record(stream)
    reader.wait_for_event(event)
    late.memcpy_dtoh_async(found, memory, reader)
    del event, stream
    gc.collect()
    assert emulated.get("events_destroyed_in_use") == 1
    assert emulated.get("streams_destroyed_in_use") == 1
    assert late.Stream().handle != handle  # its work is not done: the handle is not given away
    reader.synchronize()
    assert (found == 9).all()
    assert late.Stream().handle == handle  # as a driver may do


# ---- failures ----------------------------------------------------------------------------------


class Tools:
    """One of each thing that calls are made with."""

    def __init__(self, drv: Any) -> None:
        self.drv = drv
        self.memory, self.other = drv.mem_alloc(64), drv.mem_alloc(64)
        self.stream, self.event = drv.Stream(), drv.Event()
        self.event.record()
        self.event.synchronize()
        self.pinned = drv.pagelocked_empty(64, np.uint8)
        self.bytes = np.zeros(64, np.uint8)


# Not here: cuCtxPushCurrent, after whose failure PyCUDA's own stack of contexts is wrong, and what
# destructors call, where a failure is only a warning.
CALLS: dict[str, tuple[int, Callable[[Tools], Any], str]] = {
    "cuMemAlloc": (2, lambda t: t.drv.mem_alloc(10), "MemoryError"),
    "cuMemAllocManaged": (
        2,
        lambda t: t.drv.managed_empty(4, np.uint8, mem_flags=t.drv.mem_attach_flags.GLOBAL),
        "MemoryError",
    ),
    "cuMemGetInfo": (999, lambda t: t.drv.mem_get_info(), "Error"),
    "cuMemGetAddressRange": (1, lambda t: t.drv.mem_get_address_range(t.memory), "LogicError"),
    "cuMemHostAlloc": (2, lambda t: t.drv.pagelocked_empty(4, np.float32), "MemoryError"),
    "cuMemcpyHtoD": (700, lambda t: t.drv.memcpy_htod(t.memory, t.bytes), "LogicError"),
    "cuMemcpyDtoH": (999, lambda t: t.drv.memcpy_dtoh(t.bytes, t.memory), "Error"),
    "cuMemcpyDtoD": (1, lambda t: t.drv.memcpy_dtod(t.memory, t.other, 64), "LogicError"),
    "cuMemcpyHtoDAsync": (
        400, lambda t: t.drv.memcpy_htod_async(t.memory, t.pinned, t.stream), "LogicError",
    ),
    "cuMemcpyDtoHAsync": (
        719, lambda t: t.drv.memcpy_dtoh_async(t.pinned, t.memory, t.stream), "LaunchError",
    ),
    "cuMemcpyDtoDAsync": (
        1, lambda t: t.drv.memcpy_dtod_async(t.memory, t.other, 64, t.stream), "LogicError",
    ),
    "cuMemsetD8": (1, lambda t: t.drv.memset_d8(t.memory, 0, 1), "LogicError"),
    "cuMemsetD16": (1, lambda t: t.drv.memset_d16(t.memory, 0, 1), "LogicError"),
    "cuMemsetD32": (1, lambda t: t.drv.memset_d32(t.memory, 0, 1), "LogicError"),
    "cuMemsetD8Async": (1, lambda t: t.drv.memset_d8_async(t.memory, 0, 1), "LogicError"),
    "cuMemsetD32Async": (1, lambda t: t.drv.memset_d32_async(t.memory, 0, 1), "LogicError"),
    "cuStreamCreate": (2, lambda t: t.drv.Stream(), "MemoryError"),
    "cuStreamSynchronize": (719, lambda t: t.stream.synchronize(), "LaunchError"),
    "cuStreamQuery": (700, lambda t: t.stream.is_done(), "LogicError"),
    "cuStreamWaitEvent": (400, lambda t: t.stream.wait_for_event(t.event), "LogicError"),
    "cuEventCreate": (2, lambda t: t.drv.Event(), "MemoryError"),
    "cuEventRecord": (400, lambda t: t.event.record(t.stream), "LogicError"),
    "cuEventSynchronize": (700, lambda t: t.event.synchronize(), "LogicError"),
    "cuEventQuery": (700, lambda t: t.event.query(), "LogicError"),
    "cuEventElapsedTime": (1, lambda t: t.event.time_since(t.event), "LogicError"),
    "cuCtxSynchronize": (719, lambda t: t.drv.Context.synchronize(), "LaunchError"),
    "cuCtxGetDevice": (201, lambda t: t.drv.Context.get_device(), "LogicError"),
    "cuDevicePrimaryCtxRetain": (
        46, lambda t: t.drv.Device(0).retain_primary_context(), "LogicError",
    ),
    "cuDeviceGet": (101, lambda t: t.drv.Device(0), "LogicError"),
    "cuDeviceGetCount": (100, lambda t: t.drv.Device.count(), "RuntimeError"),
    "cuDeviceGetName": (1, lambda t: t.drv.Device(0).name(), "LogicError"),
    "cuDeviceTotalMem": (1, lambda t: t.drv.Device(0).total_memory(), "LogicError"),
    "cuDeviceGetAttribute": (
        1, lambda t: t.drv.Device(0).get_attribute(t.drv.device_attribute.WARP_SIZE), "LogicError",
    ),
    "cuInit": (100, lambda t: t.drv.init(), "RuntimeError"),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_every_call_of_pycuda_can_fail(drv: Any, emulated: Any, call: str) -> None:
    code, attempt, expected = CALLS[call]
    tools = Tools(drv)
    emulated.fail(call, 1, code)
    with pytest.raises(drv.Error) as caught:
        attempt(tools)
    emulated.fail(call, 0)
    assert type(caught.value).__name__ == expected and f"{call} failed" in str(caught.value)
    attempt(tools)  # and works again


@pytest.mark.parametrize(
    ("call", "counter", "function"),
    [
        ("cuMemFree", "live_allocations", "cuMemFree_v2"),
        ("cuMemFreeHost", "live_pinned", "cuMemFreeHost"),
        ("cuStreamDestroy", "live_streams", "cuStreamDestroy_v2"),
    ],
)
def test_a_destructor_that_fails_leaks(
    drv: Any, emulated: Any, call: str, counter: str, function: str, capfd: Any
) -> None:
    made = {
        "cuMemFree": lambda: drv.mem_alloc(64),
        "cuMemFreeHost": lambda: drv.pagelocked_empty(64, np.uint8),
        "cuStreamDestroy": drv.Stream,
    }[call]()
    handle = made.ctypes.data if call == "cuMemFreeHost" else getattr(made, "handle", None)
    address = int(made) if handle is None else handle
    before = emulated.get(counter)
    emulated.fail(call, 1, 1)
    del made
    gc.collect()
    emulated.fail(call, 0)
    assert emulated.get(counter) == before
    assert f"{call} failed: invalid argument" in capfd.readouterr().err  # PyCUDA only warns
    assert getattr(emulated.library, function)(ctypes.c_uint64(address)) == 0


def test_a_broken_context_answers_everything_with_its_error(drv: Any, emulated: Any) -> None:
    tools = Tools(drv)
    emulated.sticky(700)
    for attempt in (
        lambda: drv.mem_alloc(10),
        lambda: drv.Context.synchronize(),
        lambda: drv.memcpy_htod(tools.memory, tools.bytes),
    ):
        with pytest.raises(drv.LogicError, match="illegal memory access"):
            attempt()
    assert drv.Context.get_device() == drv.Device(0)  # asks nothing of the context
    before = emulated.live()["live_allocations"]
    tools.memory.free()  # PyCUDA only warns
    assert emulated.live()["live_allocations"] == before - 1  # gone with the context all the same
    emulated.sticky(0)
    drv.Context.synchronize()


def test_another_thread_has_no_context(cuda: Any, drv: Any, emulated: Any) -> None:
    seen: list[Any] = []

    def work() -> None:
        try:
            drv.mem_alloc(10)
        except drv.Error as error:
            seen.append(type(error))
        with cuda.current():
            drv.mem_alloc(10).free()
            seen.append("worked")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [drv.LogicError, "worked"]


def test_a_forked_child_has_no_driver(drv: Any, emulated: Any) -> None:
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this process has threads
        child = os.fork()
    if child == 0:
        count = ctypes.c_int()
        code = emulated.library.cuDeviceGetCount(ctypes.byref(count))
        os.write(write, str(code).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 10) == b"3"  # CUDA_ERROR_NOT_INITIALIZED
    os.close(read)
    os.close(write)


def test_there_may_be_no_device(emulated: Any) -> None:
    emulated.set("devices", 0)
    assert emulated.library.cuInit(0) == 100  # CUDA_ERROR_NO_DEVICE
    with pytest.raises(KeyError):
        emulated.set("no such knob", 1)


# ---- DLPack by cuda.core ------------------------------------------------------------------------


def test_cuda_core_works_on_it(drv: Any, emulated: Any) -> None:
    core = pytest.importorskip("cuda.core", reason="needs cuda-core")
    utils = pytest.importorskip("cuda.core.utils")
    memory = drv.mem_alloc(1 << 12)
    address = int(memory)
    core.Device(0).set_current()
    buffer = core.Buffer.from_handle(address, 1 << 12, owner=memory)
    view = utils.StridedMemoryView.from_buffer(buffer, (4, 8, 64), dtype=np.dtype(np.float16))
    assert (view.ptr, view.__dlpack_device__()) == (address, (2, 0))
    before = emulated.live()["live_allocations"]
    capsule = view.__dlpack__()
    del memory, buffer, view
    gc.collect()
    assert emulated.live()["live_allocations"] == before  # the capsule keeps the memory
    del capsule
    gc.collect()
    assert emulated.live()["live_allocations"] == before - 1


def test_the_stub_is_not_in_the_package() -> None:
    import pagedcache

    package = Path(pagedcache.__file__).parent
    assert not list(package.rglob("libcuda*.so*")) + list(package.rglob("*stub*"))
    assert not list(package.rglob("*emulat*"))
