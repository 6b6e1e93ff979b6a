"""Attention over slabs in the CPU's memory: the arrays of a call, and the call."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from pagedcache import machine
from pagedcache._native import attention as native
from pagedcache.arrays import as_float_array, copied, overlap, row_format
from pagedcache.errors import FormatError, InvalidArgumentError, ShapeError, StorageMemoryError
from pagedcache.foreign import as_ndarray, is_tensor
from pagedcache.spec import CacheSpec
from pagedcache.storage.attention import (
    AttentionArrays,
    AttentionBatch,
    AttentionOptions,
    num_q_heads,
)
from pagedcache.storage.checks import overlaps_itself
from pagedcache.storage.slabs import Array


def check_arrays(
    spec: CacheSpec, q: Any, out: Any, sinks: Any, return_lse: bool, filled: Any, empty: Any
) -> AttentionArrays:
    """The arrays of a call; see ``Storage.attention_arrays``.

    ``filled(array, what)`` gives the NumPy array over one that is to be filled, and
    ``empty(shape, format)`` makes a new one.
    """
    shape, rows = _queries(spec, q)
    fmt = row_format(rows.dtype)
    given = out
    if out is None:
        if is_tensor(q):
            given = _new_tensor(q, shape)
            target = as_ndarray(given, "out", written=True)
        else:
            given = target = empty(shape, fmt)
    else:
        target = _target(filled(out, "out"), shape, rows.dtype)
        if overlap(target, rows):
            raise ShapeError("an out that shares no memory with q", "overlapping arrays", "out")
    lse = result_lse = None
    if return_lse:
        lse = empty(rows.shape[:2], row_format("float32"))
        result_lse = _as_tensor(lse) if is_tensor(q) else lse
    return AttentionArrays(
        rows, target.reshape(rows.shape), lse, check_sinks(sinks, rows.shape[1]), given, result_lse
    )


def _queries(spec: CacheSpec, q: Any) -> tuple[tuple[int, ...], Array]:
    """The shape that q has, and its rows ``[n, num_q_heads, head_dim]``."""
    rows = as_float_array(q, "q")
    heads = num_q_heads(spec, rows.shape)
    if not rows.flags.aligned:
        rows = copied(rows, "q")
    return rows.shape, rows.reshape(len(rows), heads, spec.head_dim)


def _target(target: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    if target.dtype != dtype or not target.dtype.isnative:
        raise FormatError(f"{dtype}, as q has", target.dtype, "out")
    if target.shape != shape:
        raise ShapeError(f"{list(shape)}, as q has", list(target.shape), "out")
    if overlaps_itself(target.shape, target.strides, target.itemsize):
        raise ShapeError("elements of their own", f"strides {target.strides}", "out")
    if not target.flags.writeable or not target.flags.aligned:
        raise FormatError("a writable, aligned array", "a read-only or misaligned one", "out")
    return target


def check_sinks(sinks: Any, num_q_heads: int) -> Array | None:
    """Sinks on the host as float32 ``[num_q_heads]``; NaN and +inf are refused."""
    if sinks is None:
        return None
    values = as_float_array(sinks, "sinks")
    if values.shape != (num_q_heads,):
        raise ShapeError([num_q_heads], list(values.shape), "sinks")
    values = np.ascontiguousarray(values, np.float32)
    if np.isnan(values).any() or np.isposinf(values).any():
        raise InvalidArgumentError("sinks: expected numbers below +inf, got NaN or +inf")
    return values


def _new_tensor(q: Any, shape: tuple[int, ...]) -> Any:
    torch = sys.modules["torch"]
    try:
        return torch.empty(shape, dtype=q.dtype)
    except RuntimeError:
        raise StorageMemoryError(0, f"the result of {shape}") from None


def _as_tensor(array: Array) -> Any:
    return sys.modules["torch"].from_numpy(array)


def attend(
    slabs: dict[Any, Any],
    layer: int,
    arrays: AttentionArrays,
    batch: AttentionBatch,
    options: AttentionOptions,
) -> None:
    """Run a call."""
    run(
        slabs["k"],
        slabs["v"],
        layer,
        arrays.q,
        arrays.out,
        row_format(arrays.q.dtype).code,
        *batch,
        options.scale,
        options.causal,
        options.window or 0,
        options.soft_cap or 0.0,
        arrays.sinks,
        arrays.lse,
    )


def run(*call: Any) -> None:
    """The native call, with what is chosen for this machine."""
    native.attend(*(*call, machine.isa_index(), machine.get_num_threads()))
