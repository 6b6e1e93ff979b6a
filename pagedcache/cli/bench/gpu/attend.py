"""Attention over pages: decode steps of one sequence and of many.

gbps_moved counts the bytes of K and V of all keys, once; pct_of_copy is their share of what a
plain read of as many bytes moves in the same run. Calls go through so many layers that none finds
its keys in the GPU's cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import ml_dtypes
import numpy as np

import pagedcache
from pagedcache.checks.devices import upload

from ...output import note
from ..rows import Options, Row, measure
from ..store import BLOCK_SIZE, HEAD_DIM, HEADS, scattered
from .machine import Machine

GROUP = 4  # query heads of a KV head
BATCHES, CONTEXTS = (1, 32), (8192, 32768)
LAYERS_NBYTES = 512 << 20  # of K and V of all layers: several times any cache
_CHUNK = 8192  # tokens that are stored at a time


def rows(options: Options) -> Iterator[Row]:
    """Every format, batch and context that half of the free memory holds."""
    with Machine(options) as machine:
        for name in options.formats:
            for batch in BATCHES:
                for context in dict.fromkeys(min(n, options.tokens) for n in CONTEXTS):
                    yield from _one(options, machine, name, batch, context)


def _spec(name: str, num_layers: int) -> pagedcache.CacheSpec:
    return pagedcache.CacheSpec(
        num_layers=num_layers, num_kv_heads=HEADS, head_dim=HEAD_DIM, block_size=BLOCK_SIZE,
        kv_format=name, on_nonfinite="saturate",
    )  # fmt: skip


def _one(
    options: Options, machine: Machine, name: str, batch: int, context: int
) -> Iterator[Row]:
    blocks = batch * -(-context // BLOCK_SIZE)
    nbytes = blocks * _spec(name, 1).block_nbytes
    layers = max(2, -(-LAYERS_NBYTES // nbytes))
    if layers * nbytes > machine.device.memory_info()[0] // 2:
        note(f"pagedcache bench: {machine.name}: no room for {batch} x {context:,} keys in {name}")
        return
    spec = _spec(name, layers)
    with pagedcache.PagedKVCache(
        spec, blocks + 4 * batch, device=machine.name, partial_block_reuse=0,
        num_open_blocks=2 * batch if spec.has_open_blocks else None,
    ) as cache:  # fmt: skip
        seqs = _filled(machine, cache, batch, context)
        values = np.random.default_rng(4).standard_normal((batch, HEADS * GROUP, HEAD_DIM))
        q = upload(values.astype(ml_dtypes.bfloat16), machine.name)
        out = machine.empty(q.shape, q.dtype)
        turns = cycle(range(layers))

        def attend() -> Any:
            return cache.attend(next(turns), q, seqs, out=out)

        _check(machine, cache.attend(0, q, seqs, out=out), values, context)
        timers = {"ours": machine.timer(attend), "copy": machine.read(nbytes)}
        yield from measure(
            "attend", f"decode, {batch} x {context} keys", name, nbytes, batch * context, timers,
            options.runs, nbytes, nbytes // 2,
        )  # fmt: skip


def _filled(machine: Machine, cache: Any, batch: int, context: int) -> list[Any]:
    """Sequences of the same rows in blocks that do not follow one another."""
    seqs = scattered(cache, batch, context)
    chunk = min(_CHUNK, context)
    k, v = machine.rows(chunk, np.dtype(np.float32))
    for seq in seqs:
        for first in range(0, context, chunk):
            count = min(chunk, context - first)
            for layer in range(cache.spec.num_layers):
                seq.append(layer, k[:count], v[:count])
            seq.commit(count)
    return seqs


def _check(machine: Machine, got: Any, values: np.ndarray, context: int) -> None:
    """Raise unless NumPy gives the same for the last sequence, 4-bit steps aside."""
    chunk = min(_CHUNK, context)
    k, v = (np.asarray(x) for x in machine.rows(chunk, np.dtype(np.float32)))
    k, v = (np.resize(x, (context, HEADS, HEAD_DIM)) for x in (k, v))
    shape = (HEADS, GROUP, HEAD_DIM)
    scores = np.einsum("hgd,thd->hgt", values[-1].reshape(shape) / np.sqrt(HEAD_DIM), k)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.einsum("hgt,thd->hgd", weights / weights.sum(-1, keepdims=True), v)
    error = np.abs(np.asarray(got)[-1].astype(np.float32).reshape(shape) - want).max()
    if not error < 0.2:
        raise AssertionError(f"attention is off by {error}: not timed")
