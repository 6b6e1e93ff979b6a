"""Paged storage once more, slowly, in NumPy: which byte of which block every value becomes.

The oracle of the compiled storage, written without importing the package. A block is described
by a map from (head, token) to the indices of that row's bytes; storing a token, reading it and
copying it are then indexing and nothing else. Where scales run along the tokens a block is packed
and unpacked as a whole. A place is a block id, or the number of blocks and the index of an open
slot, which has rows of a float format.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import reference_formats as formats
from numpy.typing import NDArray

Array = NDArray[Any]
KINDS = ("k", "v")


def row_map(name: str, layout: str, heads: int, block_size: int, dim: int) -> tuple[Any, int]:
    """Return ({(head, token): byte indices in the block}, bytes of the block).

    The indices of a row are in the order in which ``row_bytes`` gives its bytes; where scales run
    along the tokens they are those of its quants alone.
    """
    if name in formats.BY_CHANNEL:
        data_nbytes, scale_nbytes = (dim + 1) // 2, 0
    else:
        data, scales = formats.encode_rows(name, np.zeros((1, dim), np.float32))
        data_nbytes, scale_nbytes = data.shape[1], scales.shape[1]
    if name in formats.DENSE or name not in formats.PLANAR:
        data_nbytes, scale_nbytes = data_nbytes + scale_nbytes, 0
    if layout == "HND":
        planes = [[(head, token) for token in range(block_size)] for head in range(heads)]
    else:
        planes = [[(head, token) for token in range(block_size) for head in range(heads)]]
    places: dict[tuple[int, int], list[int]] = {}
    end = 0
    for plane in planes:
        for row_nbytes in (data_nbytes, scale_nbytes):  # all data of the plane, then all scales
            for row in plane:
                places.setdefault(row, []).extend(range(end, end + row_nbytes))
                end += row_nbytes
            if name in formats.BY_CHANNEL and row_nbytes == scale_nbytes:
                end += -(-block_size // 32) * 4 * dim * len(plane) // block_size
            if name in formats.PLANAR:
                end += -end % 16
    return {row: np.array(places[row]) for row in places}, end


def row_bytes(name: str, x: Array) -> NDArray[np.uint8]:
    """Return the stored bytes of rows [n, dim] of a float dtype as uint8 [n, bytes]."""
    if x.dtype == formats.DENSE.get(name):
        return np.ascontiguousarray(x).view(np.uint8)  # no conversion: NaN payloads stay
    data, scales = formats.encode_rows(name, x.astype(np.float32))
    if name in formats.DENSE:
        return data
    if name in formats.PLANAR:
        return np.concatenate([data, scales], axis=1)
    return formats.interleaved(name, data, scales).reshape(len(x), -1)


def row_values(name: str, stored: NDArray[np.uint8], dim: int, dtype: Any) -> Array:
    """Return what uint8 [n, bytes] reads as: [n, dim] of ``dtype``."""
    if formats.DENSE.get(name) == dtype:
        return np.ascontiguousarray(stored).view(dtype)
    if name in formats.DENSE:
        data, scales = stored, np.zeros((len(stored), 0), np.uint8)
    else:
        quants, scale = formats.GROUP_BYTES[name]
        groups = -(-dim // 32)
        if name in formats.PLANAR:
            data, scales = stored[:, : groups * quants], stored[:, groups * quants :]
        else:
            split = stored.reshape(len(stored), groups, scale + quants)
            data = split[:, :, scale:].reshape(len(stored), -1)
            scales = split[:, :, :scale].reshape(len(stored), -1)
    with np.errstate(all="ignore"):
        return formats.decode_rows(name, data, scales, dim).astype(dtype)


def clamped(name: str, x: Array) -> NDArray[np.float32]:
    """What an open slot of the float format ``name`` takes for a quantised one: rows [n, dim],
    finite by groups of 32, within the range of the format."""
    rows, dim = x.shape
    groups, counts = formats.split_rows(x.astype(np.float32))
    finite = formats.saturated(groups, counts).reshape(rows, -1)[:, :dim]
    most = {"float32": 3.4028235e38, "float16": 65504.0, "bfloat16": 3.3895314e38}[name]
    return np.clip(finite, -np.float32(most), np.float32(most))


class ReferenceStorage:
    """K and V of ``num_blocks`` blocks as uint8 ``blocks[kind][layer, block, byte]``, and of
    ``num_open`` open slots in ``opened``, of the same shape."""

    def __init__(
        self,
        num_layers: int,
        heads: int,
        dim: int,
        block_size: int,
        k_format: str,
        v_format: str,
        layout: str,
        num_blocks: int,
        num_open: int = 0,
        open_format: str = "float16",
    ) -> None:
        self.num_layers, self.heads, self.dim, self.block_size = num_layers, heads, dim, block_size
        self.num_blocks, self.num_open, self.layout = num_blocks, num_open, layout
        self.formats = {"k": k_format, "v": v_format}
        self.open_formats = {
            kind: name if name in formats.DENSE else open_format
            for kind, name in self.formats.items()
        }
        self.maps: dict[str, Any] = {}
        self.open_maps: dict[str, Any] = {}
        self.blocks: dict[str, NDArray[np.uint8]] = {}
        self.opened: dict[str, NDArray[np.uint8]] = {}
        for kind in KINDS:
            size = layout, heads, block_size, dim
            self.maps[kind], nbytes = row_map(self.formats[kind], *size)
            self.blocks[kind] = np.zeros((num_layers, num_blocks, nbytes), np.uint8)
            self.open_maps[kind], nbytes = row_map(self.open_formats[kind], *size)
            self.opened[kind] = np.zeros((num_layers, num_open, nbytes), np.uint8)

    # ---- one block ---------------------------------------------------------------------

    def where(self, kind: str, place: int) -> tuple[str, Any, NDArray[np.uint8], bool]:
        """(format, map, bytes [layer, byte] of the block, whether it stands in for a quantised
        format) of a place."""
        if place < self.num_blocks:
            return self.formats[kind], self.maps[kind], self.blocks[kind][:, place], False
        stands_in = self.formats[kind] not in formats.DENSE
        block = self.opened[kind][:, place - self.num_blocks]
        return self.open_formats[kind], self.open_maps[kind], block, stands_in

    def by_channel(self, kind: str, place: int) -> bool:
        """Whether scales run along the tokens there."""
        return place < self.num_blocks and self.formats[kind] in formats.BY_CHANNEL

    def write(self, layer: int, kind: str, place: int, first: int, x: Array) -> None:
        """Store rows [n, heads, dim] from token ``first`` on."""
        name, rows, block, stands_in = self.where(kind, place)
        if self.by_channel(kind, place):
            assert (first, len(x)) == (0, self.block_size), "written whole or not at all"
            block[layer] = formats.pack_block(name, self.layout, x.astype(np.float32))
            return
        flat = x.reshape(-1, self.dim)
        with np.errstate(all="ignore"):
            stored = row_bytes(name, clamped(name, flat) if stands_in else flat)
        stored = stored.reshape(len(x), self.heads, -1)
        for token in range(len(x)):
            for head in range(self.heads):
                block[layer, rows[head, first + token]] = stored[token, head]

    def read(self, layer: int, kind: str, place: int, dtype: Any = np.float32) -> Array:
        """All rows of a block, [block_size, heads, dim]."""
        name, rows, block, _ = self.where(kind, place)
        order = [(head, token) for token in range(self.block_size) for head in range(self.heads)]
        stored = np.array([block[layer, rows[row]] for row in order])
        if self.by_channel(kind, place):
            values = self._unpacked(stored, rows, block[layer])
            with np.errstate(all="ignore"):
                return values.astype(dtype)
        values = row_values(name, stored, self.dim, dtype)
        return values.reshape(self.block_size, self.heads, self.dim)

    def _unpacked(self, stored: Array, rows: Any, block: NDArray[np.uint8]) -> Array:
        """The rows of a block whose scales follow, padded to 16, the quants of their plane."""
        nibbles = stored.reshape(self.block_size, self.heads, -1)
        groups = -(-self.block_size // 32)
        nbytes = groups * self.dim * 4
        heads = []
        for head in range(self.heads):
            last = self.heads - 1 if self.layout == "NHD" else head
            end = int(rows[last, self.block_size - 1][-1]) + 1
            start = end + -end % 16 + (head * nbytes if self.layout == "NHD" else 0)
            scales = block[start : start + nbytes].reshape(groups, self.dim, 4)
            heads.append(formats.decode_channels(nibbles[:, head], scales, self.dim))
        return np.stack(heads, axis=1)

    # ---- the storage -------------------------------------------------------------------

    def store(self, layer: int, k: Array, v: Array, slots: Any) -> None:
        """Store rows [n, heads, dim] at slots; -1 skips; non-finite values saturate."""
        for kind, x in zip(KINDS, (k, v), strict=True):
            token = 0
            while token < len(slots):
                place, offset = divmod(int(slots[token]), self.block_size)
                count = self.block_size if self.by_channel(kind, max(place, 0)) else 1
                if slots[token] < 0:
                    count = 1
                else:
                    self.write(layer, kind, place, offset, x[token : token + count])
                token += count

    def gather(self, layer: int, kind: str, slots: Any, dtype: Any) -> Array:
        """Return the rows at slots as [n, heads, dim] of ``dtype``."""
        blocks: dict[int, Array] = {}
        out = np.empty((len(slots), self.heads, self.dim), dtype)
        for row, slot in zip(out, map(int, slots), strict=True):
            place, offset = divmod(slot, self.block_size)
            if place not in blocks:
                blocks[place] = self.read(layer, kind, place, dtype)
            row.view(f"u{out.itemsize}")[:] = blocks[place][offset].view(f"u{out.itemsize}")
        return out

    def copy_tokens(self, src: Any, dst: Any) -> None:
        """Copy tokens slot to slot in every layer, one pair after the other."""
        for source, target in zip(map(int, src), map(int, dst), strict=True):
            (b, o), (c, p) = divmod(source, self.block_size), divmod(target, self.block_size)
            self._copy_rows(b, o, c, p, 1)

    def copy_blocks(self, src: Any, dst: Any, rows: Any) -> None:
        """Copy the first token rows of blocks; all of them copies every byte."""
        for source, target, count in zip(map(int, src), map(int, dst), map(int, rows), strict=True):
            self._copy_rows(source, 0, target, 0, count)

    def _copy_rows(self, b: int, o: int, c: int, p: int, count: int) -> None:
        for kind in KINDS:
            here, there = self.where(kind, b), self.where(kind, c)
            same = (b < self.num_blocks) == (c < self.num_blocks)
            if same and count == self.block_size:
                there[2][:] = here[2].copy()
            elif count and (same or here[0] == there[0]):
                assert not self.by_channel(kind, c)
                moved = [
                    (there[1][head, p + i], here[2][:, here[1][head, o + i]].copy())
                    for head in range(self.heads) for i in range(count)
                ]  # fmt: skip
                for place, row in moved:
                    there[2][:, place] = row
            elif count:
                for layer in range(self.num_layers):
                    self.write(layer, kind, c, p, self.read(layer, kind, b)[o : o + count])

    def move_blocks(self, moves: Any) -> None:
        """Move whole blocks in order; -1 is a scratch block."""
        scratch: dict[str, Any] = {}
        for source, target in moves:
            for kind in KINDS:
                moved = scratch[kind] if source < 0 else self.blocks[kind][:, source].copy()
                if target < 0:
                    scratch[kind] = moved
                else:
                    self.blocks[kind][:, target] = moved
