"""The store kernel writes the bytes that the CPU's native code writes, and no others."""

from __future__ import annotations

import itertools
import os
from typing import Any

import numpy as np
import pytest
from kernelkit import E_NONFINITE, E_RANGE, NO_FAULT, Board, Place, bits, uneven
from profiles import SHORT
from storagekit import ARRANGEMENTS, BY_ROW, DTYPES, LAYOUTS, QUANTIZED

QUANTIZED_BY_ROW = tuple(fmt for fmt in QUANTIZED if fmt in BY_ROW)
DIMS = (1, 16, 33, 64, 80, 96, 128)
BLOCK_SIZES = (1, 4, 16)
#: How the same rows may lie in memory; "flat" is another shape.
LIES = tuple(name for name in ARRANGEMENTS if name != "flat")


@pytest.fixture
def board(cuda: Any) -> Board:
    return Board(cuda)


def values(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> Any:
    """Finite values of all magnitudes, zeros and exact halves of a quant among them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 12, shape[:2])[..., None]
    x.flat[:: 3 + seed % 5] = 0
    x[:, :, ::7] = np.round(x[:, :, ::7])
    return x.astype(dtype)


def some_slots(place: Place, n: int, seed: int = 0) -> Any:
    """n different slots in random order, every fifth one replaced by -1."""
    slots = np.random.default_rng(seed).permutation(place.num_slots)[:n]
    slots[4::5] = -1
    return slots


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", BY_ROW)
def test_same_bytes_as_the_cpu(board: Board, fmt: str, dtype: Any, layout: str) -> None:
    # SPEC F43 F44  # CASE C40 C45
    lies = itertools.cycle(LIES)
    for n, dim in enumerate(DIMS):
        for block_size in BLOCK_SIZES[n % 3 :][:1] if SHORT else BLOCK_SIZES:
            place = Place(board, fmt, layout, heads=3, block_size=block_size, dim=dim,
                          num_blocks=40 // block_size + 1)  # fmt: skip
            lie = next(lies)
            for seed, arrange in enumerate((ARRANGEMENTS["contiguous"], ARRANGEMENTS[lie])):
                rows = arrange(values((37, 3, dim), dtype, seed))
                place.store_both(rows, some_slots(place, 37, seed))
                place.assert_equal()


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_any_strides(board: Board, dtype: Any, lie: str) -> None:
    # CASE C45
    for fmt in BY_ROW:
        place = Place(board, fmt, heads=2, dim=40, num_blocks=9)
        rows = ARRANGEMENTS[lie](values((33, 2, 40), dtype, 3))
        place.store_both(rows, some_slots(place, 33))
        place.assert_equal()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_which_one_step_is_not_aligned(board: Board, dtype: Any) -> None:
    """Tokens 16 bytes apart and heads not, or the other way round: no wide access fits."""
    # CASE C45
    for fmt in BY_ROW:
        place = Place(board, fmt, heads=3, dim=32, num_blocks=4)
        for axis in (0, 1):
            rows = uneven(values((15, 3, 32), dtype, axis), axis)
            place.store_both(rows, some_slots(place, 15, axis))
            place.assert_equal()


@pytest.mark.parametrize("shift", (0, 1, 2, 4, 8))
@pytest.mark.parametrize("fmt", BY_ROW)
def test_slabs_at_any_address_and_stride(board: Board, fmt: str, shift: int) -> None:
    """Adopted slabs may lie anywhere; bytes between blocks and padding stay as they are."""
    # SPEC F48
    for layout, gap, backwards in (("HND", 0, False), ("NHD", 48, False), ("HND", 13, True)):
        place = Place(board, fmt, layout, heads=2, dim=72, gap=gap, backwards=backwards,
                      shift=shift)  # fmt: skip
        place.store_both(values((19, 2, 72), np.float32), some_slots(place, 19))
        place.assert_equal()


@pytest.mark.parametrize("order", ("fwd", "rev", "1", "2"))
def test_any_order_of_threads(board: Board, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More groups than one round of the emulated grid holds, tiles part-filled at the end."""
    monkeypatch.setenv("PC_EMU_ORDER", order)
    for fmt in ("bfloat16", "q8", "q4_0", "q4_1"):
        place = Place(board, fmt, heads=5, block_size=16, dim=96, num_blocks=8)
        place.store_both(values((101, 5, 96), np.float16), some_slots(place, 101))
        place.assert_equal()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", BY_ROW)
def test_nothing_to_do(board: Board, fmt: str, dtype: Any) -> None:
    place = Place(board, fmt)
    rows = values((6, 2, 64), dtype)
    assert place.store(rows, np.full(6, -1)) == NO_FAULT
    assert place.store(rows[:0], []) == NO_FAULT
    place.assert_equal()


@pytest.mark.parametrize("fmt", BY_ROW)
def test_slots_out_of_range_are_skipped_and_reported(board: Board, fmt: str) -> None:
    # SPEC F33
    place = Place(board, fmt, num_blocks=3)
    rows = values((5, 2, 64), np.float32)
    bad = np.array([0, 12, -2, 11, -(2**62)])
    kept = np.array([0, -1, -1, 11, -1])
    code, slot = place.store(rows, bad)
    assert code == E_RANGE and slot in (12, -2, -(2**62))
    assert place.native.store(0, bits(rows), 0, kept, 0) == 0
    place.assert_equal()
    place.store(rows, bad, fault=False)  # nobody asks: nothing is written, nothing breaks
    place.assert_equal()


def test_the_first_fault_stays(board: Board) -> None:
    """A word that tells of a fault is not written again."""
    place = Place(board, "q8", num_blocks=3)
    word = np.array([7, 8], np.int64)
    rows, slots = values((1, 2, 64), np.float32), np.array([99])
    source, device_slots, device_word = map(board.copy, (rows, slots, word))
    board.call("pc_cuda_store", place.geometry, place.bases[0], place.stride, 3, source.address,
               *rows.strides, 0, device_slots.address, 1, 0, device_word.address)  # fmt: skip
    device_word.fetch()
    assert word.tolist() == [7, 8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", QUANTIZED_BY_ROW)
def test_nonfinite_is_saturated(board: Board, fmt: str, dtype: Any) -> None:
    # SPEC F7
    for dim in (32, 33, 40, 64):
        rows = values((12, 2, dim), dtype, dim)
        rng = np.random.default_rng(dim)
        for value in (np.nan, np.inf, -np.inf, -np.nan):
            rows.flat[rng.integers(0, rows.size, 40)] = value
        rows[3, 1] = np.nan  # groups with no finite value
        rows[4, 0] = -np.inf
        rows[5, 0] = np.where(np.arange(dim) % 2, np.inf, np.nan)
        place = Place(board, fmt, "NHD", dim=dim)
        place.store_both(rows, some_slots(place, 12), "saturate")
        place.assert_equal()


@pytest.mark.parametrize("where", (0, 31, 32, 69))
@pytest.mark.parametrize("fmt", QUANTIZED_BY_ROW)
def test_nonfinite_is_reported(board: Board, fmt: str, where: int) -> None:
    """A group with NaN or Inf stays as it was; every other one is stored."""
    # SPEC F7
    place = Place(board, fmt, dim=70, num_blocks=3)
    slots = np.arange(12)[::-1].copy()
    place.store_both(values((12, 2, 70), np.float32), slots)
    old = decoded(place, 12)
    spoiled = values((12, 2, 70), np.float32, 1)
    spoiled[7, 1, where] = np.inf
    if where < 69:
        spoiled[7, 1, where + 1] = np.nan  # another, perhaps in the next group
    flat = (7 * 2 + 1) * 70 + where
    code, index = place.store(spoiled, slots)
    # Of one group it is the first value; of two groups whichever is found first.
    assert code == E_NONFINITE and index in ((flat, flat + 1) if where == 31 else (flat,))

    healed = np.where(np.isfinite(spoiled), spoiled, np.float32(0))
    place.native.store(0, bits(healed), 0, slots, 0)
    expected, memory = decoded(place, 12), place.memories[0].copy()
    for group in {where // 32, min(where + 1, 69) // 32}:
        values_of = slice(32 * group, 32 * group + 32)
        expected[slots[7], 1, values_of] = old[slots[7], 1, values_of]
    place.copies[0].fetch()
    np.testing.assert_array_equal(decoded(place, 12), expected)
    place.native.store(0, bits(healed[7:8]), 0, slots[7:8], 0)
    np.testing.assert_array_equal(place.memories[0], memory)  # all the rest, padding too


def decoded(place: Place, n: int) -> Any:
    """The first n slots of the host's bytes as float32."""
    out = np.zeros((n, place.heads, place.dim), np.float32)
    ids = np.arange(place.num_blocks, dtype=np.int32)
    place.native.load(0, ids, 0, bits(out), 0)
    return out


@pytest.mark.parametrize("fmt", ("float32", "float16", "bfloat16"))
def test_float_formats_hold_what_is_not_finite(board: Board, fmt: str) -> None:
    """Bits are copied where the dtype is the stored one: payloads of NaN, -0, subnormals."""
    # SPEC F1 F2 F43
    for dtype in DTYPES:
        unsigned = np.dtype(f"u{dtype.itemsize}")
        rng = np.random.default_rng(5)
        words = rng.integers(0, 2 ** (8 * dtype.itemsize), (20, 2, 24), unsigned)
        special = 0x7F800000 if dtype.itemsize == 4 else 0x7F80 if dtype != np.float16 else 0x7C00
        words[::3] |= unsigned.type(special)
        place = Place(board, fmt, dim=24)
        place.store_both(words.view(dtype), some_slots(place, 20))
        place.assert_equal()


def test_every_float_to_float16(board: Board) -> None:
    """GPUs round with an instruction of their own; all 2^32 inputs in the full profile on one."""
    # SPEC F1
    emulated = bool(os.environ.get("PAGEDCACHE_CUDA_EMULATION"))
    dim, tokens, chunks = (256, 64, 2) if emulated else (1024, 16384, 16 if SHORT else 256)
    place = Place(board, "float16", heads=1, block_size=16, dim=dim, num_blocks=tokens // 16)
    size = dim * tokens
    step = 1 if chunks == 256 else 2**32 // (size * chunks) | 1  # odd: sooner or later every input
    for chunk in range(chunks):
        words = (np.arange(chunk * size, (chunk + 1) * size, dtype=np.uint64) * step) & 0xFFFFFFFF
        rows = words.astype(np.uint32).view(np.float32).reshape(tokens, 1, dim)
        place.store_both(rows, np.arange(tokens))
        place.assert_equal()


def test_far_beyond_two_gigabytes(board: Board) -> None:
    """Block ids and strides whose product needs 45 bits: the base is moved back by as much."""
    # CASE C46
    stride = 2**23 + 64
    for fmt, far in (("float16", 3_000_000), ("q8", -3_000_000)):
        place = Place(board, fmt, num_blocks=1, block_size=2**10, dim=64, heads=1)
        rows = values((4, 1, 64), np.float32)
        slots = np.array([0, 2**10 - 1, 77, 2**9])
        step = stride if far > 0 else -stride
        source = board.copy(rows)
        device_slots = board.copy(slots + abs(far) * 2**10)
        board.call(
            "pc_cuda_store", place.geometry,
            place.bases[0] - abs(far) * step, step, abs(far) + 1, source.address,
            *rows.strides, 0, device_slots.address, 4, 0, None,
        )  # fmt: skip
        assert place.native.store(0, bits(rows), 0, slots, 0) == 0
        place.assert_equal()
