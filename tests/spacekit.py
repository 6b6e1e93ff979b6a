"""Kernels on sealed blocks and open slots of some layers, beside the native code on the same bytes.

The two sides are a ``Place`` each; tables and addresses that kernels get for open slots are moved
down by ``num_blocks`` blocks, so that places name their blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from kernelkit import LAYOUTS, Array, Board, Copy, Place, bits

from pagedcache._native.rows import Slabs
from pagedcache.formats import get_format

SEALED, OPEN = 0, 1
POLICIES = ["raise", "saturate"]


class Space:
    """K or V of some layers: blocks of ``fmt`` and open slots of ``opened``; every byte random.

    Options are those of ``Place``; gaps, shifts and directions are the sealed side's.
    """

    def __init__(
        self,
        board: Board,
        fmt: str,
        opened: str = "float16",
        layout: str = "HND",
        *,
        num_blocks: int = 5,
        num_open: int = 4,
        heads: int = 2,
        block_size: int = 4,
        dim: int = 64,
        layers: int = 1,
        seed: int = 0,
        **options: Any,
    ) -> None:
        shape = {"heads": heads, "block_size": block_size, "dim": dim, "layers": layers}
        self.board, self.num_blocks, self.num_open = board, num_blocks, num_open
        self.heads, self.block_size, self.dim, self.layers = heads, block_size, dim, layers
        sealed = Place(board, fmt, layout, num_blocks=num_blocks, seed=seed, **shape, **options)
        open_side = Place(board, opened, layout, num_blocks=num_open, seed=seed + 1, **shape)
        self.sides = sealed, open_side
        if get_format(fmt).is_quantized:
            board.device.call("pc_cuda_clamp", open_side.geometry)
        self.native = Slabs(
            list(sealed.blocks), sealed.format.code, LAYOUTS[layout], heads, block_size, dim,
            list(open_side.blocks), open_side.format.code,
        )  # fmt: skip
        moved = [(base - num_blocks * open_side.stride) % 2**64 for base in open_side.bases]
        self.open_bases = moved
        rows = np.array([(base, open_side.stride) for base in moved], "u8,i8")
        self.tables = sealed.slabs, board.copy(rows)

    @property
    def open_slots(self) -> Array:
        """All slots of open blocks."""
        return self.num_blocks * self.block_size + np.arange(self.num_open * self.block_size)

    @property
    def first_open(self) -> int:
        return self.num_blocks * self.block_size

    def assert_equal(self) -> None:
        for side in self.sides:
            side.assert_equal()

    def store_open(
        self, rows: Array, slots: Any, policy: str = "raise", fault: bool = True
    ) -> tuple[int, int]:
        """Store into open slots of layer 0 on the device alone; returns (code, where)."""
        return self._store("pc_cuda_store", OPEN, rows, slots, len(slots), policy, fault)

    def store_blocks(
        self, rows: Array, entries: Any, policy: str = "raise", fault: bool = True
    ) -> tuple[int, int]:
        """Store whole sealed blocks of layer 0, ``entries`` (first token, block), likewise."""
        pairs = np.asarray(entries, np.int64).reshape(-1, 2)
        return self._store("pc_cuda_store_blocks", SEALED, rows, pairs, len(pairs), policy, fault)

    def _store(
        self, name: str, where: int, rows: Array, listed: Any, n: int, policy: str, fault: bool
    ) -> tuple[int, int]:
        word = np.zeros(2, np.int64)
        source, device_word = map(self.board.copy, (rows, word))
        device_list = self.board.copy(np.asarray(listed, np.int64))
        side = self.sides[where]
        base = self.open_bases[0] if where == OPEN else side.bases[0]
        count = self.num_blocks + (self.num_open if where == OPEN else 0)
        extra = [len(rows)] if name == "pc_cuda_store_blocks" else []
        self.board.call(
            name, side.geometry, base, side.stride, count, source.address, *rows.strides,
            get_format(rows.dtype.name).code, *extra, device_list.address, n,
            POLICIES.index(policy), device_word.address if fault else None,
        )  # fmt: skip
        device_word.fetch()
        return int(word[0]), int(word[1])

    def native_store(self, rows: Array, slots: Any, policy: str = "raise") -> int:
        """The same by native code, at place-slots."""
        slots = np.asarray(slots, np.int64)
        code = get_format(rows.dtype.name).code
        return self.native.store(0, bits(rows), code, slots, POLICIES.index(policy))

    def convert(self, src: Any, dst: Any, rows: Any, origin: int, most: int) -> None:
        """Copy rows from slot to slot, to the other side, in all layers of the device alone."""
        lists: list[Copy] = [
            self.board.copy(np.asarray(listed, dtype))
            for listed, dtype in ((src, np.int64), (dst, np.int64), (rows, np.int32))
        ]
        target = 1 - origin
        self.board.call(
            "pc_cuda_convert", self.sides[origin].geometry, self.tables[origin].address,
            self.sides[target].geometry, self.tables[target].address, self.layers,
            *(each.address for each in lists), len(rows), most,
        )  # fmt: skip

    def convert_both(self, src: Any, dst: Any, rows: Any, origin: int) -> None:
        """Whole places or their first rows, on the device and natively; all bytes agree."""
        src, dst, rows = (np.asarray(each, np.int32) for each in (src, dst, rows))
        size = self.block_size
        self.convert(src.astype(np.int64) * size, dst.astype(np.int64) * size, rows, origin, size)
        self.native.copy(src, dst, rows)
        self.assert_equal()

    def send(self) -> None:
        """Bring the host's bytes to the device."""
        for side in self.sides:
            for copy in side.copies:
                copy.send()
