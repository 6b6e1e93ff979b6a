"""Tools of the device tests: caches on a GPU, rows in its memory, streams, and kernels of others.

``Foreign`` plays a kernel that pagedcache knows nothing of: it reads or writes a block on a stream
of its own, in its own time. Under deferred streams of the emulation nothing runs before something
waits for it, so an order that nobody asked for shows as a wrong value.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from cachekit import make_cache, rows
from devicekit import host

import pagedcache as pc
from pagedcache._cuda.arrays import DeviceArray
from pagedcache._cuda.memory import DeviceMemory
from pagedcache.checks.devices import upload

#: Calls that make the host wait, or ask the device how far it is.
WAITS = ("cuEventQuery", "cuEventSynchronize", "cuStreamQuery", "cuStreamSynchronize",
         "cuCtxSynchronize")  # fmt: skip


#: Rows given to kernels that may not have run yet. Freeing memory lets everything queued run, which
#: would hide a missing order; emptied when the streams of a test go.
_kept: list[Any] = []
_open_streams = 0


def on_gpu(num_blocks: int = 8, **options: Any) -> pc.PagedKVCache:
    """``make_cache`` on ``cuda:0``."""
    return make_cache(num_blocks, **({"device": "cuda:0"} | options))


def device_rows(cache: pc.PagedKVCache, layer: int, marks: Any) -> tuple[Any, Any]:
    """The rows of ``marks`` in the memory of the layer's GPU."""
    pair = [upload(part, cache.layer_device(layer)) for part in rows(cache.spec, layer, marks)]
    if _open_streams:
        _kept.extend(pair)
    return pair[0], pair[1]


def append(cache: pc.PagedKVCache, seq: pc.Sequence, marks: Any, stream: Any = None) -> None:
    """Append the rows of ``marks``, from device memory, to every layer on a stream."""
    for layer in range(cache.spec.num_layers):
        seq.append(layer, *device_rows(cache, layer, marks), stream=stream)


def forget_rows() -> None:
    """Free the rows given so far; the device must be done with them."""
    _kept.clear()


def read_on(seq: pc.Sequence, layer: int, stop: int, stream: Any) -> tuple[Any, Any]:
    """float32 K and V of the first ``stop`` tokens, read on a stream, then fetched."""
    k, v = seq.gather(layer, 0, stop, dtype=np.float32, stream=stream)
    return host(k), host(v)


@contextmanager
def streams_of(device: Any, count: int) -> Iterator[list[Any]]:
    """PyCUDA streams that wait for nobody, not for the default stream either."""
    import pycuda.driver

    global _open_streams
    _open_streams += 1
    with device.current():
        made = [pycuda.driver.Stream(1) for _ in range(count)]
    try:
        yield made
    finally:
        device.broken = None
        device.synchronize()
        _open_streams -= 1
        if not _open_streams:
            _kept.clear()
        with device.current():
            made.clear()


def finish(stream: Any, device: Any) -> None:
    """Wait for one stream: what it waits for is run, and nothing else."""
    device.call("pc_cuda_stream_synchronize", stream.handle)


class Foreign:
    """Work of somebody else on one stream."""

    def __init__(self, device: Any, stream: Any) -> None:
        self.device, self.stream = device, stream

    def read(self, array: DeviceArray) -> DeviceArray:
        """Queue a copy of a contiguous array into memory of its own."""
        memory = DeviceMemory(self.device, array.nbytes, "what a foreign kernel reads")
        self._copy(memory.address, array.address, array.nbytes)
        return DeviceArray(
            memory.address, array.shape, None, array.dtype, self.device, owner=memory,
            stream=self.stream,
        )  # fmt: skip

    def write(self, array: DeviceArray, values: DeviceArray) -> None:
        """Queue a copy of ``values`` over a contiguous array."""
        assert array.is_contiguous and values.is_contiguous and array.nbytes == values.nbytes
        self._copy(array.address, values.address, array.nbytes)

    def _copy(self, to: int, origin: int, nbytes: int) -> None:
        self.device.call("pc_cuda_copy", to, origin, nbytes, self.stream.handle)


class Calls:
    """How often functions of the driver are called inside a ``with`` block."""

    def __init__(self, emulated: Any) -> None:
        self._emulated = emulated

    def __enter__(self) -> Calls:
        self._before: dict[str, int] = {}
        self._snapshot = self._count_all()
        return self

    def __exit__(self, *_: object) -> None:
        after = self._count_all()
        self.counts = {name: after[name] - self._snapshot[name] for name in after}

    def _count_all(self) -> dict[str, int]:
        names = (*WAITS, "cuEventRecord", "cuStreamWaitEvent", "cuMemAlloc", "cuMemHostAlloc",
                 "pc_stub_enqueue", "cuMemcpyAsync")  # fmt: skip
        return {name: self._emulated.get(f"calls:{name}") for name in names}

    def __getitem__(self, name: str) -> int:
        return self.counts[name]

    @property
    def waits(self) -> dict[str, int]:
        """Calls that the host waits in, those that were made."""
        return {name: self.counts[name] for name in WAITS if self.counts[name]}


class Capture:
    """``with Capture(device, stream) as graph:`` records what is queued on the stream into a graph.

    ``mode``: 0, the strictest: while it lasts no thread may make the device wait or take memory;
    2: only the stream itself is watched. PyCUDA has no graphs, hence the driver's own functions.
    """

    def __init__(self, device: Any, stream: Any, mode: int = 0) -> None:
        self.device, self.stream, self.mode = device, stream, mode
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._graph, self._executable = ctypes.c_void_p(), ctypes.c_void_p()

    def _call(self, name: str, *arguments: Any) -> None:
        with self.device.current():
            code = self._driver[name](*arguments)
        assert code == 0, f"{name}: {code}"

    def _handle(self) -> Any:
        return ctypes.c_void_p(self.stream.handle)

    def __enter__(self) -> Capture:
        self._call("cuStreamBeginCapture_v2", self._handle(), self.mode)
        return self

    def __exit__(self, *exc: object) -> None:
        self._call("cuStreamEndCapture", self._handle(), ctypes.byref(self._graph))
        self._call("cuGraphInstantiateWithFlags", ctypes.byref(self._executable), self._graph,
                   ctypes.c_ulonglong(0))  # fmt: skip

    def launch(self) -> None:
        """Queue the whole graph on the stream once."""
        self._call("cuGraphLaunch", self._executable, self._handle())

    def close(self) -> None:
        self._call("cuGraphExecDestroy", self._executable)
        self._call("cuGraphDestroy", self._graph)
