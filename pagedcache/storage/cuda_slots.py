"""Host slots on their way to a CUDA device, sorted by how what lies there is stored.

Rows go to sealed blocks and to open slots by launches of their own, each with a list of all tokens
in which the others' slots are -1. Blocks whose groups run along the tokens are listed whole.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pagedcache._cuda.scratch import Region
from pagedcache._cuda.staging import Staging
from pagedcache._cuda.streams import Stream
from pagedcache.storage.slabs import Array


class SlotLists(NamedTuple):
    """What of a slot mapping is uploaded; int64 each, None where there is nothing of it."""

    rows: Array | None
    """Slots of sealed blocks that are stored row by row, ``[num_tokens]``."""
    blocks: Array | None
    """Sealed blocks that are stored whole: ``[n, 2]`` of (first token, block id)."""
    opened: Array | None
    """Slots of open blocks, ``[num_tokens]``."""


def sorted_slots(
    slots: Array, num_blocks: int, block_size: int, by_row: bool, whole: bool
) -> SlotLists:
    """Sort checked slots. ``by_row``, ``whole``: how sealed blocks of K or V are stored (both,
    where they differ)."""
    end = num_blocks * block_size
    is_open = slots >= end
    is_sealed = (slots >= 0) & ~is_open
    any_open, any_sealed = bool(is_open.any()), bool(is_sealed.any())
    rows = blocks = opened = None
    if any_open:
        opened = np.where(is_open, slots, -1) if any_sealed else slots
    if any_sealed and by_row:
        rows = np.where(is_sealed, slots, -1) if any_open else slots
    if any_sealed and whole:
        first = np.flatnonzero(is_sealed & (slots % block_size == 0))
        blocks = np.stack([first, slots[first] // block_size], axis=1)
    return SlotLists(rows, blocks, opened)


class DeviceSlots:
    """A slot mapping on the device: addresses of its lists (None where there are none), and the
    places that it names."""

    __slots__ = ("blocks", "num_whole", "opened", "places", "queue", "region", "rows")

    def __init__(self, lists: SlotLists, places: Array, staging: Staging, queue: Stream) -> None:
        self.places, self.queue = places, queue
        self.num_whole = 0 if lists.blocks is None else len(lists.blocks)
        parts = [part.reshape(-1) for part in lists if part is not None]
        joined = parts[0] if len(parts) == 1 else np.concatenate([*parts, np.empty(0, np.int64)])
        self.region: Region = staging.upload(joined, queue)
        at = self.region.address
        addresses: list[Any] = []
        for part in lists:
            addresses.append(None if part is None else at)
            at += 0 if part is None else part.nbytes
        self.rows, self.blocks, self.opened = addresses
