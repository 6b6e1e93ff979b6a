"""The formats once more, slowly and in NumPy, to judge the library by.

Nothing here calls native code or reads the library's format table: names, group size and rules
are written out again, so that a mistake in the headers cannot hide in its own oracle. Rows are
float32 ``[..., head_dim]``; what is stored is a :class:`StoredRows` of bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

GROUP = 32
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
_ONE = np.float32(1)
_TINY = np.float32(1e-10)  # groups below this magnitude are stored as zeros (q8, q4)


@dataclass(frozen=True)
class StoredRows:
    """Bytes of rows: ``data`` ``[..., data_nbytes]`` and, for planar formats, ``scales``."""

    data: Bytes
    scales: Bytes


def _groups(rows: Floats) -> Floats:
    """Rows as ``[..., num_groups, 32]``, the last group padded with zeros."""
    pad = -rows.shape[-1] % GROUP
    padded = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, pad)])
    return padded.reshape(*rows.shape[:-1], padded.shape[-1] // GROUP, GROUP)


def _ungroup(groups: Floats, head_dim: int) -> Floats:
    flat = groups.reshape(*groups.shape[:-2], groups.shape[-2] * GROUP)
    return np.ascontiguousarray(flat[..., :head_dim], dtype=np.float32)


def _round_half_away(values: Floats) -> NDArray[np.float64]:
    wide = values.astype(np.float64)  # adding 0.5 must be exact: 0.49999997 rounds to 0
    return np.trunc(wide + np.copysign(0.5, wide))


def _as_bytes(values: NDArray[np.generic], lead: tuple[int, ...]) -> Bytes:
    width = values.itemsize * math.prod(values.shape[len(lead) :])
    flat: Bytes = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return flat.reshape(*lead, width)


def _no_scales(data: Bytes) -> StoredRows:
    return StoredRows(data, np.zeros((*data.shape[:-1], 0), np.uint8))


def _reciprocal(scale: Floats) -> Floats:
    return np.divide(_ONE, scale, out=np.zeros_like(scale), where=scale != 0)


# -- float formats ---------------------------------------------------------------------------

_DENSE: dict[str, np.dtype[np.generic]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def _encode_dense(name: str, rows: Floats) -> StoredRows:
    with np.errstate(over="ignore"):
        stored = rows.astype(_DENSE[name])
    return _no_scales(_as_bytes(stored, rows.shape[:-1]))


def _decode_dense(name: str, stored: StoredRows, head_dim: int) -> Floats:
    values = np.ascontiguousarray(stored.data).view(_DENSE[name])
    return values[..., :head_dim].astype(np.float32)


# -- q8 and q4: float32 scales in a plane of their own ---------------------------------------


def _symmetric(rows: Floats, top: int, low: int) -> tuple[NDArray[np.float64], Floats]:
    groups = _groups(rows)
    amax = np.abs(groups).max(axis=-1, keepdims=True)
    scale = np.where(amax < _TINY, np.float32(0), amax / np.float32(top))
    quants = _round_half_away(groups * _reciprocal(scale))
    return np.clip(quants, low, top), scale


def _encode_q8(rows: Floats) -> StoredRows:
    quants, scale = _symmetric(rows, 127, -127)
    lead = rows.shape[:-1]
    return StoredRows(_as_bytes(quants.astype(np.int8), lead), _as_bytes(scale, lead))


def _decode_q8(stored: StoredRows, head_dim: int) -> Floats:
    lead = stored.data.shape[:-1]
    quants = stored.data.view(np.int8).reshape(*lead, stored.data.shape[-1] // GROUP, GROUP)
    scale = np.ascontiguousarray(stored.scales).view("<f4")[..., None]
    return _ungroup(quants.astype(np.float32) * scale, head_dim)


def _encode_q4(rows: Floats) -> StoredRows:
    quants, scale = _symmetric(rows, 7, -8)
    # A zero group is stored as zero bytes, not as nibbles of 8.
    nibbles = np.where(scale == 0, 0, quants + 8).astype(np.uint8)
    data = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    lead = rows.shape[:-1]
    return StoredRows(_as_bytes(data, lead), _as_bytes(scale, lead))


def _decode_q4(stored: StoredRows, head_dim: int) -> Floats:
    lead = stored.data.shape[:-1]
    num_groups = stored.data.shape[-1] // (GROUP // 2)
    data = stored.data.reshape(*lead, num_groups, GROUP // 2)
    quants = np.stack((data & 15, data >> 4), axis=-1).reshape(*lead, num_groups, GROUP)
    scale = np.ascontiguousarray(stored.scales).view("<f4")[..., None]
    values = (quants.astype(np.float32) - np.float32(8)) * scale
    return _ungroup(np.where(scale == 0, np.float32(0), values), head_dim)


# -- ggml's formats: a float16 scale in front of each group's quants --------------------------


def _interleave(*parts: NDArray[np.generic]) -> StoredRows:
    lead = parts[0].shape[:-1]
    data = np.concatenate([_as_bytes(part, lead) for part in parts], axis=-1)
    return _no_scales(_as_bytes(data, lead[:-1]))


def _split(stored: StoredRows, header: int, quants: int) -> tuple[Floats, Bytes]:
    lead = stored.data.shape[:-1]
    width = header + quants
    groups = stored.data.reshape(*lead, stored.data.shape[-1] // width, width)
    head = np.ascontiguousarray(groups[..., :header]).view("<f2").astype(np.float32)
    return head, np.ascontiguousarray(groups[..., header:])


def _halves(data: Bytes) -> Floats:
    """ggml's nibbles: byte i holds value i (low) and value i + 16 (high)."""
    return np.concatenate((data & 15, data >> 4), axis=-1).astype(np.float32)


def _pack_halves(nibbles: Bytes) -> Bytes:
    packed: Bytes = nibbles[..., : GROUP // 2] | nibbles[..., GROUP // 2 :] << np.uint8(4)
    return packed


def _encode_q8_0(rows: Floats) -> StoredRows:
    groups = _groups(rows)
    scale = np.abs(groups).max(axis=-1, keepdims=True) / np.float32(127)
    quants = _round_half_away(groups * _reciprocal(scale)).astype(np.int8)
    return _interleave(scale.astype("<f2"), quants)


def _decode_q8_0(stored: StoredRows, head_dim: int) -> Floats:
    scale, data = _split(stored, 2, GROUP)
    return _ungroup(data.view(np.int8).astype(np.float32) * scale, head_dim)


def _encode_q4_0(rows: Floats) -> StoredRows:
    groups = _groups(rows)
    where = np.abs(groups).argmax(axis=-1)[..., None]  # the first of equals, with its sign
    scale = np.take_along_axis(groups, where, axis=-1) / np.float32(-8)
    shifted = groups * _reciprocal(scale) + np.float32(8.5)
    nibbles = np.minimum(np.trunc(shifted), 15).astype(np.uint8)
    return _interleave(scale.astype("<f2"), _pack_halves(nibbles))


def _decode_q4_0(stored: StoredRows, head_dim: int) -> Floats:
    scale, data = _split(stored, 2, GROUP // 2)
    return _ungroup((_halves(data) - np.float32(8)) * scale, head_dim)


def _encode_q4_1(rows: Floats) -> StoredRows:
    groups = _groups(rows)
    low = groups.min(axis=-1, keepdims=True)
    scale = (groups.max(axis=-1, keepdims=True) - low) / np.float32(15)
    shifted = (groups - low) * _reciprocal(scale) + np.float32(0.5)
    nibbles = np.minimum(np.trunc(shifted), 15).astype(np.uint8)
    return _interleave(scale.astype("<f2"), low.astype("<f2"), _pack_halves(nibbles))


def _decode_q4_1(stored: StoredRows, head_dim: int) -> Floats:
    head, data = _split(stored, 4, GROUP // 2)
    return _ungroup(_halves(data) * head[..., :1] + head[..., 1:], head_dim)


_GROUPED: dict[
    str, tuple[Callable[[Floats], StoredRows], Callable[[StoredRows, int], Floats]]
] = {
    "q8": (_encode_q8, _decode_q8),
    "q4": (_encode_q4, _decode_q4),
    "q8_0": (_encode_q8_0, _decode_q8_0),
    "q4_0": (_encode_q4_0, _decode_q4_0),
    "q4_1": (_encode_q4_1, _decode_q4_1),
    # A flat run of values has no tokens for a group to run along: q4_1's groups. In a block:
    # channels.py.
    "q4k": (_encode_q4_1, _decode_q4_1),
}
PLANAR = ("q8", "q4")


def knows(name: str) -> bool:
    """Whether the reference has rules for a format of this name."""
    return name in _DENSE or name in _GROUPED


def encode_rows(name: str, rows: Floats) -> StoredRows:
    """Finite (or, for float formats, any) float32 rows ``[..., head_dim]`` as stored bytes."""
    rows = np.ascontiguousarray(rows, dtype=np.float32)
    return _encode_dense(name, rows) if name in _DENSE else _GROUPED[name][0](rows)


def decode_rows(name: str, stored: StoredRows, head_dim: int) -> Floats:
    """Stored bytes back as float32 rows ``[..., head_dim]``."""
    if name in _DENSE:
        return _decode_dense(name, stored, head_dim)
    return _GROUPED[name][1](stored, head_dim)


def read_back(name: str, rows: Floats) -> Floats:
    """What rows read back as after they were stored in a format."""
    return decode_rows(name, encode_rows(name, rows), rows.shape[-1])


def saturate(rows: Floats) -> Floats:
    """``on_nonfinite="saturate"``: Inf as the group's largest finite magnitude, NaN as 0."""
    groups = _groups(np.asarray(rows, dtype=np.float32))
    finite = np.isfinite(groups)
    largest = np.where(finite, np.abs(groups), 0).max(axis=-1, keepdims=True)
    limited = np.where(np.isnan(groups), 0, np.copysign(largest, groups))
    return _ungroup(np.where(finite, groups, limited).astype(np.float32), rows.shape[-1])
