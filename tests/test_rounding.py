"""float32 <-> float16 and bfloat16 bits: every input against NumPy and ml_dtypes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from profiles import SHORT

from pagedcache import machine
from pagedcache.arithmetic import (
    bfloat16_bits_to_float32,
    float16_bits_to_float32,
    float32_to_bfloat16_bits,
    float32_to_float16_bits,
)
from pagedcache.errors import FormatError

CHUNK = 1 << 22
TARGETS = {
    "float16": (np.float16, float32_to_float16_bits, float16_bits_to_float32),
    "bfloat16": (ml_dtypes.bfloat16, float32_to_bfloat16_bits, bfloat16_bits_to_float32),
}


def some_bits() -> np.ndarray:
    """All exponents and signs with mantissas around every rounding edge, and 2^24 at random."""
    edges = np.array([0, 1, 0x7FFFFF, 0x7FFFFE, 0x400000, 0x3FFFFF, 0x400001], np.uint32)
    for shift in range(1, 24):
        half = 1 << (shift - 1)
        for odd in (0, 1, 2, 3):
            centre = (odd << shift) | half
            edges = np.append(edges, [centre - 1, centre, centre + 1]).astype(np.uint32)
    edges = np.unique(edges & 0x7FFFFF)
    exponents = np.arange(512, dtype=np.uint32) << 23
    grid = (exponents[:, None] | edges[None, :]).reshape(-1)
    random = np.random.default_rng(1).integers(0, 1 << 32, 1 << 24, dtype=np.uint32)
    return np.concatenate([grid, random])


@pytest.fixture(params=machine.usable_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set in turn."""
    machine.use_isa(request.param)
    yield request.param
    machine.use_isa(None)


# SPEC F1 F2
@pytest.mark.parametrize("name", TARGETS)
def test_every_float32(name: str) -> None:
    """All 2^32 bit patterns by every instruction set; in the short profile the edges and 2^24 at
    random."""
    dtype, convert, _ = TARGETS[name]

    def expected(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with np.errstate(all="ignore"):
            return bits, bits.view(np.float32).astype(dtype).view(np.uint16)

    def chunk(start: int) -> tuple[np.ndarray, np.ndarray]:
        return expected(np.arange(start, start + CHUNK, dtype=np.uint64).astype(np.uint32))

    def compare(bits: np.ndarray, want: np.ndarray) -> None:
        for isa in machine.usable_isas():
            machine.use_isa(isa)
            got = convert(bits.view(np.float32))
            if not np.array_equal(got, want):
                i = int(np.flatnonzero(got != want)[0])
                pytest.fail(f"{isa}: {bits[i]:#010x}: got {got[i]:#06x}, expected {want[i]:#06x}")

    try:
        if SHORT:
            compare(*expected(some_bits()))
            return
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # NumPy casts with the GIL released
            for first in range(0, 1 << 32, 16 * CHUNK):  # a few at a time: they take memory
                for found in pool.map(chunk, range(first, first + 16 * CHUNK, CHUNK)):
                    compare(*found)
    finally:
        machine.use_isa(None)


# SPEC F3
@pytest.mark.parametrize("name", TARGETS)
def test_every_16_bit_pattern_back(name: str, isa: str) -> None:
    dtype, convert, back = TARGETS[name]
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    got = back(bits)
    assert np.array_equal(got.view(np.uint32), bits.view(dtype).astype(np.float32).view(np.uint32))
    if name == "float16":
        assert np.array_equal(convert(got), bits)  # every payload has a bit of the top ten
    else:
        nan = np.isnan(got)
        assert np.array_equal(convert(got)[~nan], bits[~nan])


# SPEC F1
@pytest.mark.parametrize(
    ("value", "half"),
    [
        (0x7F800001, 0x7C01),  # NaN whose top ten payload bits are zero stays a NaN
        (0xFF801FFF, 0xFC01),
        (0x7FC00000, 0x7E00),
        (0x7F800000, 0x7C00),
        (0xFF800000, 0xFC00),
        (0x80000000, 0x8000),
        (0x33000000, 0x0000),  # 2^-25, half of the smallest subnormal: to even
        (0x33000001, 0x0001),
        (0x33C00000, 0x0002),  # 1.5 * 2^-24: to even
        (0x387FFFFF, 0x0400),  # the largest value below 2^-14 rounds up to it
        (0x477FEFFF, 0x7BFF),  # just below 65520
        (0x477FF000, 0x7C00),  # 65520 ties to Inf
        (0x3F801000, 0x3C00),  # 1 + 2^-11: to even
        (0x3F803000, 0x3C02),
    ],
)
def test_float16_by_hand(value: int, half: int) -> None:
    x = np.array([value], np.uint32).view(np.float32)
    assert float32_to_float16_bits(x)[0] == half


# SPEC F2
@pytest.mark.parametrize(
    ("value", "bfloat"),
    [
        (0x7F800001, 0x7FC0),  # add-and-shift would give Inf
        (0x7FFFFFFF, 0x7FC0),  # add-and-shift would give -0
        (0xFFFFFFFF, 0xFFC0),
        (0x7F7FFFFF, 0x7F80),  # overflow
        (0x00000001, 0x0000),
        (0x00018000, 0x0002),  # subnormal tie to even
        (0x00008001, 0x0001),  # subnormals are not flushed
        (0x80000000, 0x8000),
        (0x3F808000, 0x3F80),
        (0x3F818000, 0x3F82),
    ],
)
def test_bfloat16_by_hand(value: int, bfloat: int) -> None:
    x = np.array([value], np.uint32).view(np.float32)
    assert float32_to_bfloat16_bits(x)[0] == bfloat


# CASE C45
@pytest.mark.parametrize("name", TARGETS)
def test_shapes_and_strides(name: str) -> None:
    dtype, convert, back = TARGETS[name]
    x = np.random.default_rng(2).standard_normal((4, 6, 10)).astype(np.float32)
    views = [x, x.T, x[::-1, 1::2, ::-3], x[:0], x[1, 2, 3:4], np.float32(1.5), x[0, 0, 0]]
    readonly = x.copy()
    readonly.flags.writeable = False
    packed = np.zeros(9, np.uint8)
    packed[1:9] = np.array([1.5, -2.0], np.float32).view(np.uint8)
    misaligned = packed[1:9].view(np.float32)
    for view in [*views, readonly, misaligned]:
        view = np.asarray(view)
        got = convert(view)
        assert got.shape == view.shape and got.dtype == np.uint16
        expected = np.array(view, order="C").astype(dtype)
        assert np.array_equal(got, expected.view(np.uint16))
        again = back(got.T)
        assert again.shape == view.T.shape and again.dtype == np.float32
        assert np.array_equal(again, expected.astype(np.float32).T)


# CASE C44
@pytest.mark.parametrize("convert", [float32_to_float16_bits, float32_to_bfloat16_bits])
@pytest.mark.parametrize(
    "bad",
    [
        np.zeros(3),
        np.zeros(3, np.float16),
        np.zeros(3, ml_dtypes.bfloat16),
        np.zeros(3, np.int32),
        np.zeros(3, np.complex64),
        np.zeros(3, object),
        np.array(["1"]),
        np.zeros(3, ">f4"),
        [1.0, 2.0],
        [[1.0], [1.0, 2.0]],
        None,
        "text",
    ],
)
def test_other_dtypes_are_refused(convert: object, bad: object) -> None:
    with pytest.raises(FormatError):
        convert(bad)  # type: ignore[operator]


@pytest.mark.parametrize("back", [float16_bits_to_float32, bfloat16_bits_to_float32])
@pytest.mark.parametrize(
    "bad", [np.zeros(3, np.int16), np.zeros(3, np.float16), np.zeros(3, ">u2"), [1, 2], "x"]
)
def test_other_bits_are_refused(back: object, bad: object) -> None:
    with pytest.raises(FormatError):
        back(bad)  # type: ignore[operator]


def test_a_half_is_carried_by_the_largest_float_below_it() -> None:
    """How device code rounds halves away from zero: by one addition, then the integer part.

    Here for every float near a half or a whole number up to 127.5, and 2^20 others.
    """
    # SPEC F44
    near = np.arange(0, 127.75, 0.5).astype(np.float32).view(np.int32)[:, None]
    others = np.random.default_rng(1).integers(0, 0x42FF0000, 1 << 20)
    bits = np.concatenate([np.maximum(near + np.arange(-2000, 2000), 0).ravel(), others])
    values = bits.astype(np.uint32).view(np.float32)
    expected = np.floor(values.astype(np.float64) + 0.5)
    carried = values + np.float32(0.49999997)
    assert carried.dtype == np.float32
    np.testing.assert_array_equal(np.trunc(carried), expected)
