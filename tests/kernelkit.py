"""Kernels called one by one on device memory, beside the CPU's native code on the same bytes."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from pagedcache._cuda.memory import DeviceMemory
from pagedcache._native.rows import Slabs
from pagedcache.formats import KVFormat, get_format
from pagedcache.spec import CacheSpec

Array = NDArray[Any]
LAYOUTS = {"HND": 0, "NHD": 1}
E_NONFINITE, E_RANGE = 1, 3
NO_FAULT = (0, 0)


def raw_bytes(array: Array) -> NDArray[np.uint8]:
    """Every byte from the first to the last that a strided array touches; not copied."""
    low, high = byte_bounds(array)
    return np.frombuffer((ctypes.c_uint8 * (high - low)).from_address(low), np.uint8)


def bits(array: Array) -> Array:
    """The values as unsigned integers of their width, in the same places."""
    return array.view(f"u{array.dtype.itemsize}")


def uneven(array: Array, axis: int) -> Array:
    """The same values from a 64-byte boundary on; only the steps along ``axis`` (0 or 1) are no
    multiples of 16 bytes."""
    item = array.dtype.itemsize
    inner = array.shape[2] + (axis == 1)
    outer = -(-inner * array.shape[1] // 16) * 16 + (axis == 0)
    memory = np.zeros(array.shape[0] * outer + 64, array.dtype)
    start = -memory.ctypes.data % 64 // item
    strides = (outer * item, inner * item, item)
    view = np.lib.stride_tricks.as_strided(memory[start:], array.shape, strides)
    view[:] = array
    return view


class Copy:
    """A device copy of everything that a host array touches, as it lies, alignment included.

    ``address``: of element 0 on the device.
    """

    def __init__(self, board: Board, array: Array) -> None:
        self.board, self.array = board, array
        low, high = byte_bounds(array)
        shift = low % 16
        self.memory = DeviceMemory(board.device, high - low + shift, "a test")
        self.start, self.nbytes = self.memory.address + shift, high - low
        self.address = self.start + array.ctypes.data - low
        self.send()

    def send(self) -> None:
        self.board.call("pc_cuda_copy", self.start, byte_bounds(self.array)[0], self.nbytes)

    def fetch(self) -> None:
        """Bring the device's bytes to the host array's places."""
        self.board.call("pc_cuda_copy", byte_bounds(self.array)[0], self.start, self.nbytes)


class Board:
    """The library on one device; every call waits for its end."""

    def __init__(self, device: Any) -> None:
        self.device = device

    def call(self, name: str, *arguments: Any) -> None:
        self.device.call(name, *arguments, None)
        self.device.call("pc_cuda_stream_synchronize", None)

    def copy(self, array: Array) -> Copy:
        return Copy(self, array)


class Place:
    """The slabs of some layers, on the device and, native, on the host.

    ``gap``: bytes between blocks. ``backwards``: the blocks lie in descending order. ``shift``:
    bytes from a 64-byte boundary to the memory's start. Every byte starts random.
    """

    def __init__(
        self,
        board: Board,
        fmt: str,
        layout: str = "HND",
        *,
        heads: int = 2,
        block_size: int = 4,
        dim: int = 64,
        num_blocks: int = 5,
        layers: int = 1,
        gap: int = 0,
        backwards: bool = False,
        shift: int = 0,
        seed: int = 0,
    ) -> None:
        self.board, self.format, self.layout = board, get_format(fmt), layout
        self.heads, self.block_size, self.dim = heads, block_size, dim
        self.num_blocks, self.layers = num_blocks, layers
        rng = np.random.default_rng(seed)
        library = board.device.library
        self.geometry = ctypes.create_string_buffer(library.pc_cuda_geometry_nbytes())
        code = library.pc_cuda_geometry(
            self.geometry, self.format.code, LAYOUTS[layout], heads, block_size, dim
        )
        assert code == 0
        self.block_nbytes = block_nbytes(self.format, layout, heads, block_size, dim)
        stride = self.block_nbytes + gap
        self.memories = []
        for _ in range(layers):
            memory = np.zeros(num_blocks * stride + 128, np.uint8)
            start = -memory.ctypes.data % 64 + shift
            memory = memory[start : start + num_blocks * stride]
            memory[:] = rng.integers(0, 256, memory.size, np.uint8)
            self.memories.append(memory)
        order = slice(None, None, -1 if backwards else 1)
        self.blocks = [
            memory.reshape(num_blocks, stride)[order, : self.block_nbytes]
            for memory in self.memories
        ]
        self.native = Slabs(
            list(self.blocks), self.format.code, LAYOUTS[layout], heads, block_size, dim
        )
        self.copies = [board.copy(memory) for memory in self.memories]
        self.stride = self.blocks[0].strides[0]
        self.bases = [
            copy.address + block.ctypes.data - memory.ctypes.data
            for copy, block, memory in zip(self.copies, self.blocks, self.memories, strict=True)
        ]
        rows = np.array([(base, self.stride) for base in self.bases], "u8,i8")
        self.slabs = board.copy(rows)

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    def fill_with_values(self, seed: int = 1) -> None:
        """Store finite rows in every slot, on the host and, by copy, on the device."""
        rng = np.random.default_rng(seed)
        shape = (self.num_slots, self.heads, self.dim)
        for layer in range(self.layers):
            rows = rng.standard_normal(shape).astype(np.float32)
            self.native.store(layer, bits(rows), 0, np.arange(self.num_slots), 1)
        for copy in self.copies:
            copy.send()

    def assert_equal(self) -> None:
        """Every byte of device and host agrees, between the blocks and outside rows too."""
        for copy, memory in zip(self.copies, self.memories, strict=True):
            host = memory.copy()
            copy.fetch()
            device = memory.copy()
            memory[:] = host
            np.testing.assert_array_equal(device, host)

    # ---- the same on the device and on the host ------------------------------------------

    def store(
        self, rows: Array, slots: Any, policy: str = "raise", layer: int = 0, fault: bool = True
    ) -> tuple[int, int]:
        """Store on the device alone; returns (code, where) of the fault."""
        slots = np.asarray(slots, np.int64)
        word = np.zeros(2, np.int64)
        source, device_slots, device_word = map(self.board.copy, (rows, slots, word))
        self.board.call(
            "pc_cuda_store", self.geometry, self.bases[layer], self.stride, self.num_blocks,
            source.address, *rows.strides, get_format(rows.dtype.name).code,
            device_slots.address, len(slots), ["raise", "saturate"].index(policy),
            device_word.address if fault else None,
        )  # fmt: skip
        device_word.fetch()
        return int(word[0]), int(word[1])

    def store_both(self, rows: Array, slots: Any, policy: str = "raise") -> None:
        slots = np.asarray(slots, np.int64)
        assert self.store(rows, slots, policy) == NO_FAULT
        code = get_format(rows.dtype.name).code
        assert self.native.store(0, bits(rows), code, slots, policy == "saturate") == 0

    def load(
        self, out: Array, block_ids: Any, first: int, pointers: bool = False, layer: int = 0
    ) -> None:
        """Load on the device into the places of ``out``."""
        ids = np.asarray(block_ids, np.int32)
        addresses = (self.bases[layer] + ids.astype(np.int64) * self.stride).astype(np.uint64)
        listed = self.board.copy(addresses if pointers else ids)
        target = self.board.copy(out)
        self.board.call(
            "pc_cuda_load", self.geometry, None if pointers else self.bases[layer],
            0 if pointers else self.stride, None if pointers else listed.address,
            listed.address if pointers else None, first, target.address, *out.strides,
            get_format(out.dtype.name).code, len(out),
        )  # fmt: skip
        target.fetch()

    def on_slabs(self, name: str, *arguments: Any) -> None:
        """Call a function over the slabs of all layers; arrays are sent to the device."""
        sent = [self.board.copy(a) if isinstance(a, np.ndarray) else a for a in arguments]
        addresses = [each.address if isinstance(each, Copy) else each for each in sent]
        self.board.call(name, self.geometry, self.slabs.address, self.layers, *addresses)


def block_nbytes(fmt: KVFormat, layout: str, heads: int, block_size: int, dim: int) -> int:
    """Bytes of a block of one layer and one kind, as the package counts them."""
    spec = CacheSpec(
        1, heads, dim, block_size, k_format=fmt.name, v_format="float32", layout=layout
    )
    return spec.layer_block_nbytes("k")
