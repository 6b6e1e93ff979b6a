"""Open slots: the kernels that fill, seal and reopen them write what the native code writes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from kernelkit import E_NONFINITE, E_RANGE, NO_FAULT, Board, bits
from profiles import SHORT
from spacekit import OPEN, SEALED, Space
from storagekit import ARRANGEMENTS, BY_ROW, DTYPES, LAYOUTS, QUANTIZED

from pagedcache.formats import get_format

FLOATS = ("float32", "float16", "bfloat16")
QUANTIZED_BY_ROW = tuple(fmt for fmt in QUANTIZED if fmt in BY_ROW)
DIMS = (1, 16, 33, 64, 80, 128)
LIES = tuple(name for name in ARRANGEMENTS if name != "flat")


@pytest.fixture
def board(cuda: Any) -> Board:
    return Board(cuda)


def any_rows(shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
    """Values of all magnitudes, up to those that float16 cannot hold; NaN, Inf, and groups of
    nothing else among them."""
    rng = np.random.default_rng(seed)
    top = 15 if dtype == np.float16 else 100
    x = (rng.standard_normal(shape) * 2.0 ** rng.integers(-12, top, shape)).astype(np.float32)
    for value in (np.nan, -np.nan, np.inf, -np.inf, -0.0, 65504, 65519.996, 65520, -1e38):
        x.flat[rng.integers(0, x.size, 1 + x.size // 64)] = value
    x[-1] = np.where(rng.random(shape[1:]) < 0.5, np.nan, -np.inf)
    with np.errstate(over="ignore"):
        return x.astype(dtype)


def finite_rows(shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
    x = any_rows(shape, dtype, seed).astype(np.float32)
    most = np.float32(6e4 if dtype == np.float16 else 3e38)
    return np.clip(np.nan_to_num(x, nan=1, posinf=3e4, neginf=-3e4), -most, most).astype(dtype)


def some(slots: Any, n: int, seed: int) -> Any:
    """n of the slots in random order, every fifth one replaced by -1."""
    chosen = np.random.default_rng(seed).permutation(slots)[:n]
    chosen[4::5] = -1
    return chosen


# ---- rows into open slots -----------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("opened", FLOATS)
def test_open_slots_hold_what_a_group_could(
    board: Board, opened: str, dtype: Any, layout: str
) -> None:
    # SPEC F7 F43  # CASE C45
    lies = itertools.cycle(LIES)
    for n, dim in enumerate(DIMS):
        size = (1, 4, 16)[n % 3]
        space = Space(board, "q4k", opened, layout, heads=3, block_size=size, dim=dim,
                      num_open=40 // size)  # fmt: skip
        for seed in range(2):
            rows = ARRANGEMENTS[next(lies)](any_rows((29, 3, dim), dtype, seed))
            slots = some(space.open_slots, 29, seed)
            assert space.store_open(rows, slots, "saturate") == NO_FAULT
            assert space.native_store(rows, slots, "saturate") == 0
            space.assert_equal()
            rows = finite_rows((29, 3, dim), dtype, seed + 9)
            assert space.store_open(rows, slots) == NO_FAULT
            assert space.native_store(rows, slots) == 0
            space.assert_equal()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("opened", FLOATS)
def test_nonfinite_values_for_open_slots_are_reported(
    board: Board, opened: str, dtype: Any
) -> None:
    """What has NaN or Inf stays as it was, and every other group is stored."""
    # SPEC F7
    space = Space(board, "q8", opened, heads=2, dim=96)
    rows = finite_rows((8, 2, 96), dtype, 1)
    slots = space.open_slots[:8]
    assert space.store_open(rows, slots) == NO_FAULT and space.native_store(rows, slots) == 0
    old = opened_values(space)
    spoiled = finite_rows((8, 2, 96), dtype, 2)
    spoiled[5, 1, 40] = np.inf
    code, index = space.store_open(spoiled, slots)
    assert (code, index) == (E_NONFINITE, (5 * 2 + 1) * 96 + 40)
    healed = np.where(np.isfinite(spoiled), spoiled, np.array(0, dtype))
    assert space.native_store(healed, slots) == 0
    expected = opened_values(space)
    space.sides[OPEN].copies[0].fetch()
    got = opened_values(space)
    same = np.ones(got.shape, bool)
    same[5, 1, 32:64] = False
    np.testing.assert_array_equal(got[same], expected[same])
    kept = got[5, 1, 32:64]
    assert np.array_equal(kept[40 - 32], old[5, 1, 40])  # itself at least was not written
    assert ((kept == old[5, 1, 32:64]) | (kept == expected[5, 1, 32:64])).all()
    assert space.store_open(spoiled, slots, fault=False) == NO_FAULT


def opened_values(space: Space) -> Any:
    """The first 8 open rows of the host's bytes as float32."""
    out = np.zeros((8, space.heads, space.dim), np.float32)
    places = np.arange(space.num_blocks, space.num_blocks + 2, dtype=np.int32)
    space.native.load(0, places, 0, bits(out), 0)
    return out


def test_float_kinds_keep_bits_in_open_slots(board: Board) -> None:
    """A float kind's open slots are not clamped: NaN payloads and Inf stay."""
    # SPEC F43
    for fmt in FLOATS:
        space = Space(board, fmt, fmt)
        rows = any_rows((16, 2, 64), get_format(fmt).dtype, 3)
        assert space.store_open(rows, space.open_slots) == NO_FAULT
        assert space.native_store(rows, space.open_slots) == 0
        space.assert_equal()
        places = np.arange(5)
        space.convert_both(places[:4] + 5, places[:4], [4, 1, 3, 2], OPEN)
        space.convert_both(places[1:], 5 + places[:4], [2, 4, 0, 4], SEALED)


# ---- between the sides --------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("opened", FLOATS)
@pytest.mark.parametrize("fmt", QUANTIZED_BY_ROW)
def test_rows_are_sealed_and_reopened(board: Board, fmt: str, opened: str, layout: str) -> None:
    """From random bytes too: what an open slot must not hold is saturated on the way."""
    # SPEC F7 F28  # CASE C40
    for n, dim in enumerate(DIMS[1::2] if SHORT else DIMS):
        size = (3, 4, 16)[n % 3]
        space = Space(board, fmt, opened, layout, heads=3, block_size=size, dim=dim, layers=3)
        for _ in range(2):
            space.convert_both([5, 8, 7], [4, 0, 2], [size, size - 1, 0], OPEN)
            space.convert_both([1, 4, 0, 3], [6, 5, 8, 7], [size, 1, size, size - 1], SEALED)
            rows = any_rows((4 * size, 3, dim), np.dtype(np.float32), n)
            assert space.native_store(rows, space.open_slots, "saturate") == 0
            space.send()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", (*QUANTIZED, "float16"))
def test_single_tokens_between_the_sides(board: Board, fmt: str, layout: str) -> None:
    # CASE C47
    rng = np.random.default_rng(5)
    for size, dim in ((4, 64), (16, 33), (1, 80)):
        space = Space(board, fmt, "float16", layout, block_size=size, dim=dim, layers=2,
                      num_blocks=32 // size, num_open=32 // size)  # fmt: skip
        sealed, opened = rng.permutation(32)[:20], 32 + rng.permutation(32)[:20]
        ways = ((sealed, opened, SEALED), (opened, sealed, OPEN))
        for src, dst, origin in ways[: 1 if fmt == "q4k" else 2]:
            space.convert(src, dst, np.ones(20, np.int32), origin, 1)
            space.native.copy_tokens(src, dst)
            space.assert_equal()


@pytest.mark.parametrize("order", ("fwd", "rev", "4"))
@pytest.mark.parametrize("fmt", ("q8", "q4_0", "q4k", "bfloat16"))
def test_any_order_of_threads(
    board: Board, fmt: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More work than one round of the emulated grid takes."""
    monkeypatch.setenv("PC_EMU_ORDER", order)
    opened = "bfloat16" if fmt == "bfloat16" else "float16"
    space = Space(board, fmt, opened, heads=5, block_size=16, dim=96, num_blocks=8, num_open=8,
                  layers=3)  # fmt: skip
    rows = any_rows((128, 5, 96), np.dtype(np.float16), 4)
    assert space.store_open(rows, space.open_slots, "saturate") == NO_FAULT
    assert space.native_store(rows, space.open_slots, "saturate") == 0
    space.assert_equal()
    sealed = np.arange(8)
    space.convert_both(sealed + 8, sealed[::-1], np.full(8, 16), OPEN)
    space.convert_both(sealed, sealed + 8, [16, 3, 16, 0, 15, 16, 1, 2], SEALED)


def test_far_beyond_two_gigabytes(board: Board) -> None:
    """Block ids so large that the moved-down base of open slots lies terabytes away."""
    # CASE C46
    for fmt in ("q8", "q4k"):
        space = Space(board, fmt, num_blocks=2, num_open=2)
        far = 2_000_000_000
        bases = [
            (side.bases[0] - place * side.stride) % 2**64
            for side, place in zip(space.sides, (far, far + 100), strict=True)
        ]
        tables = [
            board.copy(np.array([(base, side.stride)], "u8,i8"))
            for base, side in zip(bases, space.sides, strict=True)
        ]
        space.tables = tables[0], tables[1]
        slots = 4 * np.array([far + 101]), 4 * np.array([far])
        space.convert(*slots, [4], OPEN, 4)
        space.native.copy(*(np.array([x], np.int32) for x in (3, 0, 4)))
        space.assert_equal()
        space.convert(slots[1], slots[0] - 4, [3], SEALED, 3)
        space.native.copy(*(np.array([x], np.int32) for x in (0, 2, 3)))
        space.assert_equal()


def test_nothing_to_do(board: Board) -> None:
    space = Space(board, "q4_1", layers=2)
    space.convert_both([], [], [], OPEN)
    assert space.store_open(np.zeros((0, 2, 64), np.float32), []) == NO_FAULT
    slots = np.full(3, -1)
    assert space.store_open(np.ones((3, 2, 64), np.float32), slots) == NO_FAULT
    space.convert([20, 24], [0, 4], [0, 0], OPEN, 4)
    space.assert_equal()


def test_slots_past_the_places_are_reported(board: Board) -> None:
    # SPEC F33
    space = Space(board, "q8")
    rows = finite_rows((3, 2, 64), np.float32, 1)
    end = space.first_open + len(space.open_slots)
    assert space.store_open(rows, [end, -1, space.first_open]) == (E_RANGE, end)
    assert space.native_store(rows[2:], [space.first_open]) == 0
    space.assert_equal()


# ---- what the functions refuse ------------------------------------------------------------------


def test_formats_that_a_call_is_not_for(board: Board) -> None:
    """cudaErrorInvalidValue, and nothing runs: rows for blocks that are written whole, blocks of
    other formats, two formats of one kind."""
    library = board.device.library
    q4k, q8, halves, floats = (
        Space(board, fmt, opened) for fmt, opened in
        (("q4k", "float16"), ("q8", "float16"), ("float16", "float16"), ("float32", "float32"))
    )  # fmt: skip
    rows = (None, 0, 0, 0, 0)
    store = library.pc_cuda_store
    assert store(q4k.sides[SEALED].geometry, None, 0, 1, *rows, None, 1, 0, None, None) == 1
    blocks = library.pc_cuda_store_blocks
    assert blocks(q8.sides[SEALED].geometry, None, 0, 1, *rows, 4, None, 1, 0, None, None) == 1
    for origin, target in ((q8, q4k), (q8, q8), (halves, floats)):
        sides = origin.sides[SEALED].geometry, None, target.sides[SEALED].geometry, None
        assert library.pc_cuda_convert(*sides, 1, None, None, None, 1, 4, None) == 1
