"""The caller's streams, whoever made them, as one small object each.

A stream is known by its handle. A handle may be reused once its stream is destroyed, so the
object that a caller hands in is kept alive as long as its stream is tracked; for bare integers
that is the caller's part.
"""

from __future__ import annotations

import operator
import threading
from collections import OrderedDict
from ctypes import byref, c_int
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np

from pagedcache._cuda.driver import Device
from pagedcache._cuda.failures import GONE
from pagedcache.errors import CudaCallError, DeviceError, InvalidArgumentError, shown

#: Streams tracked at a time; beyond, the one that was used least recently is waited for.
LIMIT = 64

_LEGACY, _PER_THREAD = 1, 2  # CUDA's names for the two default streams
_KINDS = (
    "None, a handle (int), or a stream of PyCUDA, torch, CuPy, Numba or cuda.core "
    "(whatever has __cuda_stream__)"
)


class CaptureError(DeviceError):
    """A stream is being captured into a graph, and the call needs more than kernels on it."""


class Tracker(Protocol):
    """Whoever keeps clocks by stream; see ``Order``."""

    def last_call(self, stream: Stream) -> int:
        """The number of the last call queued on a stream."""

    def forget(self, stream: Stream, number: int) -> bool:
        """Drop what is known of a stream done up to that call; False if it has more calls."""


class Stream:
    """A stream that work is queued on.

    ``handle``: CUDA's address of it, 0 for the legacy default stream. ``owner``: the caller's
    object, or None. ``index``: streams are counted as they come. ``forgotten``: its work was
    waited for, and its handle may be gone.
    """

    __slots__ = (
        "__weakref__", "_lock", "_trackers", "device", "forgotten", "handle", "index", "owner",
    )  # fmt: skip

    def __init__(self, device: Device, handle: int, owner: Any, index: int) -> None:
        self.device, self.handle, self.owner, self.index = device, handle, owner, index
        self.forgotten = False
        self._trackers: WeakSet[Tracker] = WeakSet()
        self._lock = threading.Lock()

    def track(self, tracker: Tracker) -> None:
        """Have ``tracker`` told when this stream is forgotten."""
        with self._lock:
            self._trackers.add(tracker)

    def trackers(self) -> list[Tracker]:
        """Those who keep a clock of this stream."""
        with self._lock:
            return list(self._trackers)

    def is_captured(self) -> bool:
        """Whether what is queued here now is recorded into a graph instead of being run."""
        capturing = c_int(0)
        try:
            self.device.call("pc_cuda_stream_capturing", byref(capturing), self.handle)
        except CudaCallError as error:
            if error.code == 906:  # asked of the default stream while another one is captured
                return True
            if error.code in GONE:  # destroyed: the next call says so, or copes
                return False
            raise
        return bool(capturing.value)

    def refuse_capture(self, what: str) -> None:
        """Raise ``DeviceError`` for ``what`` cannot be done while the stream is captured."""
        if self.is_captured():
            raise CaptureError(
                "a stream that is not being captured", f"a capture of {self!r}", what
            )

    def synchronize(self) -> None:
        """Wait for all that is queued here."""
        self.device.call("pc_cuda_stream_synchronize", self.handle)

    def __repr__(self) -> str:
        name = f"stream {self.handle:#x}" if self.handle else "the default stream"
        return f"<{name} of {self.device.name}>"


class Streams:
    """The streams of one device that are in use."""

    def __init__(self, device: Device, limit: int = LIMIT) -> None:
        self.device, self.limit = device, limit
        self.default = Stream(device, 0, None, 0)
        self._by_handle: OrderedDict[int, Stream] = OrderedDict()  # least recently used first
        self._count = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return 1 + len(self._by_handle)

    def resolve(self, x: Any) -> Stream:
        """The stream of a caller's object; the same ``Stream`` for the same handle.

        None is the legacy default stream. Raises ``InvalidArgumentError`` for what is no stream
        and for the per-thread default stream, which is another one in every thread, and
        ``DeviceError`` for a stream of another device, or one that is gone when it is first seen.
        With ``limit`` streams in use the least
        recently used one is waited for and forgotten.
        """
        if x is None:
            return self.default
        if isinstance(x, Stream):
            self._check_device(x.device.ordinal, x)
            handle, owner = x.handle, x.owner
        elif type(x) is int:
            handle, owner = x, None
        else:
            handle, ordinal = read_stream(x)
            self._check_device(ordinal, x)
            owner = None if isinstance(x, int | np.integer) else x
        handle = check_handle(handle, x)
        if not handle:
            return self.default
        with self._lock:
            stream = self._by_handle.get(handle)
            if stream is not None:
                self._by_handle.move_to_end(handle)
                if stream.owner is None:
                    stream.owner = owner
                return stream
        self._check_device(self.device.ordinal_of_stream(handle), x)
        self._make_room()
        with self._lock:
            self._count += 1
            stream = Stream(self.device, handle, owner, self._count)
            return self._by_handle.setdefault(handle, stream)

    def _check_device(self, ordinal: int | None, x: Any) -> None:
        if ordinal is not None and ordinal != self.device.ordinal:
            raise DeviceError(
                f"a stream of {self.device.name}", f"one of cuda:{ordinal} ({shown(x)})", "stream"
            )

    def refuse_captures(self, what: str) -> None:
        """Raise ``DeviceError`` while a stream is captured that is known to be alive."""
        with self._lock:
            known = [stream for stream in self._by_handle.values() if stream.owner is not None]
        for stream in (self.default, *known):
            stream.refuse_capture(what)

    def forget_finished(self, calls: dict[Stream, int]) -> None:
        """Drop the streams on which nothing was queued after these calls, which are over.

        Their owners' objects are let go of; no handle is touched.
        """
        with self._lock:
            known = list(self._by_handle.values())
        for stream in known:
            trackers = stream.trackers()
            if all([tracker.forget(stream, calls.get(stream, 0)) for tracker in trackers]):
                with self._lock:
                    if self._by_handle.get(stream.handle) is stream:
                        del self._by_handle[stream.handle]
                stream.forgotten, stream.owner = True, None

    def _make_room(self) -> None:
        while len(self) >= self.limit:
            with self._lock:
                oldest = list(self._by_handle.values())
            if not any(self._forget(stream) for stream in oldest):
                raise DeviceError(f"at most {self.limit} streams in use", "more", "stream")

    def _forget(self, stream: Stream) -> bool:
        """Wait for a stream and drop it; False if it is captured or other threads use it now."""
        calls = [(tracker, tracker.last_call(stream)) for tracker in stream.trackers()]
        # A producer's stream, from which nothing here is queued, may be gone: do not touch it.
        if not calls or any(number for _, number in calls):
            if stream.is_captured():
                return False
            try:
                stream.synchronize()
            except CudaCallError as error:
                if error.code not in GONE:
                    raise
                self.device.synchronize()  # the stream was destroyed: its work may still run
        if not all([tracker.forget(stream, number) for tracker, number in calls]):
            return False
        with self._lock:
            if self._by_handle.get(stream.handle) is stream:
                del self._by_handle[stream.handle]
        stream.forgotten, stream.owner = True, None
        return True


def check_handle(handle: int, x: Any) -> int:
    """A handle that CUDA takes, 0 for the legacy default stream under either of its names."""
    if not 0 <= handle < 2**64:
        raise InvalidArgumentError(f"stream: a handle is 0…2^64-1, got {shown(handle)}")
    if handle == _PER_THREAD:
        raise InvalidArgumentError(
            f"stream: {shown(x)} is the per-thread default stream, another one in every thread; "
            "pass a stream of your own"
        )
    return 0 if handle == _LEGACY else handle


def read_stream(x: Any) -> tuple[int, int | None]:
    """(handle, ordinal of the device or None where it does not say) of a stream object.

    Raises ``InvalidArgumentError`` for what is no stream.
    """
    if isinstance(x, int | np.integer) and not isinstance(x, bool):
        return int(x), None
    try:
        handle = _read_handle(x)
    except Exception as error:  # code of the caller's own
        raise InvalidArgumentError(
            f"stream: {type(x).__name__} does not tell its handle ({error})"
        ) from error
    if handle is None or hasattr(x, "__cuda_array_interface__") or hasattr(x, "shape"):
        raise InvalidArgumentError(
            f"stream: expected {_KINDS}, got {shown(x)} ({type(x).__name__})"
        )
    try:
        return handle, _read_ordinal(x)
    except Exception:  # default streams of cuda.core ask for the context that is current
        return handle, None


def _read_handle(x: Any) -> int | None:
    if hasattr(x, "cuda_stream"):  # torch
        return operator.index(x.cuda_stream)
    if hasattr(x, "__cuda_stream__"):  # the protocol of cuda.core; a property in early versions
        pair = x.__cuda_stream__
        return operator.index((pair() if callable(pair) else pair)[1])
    if hasattr(x, "ptr"):  # CuPy
        return operator.index(x.ptr)
    if hasattr(x, "handle"):  # PyCUDA; Numba wraps it in a c_void_p
        handle = x.handle
        return operator.index(getattr(handle, "value", handle) or 0)
    return None


def _read_ordinal(x: Any) -> int | None:
    values = [getattr(x, name, None) for name in ("device_index", "device_id")]  # torch; CuPy
    device = getattr(x, "device", None)
    values += [getattr(device, name, None) for name in ("index", "device_id", "id")]
    for value in values:
        if isinstance(value, int) and not isinstance(value, bool):
            return value if value >= 0 else None
    return None
