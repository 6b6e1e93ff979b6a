"""Sizes, error bounds and raw bytes of the formats, from SPEC 2 alone."""

from __future__ import annotations

import numpy as np
from devicekit import host

import pagedcache as pc

#: Formats of which every row has scales of its own (the others: tests/cases/test_open_cases.py).
QUANTISED = ("q8", "q4", "q8_0", "q4_0", "q4_1")
STEPS = {"q8": 127, "q4": 7, "q8_0": 127, "q4_0": 8, "q4_1": 15}


def align16(n: int) -> int:
    return (n + 15) // 16 * 16


def block_bytes(fmt: str, layout: str, heads: int, B: int, dim: int) -> int:
    """Bytes of one layer's K or V of one block, from SPEC F4, F5, F9a alone."""
    groups = -(-dim // 32)
    if fmt in ("float32", "float16", "bfloat16"):
        return heads * B * dim * (4 if fmt == "float32" else 2)
    if fmt in ("q8_0", "q4_0", "q4_1"):
        return heads * B * groups * {"q8_0": 34, "q4_0": 18, "q4_1": 20}[fmt]
    if fmt == "q4k":  # half a byte a value; 4 bytes a channel for 32 tokens of a head
        planes, of_plane = (heads, 1) if layout == "HND" else (1, heads)
        scales = of_plane * -(-B // 32) * dim * 4
        return planes * (align16(of_plane * B * -(-dim // 2)) + align16(scales))
    quants = groups * (32 if fmt == "q8" else 16)
    planes, rows_ = (heads, B) if layout == "HND" else (1, heads * B)
    return planes * (align16(rows_ * quants) + align16(rows_ * groups * 4))


def row_bytes(fmt, layout, heads, B, head, token):
    """(start, length) of the bytes of one token's rows in a block of head_dim 32 (SPEC F9a)."""
    out = []
    for h in range(heads) if head is None else [head]:
        row = token if layout == "HND" else token * heads + h
        if fmt in ("q8_0", "q4_0", "q4_1"):
            size = {"q8_0": 34, "q4_0": 18, "q4_1": 20}[fmt]
            start = (h * B + token if layout == "HND" else row) * size
            out.append((start, size))
            continue
        quants = 32 if fmt == "q8" else 16
        rows_ = B if layout == "HND" else B * heads
        plane = align16(rows_ * quants) + align16(rows_ * 4)
        base = h * plane if layout == "HND" else 0
        out.append((base + row * quants, quants))
        out.append((base + align16(rows_ * quants) + row * 4, 4))
    return out


def group_bound(x: np.ndarray, fmt: str) -> np.ndarray:
    """Largest error allowed per value of the float32 array ``x`` (SPEC F4, F5, CASE C38)."""
    dim = x.shape[-1]
    groups = -(-dim // 32)
    padded = np.zeros(x.shape[:-1] + (groups * 32,), np.float64)
    padded[..., :dim] = x
    g = padded.reshape(x.shape[:-1] + (groups, 32))
    amax = np.abs(g).max(-1, keepdims=True)
    slack = 2.0**-20 * amax
    if fmt in ("q8", "q4"):
        bound = np.where(amax < 1e-10, 1e-10, amax / STEPS[fmt] * 0.5 + slack)
    elif fmt == "q8_0":
        bound = amax / 127 * 0.5 + slack + amax * 2.0**-11 + 127 * 2.0**-25
    elif fmt == "q4_0":  # one step on the clipped side, and the scale's rounding
        bound = amax / 8 + slack + amax * 2.0**-11 + 8 * 2.0**-25
    else:
        low, high = g.min(-1, keepdims=True), g.max(-1, keepdims=True)
        span = high - low
        bound = span / 15 * 0.5 + slack + span * 2.0**-11 + np.abs(low) * 2.0**-11
        bound = bound + 16 * 2.0**-25
    out = np.broadcast_to(bound, g.shape).reshape(padded.shape)[..., :dim]
    return out


def fill_rows(seq: pc.Sequence, data: np.ndarray) -> None:
    seq.append(0, data, data)
    seq.commit(len(data))


def raw_blocks(cache: pc.PagedKVCache, seq: pc.Sequence) -> list[bytes]:
    out = []
    for layer in range(cache.spec.num_layers):
        with seq.views(layer) as views:
            out += [host(v.k).tobytes() + host(v.v).tobytes() for v in views]
    return out
