"""Ids, slots and copies inside their ranges, checked on arrays: for storages whose bytes are moved
elsewhere than in ``_native.rows``, which checks for itself. The errors are the same."""

from __future__ import annotations

import numpy as np

from pagedcache.errors import BlockError, InvalidPositionError, ShapeError, SlotError
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


def _first_outside(values: Array, low: int, end: int) -> int:
    if not len(values) or (values.min() >= low and values.max() < end):
        return -1
    return int(np.flatnonzero((values < low) | (values >= end))[0])
