"""Arrays of other libraries that lie on a CUDA device, as ``DeviceArray`` over the same memory.

Nothing is copied and no library is imported for it. Tensors of torch are read by their attributes;
everything else by ``__cuda_array_interface__``, or by DLPack.
"""

from __future__ import annotations

import sys
from ctypes import byref, c_int
from typing import Any

import numpy as np

from pagedcache._cuda.arrays import DeviceArray
from pagedcache._cuda.driver import Device, get_device, open_devices
from pagedcache._cuda.transfer import wait_once
from pagedcache.dlpack import CUDA, CUDA_MANAGED, borrow, place_of
from pagedcache.errors import (
    DeviceError,
    FormatError,
    InvalidArgumentError,
    PagedCacheError,
    shown,
)
from pagedcache.foreign import is_tensor

_LEGACY, _PER_THREAD = 1, 2
_UNKNOWN, _PINNED, _DEVICE, _MANAGED = range(4)  # kinds of pc_cuda_pointer


def as_device_array(x: Any, what: str, device: Device | None = None) -> DeviceArray | None:
    """``x`` as an array of the device it lies on; None for what does not lie on a CUDA device.

    Takes torch's CUDA tensors (with or without gradient; bfloat16 too), objects with
    ``__cuda_array_interface__`` and DLPack's CUDA and managed arrays. ``stream`` of the result is
    the one on which the producer says its values are being made. ``device``: where an empty
    array lies that does not say so.

    Raises ``FormatError`` for masked arrays and unusable descriptions, ``DeviceError`` for other
    accelerators, and ``CudaUnavailableError`` where CUDA cannot be used here at all. bfloat16
    comes as such from torch and by DLPack, and as uint16 by ``__cuda_array_interface__``.
    """
    if isinstance(x, DeviceArray):
        return x
    if isinstance(x, np.ndarray):
        return None
    if is_tensor(x):
        return _from_tensor(x, what)
    # A class's attribute would be found too; asking an object may run code of its library.
    try:
        interface = getattr(x, "__cuda_array_interface__", None)
        place = None if interface is not None else place_of(x)
    except PagedCacheError:
        raise
    except Exception as error:
        got = f"{type(x).__name__} that does not describe itself ({error})"
        raise FormatError("an array", got, what) from error
    if interface is not None:
        return _from_interface(x, interface, what, device)
    if place is None or place[0] not in (CUDA, CUDA_MANAGED):
        return None
    return _from_dlpack(x, place[1], what)


def check_pointer(array: DeviceArray, device: Device, what: str = "array") -> None:
    """Refuse an array that is not, from the first byte to the last, memory of ``device``.

    Raises ``DeviceError`` that names both for an array of another device, for an address of the
    host and for memory that was freed. Empty arrays pass.
    """
    if array.gpu is not device:
        raise DeviceError(f"memory of {device.name}", f"memory of {array.device}", what)
    low, high = array.span()
    for address in (low, high - 1) if high > low else ():
        kind, ordinal = locate(device, address)
        if kind not in (_DEVICE, _MANAGED):
            got = "pinned host memory" if kind == _PINNED else "host memory or a freed buffer"
            raise DeviceError(f"memory of {device.name}", f"{got} at {address:#x}", what)
        if kind == _DEVICE and ordinal != device.ordinal:
            raise DeviceError(
                f"memory of {device.name}", f"memory of cuda:{ordinal} at {address:#x}", what
            )


def locate(device: Device, address: int) -> tuple[int, int]:
    """(kind, ordinal) of the memory at an address: 0 none CUDA knows, 1 pinned, 2 device, 3
    managed."""
    kind, ordinal = c_int(0), c_int(-1)
    device.call("pc_cuda_pointer", byref(kind), byref(ordinal), address)
    return kind.value, ordinal.value


# ---- torch --------------------------------------------------------------------------------


def _from_tensor(x: Any, what: str) -> DeviceArray | None:
    if x.device.type == "cpu":
        return None
    if x.device.type != "cuda":
        raise DeviceError("a tensor on a CUDA device or the CPU", f"one on {x.device}", what)
    torch = sys.modules["torch"]
    if getattr(x, "layout", torch.strided) is not torch.strided:
        raise FormatError("a strided tensor", f"one of layout {x.layout}", what)
    dtype = _tensor_dtype(str(x.dtype).removeprefix("torch."), what)
    if x.is_neg():  # its memory holds the negative of what it shows
        got = "a lazily negated one"
        raise FormatError("a tensor that holds its values (x.resolve_neg())", got, what)
    try:
        address = x.data_ptr()
    except RuntimeError as error:  # a tensor of torch.func or torch.compile has no memory
        raise FormatError("a tensor with memory of its own", f"none ({error})", what) from None
    ordinal = x.device.index or 0
    stream = torch.cuda.current_stream(x.device)
    return DeviceArray(
        address,
        tuple(x.shape),
        tuple(step * dtype.itemsize for step in x.stride()),
        dtype,
        get_device(ordinal),
        owner=x,
        stream=int(stream.cuda_stream) or _LEGACY,
    )


def _tensor_dtype(name: str, what: str) -> np.dtype[Any]:
    if name == "bfloat16":
        import ml_dtypes  # not a dtype of NumPy itself

        return np.dtype(ml_dtypes.bfloat16)
    try:
        return np.dtype(name)
    except TypeError:
        raise FormatError("a dtype that NumPy knows, or bfloat16", f"torch.{name}", what) from None


# ---- __cuda_array_interface__ ---------------------------------------------------------------


def _from_interface(x: Any, interface: Any, what: str, device: Device | None) -> DeviceArray:
    try:
        shape = tuple(int(extent) for extent in interface["shape"])
        dtype = np.dtype(interface["typestr"])
        address, readonly = interface["data"]
        strides = interface.get("strides")
        strides = None if strides is None else tuple(int(stride) for stride in strides)
        version, mask = interface.get("version", 0), interface.get("mask")
        stream = interface.get("stream") if version >= 3 else None
        address = int(address or 0)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        got = f"one that cannot be read ({type(error).__name__}: {error})"
        raise FormatError("a __cuda_array_interface__ of version 2 or 3", got, what) from error
    if version < 2:
        raise FormatError("a __cuda_array_interface__ of version 2 or 3", version, what)
    if mask is not None:
        raise FormatError("an array without mask", "a masked one; fill it first", what)
    if min(shape, default=0) < 0 or (strides is not None and len(strides) != len(shape)):
        got = f"shape {shape}, strides {strides}"
        raise FormatError("a shape and as many strides", got, what)
    gpu = _device_of(address, 0 in shape, device, what)
    array = DeviceArray(address, shape, strides, dtype, gpu, owner=x, readonly=bool(readonly))
    array.stream = _producer(stream, gpu, what)
    return array


def _device_of(address: int, empty: bool, hint: Device | None, what: str) -> Device:
    """The device that an address belongs to; of an empty array, any will do."""
    known = hint or next(iter(open_devices()), None) or get_device(0)
    if empty:
        return known
    kind, ordinal = locate(known, address)
    if kind in (_UNKNOWN, _PINNED):
        got = "pinned host memory" if kind == _PINNED else "host memory or a freed buffer"
        raise DeviceError("memory of a CUDA device", f"{got} at {address:#x}", what)
    if kind == _MANAGED or ordinal == known.ordinal:
        return known
    return get_device(ordinal)


def _producer(stream: Any, device: Device, what: str) -> int | None:
    """The producer's stream as a handle that can be followed later, from any thread."""
    if stream is None:
        return None
    if isinstance(stream, bool) or not isinstance(stream, int) or not 0 < stream < 2**64:
        raise InvalidArgumentError(
            f"{what}: __cuda_array_interface__ has no stream {shown(stream)}; "
            "1 is the default stream"
        )
    if stream == _PER_THREAD:  # this thread's, now: nobody could name it later
        wait_once(device, _PER_THREAD, _LEGACY)
        return _LEGACY
    return stream


# ---- DLPack ----------------------------------------------------------------------------------


def _from_dlpack(x: Any, ordinal: int, what: str) -> DeviceArray:
    device = get_device(ordinal)
    try:
        # The producer has the legacy default stream wait for it; ours then waits for that.
        taken, dtype = borrow(x, _LEGACY)
    except PagedCacheError:
        raise
    except Exception as error:  # code of the producer's own
        got = f"{type(x).__name__}, of which none is to be had ({error})"
        raise FormatError("an array by DLPack", got, what) from error
    if taken.device[0] not in (CUDA, CUDA_MANAGED) or taken.device[1] != ordinal:
        got = f"a capsule that says {taken.device}"
        raise FormatError(f"a DLPack capsule of {device.name}, as announced", got, what)
    strides = taken.strides
    return DeviceArray(
        taken.address,
        taken.shape,
        None if strides is None else [step * dtype.itemsize for step in strides],
        dtype,
        device,
        owner=taken,
        stream=_LEGACY,
        readonly=taken.readonly,
    )
