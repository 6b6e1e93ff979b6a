"""Rows for a CUDA layer: K and V as they come in, arrays to fill as they go out.

Device arrays are read and written where they are. Host arrays pass through pinned memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pagedcache._cuda.arrays import DeviceArray
from pagedcache._cuda.driver import Device
from pagedcache._cuda.exchange import as_device_array, check_pointer
from pagedcache.arrays import as_rows, row_format
from pagedcache.errors import DeviceError, FormatError, ShapeError
from pagedcache.formats import KVFormat
from pagedcache.storage.checks import overlaps_itself
from pagedcache.storage.slabs import Array

Rows = Array | DeviceArray
Shape = tuple[int, int, int]


class Layout(NamedTuple):
    """Where rows lie on the device, as kernels take it: address, strides in bytes, dtype code."""

    address: int
    token_stride: int
    head_stride: int
    value_stride: int
    dtype: int


def layout_of(rows: DeviceArray) -> Layout:
    """The layout of a device array ``[tokens, heads, head_dim]``."""
    token, head, value = rows.strides
    return Layout(rows.address, token, head, value, row_format(rows.dtype).code)


def dense_layout(address: int, shape: Shape, dtype: np.dtype[Any]) -> Layout:
    """The layout of contiguous rows at an address."""
    size = dtype.itemsize
    return Layout(
        address, shape[1] * shape[2] * size, shape[2] * size, size, row_format(dtype).code
    )


def pair_of_rows(
    k: Any, v: Any, device: Device, heads: int, head_dim: int, num_tokens: int | None
) -> tuple[Rows, Rows]:
    """K and V as ``[num_tokens, heads, head_dim]``, both on this device or both on the host.

    Raises :class:`DeviceError` that names both places otherwise, :class:`FormatError` or
    :class:`ShapeError`.
    """
    arrays = as_device_array(k, "k"), as_device_array(v, "v")
    if all(array is None for array in arrays):
        return (
            as_rows(k, "k", heads, head_dim, num_tokens),
            as_rows(v, "v", heads, head_dim, num_tokens),
        )
    places = ["the host" if array is None else array.device for array in arrays]
    if places != [device.name, device.name]:
        raise DeviceError(
            f"k and v on {device.name} (or both on the host)",
            f"k on {places[0]}, v on {places[1]}",
            "k, v",
        )
    return (
        _device_rows(arrays[0], "k", device, heads, head_dim, num_tokens),
        _device_rows(arrays[1], "v", device, heads, head_dim, num_tokens),
    )


def _device_rows(
    array: Any, what: str, device: Device, heads: int, head_dim: int, num_tokens: int | None
) -> DeviceArray:
    row_format(array.dtype, what)
    shape, strides = array.shape, array.strides
    flat = len(shape) == 2 and shape[1] == heads * head_dim
    if not flat and not (len(shape) == 3 and shape[1:] == (heads, head_dim)):
        tokens = "num_tokens" if num_tokens is None else num_tokens
        expected = f"[{tokens}, {heads}, {head_dim}] or [{tokens}, {heads * head_dim}]"
        raise ShapeError(expected, list(shape), what)
    if num_tokens is not None and shape[0] != num_tokens:
        raise ShapeError(f"{num_tokens} tokens", f"{shape[0]} (shape {shape})", what)
    check_pointer(array, device)
    if not flat:
        rows: DeviceArray = array
        return rows
    return array.with_layout(
        (shape[0], heads, head_dim), (strides[0], strides[1] * head_dim, strides[1])
    )


def device_out(
    out: DeviceArray, what: str, device: Device, shape: tuple[int, ...], fmt: KVFormat
) -> DeviceArray:
    """A device array to fill, checked: shape, dtype, device, writable."""
    if out.device != device.name:
        raise DeviceError(f"memory of {device.name}", f"memory of {out.device}", what)
    if out.dtype != fmt.dtype:
        raise FormatError(fmt.dtype, out.dtype, what)
    if out.shape != shape:
        raise ShapeError(list(shape), list(out.shape), what)
    if overlaps_itself(out.shape, out.strides, out.itemsize):
        raise ShapeError("elements of their own", f"strides {out.strides}", what)
    if out.readonly:
        raise FormatError("a writable array", "a read-only one", what)
    check_pointer(out, device)
    return out
