"""Pointer tables of a sequence: built, asked for again unchanged, and grown by one block.

Sizes are bytes of a table, items its blocks: blocks x layers x 2 pointers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..rows import Options, Row, measure
from ..store import BLOCK_SIZE, make_cache
from ..timing import Timer, staged
from .machine import Machine

LAYERS = 32  # one kernel writes them all
_BLOCKS = 512


def rows(options: Options) -> Iterator[Row]:
    """The host's time until the table is right on the device; peer: an upload of as many bytes."""
    name = options.formats[0]
    blocks = max(2, min(_BLOCKS, options.tokens // BLOCK_SIZE))
    tokens = blocks * BLOCK_SIZE
    with Machine(options) as machine, make_cache(
        name, "HND", tokens, machine.name, LAYERS
    ) as cache:
        seq = cache.open(np.zeros(tokens, np.uint32))
        host = np.zeros((LAYERS, 2, blocks), np.uint64)
        target = machine.empty(host.shape, host.dtype)

        def build() -> None:
            twin = seq.fork()  # has no table yet
            twin.layer_device_ptr_tables(0)
            twin.free()
            machine.device.synchronize()

        def again() -> None:
            seq.layer_device_ptr_tables(LAYERS - 1)
            machine.device.synchronize()

        def upload() -> None:
            storage = cache._storage
            storage._staging.write(target.address, host, storage.queue(None))
            machine.device.synchronize()

        def shrink() -> None:
            seq.truncate(tokens - BLOCK_SIZE)
            seq.layer_device_ptr_tables(0)
            seq.prepare(tokens - seq.seq_len)
            machine.device.synchronize()

        _check(seq)
        peer = staged(_nothing, upload)
        for what, timer in (
            ("build", staged(_nothing, build)),
            ("unchanged", staged(_nothing, again)),
            ("one block more", staged(shrink, again)),
        ):
            timers: dict[str, Timer] = {"ours": timer, "upload": peer}
            variant = f"{what}, {blocks} x {LAYERS} layers"
            yield from measure(
                "tables", variant, None, 16 * LAYERS * blocks, blocks, timers, options.runs
            )


def _nothing() -> None:
    """Nothing to prepare."""


def _check(seq: Any) -> None:
    for layer in (0, LAYERS - 1):
        ours, want = seq.layer_device_ptr_tables(layer), seq.layer_block_ptr_tables(layer)
        if not (
            np.array_equal(np.asarray(ours.k), want.k)
            and np.array_equal(np.asarray(ours.v), want.v)
        ):
            raise AssertionError("a pointer table is wrong: not timed")
