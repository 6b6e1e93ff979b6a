"""Paged storage once more, slowly, in NumPy: which byte of which block every value becomes.

The oracle of the compiled storage, written without importing the package. A block is described
by a map from (head, token) to the indices of that row's bytes; storing a token, reading it and
copying it are then indexing and nothing else.
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

    The indices of a row are in the order in which ``row_bytes`` gives its bytes.
    """
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


class ReferenceStorage:
    """K and V of ``num_blocks`` blocks as uint8 ``blocks[kind][layer, block, byte]``."""

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
    ) -> None:
        self.num_layers, self.heads, self.dim, self.block_size = num_layers, heads, dim, block_size
        self.formats = {"k": k_format, "v": v_format}
        self.maps: dict[str, Any] = {}
        self.blocks: dict[str, NDArray[np.uint8]] = {}
        for kind in KINDS:
            self.maps[kind], nbytes = row_map(self.formats[kind], layout, heads, block_size, dim)
            self.blocks[kind] = np.zeros((num_layers, num_blocks, nbytes), np.uint8)

    def store(self, layer: int, k: Array, v: Array, slots: Any) -> None:
        """Store rows [n, heads, dim] at slots; -1 skips; non-finite values saturate."""
        if len(slots) == 0:
            return
        for kind, x in zip(KINDS, (k, v), strict=True):
            stored = row_bytes(self.formats[kind], x.reshape(-1, self.dim))
            stored = stored.reshape(len(slots), self.heads, -1)
            for token, slot in enumerate(slots):
                if slot >= 0:
                    block, offset = divmod(int(slot), self.block_size)
                    for head in range(self.heads):
                        place = self.maps[kind][head, offset]
                        self.blocks[kind][layer, block, place] = stored[token, head]

    def gather(self, layer: int, kind: str, slots: Any, dtype: Any) -> Array:
        """Return the rows at slots as [n, heads, dim] of ``dtype``."""
        rows = [
            self.blocks[kind][layer, slot // self.block_size][
                self.maps[kind][head, slot % self.block_size]
            ]
            for slot in map(int, slots)
            for head in range(self.heads)
        ]
        if not rows:
            return np.empty((0, self.heads, self.dim), dtype)
        values = row_values(self.formats[kind], np.array(rows), self.dim, dtype)
        return values.reshape(-1, self.heads, self.dim)

    def copy_tokens(self, src: Any, dst: Any) -> None:
        """Copy tokens slot to slot in every layer, one pair after the other."""
        for kind in KINDS:
            for source, target in zip(map(int, src), map(int, dst), strict=True):
                (b, o), (c, p) = divmod(source, self.block_size), divmod(target, self.block_size)
                for head in range(self.heads):
                    here, there = self.maps[kind][head, o], self.maps[kind][head, p]
                    self.blocks[kind][:, c, there] = self.blocks[kind][:, b, here]

    def copy_blocks(self, src: Any, dst: Any, rows: Any) -> None:
        """Copy the first token rows of blocks; all of them copies every byte."""
        for source, target, count in zip(src, dst, rows, strict=True):
            if count == self.block_size:
                for kind in KINDS:
                    self.blocks[kind][:, target] = self.blocks[kind][:, source]
            else:
                offsets = np.arange(count)
                self.copy_tokens(
                    source * self.block_size + offsets, target * self.block_size + offsets
                )

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
