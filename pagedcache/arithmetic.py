"""Conversions between float32, float16 and bfloat16 bits, and flat quantised buffers.

Results are bit for bit those of the C headers, which the storage uses too. The GIL is released
while values are converted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedcache._native import arithmetic as _native
from pagedcache.arguments import as_count, as_integer
from pagedcache.arrays import as_float_array, overlap, row_format
from pagedcache.errors import (
    CorruptionError,
    FormatError,
    InvalidPositionError,
    NonFiniteError,
    PagedCacheError,
    ShapeError,
    StorageMemoryError,
    shown,
)
from pagedcache.foreign import as_ndarray, is_tensor
from pagedcache.formats import FORMATS, KVFormat, get_format, get_policy

_STATUS = {name: code for code, (name, _) in _native.status_table().items()}
_SCALE_ALIGNMENT = 16  # of the scales behind the quants, as in a block


def float32_to_float16_bits(x: ArrayLike) -> NDArray[np.uint16]:
    """Round float32 values to the nearest float16 and return their bits as uint16.

    ``x``: float32 array of any shape and strides; the result has its shape, in C order. Ties go
    to even, overflow gives ±Inf, subnormals are exact; a NaN keeps its sign and the top 10 bits
    of its payload (1 if they are zero). Raises :class:`FormatError` for any other dtype.
    """
    return _encode_bits(x, FORMATS["float16"])


def float32_to_bfloat16_bits(x: ArrayLike) -> NDArray[np.uint16]:
    """Round float32 values to the nearest bfloat16 and return their bits as uint16.

    As :func:`float32_to_float16_bits`; a NaN becomes the quiet NaN of its sign (0x7FC0, 0xFFC0).
    """
    return _encode_bits(x, FORMATS["bfloat16"])


def float16_bits_to_float32(bits: ArrayLike) -> NDArray[np.float32]:
    """Return the float32 values of float16 bits; exact.

    ``bits``: uint16 array of any shape and strides; the result has its shape, in C order. Raises
    :class:`FormatError` for any other dtype.
    """
    return _decode_bits(bits, FORMATS["float16"])


def bfloat16_bits_to_float32(bits: ArrayLike) -> NDArray[np.float32]:
    """Return the float32 values of bfloat16 bits, as :func:`float16_bits_to_float32`."""
    return _decode_bits(bits, FORMATS["bfloat16"])


class FlatQuantized:
    """``num_values`` values in one flat buffer of any storage format, zero at first.

    Values are grouped from the start, whatever shape they came in; the last group is padded with
    zeros. ``data`` (uint8, ``nbytes`` long) holds the groups as a one-row block does: planar
    formats all quants, then (16-byte aligned) all scales; the others group after group.

    ``data=`` adopts such bytes, for instance from a file, instead of making new ones; they must
    be a contiguous, writable uint8 array of that size, or a tensor of torch on the CPU
    (:class:`ShapeError`, :class:`FormatError`, :class:`DeviceError`). What a buffer is made of
    cannot be replaced later; its bytes can be written through ``data``.
    Raises :class:`InvalidArgumentError` for a negative or absurd ``num_values`` and
    :class:`StorageMemoryError` when the memory can't be had.
    """

    __slots__ = ("_data", "_format", "_nbytes", "_num_values", "_scale_offset", "_shape")

    def __init__(
        self, format: str | KVFormat, num_values: int, data: NDArray[np.uint8] | None = None
    ) -> None:
        self._format = row = get_format(format)
        self._num_values = as_count(num_values, "num_values")
        self._shape: tuple[int, ...] = (self._num_values,)
        groups = -(-self._num_values // row.group_size)
        nbytes = groups * row.group_nbytes
        self._scale_offset = 0
        if row.packing == "planar":
            quants = groups * row.quant_nbytes
            self._scale_offset = -(-quants // _SCALE_ALIGNMENT) * _SCALE_ALIGNMENT
            nbytes = self._scale_offset + groups * row.scale_nbytes
        self._nbytes = nbytes
        if is_tensor(data):
            data = _foreign(data, "data", "uint8", written=True)
        self._data = _new_bytes(nbytes) if data is None else _adopted_bytes(data, nbytes)

    @property
    def format(self) -> KVFormat:
        """How the values are stored."""
        return self._format

    @property
    def num_values(self) -> int:
        """Number of values."""
        return self._num_values

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array that was quantised; ``to_float32`` returns it."""
        return self._shape

    @property
    def data(self) -> NDArray[np.uint8]:
        """The bytes themselves, uint8 ``[nbytes]``; writing to them changes the buffer."""
        return self._data

    @property
    def nbytes(self) -> int:
        """Size of ``data``: of whole groups, scales included."""
        return self._nbytes

    def __len__(self) -> int:
        return self._num_values

    def __repr__(self) -> str:
        return f"<FlatQuantized {self.format}: {self.num_values} values, {self.nbytes} bytes>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self._format.name, self._num_values, self._data, self._shape)

    def read(self, offset: int = 0, length: int | None = None) -> NDArray[np.float32]:
        """Return values ``offset … offset + length`` (to the end by default) as new float32.

        Raises :class:`InvalidPositionError` when the range isn't inside the buffer.
        """
        start = as_integer(offset, "offset")
        count = self._num_values - start if length is None else as_integer(length, "length")
        self._check_range(start, count)
        out = _new_values(count)
        data = _adopted_bytes(self._data, self._nbytes, written=False)
        _native.flat_read(self._format.code, data, self._scale_offset, start, out)
        return out

    def write(self, offset: int, values: ArrayLike, on_nonfinite: str = "raise") -> None:
        """Replace the values from ``offset`` on by ``values``.

        ``values``: float32, float16 or bfloat16, any shape, taken in C order. A group that is
        covered in part is read, changed and quantised again, so that its other values may move
        within the error of the format; other groups keep their bytes.

        Raises, and writes nothing: :class:`InvalidPositionError` when the range isn't inside the
        buffer; :class:`FormatError` for other dtypes; :class:`NonFiniteError` for NaN or Inf in a
        quantised format under ``on_nonfinite="raise"``. Under ``"saturate"``, Inf acts as ± the
        largest finite magnitude of its group as it is after the write, NaN as 0.
        """
        policy = get_policy(on_nonfinite)
        start = as_integer(offset, "offset")
        flat = _float32_values(values, "values")
        self._check_range(start, flat.size)
        data = _adopted_bytes(self._data, self._nbytes)
        if overlap(flat, data):
            flat = flat.copy()  # a write must not change what it has still to read
        _raise_status(
            _native.flat_write(
                self._format.code, data, self._scale_offset, self._num_values, start, flat, policy
            ),
            "values",
            flat,
        )

    def to_float32(self) -> NDArray[np.float32]:
        """Return all values as new float32 of ``shape``."""
        return self.read().reshape(self._shape)

    def _check_range(self, start: int, count: int) -> None:
        if start < 0 or start > self._num_values:
            raise InvalidPositionError(start, self._num_values, "offset of a flat buffer")
        if count < 0 or start + count > self._num_values:
            reason = f"end of {shown(count)} values from offset {start}"
            raise InvalidPositionError(start + count, self._num_values, reason)


def _restored(
    format: str, num_values: int, data: NDArray[np.uint8], shape: tuple[int, ...]
) -> FlatQuantized:
    """What a pickled or copied buffer is loaded with; bytes that cannot be written are copied."""
    buffer = FlatQuantized(format, num_values, data if data.flags.writeable else data.copy())
    buffer._shape = shape
    return buffer


def quantize(
    x: ArrayLike, format: str | KVFormat, on_nonfinite: str = "raise"
) -> FlatQuantized:
    """Store ``x`` in ``format``.

    ``x``: float32, float16 or bfloat16 array of any shape and strides, taken in C order: groups
    run on from row to row, unlike in a cache. Raises :class:`FormatError` for other dtypes and
    unknown formats, and :class:`NonFiniteError` for NaN or Inf in a quantised format under
    ``on_nonfinite="raise"``; under ``"saturate"`` Inf acts as ± the largest finite magnitude of
    its group and NaN as 0.
    """
    policy = get_policy(on_nonfinite)
    array = as_float_array(x, "x")
    buffer = FlatQuantized(format, array.size)
    buffer._shape = array.shape
    flat = _float32_values(array, "x")
    status = _native.encode(buffer.format.code, flat, buffer.data, buffer._scale_offset, policy)
    _raise_status(status, "x", flat)
    return buffer


def dequantize(buffer: FlatQuantized) -> NDArray[np.float32]:
    """Return the values of a quantised buffer as new float32 of the shape they came in."""
    if not isinstance(buffer, FlatQuantized):
        raise FormatError("a FlatQuantized buffer", type(buffer).__name__, "buffer")
    return buffer.to_float32()


def _encode_bits(x: ArrayLike, format: KVFormat) -> NDArray[np.uint16]:
    array = as_float_array(x, "x")
    if array.dtype != np.float32:
        raise FormatError("float32", array.dtype, "x")
    out = _new_bytes(2 * array.size).view(np.uint16)
    _native.encode(format.code, _contiguous(array), out.view(np.uint8), 0, 0)
    return out.reshape(array.shape)


def _decode_bits(bits: ArrayLike, format: KVFormat) -> NDArray[np.float32]:
    array = _foreign(bits, "bits", "uint16")
    if array.dtype != np.uint16 or not array.dtype.isnative:
        raise FormatError("uint16", array.dtype, "bits")
    out = _new_values(array.size)
    _native.decode(format.code, _contiguous(array).view(np.uint8), 0, out)
    return out.reshape(array.shape)


def _foreign(x: Any, what: str, dtype: str, written: bool = False) -> NDArray[Any]:
    """What NumPy, torch or DLPack read of ``x``; the dtype is the caller's to check."""
    try:
        return as_ndarray(x, what, written=written)
    except PagedCacheError:
        raise
    except (TypeError, ValueError, RuntimeError, OverflowError, MemoryError) as error:
        # ragged lists, huge ranges, tensors of other dtypes
        got = f"{type(x).__name__} ({shown(str(error))})"
        raise FormatError(f"an array of {dtype}", got, what) from None


def _contiguous(array: NDArray[Any]) -> NDArray[Any]:
    """The values in C order as one aligned row; a copy only where it has to be."""
    return np.require(array, requirements=["C", "A"]).reshape(-1)


def _float32_values(values: ArrayLike, what: str) -> NDArray[np.float32]:
    array = as_float_array(values, what)
    flat = _contiguous(array)
    source = row_format(array.dtype)
    if source.name == "float32":
        return flat
    out = _new_values(flat.size)
    _native.decode(source.code, flat.view(np.uint8), 0, out)
    return out


def _new_bytes(nbytes: int) -> NDArray[np.uint8]:
    try:
        return np.zeros(nbytes, np.uint8)
    except (MemoryError, ValueError):  # ValueError: more than an index can hold
        raise StorageMemoryError(nbytes, "a flat quantised buffer") from None


def _new_values(count: int) -> NDArray[np.float32]:
    try:
        return np.empty(count, np.float32)
    except (MemoryError, ValueError):
        raise StorageMemoryError(4 * count, f"{count:,} float32 values") from None


def _adopted_bytes(
    data: NDArray[np.uint8], nbytes: int, written: bool = True
) -> NDArray[np.uint8]:
    """``data`` if it is as it must be: checked when adopted, and again whenever native code is to
    touch it, because an array can be resized or frozen in place."""
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8:
        kind = str(data.dtype) if isinstance(data, np.ndarray) else type(data).__name__
        raise FormatError("a uint8 array", kind, "data")
    writeable = data.flags.writeable or not written
    if data.shape != (nbytes,) or not data.flags.c_contiguous or not writeable:
        got = f"shape {data.shape}, strides {data.strides}, writeable {data.flags.writeable}"
        raise ShapeError(f"{nbytes} contiguous, writeable bytes", got, "data")
    return data


def _raise_status(status: int, what: str, values: NDArray[np.float32]) -> None:
    """The one place where a status code of this module's native calls becomes an exception."""
    if status == _STATUS["PC_OK"]:
        return
    if status == _STATUS["PC_E_NONFINITE"]:
        index = int(np.argmin(np.isfinite(values)))
        raise NonFiniteError(what, index, float(values[index]))
    name, text = _native.status_table().get(status, ("unknown", "unknown"))
    raise CorruptionError(f"native code returned {status} ({name}: {text})")
