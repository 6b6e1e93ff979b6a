"""Places, slots and copies inside their ranges, checked on arrays: for storages whose bytes are
moved elsewhere than in ``_native.rows``, which checks for itself. The errors are the same."""

from __future__ import annotations

import numpy as np

from pagedcache.errors import (
    BlockError,
    FormatError,
    InvalidPositionError,
    ShapeError,
    SlotError,
)
from pagedcache.storage.slabs import Array


def check_slots(slots: Array, num_slots: int, low: int = -1) -> None:
    """Raise :class:`SlotError` for the first slot outside ``low … num_slots - 1``."""
    index = _first_outside(slots, low, num_slots)
    if index >= 0:
        reason = f"outside {low}…{num_slots - 1} (index {index} of the mapping)"
        raise SlotError(int(slots[index]), reason)


def check_ids(ids: Array, num_blocks: int, low: int = 0) -> None:
    """Raise :class:`BlockError` for the first id outside ``low … num_blocks - 1``."""
    index = _first_outside(ids, low, num_blocks)
    if index >= 0:
        raise BlockError(int(ids[index]), f"outside {low}…{num_blocks - 1} (index {index})")


def check_whole(slots: Array, num_blocks: int, block_size: int) -> None:
    """Raise :class:`SlotError` unless slots of sealed blocks are all those of a block, in order:
    for formats whose groups run along the tokens. The slots are in range."""
    sealed = (slots >= 0) & (slots < num_blocks * block_size)
    offsets = slots % block_size
    follows = np.empty(len(slots) + 1, bool)  # the slot after the one before it in the mapping
    follows[1:-1] = slots[1:] == slots[:-1] + 1
    follows[:1] = follows[-1:] = False
    begun = (offsets == 0) | follows[:-1]
    ended = (offsets == block_size - 1) | follows[1:]
    index = _first(sealed & ~(begun & ended))
    if index >= 0:
        # Of a block that breaks off later on, the first slot is the one to name.
        index -= int(offsets[index]) if begun[index] else 0
        reason = (
            "a block whose scales run along its tokens is written whole: all "
            f"{block_size} slots of it, in order (index {index} of the mapping)"
        )
        raise SlotError(int(slots[index]), reason)


def check_whole_copies(dst: Array, rows: Array, num_blocks: int, block_size: int) -> None:
    """Raise :class:`InvalidPositionError` for a copy of a part of a block into a sealed one, for
    formats whose groups run along the tokens."""
    index = _first((rows > 0) & (rows < block_size) & (dst < num_blocks))
    if index >= 0:
        reason = (
            f"token rows of copy {index}: a block whose scales run along its tokens is written "
            "whole"
        )
        raise InvalidPositionError(int(rows[index]), block_size, reason)


def check_open_targets(dst: Array, num_blocks: int, block_size: int) -> None:
    """Raise :class:`FormatError` for a token copied into a sealed block, for such formats."""
    index = _first(dst < num_blocks * block_size)
    if index >= 0:
        expected = "an open block, or copies of whole blocks, as scales run along the tokens"
        got = f"slot {int(dst[index])} of a sealed block"
        raise FormatError(expected, got, f"dst of copy {index}")


def check_copies(src: Array, dst: Array, rows: Array, num_blocks: int, block_size: int) -> None:
    """Raise unless ``rows[i]`` token rows of block ``src[i]`` may be copied to ``dst[i]``."""
    check_lengths(len(src), len(dst), "src and dst")
    check_lengths(len(src), len(rows), "src and rows")
    check_ids(src, num_blocks)
    check_ids(dst, num_blocks)
    index = _first_outside(rows, 0, block_size + 1)
    if index >= 0:
        raise InvalidPositionError(int(rows[index]), block_size, f"token rows of copy {index}")


def check_lengths(first: int, second: int, what: str) -> None:
    """Raise :class:`ShapeError` unless the lengths are the same."""
    if first != second:
        raise ShapeError(f"{what} of one length", [first, second], "copies")


def overlaps_itself(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether two elements of an array may share a byte (a stride of 0, say)."""
    room = itemsize
    for stride, extent in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True)):
        if extent > 1:
            if stride < room:
                return True
            room = stride * (extent - 1) + room
    return False


def independent(src: Array, dst: Array) -> bool:
    """Whether no dst is another pair's src or dst, so that the pairs may run in any order."""
    if len(src) == 1:
        return bool(src[0] != dst[0])
    return len(np.unique(dst)) == len(dst) and not np.isin(dst, src).any()


def _first(wrong: Array) -> int:
    found = np.flatnonzero(wrong)
    return int(found[0]) if len(found) else -1


def _first_outside(values: Array, low: int, end: int) -> int:
    if not len(values) or (values.min() >= low and values.max() < end):
        return -1
    return int(np.flatnonzero((values < low) | (values >= end))[0])
