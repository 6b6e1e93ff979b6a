"""Copies, moves and fills of blocks, and pointer tables, against the CPU's native code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernelkit import Array, Board, Place
from profiles import scaled
from storagekit import BY_ROW, FORMATS, LAYOUTS


@pytest.fixture
def board(cuda: Any) -> Board:
    return Board(cuda)


#: (heads, block size, head dim): columns of every width, planes that no 16 divides.
SHAPES = ((2, 4, 64), (3, 4, 33), (1, 1, 1), (3, 1, 33), (2, 16, 80), (8, 16, 128))


def ids(*numbers: Any) -> Array:
    return np.array(numbers, np.int32).reshape(-1)


def copy_both(place: Place, src: Array, dst: Array, rows: Array, in_order: bool) -> None:
    place.on_slabs("pc_cuda_copy_blocks", src, dst, rows, len(rows), int(in_order))
    place.native.copy(src, dst, rows)
    place.assert_equal()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", BY_ROW)
def test_copies_in_any_order(board: Board, fmt: str, layout: str) -> None:
    """Whole blocks with their padding, and some rows of a block with nothing else."""
    # SPEC F28 F40  # CASE C56
    for heads, block_size, dim in SHAPES:
        place = Place(board, fmt, layout, heads=heads, block_size=block_size, dim=dim,
                      num_blocks=12, layers=4)  # fmt: skip
        rows = ids(block_size, 0, 1, block_size - 1, block_size, (block_size + 1) // 2)
        copy_both(place, ids(0, 1, 2, 3, 0, 4), ids(6, 7, 8, 9, 10, 11), rows, in_order=False)


@pytest.mark.parametrize("order", ("fwd", "rev", "3"))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", BY_ROW)
def test_copies_in_order(
    board: Board, fmt: str, layout: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains and cycles: what one pair writes the next one reads."""
    monkeypatch.setenv("PC_EMU_ORDER", order)
    rng = np.random.default_rng(7)
    for heads, block_size, dim in SHAPES[:5]:
        place = Place(board, fmt, layout, heads=heads, block_size=block_size, dim=dim, layers=2)
        src, dst = rng.integers(0, 5, (2, 40), np.int32)
        rows = rng.choice(ids(block_size, rng.integers(0, block_size + 1)), 40)
        copy_both(place, src, dst, rows, in_order=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("in_order", (False, True))
def test_copies_of_blocks_that_are_written_whole(
    board: Board, in_order: bool, layout: str
) -> None:
    # SPEC F28 F40
    for heads, block_size, dim in (*SHAPES, (2, 40, 33)):
        place = Place(board, "q4k", layout, heads=heads, block_size=block_size, dim=dim,
                      num_blocks=8, layers=3)  # fmt: skip
        src, dst = (ids(0, 4, 5), ids(4, 5, 1)) if in_order else (ids(0, 1, 2), ids(6, 3, 4))
        copy_both(place, src, dst, ids(block_size, block_size, block_size), in_order)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", BY_ROW)
def test_copies_of_tokens(board: Board, fmt: str, layout: str) -> None:
    """Quants and scale of that token alone, one after the other."""
    # CASE C47
    rng = np.random.default_rng(8)
    for heads, block_size, dim in SHAPES:
        place = Place(board, fmt, layout, heads=heads, block_size=block_size, dim=dim, layers=3)
        src, dst = rng.integers(0, place.num_slots, (2, 60))
        place.on_slabs("pc_cuda_copy_tokens", src, dst, 60)
        place.native.copy_tokens(src, dst)
        place.assert_equal()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_moves(board: Board, fmt: str, layout: str) -> None:
    """A cycle turned through the scratch block (-1), then moves at random."""
    # SPEC F19  # CASE C56
    rng = np.random.default_rng(9)
    for heads, block_size, dim in SHAPES:
        place = Place(board, fmt, layout, heads=heads, block_size=block_size, dim=dim, layers=4)
        cycle = ids((0, -1), (1, 0), (2, 1), (-1, 2), (3, 4), (4, 4), (-1, 3), (-1, -1))
        for moves in (cycle.reshape(-1, 2), rng.integers(-1, 5, (50, 2), np.int32)):
            scratch = np.zeros(place.block_nbytes, np.uint8)
            place.on_slabs("pc_cuda_move_blocks", moves, len(moves))
            place.native.move(moves[:, 0].copy(), moves[:, 1].copy(), scratch)
            place.assert_equal()


@pytest.mark.parametrize("fmt", FORMATS)
def test_fills(board: Board, fmt: str) -> None:
    # CASE C41
    for heads, block_size, dim in SHAPES:
        place = Place(board, fmt, heads=heads, block_size=block_size, dim=dim, layers=5, gap=32)
        for byte, chosen in ((0, ids(3, 0, 4, 4)), (0xFF, ids(1)), (0x5A, ids(4))):
            place.on_slabs("pc_cuda_fill_blocks", chosen, len(chosen), byte)
            for block in place.blocks:
                block[chosen] = byte
            place.assert_equal()


@pytest.mark.parametrize("shift", (1, 2, 4, 8))
def test_slabs_at_any_address_and_stride(board: Board, shift: int) -> None:
    # SPEC F48
    for fmt, gap, backwards in (("q8", 0, True), ("float16", 3, False), ("q4_0", 8, True)):
        place = Place(board, fmt, dim=64, gap=gap, backwards=backwards, shift=shift, layers=2)
        place.fill_with_values()
        copy_both(place, ids(0, 1), ids(2, 3), ids(4, 3), in_order=False)
        place.on_slabs("pc_cuda_copy_tokens", np.array([0, 9]), np.array([19, 1]), 2)
        place.native.copy_tokens(np.array([0, 9]), np.array([19, 1]))
        moves = ids((0, 4), (3, 0)).reshape(-1, 2)
        place.on_slabs("pc_cuda_move_blocks", moves, 2)
        place.native.move(ids(0, 3), ids(4, 0), np.zeros(place.block_nbytes, np.uint8))
        place.assert_equal()


def test_nothing_to_do(board: Board) -> None:
    place = Place(board, "q8", layers=2)
    for name, arguments in (
        ("pc_cuda_copy_blocks", (None, None, None, 0, 0)), ("pc_cuda_copy_tokens", (None, None, 0)),
        ("pc_cuda_move_blocks", (None, 0)), ("pc_cuda_fill_blocks", (None, 0, 7)),
    ):  # fmt: skip
        place.on_slabs(name, *arguments)
    place.assert_equal()


def test_far_beyond_two_gigabytes(board: Board) -> None:
    # CASE C46
    near = Place(board, "q8", num_blocks=3, layers=2)
    near.fill_with_values()
    far, step = 1_000_000_000, near.stride
    moved = np.array([(base - far * step, step) for base in near.bases], "u8,i8")
    near.slabs = board.copy(moved)
    near.on_slabs("pc_cuda_copy_blocks", ids(far), ids(far + 1), ids(3), 1, 0)
    near.on_slabs("pc_cuda_move_blocks", ids(far + 1, far + 2), 1)
    near.on_slabs("pc_cuda_copy_tokens", np.array([far * 4 + 1]), np.array([far * 4 + 11]), 1)
    near.native.copy(ids(0), ids(1), ids(3))
    near.native.move(ids(1), ids(2), np.zeros(near.block_nbytes, np.uint8))
    near.native.copy_tokens(np.array([1]), np.array([11]))
    near.assert_equal()


def test_pointers_of_every_layer(board: Board) -> None:
    """table[layer][K, V][entry] = base + place * stride, of sealed or open slabs; a negative place
    is 0; the rest stays."""
    # SPEC F45
    layers, capacity, first, count = 5, 700, 13, scaled(600, 600)
    rng = np.random.default_rng(2)
    slabs = np.zeros((2, 2, layers), "u8,i8")  # sealed and open; K and V
    slabs["f0"] = rng.integers(0, 2**47, (2, 2, layers))
    slabs["f1"] = rng.integers(-(2**40), 2**40, (2, 2, layers))
    num_blocks = 2**19
    block_ids = rng.integers(0, 2**20, count, np.int32)
    block_ids[:2] = num_blocks - 1, num_blocks
    block_ids[5::7] = -1
    table = rng.integers(0, 2**63, (layers, 2, capacity), np.uint64)
    device_slabs = board.copy(slabs)
    device_ids, device_table = board.copy(block_ids), board.copy(table.copy())
    board.call(
        "pc_cuda_build_pointers",
        *(device_slabs.address + part * slabs[0, 0].nbytes for part in range(4)), num_blocks,
        layers, device_ids.address, first, count, device_table.address, capacity,
    )  # fmt: skip
    device_table.fetch()
    for kind in range(2):
        for layer in range(layers):
            where = [[int(x) for x in slabs[which, kind, layer]] for which in range(2)]
            addresses = []
            for block in block_ids.tolist():
                base, stride = where[block >= num_blocks]
                addresses.append(0 if block < 0 else (base + block * stride) % 2**64)
            table[layer, kind, first : first + count] = addresses
    np.testing.assert_array_equal(device_table.array, table)
