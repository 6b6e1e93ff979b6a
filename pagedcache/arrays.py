"""Arrays at the public door: what callers hand in becomes one known dtype, or a typed error.

Integers (tokens, slots, block ids) are converted only where no value can change; floating
point rows are never converted here at all, because a silent float64 or int8 cache would be a
wrong cache. An array is copied only when it has to be.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np

from pagedcache.errors import (
    FormatError,
    InvalidArgumentError,
    PagedCacheError,
    ShapeError,
    StorageMemoryError,
    shown,
)
from pagedcache.foreign import as_ndarray, is_array, tensor_integer, torch_dtype_name
from pagedcache.formats import FORMATS, KVFormat

_ROW_NAMES = ", ".join(fmt.name for fmt in FORMATS.values() if not fmt.is_quantized)

_UINT32_MAX = 2**32 - 1
_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1

# array.array fills C integers from a list much faster than numpy does, and refuses floats.
_CODES = {np.dtype(np.uint32): "I", np.dtype(np.int32): "i", np.dtype(np.int64): "q"}


def as_tokens(x: Any, what: str = "tokens") -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Return token ids as a C-contiguous uint32 array of rank 1.

    ``x``: list, tuple, range, or any integer array: whatever NumPy or DLPack reads, and tensors
    of torch on the CPU. A contiguous uint32 array is returned as it is (no copy: do not keep it
    beyond the call).

    Raises :class:`InvalidArgumentError` naming the first bad index and value: outside
    0…2^32-1, a float, a bool, a string, a nested list, or an array of another rank; and
    :class:`DeviceError` for an array that is not on the CPU.
    """
    return _as_integers(x, what, np.dtype(np.uint32), 0, _UINT32_MAX)


def as_slots(x: Any, what: str = "slots") -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return slots (``block_id * block_size + offset``, -1 = skip) as a contiguous int64 array.

    Only the type is checked here, not whether a pool has the slot. Raises as
    :func:`as_tokens`, the range being int64's.
    """
    return _as_integers(x, what, np.dtype(np.int64), _INT64_MIN, _INT64_MAX)


def as_ids(x: Any, what: str = "block ids") -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return block ids as a contiguous int32 array; raises as :func:`as_tokens`."""
    return _as_integers(x, what, np.dtype(np.int32), _INT32_MIN, _INT32_MAX)


def as_amounts(x: Any, what: str) -> list[Any]:
    """One integer per sequence as a list of its own type; how many there must be, and which
    values, is the callee's to check.

    ``x``: a list, anything that can be iterated, or an integer array as for :func:`as_tokens`.
    Raises :class:`InvalidArgumentError` for what holds no values and for arrays of other dtypes
    or ranks.
    """
    if type(x) is list:
        return x
    if is_array(x) and getattr(x, "shape", None) != (0,):  # without values, any dtype will do
        values: list[Any] = as_slots(x, what).tolist()
        return values
    kind = type(x).__name__
    if not isinstance(x, (str, bytes)) and isinstance(x, Iterable):
        try:
            return list(x)
        except (TypeError, OverflowError, MemoryError):  # a huge range
            kind = shown(x)
    raise InvalidArgumentError(f"{what} must be one integer per sequence, got {kind}")


def _as_integers(x: Any, what: str, dtype: np.dtype[Any], low: int, high: int) -> Any:
    if isinstance(x, np.ndarray):
        if type(x) is np.ndarray and x.dtype == dtype and x.ndim == 1 and x.flags.c_contiguous:
            return x
    try:
        return _converted(x, what, dtype, low, high)
    except MemoryError:
        raise StorageMemoryError(len(x) * dtype.itemsize, what) from None


def _converted(x: Any, what: str, dtype: np.dtype[Any], low: int, high: int) -> Any:
    if isinstance(x, np.ndarray):
        return _from_array(x, what, dtype, low, high)
    if isinstance(x, range):
        return _from_range(x, what, dtype, low, high)
    if isinstance(x, (str, bytes, bytearray)) or x is None:
        raise InvalidArgumentError(f"{what}: expected integers, got {type(x).__name__}")
    if is_array(x) or isinstance(x, (array, memoryview)):
        try:
            shared = as_ndarray(x, what)
        except PagedCacheError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            got = f"{type(x).__name__} ({shown(str(error))})"
            raise InvalidArgumentError(f"{what}: expected integers, got {got}") from None
        return _from_array(shared, what, dtype, low, high)
    if isinstance(x, Sequence):
        return _from_sequence(x, what, dtype, low, high)
    raise InvalidArgumentError(
        f"{what}: expected a list, tuple, range or integer array, got {type(x).__name__}"
    )


def _from_array(x: np.ndarray[Any, Any], what: str, dtype: Any, low: int, high: int) -> Any:
    if x.dtype.kind not in "iu":
        raise InvalidArgumentError(f"{what}: expected an integer array, got dtype {x.dtype}")
    if type(x) is not np.ndarray and isinstance(x, np.ma.MaskedArray):
        raise InvalidArgumentError(f"{what}: got a masked array; fill it first")
    if x.ndim != 1:
        cure = " (of one sequence: x[0] or x.ravel())" if x.ndim else ""
        raise InvalidArgumentError(f"{what}: expected a flat array{cure}, got shape {x.shape}")
    if x.dtype != dtype and x.size:
        info = np.iinfo(x.dtype)
        least = int(x.min()) if info.min < low else 0
        most = int(x.max()) if info.max > high else 0
        if least < low or most > high:
            # Compare against what the source dtype can hold: numpy refuses other literals.
            bad = (x < max(low, info.min)) | (x > min(high, info.max))
            index = int(np.flatnonzero(bad)[0])
            raise _out_of_range(what, index, int(x[index]), low, high)
    return np.ascontiguousarray(x, dtype=dtype)


def _from_range(x: range, what: str, dtype: Any, low: int, high: int) -> Any:
    if not x:  # len() refuses ranges that no machine could hold
        return np.empty(0, dtype)
    if min(x[0], x[-1]) < low or max(x[0], x[-1]) > high:
        first_bad = 0 if not low <= x[0] <= high else _first_outside(x, low, high)
        raise _out_of_range(what, first_bad, x[first_bad], low, high)
    if (x[-1] - x[0]) // x.step >= _INT64_MAX // dtype.itemsize:
        raise InvalidArgumentError(f"{what}: a range of more values than any memory holds")
    # stop may lie outside the dtype though no value does, hence the arithmetic in int64
    return (x.start + x.step * np.arange(len(x), dtype=np.int64)).astype(dtype)


def _first_outside(x: range, low: int, high: int) -> int:
    if x.step > 0:
        return (high - x.start) // x.step + 1
    return (x.start - low) // -x.step + 1


def _from_sequence(x: Sequence[Any], what: str, dtype: Any, low: int, high: int) -> Any:
    if any(not issubclass(t, (int, np.integer)) or t is bool for t in set(map(type, x))):
        x = _integers(x, what)
    try:
        return np.frombuffer(array(_CODES[dtype], x), dtype) if len(x) else np.empty(0, dtype)
    except OverflowError:
        index = next(i for i, v in enumerate(x) if not low <= v <= high)
        raise _out_of_range(what, index, int(x[index]), low, high) from None


def _integers(x: Sequence[Any], what: str) -> list[Any]:
    """The values of a sequence that holds more than ints: tensors of one integer count as such."""
    values = []
    for index, value in enumerate(x):
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
            number = tensor_integer(value)
            if number is None:
                raise InvalidArgumentError(
                    f"{what}: expected integers, got {type(value).__name__} {_short(value)} "
                    f"at index {index}"
                )
            value = number
        values.append(value)
    return values


def _short(value: Any) -> str:
    text = shown(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _out_of_range(what: str, index: int, value: int, low: int, high: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{what}: value {shown(value)} at index {index} is outside {low}…{high}"
    )


@cache
def row_dtypes() -> dict[np.dtype[Any], KVFormat]:
    """Return the dtypes in which rows come in and go out, with their dense formats.

    Made on the first call: bfloat16's dtype costs an import.
    """
    return {fmt.dtype: fmt for fmt in FORMATS.values() if not fmt.is_quantized}


def row_format(dtype: Any, what: str = "dtype") -> KVFormat:
    """Return the dense format (float32, float16, bfloat16) of a dtype, of torch's too, or its name.

    Raises :class:`FormatError` that names the dtype for every other one, and for one in the
    other byte order.
    """
    if isinstance(dtype, np.dtype):
        found = row_dtypes().get(dtype)  # the common case; the other byte order is not equal
        if found is not None:
            return found
    dtype = torch_dtype_name(dtype) or dtype
    if isinstance(dtype, str) and dtype in FORMATS:
        dtype = FORMATS[dtype].dtype if not FORMATS[dtype].is_quantized else dtype
    try:
        key = np.dtype(dtype)
    except (TypeError, ValueError):
        raise FormatError(f"one of {_ROW_NAMES}", _short(dtype), what) from None
    known = row_dtypes()
    fmt = known.get(key) if key.isnative else None
    if fmt is not None:
        return fmt
    if not key.isnative and key.newbyteorder("=") in known:
        raise FormatError(
            f"native byte order (use x.astype({str(key.newbyteorder('='))!r}))", key, what
        )
    raise FormatError(f"one of {_ROW_NAMES} (convert with .astype, a tensor with .to)", key, what)


def as_float_array(x: Any, what: str) -> np.ndarray[Any, Any]:
    """Return ``x`` as a numpy array of float32, float16 or bfloat16 without changing a value.

    Any rank, any strides, read-only or not; no copy where the memory can be shared. Whatever
    NumPy or DLPack reads is taken, and tensors of torch, those that require a gradient without it.
    Raises :class:`FormatError` naming the dtype for anything else (float64, integers, complex,
    objects, strings, ragged lists, masked arrays, the other byte order) and
    :class:`DeviceError` for memory of a GPU.
    """
    if not isinstance(x, np.ndarray):
        try:
            x = as_ndarray(x, what)
        except PagedCacheError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            got = f"{type(x).__name__} that is no array ({shown(str(error))})"
            raise FormatError(f"an array of {_ROW_NAMES}", got, what) from None
    elif type(x) is not np.ndarray and isinstance(x, np.ma.MaskedArray):
        raise FormatError(f"an array of {_ROW_NAMES}", "a masked array; fill it first", what)
    row_format(x.dtype, what)
    # As a plain ndarray: a subclass (numpy.matrix) may reshape in its own way.
    return x.view(np.ndarray) if type(x) is not np.ndarray else x


def as_rows(
    x: Any, what: str, num_heads: int, head_dim: int, num_tokens: int | None = None
) -> np.ndarray[Any, Any]:
    """Return ``x`` as rows ``[num_tokens, num_heads, head_dim]`` that native code may read.

    ``x`` may also be ``[num_tokens, num_heads * head_dim]``. Strides are kept; only a
    misaligned array is copied. ``num_tokens=None`` takes whatever ``x`` has.
    Raises :class:`FormatError`, :class:`DeviceError` or :class:`ShapeError`.
    """
    rows = as_float_array(x, what)
    tokens = "num_tokens" if num_tokens is None else num_tokens
    flat = rows.ndim == 2 and rows.shape[1] == num_heads * head_dim
    if not flat and not (rows.ndim == 3 and rows.shape[1:] == (num_heads, head_dim)):
        raise ShapeError(
            f"[{tokens}, {num_heads}, {head_dim}] or [{tokens}, {num_heads * head_dim}]",
            list(rows.shape),
            what,
        )
    if num_tokens is not None and rows.shape[0] != num_tokens:
        raise ShapeError(f"{num_tokens} tokens", f"{rows.shape[0]} (shape {rows.shape})", what)
    if not rows.flags.aligned:
        rows = copied(rows, what)
    return rows.reshape(rows.shape[0], num_heads, head_dim) if flat else rows


def copied(rows: np.ndarray[Any, Any], what: str) -> np.ndarray[Any, Any]:
    """A copy of ``rows``; :class:`StorageMemoryError` when there is no memory for it."""
    try:
        return rows.copy()
    except MemoryError:
        raise StorageMemoryError(rows.size * rows.itemsize, f"a copy of {what}") from None


def overlap(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    """Return whether two arrays share a byte; True where that takes too long to find out.

    The regular strides of slabs and rows are decided at once.
    """
    if not np.may_share_memory(a, b):
        return False
    try:
        return bool(np.shares_memory(a, b, max_work=100_000))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
