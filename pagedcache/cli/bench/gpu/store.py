"""Rows on the device into scattered blocks: a prefill, and one token for each of many sequences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..rows import Options, Row, measure
from ..store import BATCH, BLOCK_SIZE, SOURCES, make_cache, scattered, stored_nbytes
from .machine import Machine, check
from .torch_peer import store_peer


def rows(options: Options) -> Iterator[Row]:
    """Every source dtype into every format and layout; peer: torch's indexed assignment."""
    with Machine(options) as machine:
        tokens = machine.fitting(options.tokens)
        for name in options.formats:
            for layout in ("HND", "NHD"):
                yield from _prefill_and_decode(options, machine, name, layout, tokens)


def _prefill_and_decode(
    options: Options, machine: Machine, name: str, layout: str, tokens: int
) -> Iterator[Row]:
    for what, num_seqs, each in (("prefill", 1, tokens), ("decode", min(BATCH, tokens), 1)):
        # One sequence per decode token, each with a block of its own.
        room = num_seqs * max(each, BLOCK_SIZE)
        with make_cache(name, layout, room, machine.name) as cache:
            seqs = scattered(cache, num_seqs, each)
            slots = cache.prepare(seqs, [each] * num_seqs)
            for source in SOURCES:
                variant = f"{source.name}, {layout}, {what} {num_seqs * each}"
                yield from _one(options, machine, cache, seqs, slots, source, variant)


def _one(
    options: Options, machine: Machine, cache: Any, seqs: list[Any], slots: Any, source: Any,
    variant: str,
) -> Iterator[Row]:
    spec, count = cache.spec, len(slots)
    k, v = machine.rows(count, source)
    cache.store(0, k, v, slots)
    got, _ = seqs[0].gather(0, 0, count // len(seqs), dtype=np.float32)
    check(got, k[: len(got)], f"store of {spec.k_format.name}")
    stored = stored_nbytes(cache, count)
    moved = k.nbytes + v.nbytes + stored
    timers = {
        "ours": machine.timer(lambda: cache.store(0, k, v, slots)),
        "copy": machine.copy(moved // 2),
    }
    if not spec.k_format.is_quantized:
        timers |= store_peer(machine, cache, np.asarray(slots), source)
    yield from measure(
        "store", variant, spec.k_format.name, k.nbytes + v.nbytes, count, timers, options.runs,
        moved, moved // 2,
    )
