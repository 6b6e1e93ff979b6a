"""Arrays in device memory, as other libraries take them."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedcache._cuda import transfer
from pagedcache.dlpack import CUDA, capsule_of
from pagedcache.errors import (
    DeviceError,
    FormatError,
    InvalidArgumentError,
    InvalidPositionError,
    shown,
)

if TYPE_CHECKING:
    from pagedcache._cuda.driver import Device


class DeviceArray:
    """An array in the memory of a CUDA device; it owns no memory, but keeps the owner alive.

    ``address``: of its first element. ``shape``; ``strides`` in bytes, of any sign; ``dtype``: one
    of NumPy's, or bfloat16 of ml_dtypes. ``device``: ``"cuda:0"``. ``stream``: None, or the stream
    (a handle or an object) on which its values are being made. ``readonly``: others must not
    write to it.

    PyTorch, CuPy, Numba and PyCUDA take it by DLPack or ``__cuda_array_interface__`` without a
    copy. bfloat16 is given as such by DLPack; ``__cuda_array_interface__`` has no name for it and
    says uint16, to be viewed as bfloat16 on the other side (for a library that reads DLPack and
    knows no bfloat16, give it ``array.view(np.uint16)``). ``np.asarray(array)`` and :meth:`get`
    copy to the host.
    """

    __slots__ = (
        "__weakref__",
        "address",
        "dtype",
        "gpu",
        "owner",
        "readonly",
        "shape",
        "stream",
        "strides",
    )

    def __init__(
        self,
        address: int,
        shape: Iterable[int],
        strides: Iterable[int] | None,
        dtype: Any,
        device: Device | str,
        owner: Any = None,
        stream: Any = None,
        readonly: bool = False,
    ) -> None:
        self.address, self.shape, self.dtype = address, tuple(shape), np.dtype(dtype)
        dense = dense_strides(self.shape, self.dtype.itemsize)
        self.strides = dense if strides is None else tuple(strides)
        self.gpu = named_device(device) if isinstance(device, str) else device
        self.owner, self.stream, self.readonly = owner, stream, readonly

    @classmethod
    def of(cls, x: Any) -> DeviceArray:
        """Another library's device array, over the same memory.

        Raises ``DeviceError`` for what lies on the host. bfloat16 values that a library keeps as
        16-bit integers become bfloat16 by ``DeviceArray.of(x).view(ml_dtypes.bfloat16)``.
        """
        from pagedcache._cuda.exchange import as_device_array

        found = as_device_array(x, "array")
        if found is None:
            raise DeviceError("an array in device memory", type(x).__name__, "array")
        return found

    # ---- facts ---------------------------------------------------------------------------

    @property
    def device(self) -> str:
        """The device's name, ``"cuda:0"``."""
        return self.gpu.name

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        size = 1
        for extent in self.shape:
            size *= extent
        return size

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, gaps between them not counted."""
        return self.size * self.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie densely, the last axis fastest."""
        if not self.size:
            return True
        dense = dense_strides(self.shape, self.itemsize)
        return all(
            extent == 1 or stride == wanted
            for extent, stride, wanted in zip(self.shape, self.strides, dense, strict=True)
        )

    def span(self) -> tuple[int, int]:
        """(first address, address behind the last byte) of the elements; equal when empty."""
        low = high = self.address
        if not self.size:
            return low, low
        for extent, stride in zip(self.shape, self.strides, strict=True):
            reach = (extent - 1) * stride
            low, high = low + min(reach, 0), high + max(reach, 0)
        return low, high + self.itemsize

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array without axes has no len()")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<DeviceArray {list(self.shape)} of {self.dtype} on {self.device}>"

    # ---- other arrays over the same memory --------------------------------------------------

    def with_layout(
        self, shape: Iterable[int], strides: Iterable[int], offset: int = 0
    ) -> DeviceArray:
        """The same memory from ``offset`` bytes on with another shape and strides (bytes)."""
        return DeviceArray(
            self.address + offset,
            shape,
            strides,
            self.dtype,
            self.gpu,
            self.owner,
            self.stream,
            self.readonly,
        )

    def with_owner(self, owner: Any, readonly: bool | None = None) -> DeviceArray:
        """The same array, which keeps ``owner`` alive and may be made read-only."""
        same = self.with_layout(self.shape, self.strides)
        same.owner = owner
        same.readonly = self.readonly if readonly is None else readonly
        return same

    def transpose(self, *axes: Any) -> DeviceArray:
        """The axes in another order; reversed when none is named. ``InvalidArgumentError``."""
        named = axes[0] if len(axes) == 1 and isinstance(axes[0], tuple | list) else axes
        order = tuple(named) if named else tuple(reversed(range(self.ndim)))
        try:
            order = tuple(operator.index(axis) % self.ndim for axis in order)
        except (TypeError, ZeroDivisionError):
            order = (-1,)
        if sorted(order) != list(range(self.ndim)):
            raise InvalidArgumentError(
                f"axes: expected each of 0…{self.ndim - 1} once, got {shown(named)}"
            )
        return self.with_layout(
            [self.shape[axis] for axis in order], [self.strides[axis] for axis in order]
        )

    def view(self, dtype: Any) -> DeviceArray:
        """The same bytes as another dtype of the same size; ``FormatError`` for another size."""
        dtype = np.dtype(dtype)
        if dtype.itemsize != self.itemsize:
            raise FormatError(f"a dtype of {self.itemsize} bytes", dtype, "view")
        other = self.with_layout(self.shape, self.strides)
        other.dtype = dtype
        return other

    def __getitem__(self, key: Any) -> DeviceArray:
        """Integers, slices and ``...``, as in NumPy; always an array, without a copy.

        Raises ``InvalidPositionError`` for an index outside and ``InvalidArgumentError`` for
        what is no such key.
        """
        keys = list(key) if isinstance(key, tuple) else [key]
        dots = [place for place, part in enumerate(keys) if part is Ellipsis]
        if len(dots) > 1 or len(keys) - len(dots) > self.ndim:
            raise InvalidArgumentError(
                f"index: expected at most {self.ndim} integers and slices, got {shown(key)}"
            )
        place = dots[0] if dots else len(keys)
        whole = [slice(None)] * (self.ndim - len(keys) + len(dots))
        keys = keys[:place] + whole + keys[place + 1 :]
        offset, shape, strides = 0, [], []
        for part, extent, stride in zip(keys, self.shape, self.strides, strict=True):
            if isinstance(part, slice):
                start, stop, step = _bounds(part, extent)
                offset += start * stride
                shape.append(len(range(start, stop, step)))
                strides.append(stride * step)
            else:
                offset += _position(part, extent) * stride
        return self.with_layout(shape, strides, offset)

    # ---- to the host -----------------------------------------------------------------------

    def get(self, stream: Any = None) -> np.ndarray[Any, Any]:
        """A NumPy copy, made after what is queued on ``stream`` or else on its own; waits."""
        return transfer.to_host(self, self.stream if stream is None else stream)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError("device memory comes to the host as a copy only")
        array = self.get()
        return array if dtype is None else array.astype(dtype, copy=False)

    # ---- to other libraries ------------------------------------------------------------------

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3; bfloat16 as ``<u2``. ``stream``: which the reader must come after."""
        dtype = _known_dtype(self.dtype)
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": dtype.str,
            "data": (self.address if self.size else 0, self.readonly),
            "strides": None if self.is_contiguous else self.strides,
            "stream": transfer.stream_entry(self.stream),
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self.gpu.ordinal

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A DLPack capsule over this memory.

        ``stream``: the reader's, which is made to wait on the device for this array's own; None
        is the legacy default stream, -1 none at all. ``max_version``: the newest version of
        DLPack that the reader knows. Raises ``BufferError`` for another device, for ``copy=True``
        and for a reader from before 1.0, which cannot keep a read-only array unwritten.
        """
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"the array lies on {self.device}, not on {dl_device}")
        if copy:
            raise BufferError("the array is given without a copy only")
        self.gpu.refuse_strangers()
        # Made before streams are ordered: what is refused leaves no trace.
        capsule = capsule_of(
            self,
            self.address,
            self.shape,
            self.strides,
            self.dtype,
            self.__dlpack_device__(),
            max_version,
            readonly=self.readonly,
        )
        if stream != -1:
            transfer.order_after(self.gpu, self.stream, stream)
        return capsule


def named_device(name: str) -> Device:
    """The GPU of a name such as "cuda:0"; raises as ``get_device``, or ``DeviceError``."""
    from pagedcache._cuda.driver import get_device

    kind, _, ordinal = name.partition(":")
    if kind != "cuda" or not (ordinal or "0").isdecimal():
        raise DeviceError('"cuda:N"', shown(name), "device")
    return get_device(int(ordinal or 0))


def dense_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Strides in bytes of a contiguous array, the last axis fastest."""
    strides, step = [], itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def _known_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype, or for one that is not NumPy's own (bfloat16) unsigned integers of its size."""
    return dtype if dtype.kind in "biufc" else np.dtype(f"u{dtype.itemsize}")


def _bounds(part: slice, extent: int) -> tuple[int, int, int]:
    try:
        return part.indices(extent)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"index: {shown(part)} is no slice ({error})") from None


def _position(part: Any, extent: int) -> int:
    if isinstance(part, bool | np.bool):
        raise InvalidArgumentError(f"index: expected an integer or a slice, got {part}")
    try:
        position = operator.index(part)
    except TypeError:
        raise InvalidArgumentError(
            f"index: expected an integer, a slice or ..., got {shown(part)}"
        ) from None
    if not -extent <= position < extent:
        raise InvalidPositionError(position, extent, "an axis of a device array")
    return position % extent


