"""Rows out of scattered blocks into device arrays, contiguous and in token order."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from ..rows import Options, Row, measure
from ..store import make_cache, scattered
from .machine import Machine, check
from .torch_peer import gather_peer


def rows(options: Options) -> Iterator[Row]:
    """Every format and layout into float32 (and 16 bits as they are); peer: torch."""
    with Machine(options) as machine:
        tokens = machine.fitting(options.tokens)
        for name in options.formats:
            for layout in ("HND", "NHD"):
                yield from _one(options, machine, name, layout, tokens)


def _one(
    options: Options, machine: Machine, name: str, layout: str, tokens: int
) -> Iterator[Row]:
    with make_cache(name, layout, tokens, machine.name) as cache:
        (seq,) = scattered(cache, 1, tokens)
        k, v = machine.rows(tokens, np.dtype(np.float32))
        seq.append(0, k, v)
        seq.commit(tokens)
        row = cache.spec.k_format
        outputs = [np.dtype(np.float32)]
        if not row.is_quantized and name != "float32":
            outputs.append(row.dtype)
        for dtype in outputs:
            out = machine.empty(k.shape, dtype), machine.empty(v.shape, dtype)
            seq.gather(0, out=out)
            check(out[0], k, f"gather of {name}")
            moved = int(2 * k.size * row.bytes_per_value) + out[0].nbytes + out[1].nbytes
            timers = {
                "ours": machine.timer(partial(seq.gather, 0, out=out)),
                "copy": machine.copy(moved // 2),
            }
            if not row.is_quantized:
                timers |= gather_peer(machine, cache, np.array(seq.block_table), dtype)
            variant = f"{layout}→{dtype.name}, {tokens} tokens"
            yield from measure(
                "gather", variant, name, k.nbytes + v.nbytes, tokens, timers, options.runs, moved,
                moved // 2,
            )
