"""Blocks whose groups run along the tokens: the bytes and values of the native code."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from kernelkit import E_NONFINITE, E_RANGE, NO_FAULT, Board, bits, uneven
from profiles import SHORT
from spacekit import OPEN, SEALED, Space
from storagekit import ARRANGEMENTS, DTYPES, LAYOUTS

from pagedcache.formats import get_format

DIMS = (1, 2, 16, 33, 64, 80, 128)
SIZES = (1, 4, 16, 32, 40, 65)
LIES = tuple(name for name in ARRANGEMENTS if name != "flat")


@pytest.fixture
def board(cuda: Any) -> Board:
    return Board(cuda)


def keys(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> Any:
    """Finite keys: channels of all magnitudes with means of their own, some constant or zero."""
    rng = np.random.default_rng(seed)
    scale = 2.0 ** rng.integers(-14, 14, shape[1:])
    x = (rng.standard_normal(shape) + rng.integers(-7, 8, shape[1:])) * scale
    x[:, :, ::5] = np.round(x[:, :, ::5])
    x[:, :, 3::11] = x[:1, :, 3::11]
    x[:, :, 4::13] = 0
    x[: len(x) // 2, :, 5::7] = -0.0
    return np.clip(x, -6e4, 6e4).astype(dtype)


def whole_blocks(size: int, blocks: Any) -> tuple[Any, Any]:
    """(entries, slots) of blocks that follow one another in the rows, token 1 of them skipped."""
    blocks = np.asarray(blocks)
    entries = np.stack([1 + np.arange(len(blocks)) * size, blocks], axis=1)
    slots = (blocks[:, None] * size + np.arange(size)).reshape(-1)
    return entries, np.concatenate([[-1], slots])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bytes_as_the_cpu(board: Board, dtype: Any, layout: str) -> None:
    # SPEC F43 F44  # CASE C40 C45
    lies = itertools.cycle(LIES)
    for n, (dim, size) in enumerate(itertools.product(DIMS, SIZES)):
        if SHORT and n % 4 != (dtype.itemsize + (layout == "HND")) % 4:
            continue
        space = Space(board, "q4k", layout=layout, heads=3, block_size=size, dim=dim)
        entries, slots = whole_blocks(size, [4, 0, 3])
        for seed, lie in enumerate(("contiguous", next(lies))):
            rows = ARRANGEMENTS[lie](keys((len(slots), 3, dim), dtype, seed))
            assert space.store_blocks(rows, entries) == NO_FAULT
            assert space.native_store(rows, slots) == 0
            space.assert_equal()


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_any_strides(board: Board, dtype: Any, lie: str) -> None:
    # CASE C45
    for dim, size in ((40, 4), (33, 32), (64, 16)):
        space = Space(board, "q4k", heads=2, block_size=size, dim=dim)
        entries, slots = whole_blocks(size, [2, 1])
        rows = ARRANGEMENTS[lie](keys((len(slots), 2, dim), dtype, 3))
        assert space.store_blocks(rows, entries) == NO_FAULT
        assert space.native_store(rows, slots) == 0
        space.assert_equal()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_which_one_step_is_not_aligned(board: Board, dtype: Any) -> None:
    # CASE C45
    space = Space(board, "q4k", heads=3, dim=32)
    entries, slots = whole_blocks(4, [1, 3, 0])
    for axis in (0, 1):
        rows = uneven(keys((13, 3, 32), dtype, axis), axis)
        assert space.store_blocks(rows, entries) == NO_FAULT
        assert space.native_store(rows, slots) == 0
        space.assert_equal()


@pytest.mark.parametrize("shift", (0, 1, 2, 4, 8))
def test_slabs_at_any_address_and_stride(board: Board, shift: int) -> None:
    """Bytes between blocks and padding stay as they are; all is read from there too."""
    # SPEC F48
    for layout, gap, backwards in (("HND", 0, False), ("NHD", 48, False), ("HND", 13, True)):
        space = Space(board, "q4k", layout=layout, dim=72, block_size=16, gap=gap,
                      backwards=backwards, shift=shift)  # fmt: skip
        entries, slots = whole_blocks(16, [4, 2, 0, 1, 3])
        rows = keys((len(slots), 2, 72), np.float32)
        assert space.store_blocks(rows, entries) == NO_FAULT
        assert space.native_store(rows, slots) == 0
        space.assert_equal()
        for pointers in (False, True):
            out = np.full((40, 2, 72), 9, np.float16)
            expected = out.copy()
            ids = np.array([3, 0, 4], np.int32)
            space.native.load(0, ids, 5, bits(expected), get_format("float16").code)
            space.sides[SEALED].load(out, ids, 5, pointers)
            np.testing.assert_array_equal(bits(out), bits(expected))
        space.convert_both([1, 4], [6, 5], [16, 7], SEALED)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("opened", ("float32", "float16", "bfloat16"))
def test_blocks_are_sealed_and_reopened(board: Board, opened: str, layout: str) -> None:
    """From random bytes too: NaN and Inf are saturated channel by channel, and by 32 channels of
    a row on the way back."""
    # SPEC F7 F28
    for n, (dim, size) in enumerate(itertools.product(DIMS, SIZES)):
        if SHORT and n % 4 != (len(opened) + (layout == "HND")) % 4:
            continue
        space = Space(board, "q4k", opened, layout, heads=3, block_size=size, dim=dim, layers=3)
        space.convert_both([1, 4, 0, 3], [6, 5, 8, 7], [size, 1, size, size - 1], SEALED)
        space.convert_both([5, 8, 7], [4, 0, 2], [size] * 3, OPEN)
        rows = keys((4 * size, 3, dim), np.float32, n)
        assert space.native_store(rows, space.open_slots, "saturate") == 0
        space.send()
        space.convert_both([8, 5, 6], [2, 3, 1], [size] * 3, OPEN)
        space.convert_both([3, 1], [7, 5], [size, size // 2], SEALED)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nonfinite_is_saturated(board: Board, dtype: Any) -> None:
    """By channel, also where a channel of a group has no finite value at all."""
    # SPEC F7
    for dim, size in ((64, 16), (33, 40), (6, 1)):
        rng = np.random.default_rng(dim)
        space = Space(board, "q4k", layout="NHD", dim=dim, block_size=size)
        entries, slots = whole_blocks(size, [3, 0, 1, 4])
        rows = keys((len(slots), 2, dim), dtype, dim)
        for value in (np.nan, np.inf, -np.inf, -np.nan):
            rows.flat[rng.integers(0, rows.size, rows.size // 30)] = value
        rows[1 : 1 + size, 1, 4] = np.nan
        rows[1 : 1 + size, 1, 5] = -np.inf
        assert space.store_blocks(rows, entries, "saturate") == NO_FAULT
        assert space.native_store(rows, slots, "saturate") == 0
        space.assert_equal()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channel", (0, 21, 32))
def test_nonfinite_is_reported(board: Board, channel: int, dtype: Any) -> None:
    """Two channels of one group stay as they were; all else is stored."""
    # SPEC F7
    space = Space(board, "q4k", dim=33, block_size=40)
    entries, slots = whole_blocks(40, [2, 0])
    first = keys((81, 2, 33), dtype)
    assert space.store_blocks(first, entries) == NO_FAULT
    assert space.native_store(first, slots) == 0
    old = decoded(space)
    spoiled = keys((81, 2, 33), dtype, 1)
    token = 41 + 35  # the second group of block 0
    spoiled[token, 1, channel] = -np.inf
    spoiled[token + 2, 1, channel] = np.nan  # a later one is not the one named
    code, index = space.store_blocks(spoiled, entries)
    assert (code, index) == (E_NONFINITE, (token * 2 + 1) * 33 + channel)
    healed = np.where(np.isfinite(spoiled), spoiled, np.array(0, dtype))
    assert space.native_store(healed, slots) == 0
    expected = decoded(space)
    pair = slice(channel // 2 * 2, channel // 2 * 2 + 2)
    expected[0, 32:40, 1, pair] = old[0, 32:40, 1, pair]
    space.sides[SEALED].copies[0].fetch()
    np.testing.assert_array_equal(decoded(space), expected)


def decoded(space: Space) -> Any:
    """Blocks 0 and 2 of the host's bytes as float32, ``[2, block_size, heads, dim]``."""
    out = np.zeros((2 * space.block_size, space.heads, space.dim), np.float32)
    space.native.load(0, np.array([0, 2], np.int32), 0, bits(out), 0)
    return out.reshape(2, space.block_size, space.heads, space.dim)


def test_entries_out_of_range_are_skipped_and_reported(board: Board) -> None:
    # SPEC F33
    space = Space(board, "q4k")
    rows = keys((9, 2, 64), np.float32)
    for bad in ((0, 5), (0, -1), (6, 1), (-1, 1), (0, 2**40)):
        code, block = space.store_blocks(rows, [bad, (5, 2)])
        assert (code, block) == (E_RANGE, bad[1])
    slots = np.concatenate([np.full(5, -1), 8 + np.arange(4)])
    assert space.native_store(rows, slots) == 0
    space.assert_equal()
    assert space.store_blocks(rows, [(0, 5)], fault=False) == NO_FAULT
    assert space.store_blocks(rows, np.empty((0, 2))) == NO_FAULT
    space.assert_equal()


@pytest.mark.parametrize("order", ("fwd", "rev", "6"))
def test_any_order_of_threads(board: Board, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More columns than one round of the emulated grid takes."""
    monkeypatch.setenv("PC_EMU_ORDER", order)
    space = Space(board, "q4k", heads=7, block_size=33, dim=96)
    entries, slots = whole_blocks(33, [1, 2, 4, 0])
    rows = keys((len(slots), 7, 96), np.float16)
    assert space.store_blocks(rows, entries) == NO_FAULT
    assert space.native_store(rows, slots) == 0
    space.assert_equal()
