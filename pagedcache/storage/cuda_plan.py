"""How the work of a call of attention is cut into items for CTAs (cuda/abi_attention.h).

An item is up to ``ROWS`` queries and query heads that share a KV head, and a range of keys. Where
there are fewer items than the GPU takes at once, keys are split, and the CTA that is last adds the
parts up. Splits depend on the whole batch and on the GPU, so the last bits of results may, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pagedcache._cuda.attention import ITEM, ROWS
from pagedcache.storage.attention import AttentionBatch

Array = np.ndarray[Any, Any]

#: Keys of a tile of the kernel; its warps take one each.
_TILE = 16
#: Fewer keys are no part of their own: adding parts up would take as long as they do.
LEAST_KEYS = 128
#: More parts would be more to add up for the one CTA that is last.
MOST_PARTS = 256
_MOST_KEYS = 1 << 30


class Plan(NamedTuple):
    """The items of a call, and of how many parts and tickets they tell, per KV head."""

    items: Array
    num_parts: int
    num_tickets: int


def plan(
    batch: AttentionBatch,
    *,
    block_size: int,
    num_heads: int,
    group: int,
    causal: bool,
    window: int | None,
    num_ctas: int,
) -> Plan:
    """Cut the work of a batch into items for about ``num_ctas`` CTAs, one per item and KV head.

    ``group``: query heads of a KV head. Every query has an item, also one without keys.
    """
    seq, row, rows = _tiles(batch.q_lens * group)
    length, position = batch.lengths[seq], (batch.lengths - batch.q_lens)[seq]
    begin, end = batch.starts[seq], length
    if causal:
        end = np.minimum(end, position + (row + rows - 1) // group + 1)
    if window is not None:
        begin = np.maximum(begin, position + row // group - (window - 1))
    end = np.maximum(end, begin)
    first, step, parts = _split(begin, end, block_size, num_heads, num_ctas)

    tile = np.repeat(np.arange(len(seq)), parts)
    number = np.arange(len(tile)) - np.repeat(np.cumsum(parts) - parts, parts)
    low = np.maximum(begin[tile], first[tile] + number * step[tile])
    high = np.minimum(end[tile], first[tile] + (number + 1) * step[tile])
    block = low // block_size
    moved = block * block_size
    split = parts > 1
    first_part = np.cumsum(np.where(split, parts, 0)) - np.where(split, parts, 0)

    items = np.empty(len(tile), ITEM)
    items["table"] = batch.indptr[seq[tile]] + block
    items["position"] = position[tile] - moved
    items["token"] = (np.cumsum(batch.q_lens) - batch.q_lens)[seq[tile]]
    items["begin"], items["end"] = low - moved, high - moved
    items["row"], items["rows"] = row[tile], rows[tile]
    items["parts"], items["first_part"] = parts[tile], first_part[tile]
    items["part"] = first_part[tile] + number
    items["ticket"] = (np.cumsum(split) - split)[tile]
    return Plan(items, int(parts[split].sum()), int(split.sum()))


def _tiles(num_rows: Array) -> tuple[Array, Array, Array]:
    """(sequence, first row, rows) of each tile of rows."""
    tiles = -(-num_rows // ROWS)
    seq = np.repeat(np.arange(len(num_rows)), tiles)
    row = (np.arange(len(seq)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * ROWS
    return seq, row, np.minimum(ROWS, num_rows[seq] - row)


def _split(
    begin: Array, end: Array, block_size: int, num_heads: int, num_ctas: int
) -> tuple[Array, Array, Array]:
    """(where the first part begins, keys from part to part, parts) of each tile."""
    unit = block_size * -(-_TILE // block_size)  # a part begins with a block
    count = end - begin
    wanted = max(LEAST_KEYS, -(-int(count.sum()) * num_heads // num_ctas))
    parts = np.clip(np.rint(count / wanted), 1, MOST_PARTS).astype(np.int64)
    parts = np.maximum(parts, -(-count // _MOST_KEYS))
    first = begin // unit * unit
    step = np.maximum(-(-(end - first) // (parts * unit)), 1) * unit
    return first, step, np.maximum(-(-(end - first) // step), 1)
