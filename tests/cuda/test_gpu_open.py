"""Open blocks and groups along the tokens on a GPU: its own rounding, and large grids. What the
emulation cannot show; everything here needs a GPU."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from kernelkit import NO_FAULT, Board, bits
from profiles import SHORT
from spacekit import OPEN, SEALED, Space
from storagekit import BFLOAT16, QUANTIZED

from pagedcache.formats import get_format

pytestmark = pytest.mark.skipif(
    bool(os.environ.get("PAGEDCACHE_CUDA_EMULATION")),
    reason="only a GPU shows this, and here is its emulation",
)

#: Values of one call: 2^24, so that a float32 is named by the call's number in its low 8 bits.
VALUES = 1 << 24
#: Blocks of 8 heads x 128 channels: more pairs of channels than 16384 CTAs of 128 threads take.
BLOCKS = 4400


@pytest.fixture
def board(cuda: Any) -> Board:
    return Board(cuda)


@pytest.mark.parametrize("opened", ["float16", "bfloat16"])
def test_every_float32_goes_to_open_slots_as_on_the_cpu(board: Board, opened: str) -> None:
    """Magnitudes beyond the format are cut, NaN and Inf saturated by groups; the short profile
    takes 2^26 of 2^32."""
    # SPEC F7 F44
    space = Space(board, "q4_1", opened, "NHD", heads=1, block_size=16, dim=64, num_blocks=1,
                  num_open=VALUES // 1024)  # fmt: skip
    high = np.arange(VALUES, dtype=np.uint32) << 8
    for low in (0, 1, 0x7F, 0xFF) if SHORT else range(256):
        rows = (high | np.uint32(low)).view(np.float32).reshape(-1, 1, 64)
        for given in (rows, np.random.default_rng(low).permutation(rows)):
            assert space.store_open(given, space.open_slots, "saturate") == NO_FAULT
            assert space.native_store(given, space.open_slots, "saturate") == 0
            space.assert_equal()


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_channels_of_any_magnitude_are_quantised_as_on_the_cpu(board: Board, layout: str) -> None:
    """Division, products and rounding of groups from subnormal to the largest float32."""
    # SPEC F5 F44
    for size, seed in ((16, 0), (32, 1), (40, 2)) if SHORT else ((16, 0), (40, 1)) * 10:
        space = Space(board, "q4k", layout=layout, heads=2, block_size=size, dim=128,
                      num_blocks=512, num_open=1)  # fmt: skip
        rng = np.random.default_rng(seed)
        shape = (512 * size, 2, 128)
        with np.errstate(over="ignore"):
            rows = np.ldexp(rng.standard_normal(shape), rng.integers(-155, 128, (1, 2, 128)))
            rows = rows.astype(np.float32)
        rows[:: 7 * size] = rng.integers(0, 2**32, rows[:: 7 * size].shape, np.uint32).view("f4")
        rows[3 * size : 4 * size] = rng.integers(0, 16, (size, 2, 128))  # quants themselves
        entries = np.stack([np.arange(512) * size, rng.permutation(512)], axis=1)
        assert space.store_blocks(rows, entries, "saturate") == NO_FAULT
        slots = (entries[:, 1:] * size + np.arange(size)).reshape(-1)
        assert space.native_store(rows, slots, "saturate") == 0
        space.assert_equal()


@pytest.mark.parametrize("fmt", [*QUANTIZED, "bfloat16"])
def test_more_blocks_than_a_grid_takes_at_once(board: Board, fmt: str) -> None:
    """Sealed, reopened and read: all of the open blocks of two layers by one launch each."""
    # SPEC F43 F44
    opened = "bfloat16" if fmt == "bfloat16" else "float16"
    space = Space(board, fmt, opened, heads=8, block_size=16, dim=128, num_blocks=BLOCKS,
                  num_open=BLOCKS, layers=2)  # fmt: skip
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((16 * BLOCKS, 8, 128), np.float32)
    assert space.native_store(rows, space.open_slots) == 0
    space.send()
    sealed, every = np.arange(BLOCKS), np.full(BLOCKS, 16)
    space.convert_both(rng.permutation(sealed) + BLOCKS, sealed, every, OPEN)
    space.convert_both(sealed, sealed + BLOCKS, rng.integers(0, 17, BLOCKS), SEALED)
    if fmt == "q4k":
        entries = np.stack([sealed * 16, rng.permutation(BLOCKS)], axis=1)
        assert space.store_blocks(rows, entries) == NO_FAULT
        slots = (entries[:, 1:] * 16 + np.arange(16)).reshape(-1)
        assert space.native_store(rows, slots) == 0
        space.assert_equal()
        for dtype in (np.float32, np.float16, BFLOAT16):
            got = np.zeros((16 * BLOCKS - 21, 8, 128), dtype)
            expected = got.copy()
            places = rng.permutation(BLOCKS).astype(np.int32)
            code = get_format(got.dtype.name).code
            space.native.load(0, places, 5, bits(expected), code)
            space.sides[SEALED].load(got, places, 5)
            np.testing.assert_array_equal(bits(got), bits(expected))
