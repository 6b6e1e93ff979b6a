"""Stream capture on the stub driver: what is forbidden, what is recorded, and that it replays."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from cuda_emulation import bugs

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
NON_BLOCKING = 1
UNSUPPORTED, INVALIDATED, UNJOINED, ISOLATION, IMPLICIT, CAPTURED_EVENT = (
    900,
    901,
    904,
    905,
    906,
    907,
)


class Graphs:
    """The driver's functions of captures and graphs; each returns its code."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def begin(self, stream: int, mode: int = GLOBAL) -> int:
        return int(self.library.cuStreamBeginCapture_v2(ctypes.c_void_p(stream), mode))

    def end(self, stream: int) -> tuple[int, int]:
        """(code, graph)"""
        graph = ctypes.c_void_p()
        code = self.library.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph))
        return int(code), graph.value or 0

    def status(self, stream: int) -> tuple[int, int]:
        """(code, 0 none, 1 active or 2 invalidated)"""
        status = ctypes.c_int(-1)
        code = self.library.cuStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(status))
        return int(code), status.value

    def instantiate(self, graph: int) -> int:
        made = ctypes.c_void_p()
        code = self.library.cuGraphInstantiateWithFlags(
            ctypes.byref(made), ctypes.c_void_p(graph), ctypes.c_ulonglong(0)
        )
        assert code == 0 and self.library.cuGraphDestroy(ctypes.c_void_p(graph)) == 0
        return made.value or 0

    def launch(self, executable: int, stream: int) -> int:
        return int(self.library.cuGraphLaunch(ctypes.c_void_p(executable), ctypes.c_void_p(stream)))

    def destroy(self, executable: int) -> int:
        return int(self.library.cuGraphExecDestroy(ctypes.c_void_p(executable)))


@pytest.fixture
def drv(cuda: Any, emulated: Any) -> Iterator[Any]:
    with cuda.current():
        yield cuda.pycuda


@pytest.fixture
def graphs(drv: Any, emulated: Any) -> Graphs:
    return Graphs(emulated.library)


def test_a_kernel_and_a_copy_are_recorded_and_replayed(
    drv: Any, graphs: Graphs, cuda: Any, emulated: Any
) -> None:
    kernels = bugs.library(cuda.library.path)
    stream, given, out = drv.Stream(), drv.mem_alloc(512), drv.mem_alloc(512)
    source, found = drv.pagelocked_empty(128, np.float32), drv.pagelocked_empty(128, np.float32)
    source[:], found[:] = 1, 0
    assert graphs.begin(stream.handle) == 0
    assert graphs.status(stream.handle) == (0, 1)
    drv.memcpy_htod_async(given, source, stream)
    assert kernels.pc_cuda_bug(bugs.REVERSE, int(given), int(out), stream.handle) == 0
    drv.memcpy_dtoh_async(found, out, stream)
    code, graph = graphs.end(stream.handle)
    assert code == 0 and emulated.get("captured") == 3
    drv.Context.synchronize()
    assert not found.any()  # nothing has run yet

    executable = graphs.instantiate(graph)
    for value in (3, 4):
        source[:] = np.arange(128) * value
        assert graphs.launch(executable, stream.handle) == 0
        stream.synchronize()
        assert np.array_equal(found, np.arange(127, -1, -1) * value)
    assert graphs.destroy(executable) == 0
    assert emulated.live()["live_graphs"] == 0


FORBIDDEN: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "cuCtxSynchronize": lambda drv, stream, event, memory: drv.Context.synchronize(),
    "cuStreamSynchronize": lambda drv, stream, event, memory: stream.synchronize(),
    "cuStreamQuery": lambda drv, stream, event, memory: stream.is_done(),
    "cuEventSynchronize": lambda drv, stream, event, memory: event.synchronize(),
    "cuEventQuery": lambda drv, stream, event, memory: event.query(),
    "cuMemAlloc": lambda drv, stream, event, memory: drv.mem_alloc(4),
    "cuMemHostAlloc": lambda drv, stream, event, memory: drv.pagelocked_empty(4, np.uint8),
    "cuMemcpyDtoH": lambda drv, stream, event, memory: drv.memcpy_dtoh(np.zeros(4), memory),
    "cuMemsetD8": lambda drv, stream, event, memory: drv.memset_d8(memory, 0, 4),
}


@pytest.mark.parametrize("call", FORBIDDEN)
def test_waiting_asking_and_allocating_spoil_a_capture(
    drv: Any, graphs: Graphs, emulated: Any, call: str
) -> None:
    stream, event, memory = drv.Stream(), drv.Event(), drv.mem_alloc(64)
    assert graphs.begin(stream.handle) == 0
    drv.memset_d8_async(memory, 0, 4, stream)
    with pytest.raises(drv.Error, match=f"{call} failed: operation not permitted when"):
        FORBIDDEN[call](drv, stream, event, memory)
    assert graphs.status(stream.handle) == (0, 2)
    assert graphs.end(stream.handle) == (INVALIDATED, 0)
    assert emulated.get("capture_violations") == 1
    FORBIDDEN[call](drv, stream, event, memory)  # allowed again


def test_a_free_spoils_a_capture(drv: Any, graphs: Graphs, emulated: Any) -> None:
    stream, memory = drv.Stream(), drv.mem_alloc(64)
    assert graphs.begin(stream.handle) == 0
    assert emulated.library.cuMemFree_v2(ctypes.c_uint64(int(memory))) == UNSUPPORTED
    assert graphs.end(stream.handle)[0] == INVALIDATED


def test_the_default_stream_spoils_the_capture_of_a_blocking_one(drv: Any, graphs: Graphs) -> None:
    memory = drv.mem_alloc(64)
    blocking, free = drv.Stream(), drv.Stream(NON_BLOCKING)
    assert graphs.begin(blocking.handle) == 0
    assert graphs.status(0)[0] == IMPLICIT  # only asked: nothing is spoiled
    assert graphs.status(blocking.handle) == (0, 1)
    with pytest.raises(drv.Error, match="legacy stream depend on a capturing blocking stream"):
        drv.memset_d8_async(memory, 0, 4)
    assert graphs.end(blocking.handle)[0] == INVALIDATED

    assert graphs.begin(free.handle) == 0
    drv.memset_d8_async(memory, 0, 4)
    code, graph = graphs.end(free.handle)
    assert code == 0 and graphs.destroy(graphs.instantiate(graph)) == 0
    assert graphs.begin(0) == UNSUPPORTED


def test_modes_say_whom_a_capture_forbids(drv: Any, graphs: Graphs, cuda: Any) -> None:
    stream = drv.Stream(NON_BLOCKING)
    codes: list[bool] = []

    def elsewhere() -> None:
        with cuda.current():
            try:
                drv.mem_alloc(4).free()
                codes.append(True)
            except drv.Error:
                codes.append(False)

    for mode, allowed_here, allowed_elsewhere in (
        (GLOBAL, False, False), (THREAD_LOCAL, False, True), (RELAXED, True, True),
    ):  # fmt: skip
        for expected, inside in ((allowed_elsewhere, False), (allowed_here, True)):
            assert graphs.begin(stream.handle, mode) == 0
            if inside:
                elsewhere()
            else:
                thread = threading.Thread(target=elsewhere)
                thread.start()
                thread.join()
            assert codes.pop() is expected, (mode, inside)
            code, graph = graphs.end(stream.handle)
            assert (code == 0) is expected
            if graph:
                assert graphs.destroy(graphs.instantiate(graph)) == 0


def test_another_stream_joins_by_an_event_and_must_come_back(drv: Any, graphs: Graphs) -> None:
    first, second = drv.Stream(), drv.Stream()
    memory, found = drv.mem_alloc(4), drv.pagelocked_empty(4, np.uint8)
    for joined in (False, True):
        assert graphs.begin(first.handle) == 0
        drv.memset_d8_async(memory, 5, 4, first)
        second.wait_for_event(drv.Event().record(first))
        assert graphs.status(second.handle) == (0, 1)
        drv.memcpy_dtoh_async(found, memory, second)
        if joined:
            first.wait_for_event(drv.Event().record(second))
        code, graph = graphs.end(first.handle)
        assert graphs.status(second.handle) == (0, 0)
        assert code == (0 if joined else UNJOINED)
    executable = graphs.instantiate(graph)
    assert graphs.launch(executable, second.handle) == 0
    second.synchronize()
    assert (found == 5).all() and graphs.destroy(executable) == 0


def test_a_wait_for_work_outside_spoils_a_capture(drv: Any, graphs: Graphs) -> None:
    first, second = drv.Stream(), drv.Stream()
    outside = drv.Event().record(second)
    assert graphs.begin(first.handle) == 0
    with pytest.raises(drv.Error, match="uncaptured work in another stream"):
        first.wait_for_event(outside)
    assert graphs.end(first.handle)[0] == INVALIDATED


def test_a_captured_event_cannot_be_waited_for(drv: Any, graphs: Graphs) -> None:
    stream, event = drv.Stream(), drv.Event()
    assert graphs.begin(stream.handle, RELAXED) == 0
    event.record(stream)
    for attempt in (event.synchronize, event.query):
        with pytest.raises(drv.Error, match="event last recorded in a capturing stream"):
            attempt()
    code, graph = graphs.end(stream.handle)
    assert code == 0 and graphs.destroy(graphs.instantiate(graph)) == 0


def test_capture_as_the_library_sees_it(drv: Any, graphs: Graphs, cuda: Any) -> None:
    stream, capturing = drv.Stream(NON_BLOCKING), ctypes.c_int(-1)
    cuda.call("pc_cuda_stream_capturing", ctypes.byref(capturing), stream.handle)
    assert capturing.value == 0
    assert graphs.begin(stream.handle) == 0
    cuda.call("pc_cuda_stream_capturing", ctypes.byref(capturing), stream.handle)
    assert capturing.value == 1
    assert graphs.destroy(graphs.instantiate(graphs.end(stream.handle)[1])) == 0
