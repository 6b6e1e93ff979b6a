"""What emulated kernels cannot show: rounding by a GPU's own instructions, grids as large as they
get, and memory beyond 2^31 and 2^32 bytes. Everything here needs a GPU."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kernelkit import LAYOUTS, Array, Board, Place, bits
from profiles import SHORT
from storagekit import BFLOAT16, BY_ROW

from pagedcache._cuda.memory import DeviceMemory
from pagedcache.formats import get_format

pytestmark = pytest.mark.skipif(
    bool(os.environ.get("PAGEDCACHE_CUDA_EMULATION")),
    reason="only a GPU shows this, and here is its emulation",
)

MILLION = 1 << 20
GIGABYTE = 1 << 30
#: Values of one call: 2^24, so that a float32 is named by the call's number in its low 8 bits.
VALUES = 16 * MILLION
#: 16384 CTAs of 256 threads take two units of 16 bytes each in a round: more than that of rows.
TOKENS = 70_000


@pytest.fixture
def board(cuda: Any) -> Board:
    return Board(cuda)


def need(board: Board, nbytes: int) -> None:
    free, _ = board.device.memory_info()
    if free < nbytes:
        pytest.skip(f"needs {nbytes / GIGABYTE:.0f} GiB of free device memory, there are {free:,}")


def load_both(place: Place, dtype: Any, num_tokens: int, first: int = 0) -> None:
    """What the device loads is what the CPU loads."""
    ids = np.arange(place.num_blocks, dtype=np.int32)
    expected = np.zeros((num_tokens, place.heads, place.dim), dtype)
    got = expected.copy()
    place.native.load(0, ids, first, bits(expected), get_format(expected.dtype.name).code)
    place.load(got, ids, first)
    np.testing.assert_array_equal(bits(got), bits(expected))


# ---- numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["float16", "bfloat16"])
def test_every_float32_is_rounded_as_on_the_cpu(board: Board, fmt: str) -> None:
    """Subnormals, ties, overflow, NaN and its payload; the short profile takes 2^26 of 2^32."""
    # SPEC F7 F44
    place = Place(board, fmt, "NHD", heads=1, block_size=16, dim=64, num_blocks=VALUES // 1024)
    slots = np.arange(place.num_slots)
    high = np.arange(VALUES, dtype=np.uint32) << 8
    # With these low bits alone every tie is there, and its neighbours on both sides.
    for low in (0, 1, 0x7F, 0xFF) if SHORT else range(256):
        rows = (high | np.uint32(low)).view(np.float32).reshape(-1, 1, 64)
        place.store_both(rows, slots)
        place.assert_equal()


@pytest.mark.parametrize("fmt", ["float16", "bfloat16"])
def test_every_half_is_widened_as_on_the_cpu(board: Board, fmt: str) -> None:
    # SPEC F7 F44
    place = Place(board, fmt, heads=1, block_size=16, dim=64, num_blocks=64)
    values = np.arange(1 << 16, dtype=np.uint16).view(get_format(fmt).dtype).reshape(-1, 1, 64)
    place.store_both(values, np.arange(place.num_slots))
    place.assert_equal()
    for dtype in (np.float32, np.float16, BFLOAT16):
        load_both(place, dtype, place.num_slots)
    for other in ("float32", "float16", "bfloat16"):
        target = Place(board, other, heads=1, block_size=16, dim=64, num_blocks=64)
        target.store_both(values, np.arange(target.num_slots))
        target.assert_equal()


@pytest.mark.parametrize("fmt", [name for name in BY_ROW if get_format(name).is_quantized])
def test_groups_of_any_magnitude_are_quantised_as_on_the_cpu(board: Board, fmt: str) -> None:
    """Division, products and rounding of groups from subnormal to the largest float32."""
    # SPEC F4 F5 F44
    place = Place(board, fmt, heads=1, block_size=16, dim=64, num_blocks=4096)
    slots = np.arange(place.num_slots)
    for seed in range(2 if SHORT else 20):
        rng = np.random.default_rng(seed)
        rows = rng.standard_normal((place.num_slots, 1, 64)).astype(np.float32)
        with np.errstate(over="ignore"):
            rows = np.ldexp(rows, rng.integers(-155, 128, (place.num_slots, 1, 1)))
        rows[::1000] = rng.integers(0, 2**32, rows[::1000].shape, np.uint32).view(np.float32)
        rows[1::1000, 0, :32] = rng.integers(-300, 300, 32) / np.float32(2)  # ties
        rows[1::1000, 0, 0] = 127
        place.store_both(rows.astype(np.float32), slots, "saturate")
        place.assert_equal()
        for dtype in (np.float32, np.float16, BFLOAT16):
            load_both(place, dtype, place.num_slots)


# ---- grids -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fmt", "layout", "dtype"),
    [("float32", "NHD", np.float32), ("float16", "HND", np.float32), ("bfloat16", "NHD", BFLOAT16),
     ("q8", "HND", np.float16), ("q4_0", "NHD", np.float32)],
)  # fmt: skip
def test_more_rows_than_a_grid_takes_at_once(
    board: Board, fmt: str, layout: str, dtype: Any
) -> None:
    # SPEC F43 F44
    need(board, 2 * GIGABYTE)
    place = Place(board, fmt, layout, heads=8, block_size=16, dim=128, num_blocks=TOKENS // 16)
    rng = np.random.default_rng(3)
    rows = (rng.random((TOKENS, 8, 128), np.float32) - np.float32(0.5)).astype(dtype)
    place.store_both(rows, rng.permutation(TOKENS))
    place.assert_equal()
    load_both(place, dtype, TOKENS - 5, first=5)


def test_the_last_of_many_values_is_found(board: Board) -> None:
    # SPEC F7
    rows = np.zeros((TOKENS, 8, 128), np.float32)
    rows[-1, -1, -1] = np.nan
    assert find_nonfinite(board, board.copy(rows).address, rows) == rows.size - 1


def find_nonfinite(board: Board, address: int, rows: Any) -> int:
    """Flat index of the first NaN or Inf at an address; ``rows`` gives shape, strides and dtype."""
    found = np.zeros(1, np.uint64)
    first = board.copy(found)
    board.call(
        "pc_cuda_find_nonfinite", address, *rows.strides, get_format(rows.dtype.name).code,
        *rows.shape, first.address,
    )  # fmt: skip
    first.fetch()
    return int(found[0])


def test_more_copies_than_a_grid_has_rows(board: Board) -> None:
    """Pairs and ids along y, which ends at 65535."""
    # SPEC F44
    place = Place(board, "float16", heads=1, block_size=1, dim=16, num_blocks=2 * TOKENS)
    order = np.random.default_rng(4).permutation(2 * TOKENS).astype(np.int32)
    src, dst = order[:TOKENS].copy(), order[TOKENS:].copy()
    rows = np.ones(TOKENS, np.int32)
    place.on_slabs("pc_cuda_copy_blocks", src, dst, rows, TOKENS, 0)
    place.native.copy(src, dst, rows)
    place.assert_equal()
    place.on_slabs("pc_cuda_fill_blocks", dst, TOKENS, 0x5A)
    place.blocks[0][dst] = 0x5A
    place.assert_equal()


def test_more_slabs_than_a_grid_has_layers(board: Board) -> None:
    """Slabs along z, which ends at 65535, and tables of pointers along y."""
    # SPEC F44 F45
    memory = np.random.default_rng(5).integers(0, 256, (TOKENS, 2, 64), np.uint8)
    sent = board.copy(memory)
    slabs = np.zeros(TOKENS, "u8,i8")
    slabs["f0"] = sent.address + np.arange(TOKENS, dtype=np.uint64) * np.uint64(128)
    slabs["f1"] = 64
    table = board.copy(slabs)
    place = Place(board, "float16", heads=1, block_size=1, dim=32)  # for its geometry
    src, dst, rows = (board.copy(np.array([n], np.int32)) for n in (0, 1, 1))
    board.call(
        "pc_cuda_copy_blocks", place.geometry, table.address, TOKENS, src.address, dst.address,
        rows.address, 1, 0,
    )  # fmt: skip
    expected = memory[:, :1].repeat(2, axis=1)
    sent.fetch()
    np.testing.assert_array_equal(memory, expected)
    pointers = np.zeros((TOKENS // 2, 2, 3), np.uint64)
    made = board.copy(pointers)
    board.call(
        "pc_cuda_build_pointers", table.address, table.address + 16 * (TOKENS // 2), table.address,
        table.address, 2, TOKENS // 2, dst.address, 2, 1, made.address, 3,
    )  # fmt: skip
    made.fetch()
    assert not pointers[:, :, :2].any()
    np.testing.assert_array_equal(
        pointers[:, :, 2].T.reshape(-1), slabs["f0"] + np.uint64(64)
    )


# ---- addresses ---------------------------------------------------------------------------------


class Far:
    """A slab of 5 GiB and rows in it that lie gigabytes apart."""

    heads, block_size, dim = 8, 16, 128
    num_blocks = 5 * GIGABYTE // (8 * 16 * 128 * 2)

    def __init__(self, board: Board) -> None:
        self.board = board
        self.block_nbytes = self.heads * self.block_size * self.dim * 2
        self.memory = DeviceMemory(board.device, 5 * GIGABYTE, "a large slab")
        self.geometry = ctypes.create_string_buffer(board.device.library.pc_cuda_geometry_nbytes())
        board.device.call(
            "pc_cuda_geometry", self.geometry, get_format("float16").code, LAYOUTS["NHD"],
            self.heads, self.block_size, self.dim,
        )  # fmt: skip
        slabs = np.zeros(1, "u8,i8")
        slabs[0] = (self.memory.address, self.block_nbytes)
        self.slabs = board.copy(slabs)
        board.call("pc_cuda_fill", self.memory.address, 0, self.memory.nbytes)

    def block(self, number: int) -> Array:
        """The values of a block, ``[block_size, heads, dim]``."""
        out = np.empty((self.block_size, self.heads, self.dim), np.float16)
        address = self.memory.address + number * self.block_nbytes
        self.board.call("pc_cuda_copy", out.ctypes.data, address, out.nbytes)
        return out

    def on_slab(self, name: str, *arguments: Any) -> None:
        sent = [self.board.copy(a) if isinstance(a, np.ndarray) else a for a in arguments]
        addresses = [getattr(each, "address", each) for each in sent]
        self.board.call(name, self.geometry, self.slabs.address, 1, *addresses)


def test_blocks_beyond_two_and_four_gigabytes(board: Board) -> None:
    # CASE C46
    need(board, 6 * GIGABYTE)
    far = Far(board)
    per_gigabyte = GIGABYTE // far.block_nbytes
    chosen = [0, 2 * per_gigabyte - 1, 2 * per_gigabyte, 4 * per_gigabyte - 1, 4 * per_gigabyte,
              far.num_blocks - 1]  # fmt: skip
    rng = np.random.default_rng(6)
    rows = rng.standard_normal((16 * len(chosen), 8, 128)).astype(np.float16)
    slots = np.concatenate([np.arange(16) + 16 * block for block in chosen])
    source, places = board.copy(rows), board.copy(slots)
    board.call(
        "pc_cuda_store", far.geometry, far.memory.address, far.block_nbytes, far.num_blocks,
        source.address, *rows.strides, get_format("float16").code, places.address, len(slots), 0,
        None,
    )  # fmt: skip
    for number, block in enumerate(chosen):
        np.testing.assert_array_equal(far.block(block), rows[16 * number :][:16])
        if block + 1 < far.num_blocks and block + 1 not in chosen:
            assert not far.block(block + 1).any()
    out = np.zeros_like(rows)
    listed, target = board.copy(np.array(chosen, np.int32)), board.copy(out)
    board.call(
        "pc_cuda_load", far.geometry, far.memory.address, far.block_nbytes, listed.address, None,
        0, target.address, *out.strides, get_format("float16").code, len(out),
    )  # fmt: skip
    target.fetch()
    np.testing.assert_array_equal(out, rows)
    last, free = far.num_blocks - 1, np.array([7], np.int32)
    far.on_slab("pc_cuda_copy_blocks", np.array([last], np.int32), free,
                np.array([16], np.int32), 1, 0)  # fmt: skip
    np.testing.assert_array_equal(far.block(7), far.block(last))
    far.on_slab("pc_cuda_move_blocks", np.array([[0, last], [7, 0]], np.int32), 2)
    np.testing.assert_array_equal(far.block(last), rows[:16])
    np.testing.assert_array_equal(far.block(0), rows[-16:])
    far.on_slab("pc_cuda_copy_tokens", np.array([16 * last + 3]), np.array([5]), 1)
    np.testing.assert_array_equal(far.block(0)[5], rows[3])
    far.on_slab("pc_cuda_fill_blocks", np.array([last], np.int32), 1, 0)
    assert not far.block(last).any() and far.block(chosen[-2]).any()


def test_rows_outside_that_lie_gigabytes_apart(board: Board) -> None:
    # CASE C46
    need(board, 6 * GIGABYTE)
    far = Far(board)
    place = Place(board, "float16", "NHD", heads=1, block_size=16, dim=128, num_blocks=1)
    rng = np.random.default_rng(7)
    rows = rng.standard_normal((2, 1, 128)).astype(np.float16)
    step = 4 * GIGABYTE + 256
    for number in range(2):
        board.call(
            "pc_cuda_copy", far.memory.address + number * step, rows[number].ctypes.data, 256
        )
    slots = board.copy(np.array([3, 9]))
    board.call(
        "pc_cuda_store", place.geometry, place.bases[0], place.stride, 1, far.memory.address, step,
        256, 2, get_format("float16").code, slots.address, 2, 0, None,
    )  # fmt: skip
    place.native.store(0, bits(rows), get_format("float16").code, np.array([3, 9]), 0)
    place.assert_equal()


def test_the_last_of_four_billion_values_is_found(board: Board) -> None:
    # CASE C46
    count = (1 << 32) + 128
    need(board, 2 * count + GIGABYTE)
    memory = DeviceMemory(board.device, 2 * count, "many values")
    board.call("pc_cuda_fill", memory.address, 0, memory.nbytes)
    nan = np.full(1, np.nan, np.float16)
    board.call("pc_cuda_copy", memory.address + 2 * count - 2, nan.ctypes.data, 2)
    rows = SimpleNamespace(shape=(count // 128, 1, 128), strides=(256, 256, 2), dtype=nan.dtype)
    assert find_nonfinite(board, memory.address, rows) == count - 1
