"""Device arrays to the host, and the order between the streams of two libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pagedcache._cuda.streams import Stream, check_handle, read_stream
from pagedcache.errors import InvalidArgumentError, StorageMemoryError

if TYPE_CHECKING:
    from pagedcache._cuda.arrays import DeviceArray
    from pagedcache._cuda.driver import Device

_LEGACY = 1  # the legacy default stream, where 0 would be ambiguous

# A strided array is fetched with its gaps, unless these are much larger than its elements.
_MOST_GAPS = 4
_SMALL_NBYTES = 64 << 10


def stream_on(device: Device, x: Any) -> Stream:
    """The stream of a caller's object for one use; None is the legacy default stream.

    Raises as ``Streams.resolve``.
    """
    if isinstance(x, Stream):
        return x
    handle = 0 if x is None else check_handle(x if type(x) is int else read_stream(x)[0], x)
    return Stream(device, handle, x, 0)


def stream_entry(x: Any) -> int | None:
    """A stream as ``__cuda_array_interface__`` and DLPack number it; None stays None."""
    if x is None:
        return None
    handle = x.handle if isinstance(x, Stream) else x if type(x) is int else read_stream(x)[0]
    return handle or _LEGACY


def order_after(device: Device, first: Any, reader: int | None) -> None:
    """Have the reader's stream wait, on the device, for what is queued on ``first``.

    ``reader`` is numbered as in DLPack: None and 1 are the legacy default stream, 2 the per-thread
    one. Nothing is done where both are the same.
    """
    if reader is not None and (isinstance(reader, bool) or not isinstance(reader, int)):
        raise InvalidArgumentError(f"stream: expected an integer or None, got {reader!r}")
    if reader == 0 or (reader is not None and reader < 0):
        raise InvalidArgumentError(f"stream: DLPack has no stream {reader} on CUDA")
    made = stream_entry(first) or _LEGACY
    wanted = _LEGACY if reader is None else reader
    if made != wanted:
        wait_once(device, made, wanted)


def wait_once(device: Device, first: int, then: int) -> None:
    """Have the stream ``then`` wait, on the device, for all that is queued on ``first``."""
    for handle in (first, then):
        Stream(device, handle, None, 0).refuse_capture("giving an array to another stream")
    event = device.create_event()
    try:
        device.call("pc_cuda_event_record", event, first)
        device.call("pc_cuda_stream_wait", event, then)
    finally:
        device.give_back("pc_cuda_event_destroy", event)  # what waits for it still does


def to_host(array: DeviceArray, stream: Any) -> np.ndarray[Any, Any]:
    """A NumPy copy of a device array, made after what is queued on ``stream``; waits.

    Raises ``StorageMemoryError`` when the host has no room, ``DeviceError`` when the device fails.
    """
    try:
        out = np.empty(array.shape, array.dtype)
    except MemoryError:
        raise StorageMemoryError(array.nbytes, f"a copy of {array!r}") from None
    if array.size:
        _fetch(array, out, stream_on(array.gpu, stream))
    return out


def _fetch(array: DeviceArray, out: np.ndarray[Any, Any], stream: Stream) -> None:
    staging = array.gpu.staging
    if array.is_contiguous:
        staging.read(array.address, bits(out), stream)
        return
    low, high = array.span()
    if high - low <= max(_MOST_GAPS * array.nbytes, _SMALL_NBYTES):
        raw = np.empty(high - low, np.uint8)
        staging.read(low, raw, stream)
        bits(out)[...] = np.ndarray(
            array.shape, f"u{array.itemsize}", raw, array.address - low, array.strides
        )
        return
    for index in range(len(array)):  # gaps lie between the parts of some axis
        _fetch(array[index], out[index, ...], stream)


def bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An array as unsigned integers of its width."""
    return array.view(f"u{array.dtype.itemsize}")
