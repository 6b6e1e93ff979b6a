"""Checks of the number formats on flat arrays: conversions, quantised buffers, hashes."""

from __future__ import annotations

from functools import partial

import ml_dtypes
import numpy as np

import pagedcache
from pagedcache import arithmetic

from .compare import equal, raises, require, same_bits
from .reference import GROUP, Floats, read_back
from .registry import Context

_EDGES = (
    [0.0, 1.0, 65504.0, 65519.99, 65520.0, 65536.0, 6.1e-5, 6.09e-5, 5.96e-8, 2.98e-8, 2.99e-8]
    + [3.4e38, 3.39e38, 1e-38, 1e-45, 1.1754944e-38, 0.1, 1 / 3, np.inf, np.nan]
)


def _hard_floats(rng: np.random.Generator) -> Floats:
    """Random bit patterns (all exponents, NaNs) and values around every rounding edge."""
    edges = np.array(_EDGES, np.float32)
    near = np.concatenate([(edges.view(np.int32) + step).view(np.float32) for step in (-1, 0, 1)])
    halves = np.arange(2**16, dtype=np.uint32) << 16
    around = np.concatenate([halves + np.uint32(0x7FFF + step) for step in (0, 1, 2)])
    random = rng.integers(0, 2**32, 100_000, dtype=np.uint32)
    values = np.concatenate((near, around.view(np.float32), random.view(np.float32)))
    return np.concatenate((values, -values))


def convert_16bit(context: Context) -> None:
    """float32 to 16 bits equals NumPy and ml_dtypes; all 65,536 patterns come back exactly."""
    values = _hard_floats(context.rng)
    nan = np.isnan(values)
    with np.errstate(all="ignore"):
        halves = values.astype(np.float16).view(np.uint16)
        brains = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    sign = (values.view(np.uint32) >> 16 & 0x8000).astype(np.uint16)
    brains = np.where(nan, sign | 0x7FC0, brains).astype(np.uint16)
    same_bits(arithmetic.float32_to_float16_bits(values), halves, "to float16")
    same_bits(arithmetic.float32_to_bfloat16_bits(values), brains, "to bfloat16")
    patterns = np.arange(2**16, dtype=np.uint16)
    back = arithmetic.float16_bits_to_float32(patterns)
    number = ~np.isnan(patterns.view(np.float16))
    same_bits(back[number], patterns.view(np.float16).astype(np.float32)[number], "float16 back")
    require(bool(np.isnan(back[~number]).all()), "a float16 NaN became a number")
    same_bits(
        arithmetic.bfloat16_bits_to_float32(patterns),
        (patterns.astype(np.uint32) << 16).view(np.float32),
        "bfloat16 back",
    )


def flat_access(context: Context, name: str) -> None:
    """Any part of a flat quantised buffer reads and writes; other groups keep their values."""
    count = 5 * GROUP + 7
    values = context.rng.standard_normal(count, dtype=np.float32)
    buffer = arithmetic.quantize(values, name)
    model = _flat(name, values)
    same_bits(buffer.to_float32(), model, "all values")
    for _ in range(20):
        start, stop = np.sort(context.rng.integers(0, count + 1, 2)).tolist()
        same_bits(buffer.read(start, stop - start), model[start:stop], "a part read")
        new = context.rng.standard_normal(stop - start, dtype=np.float32) * 3
        buffer.write(start, new)
        # Groups that the range touches are read, changed and quantised again as a whole.
        low, high = start - start % GROUP, min(count, stop + -stop % GROUP)
        changed = model[low:high].copy()
        changed[start - low : stop - low] = new
        if stop > start:
            model[low:high] = _flat(name, changed)
        same_bits(buffer.to_float32(), model, f"all values after a write of {start}…{stop}")
    for start, length in ((count, 1), (-1, 2), (0, count + 1)):
        raises(IndexError, partial(buffer.read, start, length), f"read of {start}, {length}")


def _flat(name: str, values: Floats) -> Floats:
    return read_back(name, values.reshape(1, -1))[0]


def sizes(context: Context, name: str) -> None:
    """Bytes per block follow from the rule of the format, padding and scales included."""
    layout, size = context.layout, 16
    for heads, head_dim in ((1, 32), (3, 64), (2, 33), (8, 80)):
        spec = pagedcache.CacheSpec(
            num_layers=2, num_kv_heads=heads, head_dim=head_dim, block_size=size,
            k_format=name, v_format=name, layout=layout,
        )
        from .block_bytes import block_bytes

        one = block_bytes(name, layout, np.ones((size, heads, head_dim), np.float32)).size
        require(spec.block_nbytes >= 4 * one, f"{spec.block_nbytes} bytes cannot hold {4 * one}")
        require(spec.block_nbytes <= 4 * (one + 63), f"{spec.block_nbytes} bytes for {4 * one}")


def prefix_hash(context: Context) -> None:
    """The 64-bit prefix hash equals the rule written out in Python."""
    equal(pagedcache.compute_prefix_hash([]), 0xCBF29CE484222325, "hash of nothing")
    for count in (1, 2, 31, 500):
        tokens = context.rng.integers(0, 2**32, count, dtype=np.uint32)
        state = 0xCBF29CE484222325
        for token in tokens.tolist():
            state = (state ^ token) * 0x100000001B3 % 2**64
        equal(pagedcache.compute_prefix_hash(tokens), state, f"hash of {count} tokens")
