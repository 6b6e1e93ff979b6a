"""The load kernels give the values that the CPU's native code gives, bit for bit."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from kernelkit import Array, Board, Place, bits, uneven
from profiles import SHORT
from storagekit import ARRANGEMENTS, BFLOAT16, DTYPES, FORMATS, LAYOUTS

from pagedcache.formats import get_format

DIMS = (1, 16, 33, 64, 80, 96, 128)
BLOCK_SIZES = (1, 4, 16)
LIES = tuple(name for name in ARRANGEMENTS if name not in ("flat", "read-only"))


@pytest.fixture
def board(cuda: Any) -> Board:
    return Board(cuda)


def target(shape: tuple[int, ...], dtype: Any, lie: str = "contiguous") -> Array:
    """A writable array full of a mark, lying in memory as named."""
    return ARRANGEMENTS[lie](np.full(shape, 99, dtype))


def check(place: Place, out: Array, block_ids: Any, first: int, pointers: bool = False) -> None:
    """Load into ``out`` on the device and on the host: equal values, and no byte beside them."""
    expected = np.array(out)  # contiguous
    ids = np.asarray(block_ids, np.int32)
    place.native.load(0, ids, first, bits(expected), get_format(out.dtype.name).code)
    place.load(out, ids, first, pointers)
    np.testing.assert_array_equal(bits(out), bits(expected))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_same_values_as_the_cpu(board: Board, fmt: str, dtype: Any, layout: str) -> None:
    # SPEC F32 F44  # CASE C40
    lies = itertools.cycle(LIES)
    for n, dim in enumerate(DIMS):
        for block_size in BLOCK_SIZES[n % 3 :][:1] if SHORT else BLOCK_SIZES:
            place = Place(board, fmt, layout, heads=3, block_size=block_size, dim=dim,
                          num_blocks=40 // block_size + 1)  # fmt: skip
            place.fill_with_values()
            ids = np.random.default_rng(n).permutation(place.num_blocks)
            first = n % block_size
            for pointers in (False, True):
                check(place, target((39 - first, 3, dim), dtype, next(lies)), ids, first, pointers)


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_into_any_strides(board: Board, dtype: Any, lie: str) -> None:
    # CASE C45
    for fmt in FORMATS:
        place = Place(board, fmt, heads=2, dim=40, num_blocks=9)
        place.fill_with_values()
        out = target((33, 2, 40), dtype, lie)
        around = out if out.base is None else out.base
        marks = np.asarray(around).copy()
        check(place, out, [8, 0, 3, 3, 7, 1, 2, 6, 5], 2)
        if lie == "strided":  # the values between stay as they were
            changed = np.asarray(around) != marks
            changed[::2, ::3, ::2] = False
            assert not changed.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_into_rows_of_which_one_step_is_not_aligned(board: Board, dtype: Any) -> None:
    # CASE C45
    for fmt in FORMATS:
        place = Place(board, fmt, heads=3, dim=32, num_blocks=4)
        place.fill_with_values()
        for axis in (0, 1):
            check(place, uneven(target((15, 3, 32), dtype), axis), [3, 0, 2, 1], 1)


@pytest.mark.parametrize("shift", (0, 1, 2, 4, 8))
@pytest.mark.parametrize("fmt", FORMATS)
def test_from_any_address_and_stride(board: Board, fmt: str, shift: int) -> None:
    # SPEC F48
    for layout, gap, backwards in (("HND", 0, False), ("NHD", 48, False), ("HND", 13, True)):
        place = Place(board, fmt, layout, heads=2, dim=72, gap=gap, backwards=backwards,
                      shift=shift)  # fmt: skip
        place.fill_with_values()
        for pointers in (False, True):
            check(place, target((17, 2, 72), BFLOAT16), [4, 1, 0, 2, 3], 3, pointers)


@pytest.mark.parametrize("order", ("fwd", "rev", "1", "2"))
def test_any_order_of_threads(board: Board, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PC_EMU_ORDER", order)
    for fmt in ("bfloat16", "q8", "q4_0", "q4_1"):
        place = Place(board, fmt, heads=5, block_size=16, dim=96, num_blocks=8)
        place.fill_with_values()
        check(place, target((101, 5, 96), np.float16), [7, 6, 0, 1, 2, 5, 4, 3], 9)


@pytest.mark.parametrize("fmt", ("float32", "float16", "bfloat16"))
def test_any_bits_of_float_formats(board: Board, fmt: str) -> None:
    """NaN with payloads, Inf, subnormals: as on the CPU."""
    # SPEC F3
    place = Place(board, fmt, dim=24)  # every byte random
    for dtype in DTYPES:
        check(place, target((20, 2, 24), dtype), [0, 1, 2, 3, 4], 0)


def test_every_float16_to_float(board: Board) -> None:
    """All 65,536 inputs: GPUs widen with an instruction of their own, NaN by the common rule."""
    # SPEC F3
    place = Place(board, "float16", heads=1, block_size=16, dim=256, num_blocks=16)
    place.native.store(0, np.arange(2**16, dtype=np.uint16).reshape(256, 1, 256), 1,
                       np.arange(256), 0)  # fmt: skip
    place.copies[0].send()
    check(place, target((256, 1, 256), np.float32), np.arange(16), 0)


def test_only_the_tokens_asked_for(board: Board) -> None:
    """Nothing behind the last token is read: the table may end there."""
    place = Place(board, "q4", num_blocks=3)
    place.fill_with_values()
    check(place, target((3, 2, 64), np.float32), [2], 1)
    out = target((0, 2, 64), np.float32)
    place.load(out, [0], 4)
    assert out.shape == (0, 2, 64)


def test_far_beyond_two_gigabytes(board: Board) -> None:
    # CASE C46
    for fmt in ("float16", "q8"):
        place = Place(board, fmt, num_blocks=1, block_size=2**10, dim=64, heads=1)
        rows = np.random.default_rng(1).standard_normal((5, 1, 64)).astype(np.float32)
        slots = np.arange(2**10 - 5, 2**10)
        place.store_both(rows, slots)
        expected, out = np.zeros_like(rows), board.copy(np.zeros_like(rows))
        place.native.load(0, np.zeros(1, np.int32), 2**10 - 5, bits(expected), 0)
        far, step = 2_000_000, 2**23 + 64  # a base that lies before all memory
        ids = board.copy(np.full(3, far, np.int32))
        board.call(
            "pc_cuda_load", place.geometry, place.bases[0] - far * step, step,
            ids.address, None, 3 * 2**10 - 5, out.address, *rows.strides, 0, 5,
        )  # fmt: skip
        out.fetch()
        np.testing.assert_array_equal(out.array, expected)


def test_positions_beyond_two_billion(board: Board) -> None:
    """`first` and the index of a block are 64-bit."""
    # SPEC TRAP 14
    place = Place(board, "bfloat16", num_blocks=1, block_size=4, dim=64)
    place.fill_with_values()
    expected = target((4, 2, 64), np.float32)
    place.native.load(0, np.zeros(1, np.int32), 0, bits(expected), 0)
    out, ids = board.copy(np.zeros_like(expected)), board.copy(np.zeros(1, np.int32))
    index = 2**32
    board.call(
        "pc_cuda_load", place.geometry, place.bases[0], place.stride,
        ids.address - 4 * index, None, 4 * index, out.address, *expected.strides, 0, 4,
    )  # fmt: skip
    out.fetch()
    np.testing.assert_array_equal(out.array, expected)
