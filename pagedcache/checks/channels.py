"""Formats whose groups run along the tokens of a block, and rows that wait in open blocks.

The reference of q4k: in a block, a group is one channel of one head over up to 32 tokens, stored
as float16 scale, float16 minimum and one nibble per token. Blocks are float32
``[tokens, heads, head_dim]``; values may be NaN or Inf, which act as under "saturate".
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .reference import GROUP, Bytes, Floats, read_back, saturate

BY_CHANNEL = ("q4k",)

_FLOATS: dict[str, tuple[np.dtype[np.generic], float]] = {
    "float32": (np.dtype(np.float32), 3.4028234663852886e38),
    "float16": (np.dtype(np.float16), 65504.0),
    "bfloat16": (np.dtype(ml_dtypes.bfloat16), 3.3895313892515355e38),
}


def _finite(columns: Floats) -> Floats:
    """Columns ``[tokens, …]``, Inf as the column's largest finite magnitude and NaN as 0."""
    finite = np.isfinite(columns)
    largest = np.where(finite, np.abs(columns), 0).max(axis=0)
    limited = np.where(np.isnan(columns), 0, np.copysign(largest, columns))
    return np.where(finite, columns, limited).astype(np.float32)


def _clamped(x: Floats) -> Floats:
    """What float16 would make Inf is its largest value (include/pagedcache/ggml.h)."""
    largest = np.float32(65504)
    return np.where(np.abs(x) < 65520, x, np.copysign(largest, x)).astype(np.float32)


def _quantised(columns: Floats) -> tuple[Bytes, NDArray[np.float16]]:
    """One group of tokens ``[tokens, heads, head_dim]``: nibbles, one a byte, of that shape, and
    ``[heads, head_dim, 2]`` of scale and minimum."""
    columns = _finite(columns)
    low = _clamped(columns.min(axis=0))
    scale = _clamped(np.maximum(columns.max(axis=0) - low, 0) / np.float32(15))
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    nibbles = np.clip(np.trunc((columns - low) * inverse + np.float32(0.5)), 0, 15)
    return nibbles.astype(np.uint8), np.stack((scale, low), axis=-1).astype(np.float16)


def block_parts(block: Floats) -> tuple[Bytes, Bytes]:
    """A block as bytes: rows ``[tokens, heads, (head_dim + 1) // 2]`` of two nibbles a byte, even
    channels low, and scales ``[heads, token groups, 4 * head_dim]``."""
    tokens, heads, head_dim = block.shape
    nibbles, scales = [], []
    for first in range(0, tokens, GROUP):
        part, pairs = _quantised(block[first : first + GROUP])
        nibbles.append(part)
        scales.append(np.ascontiguousarray(pairs).view(np.uint8).reshape(heads, 4 * head_dim))
    each = np.concatenate(nibbles)
    if head_dim % 2:
        each = np.pad(each, [(0, 0), (0, 0), (0, 1)])
    rows: Bytes = each[..., ::2] | each[..., 1::2] << np.uint8(4)
    return rows, np.stack(scales, axis=1)


def channels_read_back(block: Floats) -> Floats:
    """What a block reads back as after it was stored by channel."""
    parts = []
    for first in range(0, len(block), GROUP):
        nibbles, pairs = _quantised(block[first : first + GROUP])
        wide = pairs.astype(np.float32)
        parts.append(nibbles.astype(np.float32) * wide[..., 0] + wide[..., 1])
    return np.concatenate(parts).astype(np.float32)


def sealed(name: str, block: Floats) -> Floats:
    """What a whole block reads back as in its own format."""
    if name in BY_CHANNEL:
        return channels_read_back(block)
    return read_back(name, saturate(block) if name not in _FLOATS else block)


def opened(name: str, held: str, rows: Floats) -> Floats:
    """What rows for a format ``name`` read back as from an open block of ``held``."""
    dtype, most = _FLOATS[name if name in _FLOATS else held]
    if name not in _FLOATS:
        rows = np.clip(saturate(rows), -np.float32(most), np.float32(most))
    with np.errstate(over="ignore"):
        return rows.astype(dtype).astype(np.float32)


def readings(name: str, held: str, rows: Floats, block_size: int) -> list[Floats]:
    """All that the rows of one block may read back as, ``rows`` being its first ones: open; sealed
    straight, or by way of an open block; and open again after that."""
    waiting = opened(name, held, rows)
    if len(rows) < block_size:
        return [waiting]
    stored = sealed(name, rows), sealed(name, waiting)
    return [waiting, *stored, *(opened(name, held, block) for block in stored)]
