"""The attention kernel called by itself: items made by hand, one launch, results on the host."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from attentionkit import Options
from kernelkit import Array, Board, Place, bits

from pagedcache._cuda.attention import ITEM, ROWS, Call, Slab, partial_nbytes
from pagedcache.formats import get_format


@dataclass
class Query:
    """A sequence's queries ``[queries, query heads, channels]``, and the blocks of its keys."""

    q: Array
    length: int
    block_ids: Sequence[int]
    start: int = 0


@dataclass
class Answer:
    out: Array
    lse: Array


def items_of(
    queries: Iterable[Query], options: Options, group: int, block_size: int, split: int
) -> tuple[Array, int, int]:
    """(items, parts, tickets): keys are split every ``split`` blocks; 0: not at all."""
    items: list[tuple[int, ...]] = []
    table = token = parts = tickets = 0
    for query in queries:
        num_queries = len(query.q)
        first_position = query.length - num_queries
        for row in range(0, num_queries * group, ROWS):
            rows = min(ROWS, num_queries * group - row)
            end = query.length
            if options.causal:
                end = min(end, first_position + (row + rows - 1) // group + 1)
            start = query.start
            if options.window is not None:
                start = max(start, first_position + row // group - options.window + 1)
            pieces = pieces_of(start, end, block_size, split)
            for number, (low, high) in enumerate(pieces):
                block = low // block_size
                moved = block * block_size
                items.append(
                    (table + block, first_position - moved, token, low - moved, high - moved, row,
                     rows, len(pieces), parts, parts + number, tickets)
                )  # fmt: skip
            if len(pieces) > 1:
                parts += len(pieces)
                tickets += 1
        table += len(query.block_ids)
        token += num_queries
    return np.array(items, ITEM), parts, tickets


def pieces_of(start: int, end: int, block_size: int, split: int) -> list[tuple[int, int]]:
    if end <= start:
        return [(0, 0)]
    if not split:
        return [(start, end)]
    step = split * block_size
    cuts = [start, *range((start // step + 1) * step, end, step), end]
    return list(zip(cuts, cuts[1:], strict=False))


def run(
    k: Place,
    v: Place,
    queries: Sequence[Query],
    options: Options,
    *,
    split: int = 0,
    pointers: bool = False,
    layer: int = 0,
    open_places: tuple[Place, Place] | None = None,
    q: Array | None = None,
    out: Array | None = None,
    order: Array | None = None,
) -> Answer:
    """Attention of all ``queries`` in one launch.

    ``q``, ``out``: arrays of any strides to use instead of dense ones. ``order``: of the items.
    ``open_places``: slabs of open slots; ids from ``k.num_blocks`` on are theirs.
    """
    board: Board = k.board
    rows = np.concatenate([query.q for query in queries])
    if q is None:
        q = rows
    q[...] = rows
    out = np.full_like(rows, 77) if out is None else out
    lse = np.full(rows.shape[:2], 77, np.float32)
    group = rows.shape[1] // k.heads
    items, parts, tickets = items_of(queries, options, group, k.block_size, split)
    if order is not None:
        items = items[order]
    ids = np.concatenate([np.asarray(query.block_ids, np.int32) for query in queries])
    call = Call()
    call.k, call.v = slab_of(k, layer), slab_of(v, layer)
    call.num_blocks = k.num_blocks
    sent = {"items": board.copy(items), "ids": board.copy(ids)}
    if open_places is not None:
        call.open_k, call.open_v = (
            slab_of(place, layer, moved=k.num_blocks) for place in open_places
        )
    if not pointers or open_places is not None:
        call.places = sent["ids"].address
    if pointers:
        for name, place in zip(("k_pointers", "v_pointers"), (k, v), strict=True):
            where = open_places[name[0] == "v"] if open_places is not None else None
            addresses = np.array([address_of(place, where, layer, int(i)) for i in ids], np.uint64)
            sent[name] = board.copy(addresses)
            setattr(call, name, sent[name].address)
    call.items, call.num_items, call.group = sent["items"].address, len(items), group
    sent["q"], sent["out"], sent["lse"] = board.copy(q), board.copy(out), board.copy(lse)
    call.q, call.out, call.lse = sent["q"].address, sent["out"].address, sent["lse"].address
    call.q_strides[:], call.out_strides[:] = q.strides, out.strides
    call.dtype = get_format(rows.dtype.name).code
    call.window = options.window or 0
    call.causal = options.causal
    call.soft_cap = options.soft_cap or 0.0
    call.scale = 1 / np.sqrt(k.dim) if options.scale is None else options.scale
    if options.sinks is not None:
        sent["sinks"] = board.copy(np.asarray(options.sinks, np.float32))
        call.sinks = sent["sinks"].address
    count = partial_nbytes(board.device.library, k.dim) * max(parts, 1) * k.heads
    sent["partials"] = board.copy(np.full(count // 4, np.nan, np.float32))
    sent["tickets"] = board.copy(np.zeros(max(tickets, 1) * k.heads, np.uint32))
    call.partials, call.tickets = sent["partials"].address, sent["tickets"].address
    board.call("pc_cuda_attend", ctypes.byref(call))
    sent["out"].fetch()
    sent["lse"].fetch()
    sent["tickets"].fetch()
    assert not sent["tickets"].array.any()  # as they were found
    return Answer(out, lse)


def slab_of(place: Place, layer: int, moved: int = 0) -> Slab:
    """A slab; ``moved``: places before the first of its blocks."""
    base = place.bases[layer] - moved * place.stride
    address = ctypes.cast(place.geometry, ctypes.c_void_p)
    return Slab(address, base % 2**64, place.stride)


def address_of(place: Place, opened: Place | None, layer: int, block: int) -> int:
    if opened is not None and block >= place.num_blocks:
        return int(opened.bases[layer] + (block - place.num_blocks) * opened.stride)
    return int(place.bases[layer] + block * place.stride)


def stored(place: Place, query: Query, opened: Place | None = None, layer: int = 0) -> Array:
    """The values of a sequence's keys as the CPU reads them, float32 ``[length, heads, dim]``."""
    parts = []
    for index, block in enumerate(query.block_ids):
        count = min(place.block_size, query.length - index * place.block_size)
        if count <= 0:
            break
        out = np.zeros((count, place.heads, place.dim), np.float32)
        where = place
        if opened is not None and block >= place.num_blocks:
            where, block = opened, block - place.num_blocks
        where.native.load(layer, np.array([block], np.int32), 0, bits(out), 0)
        parts.append(out)
    return np.concatenate(parts)
