"""Streams of any library as one object each; those out of use are waited for and forgotten."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from streammodel import ModelDevice

from pagedcache._cuda.order import Order
from pagedcache._cuda.streams import LIMIT, Stream, Streams
from pagedcache.errors import CudaCallError, DeviceError, InvalidArgumentError

FAILURE = CudaCallError("pc_cuda_stream_synchronize", 400, "cudaErrorInvalid", "invalid handle")


@pytest.fixture
def device() -> Any:
    return ModelDevice(FAILURE)


@pytest.fixture
def streams(device: Any) -> Streams:
    return Streams(device)


class Method:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 0x4000


class Property:
    __cuda_stream__ = (0, 0x4008)


class Raises:
    @property
    def cuda_stream(self) -> int:
        raise RuntimeError("this stream was closed")


TAKEN = {
    "None": (None, 0),
    "0": (0, 0),
    "the legacy default stream": (1, 0),
    "a handle": (0x7F00, 0x7F00),
    "a NumPy integer": (np.uint64(2**63 + 8), 2**63 + 8),
    "torch": (SimpleNamespace(cuda_stream=0x1000, device_index=0), 0x1000),
    "an early torch": (
        SimpleNamespace(cuda_stream=0x1010, device=SimpleNamespace(index=0)),
        0x1010,
    ),
    "CuPy": (SimpleNamespace(ptr=0x2000, device_id=0), 0x2000),
    "CuPy, without a device": (SimpleNamespace(ptr=0x2010, device_id=-1), 0x2010),
    "Numba": (SimpleNamespace(handle=ctypes.c_void_p(0x3000)), 0x3000),
    "Numba's default": (SimpleNamespace(handle=ctypes.c_void_p(0)), 0),
    "PyCUDA": (SimpleNamespace(handle=0x3010), 0x3010),
    "a number of its own": (SimpleNamespace(handle=0x3020, id=7, index=3), 0x3020),
    "the protocol as a method": (Method(), 0x4000),
    "the protocol as a property": (Property(), 0x4008),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_a_stream(streams: Streams, name: str) -> None:  # SPEC F49
    given, handle = TAKEN[name]
    stream = streams.resolve(given)
    assert stream.handle == handle
    assert streams.resolve(given) is stream
    assert streams.resolve(stream) is stream
    assert streams.resolve(handle) is stream
    assert (stream is streams.default) == (handle == 0)


REFUSED = {
    "a bool": (True, InvalidArgumentError, "got True (bool)"),
    "a negative": (-1, InvalidArgumentError, "got -1"),
    "too large": (2**64, InvalidArgumentError, "0…2^64-1"),
    "a float": (1.0, InvalidArgumentError, "got 1.0 (float)"),
    "a string": ("0", InvalidArgumentError, "got '0' (str)"),
    "an array": (np.zeros(1, np.int64), InvalidArgumentError, "(ndarray)"),
    "an object": (SimpleNamespace(), InvalidArgumentError, "(SimpleNamespace)"),
    "per-thread": (2, InvalidArgumentError, "per-thread default stream"),
    "per-thread object": (SimpleNamespace(handle=2), InvalidArgumentError, "per-thread"),
    "a closed one": (Raises(), InvalidArgumentError, "this stream was closed"),
    "no handle": (SimpleNamespace(ptr="x"), InvalidArgumentError, "SimpleNamespace does not tell"),
    "torch, cuda:1": (
        SimpleNamespace(cuda_stream=0x1000, device_index=1),
        DeviceError,
        "expected a stream of cuda:0, got one of cuda:1",
    ),
    "CuPy, cuda:3": (SimpleNamespace(ptr=0x2000, device_id=3), DeviceError, "one of cuda:3"),
    "cuda.core, cuda:2": (
        SimpleNamespace(handle=0x2000, device=SimpleNamespace(device_id=2)),
        DeviceError,
        "one of cuda:2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_none(streams: Streams, name: str) -> None:  # SPEC 7, CASE C49
    given, error, words = REFUSED[name]
    with pytest.raises(error) as caught:
        streams.resolve(given)
    assert "stream" in str(caught.value) and words in str(caught.value)
    assert len(streams) == 1


def test_a_stream_of_another_device(device: Any, streams: Streams) -> None:  # CASE C49
    other = ModelDevice(FAILURE)
    other.ordinal, other.name = 1, "cuda:1"
    theirs = Streams(other).resolve(0x100)  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match="got one of cuda:1"):
        streams.resolve(theirs)
    twin = Stream(device, 0x100, None, 9)  # of another registry of the same device
    assert streams.resolve(twin) is streams.resolve(0x100)


def test_the_owner_lives_as_long_as_its_stream(streams: Streams) -> None:  # SPEC F49
    """A handle must not be given to another stream while its work is tracked."""

    class Owner:
        handle = 0x9000

    assert streams.resolve(0x9000).owner is None
    owner = Owner()
    alive = weakref.ref(owner)
    assert streams.resolve(owner).owner is owner
    del owner
    gc.collect()
    assert alive() is not None
    streams.resolve(Owner())  # another wrapper of the same stream
    streams.resolve(0x9000)
    gc.collect()
    assert alive() is not None
    assert streams.resolve(0x9000).owner is alive()
    del streams
    gc.collect()


def test_numbers_and_names(streams: Streams) -> None:
    first, second = streams.resolve(0x10), streams.resolve(0x20)
    assert [s.index for s in (streams.default, first, second)] == [0, 1, 2]
    assert repr(streams.default) == "<the default stream of cuda:0>"
    assert repr(first) == "<stream 0x10 of cuda:0>"


def test_the_least_recently_used_stream_is_forgotten(device: Any) -> None:  # SPEC F49
    streams = Streams(device, limit=4)
    kept = [streams.resolve(handle) for handle in (0x10, 0x20, 0x30)]
    streams.resolve(0x10)
    assert not device.calls["pc_cuda_stream_synchronize"]
    streams.resolve(0x40)
    assert device.calls["pc_cuda_stream_synchronize"] == 1
    assert len(streams) == 4
    assert streams.resolve(0x10) is kept[0]
    assert streams.resolve(0x30) is kept[2]
    assert streams.resolve(0x20) is not kept[1]
    assert LIMIT == 64


def test_a_captured_stream_is_not_waited_for(device: Any) -> None:  # SPEC F49
    streams = Streams(device, limit=3)
    captured, other = streams.resolve(0x10), streams.resolve(0x20)
    device.captured = {0x10}
    streams.resolve(0x30)
    assert streams.resolve(0x10) is captured
    assert streams.resolve(0x20) is not other
    device.captured = {0x10, 0x20}
    with pytest.raises(DeviceError, match="at most 3 streams in use"):
        streams.resolve(0x40)
    assert len(streams) == 3


def test_a_stream_in_use_by_another_thread_is_kept(device: Any) -> None:  # SPEC F34, F49
    """What is queued between the wait and the forgetting must stay ordered."""
    streams, order = Streams(device, limit=3), Order(device, 4)
    busy, idle = streams.resolve(0x10), streams.resolve(0x20)
    ids = np.array([1], np.int32)
    for stream in (busy, idle):
        order.acquire(stream, ids, False)
        order.used(stream, ids, False)
    wait = device.call

    def call(name: str, *args: Any) -> None:
        wait(name, *args)
        if name == "pc_cuda_stream_synchronize" and args == (0x10,):
            order.used(busy, ids, True)  # another thread, at the worst moment

    device.call = call
    streams.resolve(0x30)
    assert streams.resolve(0x10) is busy
    assert (order.last_call(busy), order.last_call(idle)) == (2, 0)


def test_a_destroyed_stream_makes_the_device_wait(device: Any) -> None:  # SPEC F49
    streams = Streams(device, limit=2)
    first = streams.resolve(0x10)
    waited = []
    device.synchronize = lambda: waited.append("device")
    device.fail_in = 2  # whether it is captured is asked first
    assert streams.resolve(0x20).handle == 0x20
    assert waited == ["device"]
    device.error = CudaCallError("pc_cuda_stream_synchronize", 719, "cudaErrorLaunchFailure", "x")
    device.fail_in = 2
    with pytest.raises(CudaCallError, match="719"):
        streams.resolve(first)
    assert streams.resolve(0x20).index == 2  # nothing has changed


def test_a_stream_that_was_only_followed_is_left_alone(device: Any) -> None:  # SPEC F49
    """A producer's stream, known by its number alone, may be destroyed at any time."""
    streams, order = Streams(device, limit=3), Order(device, 4)
    producer = streams.resolve(0x20)
    order.follow(streams.resolve(0x10), producer)
    streams.resolve(0x10)
    asked = [device.calls[f"pc_cuda_stream_{name}"] for name in ("capturing", "synchronize")]
    streams.resolve(0x30)
    assert asked == [device.calls[f"pc_cuda_stream_{n}"] for n in ("capturing", "synchronize")]
    assert streams.resolve(0x20) is not producer


def test_many_threads_get_the_same_objects(device: Any) -> None:  # SPEC F34
    streams = Streams(device)
    found: list[list[Stream]] = []

    def work() -> None:
        found.append([streams.resolve(0x100 * i) for i in range(1, 40)])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(row == found[0] for row in found)
    assert len(streams) == 40


# ---- real streams -------------------------------------------------------------------------------


def test_pycuda_streams(cuda: Any) -> None:  # SPEC F49
    streams = Streams(cuda)
    with cuda.current():
        stream = cuda.pycuda.Stream()
    resolved = streams.resolve(stream)
    assert resolved.handle == stream.handle != 0
    assert resolved.owner is stream
    resolved.synchronize()
    streams.default.synchronize()
    assert not resolved.is_captured()
    assert not streams.default.is_captured()


def test_cuda_core_streams(cuda: Any) -> None:  # SPEC F49
    core = pytest.importorskip("cuda.core")
    device = core.Device(0)
    with cuda.current():
        device.set_current()
        stream = device.create_stream()
        resolved = Streams(cuda).resolve(stream)
        assert resolved.handle == int(stream.handle)
        resolved.synchronize()
        assert Streams(cuda).resolve(core.LEGACY_DEFAULT_STREAM).handle == 0
        stream.close()


def test_a_cuda_core_stream_of_another_device(cuda: Any, emulated: Any) -> None:  # CASE C49
    core = pytest.importorskip("cuda.core")
    emulated.set("devices", 2)
    other = SimpleNamespace(
        __cuda_stream__=(0, 0x5000), device=SimpleNamespace(device_id=1)
    )
    with pytest.raises(DeviceError, match="expected a stream of cuda:0, got one of cuda:1"):
        Streams(cuda).resolve(other)
    assert core.Device(0).device_id == 0


def test_capture_is_seen(cuda: Any, emulated: Any) -> None:  # SPEC F49
    streams = Streams(cuda)
    with cuda.current():
        stream = cuda.pycuda.Stream()
        resolved = streams.resolve(stream)
        begin, end = (
            getattr(emulated.library, name)
            for name in ("cuStreamBeginCapture_v2", "cuStreamEndCapture")
        )
        handle, graph = ctypes.c_void_p(stream.handle), ctypes.c_void_p()
        assert begin(handle, 0) == 0
        assert resolved.is_captured()
        assert streams.default.is_captured()  # it may not be used while a blocking one is
        with pytest.raises(DeviceError, match="an upload: expected a stream that is not being"):
            resolved.refuse_capture("an upload")
        assert emulated.get("capture_violations") == 0
        assert end(handle, ctypes.byref(graph)) == 0
        assert emulated.library.cuGraphDestroy(graph) == 0
        assert not resolved.is_captured()
        assert not streams.default.is_captured()
