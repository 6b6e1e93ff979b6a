"""The storage formats once more, slowly, in NumPy: the oracle of the C headers.

Written from the description of the formats, not from the headers, and without importing the
package. All arithmetic is float32, one rounding per operation. ``encode_rows`` gives quants and
scales apart; ``pack_flat`` and ``pack_block`` lay them out as bytes.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

DENSE = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
#: Quant bytes and scale bytes of a group of 32.
GROUP_BYTES = {
    "q8": (32, 4), "q4": (16, 4), "q8_0": (32, 2), "q4_0": (16, 2), "q4_1": (16, 4),
    "q4k": (16, 4),
}  # fmt: skip
PLANAR = ("q8", "q4", "q4k")
QUANTIZED = tuple(GROUP_BYTES)
ALL = (*DENSE, *QUANTIZED)
#: Formats whose groups are, in a block, one channel of a head over up to 32 tokens.
BY_CHANNEL = ("q4k",)
#: Formats whose groups lie inside one row.
BY_ROW = tuple(name for name in ALL if name not in BY_CHANNEL)

f32 = np.float32
HALF_MAX = f32(65504)


def saturated(groups: Floats, counts: NDArray[np.intp]) -> Floats:
    """Inf as +- the largest finite magnitude of its group, NaN as 0, padding (zeros) ignored."""
    out = groups.copy()
    if np.isfinite(groups).all():
        return out
    for group, count in zip(out, counts, strict=True):
        values = group[:count]
        finite = np.isfinite(values)
        most = np.abs(values[finite]).max(initial=f32(0))
        if not finite.any():
            values[:] = 0
        infinite = np.isinf(values)
        values[infinite] = np.copysign(most, values[infinite])
        values[np.isnan(values)] = 0
    return out


def split_rows(x: Floats) -> tuple[Floats, NDArray[np.intp]]:
    """[rows, dim] -> [rows * groups, 32] padded with zeros, and the values in each group."""
    rows, dim = x.shape
    groups = -(-dim // 32)
    padded = np.zeros((rows, groups * 32), f32)
    padded[:, :dim] = x
    counts = np.minimum(dim - 32 * np.arange(groups), 32)
    return padded.reshape(-1, 32), np.tile(counts, rows)


def round_half_away(t: Floats) -> Floats:
    """Exact for |t| < 2^23: the fraction of a float32 is a float32."""
    whole = np.trunc(t)
    return whole + np.where(np.abs(t - whole) >= f32(0.5), np.copysign(f32(1), t), f32(0))


def nibbles_in_pairs(n: NDArray[Any]) -> Bytes:
    """Values 2i and 2i + 1 in byte i."""
    return (n[:, 0::2] | (n[:, 1::2] << 4)).astype(np.uint8)


def nibbles_in_halves(n: NDArray[Any]) -> Bytes:
    """Values i and i + 16 in byte i, as ggml has them."""
    return (n[:, :16] | (n[:, 16:] << 4)).astype(np.uint8)


def encode_symmetric(g: Floats, top: int) -> tuple[NDArray[np.int64], Floats]:
    """q8 (top 127) and q4 (top 7): signed quants and float32 scales; 0 for tiny groups."""
    amax = np.abs(g).max(axis=1, keepdims=True)
    tiny = amax < f32(1e-10)
    scale = np.where(tiny, f32(0), amax / f32(top)).astype(f32)
    inverse = f32(1) / np.where(tiny, f32(1), scale)
    low = -127 if top == 127 else -8
    q = np.clip(round_half_away(g * inverse), low, top).astype(np.int64)
    return np.where(tiny, 0, q), scale


def bytes_of(a: NDArray[Any], dtype: Any) -> Bytes:
    return np.ascontiguousarray(a.astype(dtype)).view(np.uint8)


def inverse_of(d: Floats) -> Floats:
    """1 / d, 0 for 0, Inf where d is too small."""
    return np.where(d == 0, f32(0), f32(1) / np.where(d == 0, f32(1), d)).astype(f32)


def clamp_half(d: Floats) -> Floats:
    """Values that round to an infinite float16 become the largest finite one."""
    return np.where(np.isinf(d.astype(np.float16)), np.copysign(HALF_MAX, d), d).astype(f32)


def trunc_nibble(t: Floats, bias: float) -> NDArray[np.int64]:
    return np.clip(np.trunc(t + f32(bias)), 0, 15).astype(np.int64)


def encode_q8_0(g: Floats) -> tuple[Bytes, Bytes]:
    d = clamp_half(np.abs(g).max(axis=1, keepdims=True) / f32(127))
    inverse = inverse_of(d)
    usable = np.isfinite(inverse)
    t = g * np.where(usable, inverse, f32(0))
    q = np.clip(round_half_away(np.clip(t, f32(-1000), f32(1000))), -127, 127).astype(np.int8)
    return q.view(np.uint8), bytes_of(d, np.float16)


def encode_q4_0(g: Floats) -> tuple[Bytes, Bytes]:
    first = np.abs(g).argmax(axis=1)[:, None]
    extreme = np.take_along_axis(g, first, axis=1)
    d = clamp_half(np.where(extreme == 0, f32(0), extreme) / f32(-8))
    inverse = inverse_of(d)
    usable = np.isfinite(inverse)
    q = trunc_nibble(g * np.where(usable, inverse, f32(0)), 8.5)
    return nibbles_in_halves(np.where(usable, q, 0)), bytes_of(d, np.float16)


def affine(g: Floats) -> tuple[NDArray[np.int64], Floats, Floats]:
    """Finite groups [n, any size] -> nibbles [n, size], scales [n, 1] and minima [n, 1]."""
    # argmin and argmax: of equal zeros the first one's sign counts
    least = np.take_along_axis(g, g.argmin(axis=1)[:, None], axis=1)
    most = np.take_along_axis(g, g.argmax(axis=1)[:, None], axis=1)
    m = clamp_half(least)
    d = clamp_half(np.maximum(most - m, f32(0)) / f32(15))
    inverse = inverse_of(d)
    usable = np.isfinite(inverse)
    q = trunc_nibble((g - m) * np.where(usable, inverse, f32(0)), 0.5)
    return np.where(usable, q, 0), d, m


def encode_q4_1(g: Floats) -> tuple[Bytes, Bytes]:
    q, d, m = affine(g)
    scales = np.concatenate([bytes_of(d, np.float16), bytes_of(m, np.float16)], axis=1)
    return nibbles_in_halves(q), scales


def encode_groups(name: str, g: Floats) -> tuple[Bytes, Bytes]:
    """Finite groups [n, 32] -> quants [n, quant bytes], scales [n, scale bytes]."""
    with np.errstate(all="ignore"):
        if name == "q8":
            q, scale = encode_symmetric(g, 127)
            return q.astype(np.int8).view(np.uint8), bytes_of(scale, f32)
        if name == "q4":
            q, scale = encode_symmetric(g, 7)
            quants = np.where(scale == 0, 0, nibbles_in_pairs(q + 8)).astype(np.uint8)
            return quants, bytes_of(scale, f32)
        if name == "q4k":  # a flat buffer has no tokens: 32 values in a row, as q4_1
            return encode_q4_1(g)
        return {"q8_0": encode_q8_0, "q4_0": encode_q4_0, "q4_1": encode_q4_1}[name](g)


def decode_groups(name: str, quants: Bytes, scales: Bytes) -> Floats:
    """Quants [n, quant bytes] and scales [n, scale bytes] -> values [n, 32]."""
    dtype = f32 if name in ("q8", "q4") else np.float16
    scale = np.ascontiguousarray(scales).view(dtype).astype(f32)
    low, high = (quants & 15).astype(f32), (quants >> 4).astype(f32)
    with np.errstate(all="ignore"):
        if name in ("q8", "q8_0"):
            return quants.view(np.int8).astype(f32) * scale
        if name == "q4":
            pairs = np.stack([low, high], axis=2).reshape(-1, 32)
            return np.where(scale == 0, f32(0), (pairs - f32(8)) * scale).astype(f32)
        halves = np.concatenate([low, high], axis=1)
        if name == "q4_0":
            return (halves - f32(8)) * scale
        return halves * scale[:, :1] + scale[:, 1:]


def encode_rows(name: str, x: Floats) -> tuple[Bytes, Bytes]:
    """[rows, dim] -> data [rows, bytes], scales [rows, bytes] (no columns for dense formats).

    Non-finite values of quantised formats are saturated.
    """
    rows = x.shape[0]
    if name in DENSE:
        with np.errstate(all="ignore"):
            return bytes_of(x, DENSE[name]).reshape(rows, -1), np.zeros((rows, 0), np.uint8)
    groups, counts = split_rows(x)
    quants, scales = encode_groups(name, saturated(groups, counts))
    return quants.reshape(rows, -1), scales.reshape(rows, -1)


def decode_rows(name: str, data: Bytes, scales: Bytes, dim: int) -> Floats:
    """What ``encode_rows`` gave -> [rows, dim] float32."""
    rows = data.shape[0]
    if name in DENSE:
        return np.ascontiguousarray(data).view(DENSE[name]).astype(f32).reshape(rows, dim)
    quant_nbytes, scale_nbytes = GROUP_BYTES[name]
    values = decode_groups(name, data.reshape(-1, quant_nbytes), scales.reshape(-1, scale_nbytes))
    return values.reshape(rows, -1)[:, :dim]


def round_trip(name: str, x: Floats) -> Floats:
    """[rows, dim] as it reads back after being stored."""
    return decode_rows(name, *encode_rows(name, x), x.shape[1])


def interleaved(name: str, quants: Bytes, scales: Bytes) -> Bytes:
    """Scale, quants, scale, quants, … of all groups."""
    quant_nbytes, scale_nbytes = GROUP_BYTES[name]
    parts = [scales.reshape(-1, scale_nbytes), quants.reshape(-1, quant_nbytes)]
    return np.concatenate(parts, axis=1).reshape(-1)


def padded16(data: Bytes) -> Bytes:
    return np.concatenate([data, np.zeros(-data.size % 16, np.uint8)])


def pack_flat(name: str, x: Floats) -> Bytes:
    """Bytes of a flat buffer of the values of ``x``: one row, no padding at its end."""
    data, scales = encode_rows(name, x.reshape(1, -1))
    if name in DENSE:
        return data.reshape(-1)
    if name in PLANAR:
        return np.concatenate([padded16(data.reshape(-1)), scales.reshape(-1)])
    return interleaved(name, data, scales)


def pack_plane(name: str, x: Floats) -> Bytes:
    """Bytes of a contiguous run of rows [rows, dim] inside a block."""
    data, scales = encode_rows(name, x)
    if name in DENSE:
        return data.reshape(-1)
    if name in PLANAR:
        return np.concatenate([padded16(data.reshape(-1)), padded16(scales.reshape(-1))])
    return interleaved(name, data, scales)


def encode_channels(x: Floats) -> tuple[Bytes, Bytes]:
    """One head of a block, [tokens, dim], in q4k -> nibble rows [tokens, (dim + 1) // 2] and
    scales [token groups, dim, 4]; non-finite values saturate channel by channel."""
    tokens, dim = x.shape
    rows = np.zeros((tokens, dim + dim % 2), np.int64)
    scales = np.zeros((-(-tokens // 32), dim, 4), np.uint8)
    for group, first in enumerate(range(0, tokens, 32)):
        columns = np.ascontiguousarray(x[first : first + 32].T)
        counts = np.full(dim, columns.shape[1])
        with np.errstate(all="ignore"):
            q, d, m = affine(saturated(columns, counts))
        rows[first : first + 32, :dim] = q.T
        scales[group, :, :2] = bytes_of(d, np.float16)
        scales[group, :, 2:] = bytes_of(m, np.float16)
    return (rows[:, ::2] | (rows[:, 1::2] << 4)).astype(np.uint8), scales


def decode_channels(rows: Bytes, scales: Bytes, dim: int) -> Floats:
    """What ``encode_channels`` gave -> [tokens, dim] float32."""
    tokens = rows.shape[0]
    q = np.stack([rows & 15, rows >> 4], axis=2).reshape(tokens, -1)[:, :dim].astype(f32)
    each = np.ascontiguousarray(scales).view(np.float16).astype(f32)[np.arange(tokens) // 32]
    with np.errstate(all="ignore"):
        return q * each[..., 0] + each[..., 1]


def round_trip_channels(x: Floats) -> Floats:
    """A block [tokens, heads, dim] as it reads back after being stored in q4k."""
    heads = [decode_channels(*encode_channels(x[:, h]), x.shape[2]) for h in range(x.shape[1])]
    return np.stack(heads, axis=1)


def pack_channels(layout: str, x: Floats) -> Bytes:
    """Bytes of a q4k block: planes as of other planar formats, the scales of a plane head by
    head, token group by token group, channel by channel."""
    heads = [encode_channels(x[:, head]) for head in range(x.shape[1])]
    if layout == "HND":
        planes = [(rows.reshape(-1), scales.reshape(-1)) for rows, scales in heads]
    else:
        rows = np.stack([rows for rows, _ in heads], axis=1)
        planes = [(rows.reshape(-1), np.stack([s for _, s in heads]).reshape(-1))]
    return np.concatenate([padded16(part) for plane in planes for part in plane])


def pack_block(name: str, layout: str, x: Floats) -> Bytes:
    """Bytes of a full block of one layer's K or V: ``x`` is [block_size, num_heads, dim]."""
    if name in BY_CHANNEL:
        return pack_channels(layout, x)
    if layout == "NHD":
        return pack_plane(name, x.reshape(-1, x.shape[-1]))
    return np.concatenate([pack_plane(name, x[:, head]) for head in range(x.shape[1])])
