"""Whole blocks: the copies of copy-on-write and of partial hits, the moves of defragmentation, and
open blocks that are sealed and reopened."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from ..rows import Options, Row, measure
from ..store import BLOCK_SIZE, make_cache
from .machine import Machine

LAYERS = 4  # one launch serves them all


def rows(options: Options) -> Iterator[Row]:
    """Many blocks and one, every format; a block counts with K and V of all layers."""
    with Machine(options) as machine:
        tokens = machine.fitting(options.tokens)
        count = max(1, tokens // (BLOCK_SIZE * LAYERS))
        for name in options.formats:
            for number in dict.fromkeys((count, 1)):
                yield from _one(options, machine, name, number)


def _one(options: Options, machine: Machine, name: str, count: int) -> Iterator[Row]:
    room = count * BLOCK_SIZE  # and as much again, to copy to
    with make_cache(name, "HND", room, machine.name, LAYERS) as cache:
        storage, queue = cache._storage, cache._storage.queue(None)
        order = np.random.default_rng(1).permutation(2 * count).astype(np.int32)
        src, dst = order[:count], order[count:]
        whole, half = (np.full(count, rows, np.int32) for rows in (BLOCK_SIZE, BLOCK_SIZE // 2))
        moves = np.stack([src, dst], axis=1)
        size = count * cache.spec.block_nbytes
        copy = storage.copy_blocks
        measured = [
            ("copy-on-write", 2 * size, partial(copy, src, dst, whole, queue)),
            ("move", 2 * size, partial(storage.move_blocks, moves, queue)),
        ]
        if cache.spec.k_format.group_axis != "tokens":  # of those no part can be copied
            measured.insert(1, ("copy half of", size, partial(copy, src, dst, half, queue)))
        if storage.num_open:
            opened = storage.num_blocks + np.arange(count, dtype=np.int32)
            both = size + count * cache.spec.open_block_nbytes
            storage.fill_blocks(opened, 0x3C)  # finite values
            measured += [
                ("seal", both, partial(copy, opened, dst, whole, queue)),
                ("reopen", both, partial(copy, dst, opened, whole, queue)),
            ]
        for what, moved, function in measured:
            timers = {"ours": machine.timer(function), "copy": machine.copy(moved // 2)}
            variant = f"{what} {count} block{'s' * (count > 1)}"
            yield from measure(
                "blocks", variant, name, size, count, timers, options.runs, moved, moved // 2
            )
