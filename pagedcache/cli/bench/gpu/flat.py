"""Conversion alone: consecutive rows into consecutive slots and back, nothing scattered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np

from ..rows import Options, Row, measure
from ..store import make_cache
from .machine import TOKEN_NBYTES, Machine, check


def flat_rows(options: Options, op: str, formats: Iterable[str]) -> Iterator[Row]:
    """float32 to each format and back at every size of ``options``, in whole tokens."""
    names = list(formats)
    for size in options.sizes:
        with Machine(options) as machine:
            tokens = machine.fitting(max(1, size // TOKEN_NBYTES))
            for name in names:
                yield from _one(options, machine, op, name, tokens)


def _one(options: Options, machine: Machine, op: str, name: str, tokens: int) -> Iterator[Row]:
    with make_cache(name, "NHD", tokens, machine.name) as cache:
        seq = cache.open()  # the first blocks of an empty pool follow one another
        slots = seq.prepare(tokens)
        k, v = machine.rows(tokens, np.dtype(np.float32))
        out = machine.empty(k.shape, k.dtype), machine.empty(v.shape, v.dtype)
        encode = partial(cache.store, 0, k, v, slots)
        decode = partial(seq.gather, 0, 0, tokens, out=out)
        encode()
        decode()
        check(out[0], k, f"{op} of {name}")
        size = tokens * TOKEN_NBYTES
        moved = size + int(2 * k.size * cache.spec.k_format.bytes_per_value)
        for variant, function in ((f"f32→{name}", encode), (f"{name}→f32", decode)):
            timers = {"ours": machine.timer(function), "copy": machine.copy(moved // 2)}
            yield from measure(
                op, variant, name, size, 2 * k.size, timers, options.runs, moved, moved // 2
            )
