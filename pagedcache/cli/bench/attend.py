"""Attention over pages: decoding one token of a long context, and a chunk of a prompt.

gbps_moved counts the bytes of K and V of all keys, once; pct_of_copy is their share of what a plain
read of as many bytes by as many threads moves in the same run. Calls go through so many layers that
none finds its keys in a cache of the processor. Quantised formats are compared with bfloat16 too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import cycle
from typing import Any

import ml_dtypes
import numpy as np

import pagedcache
from pagedcache._native import bandwidth

from ..output import note
from . import peers
from .copies import as_bytes
from .counts import each_count
from .rows import Options, Row, measure
from .timing import Timer, timed

HEADS, GROUP, HEAD_DIM, BLOCK_SIZE = 8, 4, 128, 16
CONTEXT, CHUNK = 8192, 128
LAYERS_NBYTES = 192 << 20  # of K and V of all layers: several times any cache
BASE = "bfloat16"


def rows(options: Options) -> Iterator[Row]:
    """Every format with every count of threads; peers: torch, vLLM's CPU kernel, our bfloat16."""
    with _Cache(BASE) as base:
        for name in options.formats:
            with nullcontext(base) if name == BASE else _Cache(name) as cache:
                for threads in each_count(options.threads):
                    yield from _decode(options, cache, base, threads)
                for _ in each_count((1,)):
                    yield from _prefill(options, cache)


class _Cache:
    """One long sequence in many layers, all alike."""

    def __init__(self, name: str) -> None:
        self.name = name
        one = self._spec(1)
        self.nbytes = CONTEXT // BLOCK_SIZE * one.block_nbytes
        num_layers = max(2, -(-LAYERS_NBYTES // self.nbytes))
        self.cache = pagedcache.PagedKVCache(self._spec(num_layers), CONTEXT // BLOCK_SIZE + 4)
        self.seq = self.cache.open()
        self.k, self.v = np.random.default_rng(3).standard_normal(
            (2, CONTEXT, HEADS, HEAD_DIM), np.float32
        )
        for layer in range(num_layers):
            self.seq.append(layer, self.k, self.v)
        self.seq.commit(CONTEXT)
        self.layers = cycle(range(num_layers))

    def _spec(self, num_layers: int) -> pagedcache.CacheSpec:
        return pagedcache.CacheSpec(
            num_layers=num_layers, num_kv_heads=HEADS, head_dim=HEAD_DIM, block_size=BLOCK_SIZE,
            kv_format=self.name,
        )

    def __enter__(self) -> _Cache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cache.close()

    def queries(self, n: int) -> np.ndarray:
        """Queries in bfloat16, as models have them."""
        q = np.random.default_rng(4).standard_normal((n, HEADS * GROUP, HEAD_DIM), np.float32)
        return q.astype(ml_dtypes.bfloat16)

    def ours(self, q: np.ndarray) -> Callable[[], Any]:
        """Attention in one layer after the other."""
        out = np.empty_like(q)
        return lambda: self.cache.attend(next(self.layers), q, self.seq, out=out)

    def read(self, threads: int) -> Callable[[], Any]:
        """A read of as many bytes, in one layer after the other, never where ours just was."""
        spec, blocks = self.cache.spec, CONTEXT // BLOCK_SIZE
        sizes = spec.layer_block_nbytes("k"), spec.layer_block_nbytes("v")
        slabs = [
            [as_bytes(slab)[: blocks * nbytes]
             for slab, nbytes in zip(self.cache.slabs(layer), sizes, strict=True)]
            for layer in range(spec.num_layers)
        ]  # fmt: skip
        away = len(slabs) // 2
        turns = cycle(slabs[away:] + slabs[:away])
        return lambda: [bandwidth.read(slab, threads) for slab in next(turns)]


def _decode(options: Options, cache: _Cache, base: _Cache, threads: int) -> Iterator[Row]:
    q = cache.queries(1)
    _check(cache, q)
    timers: dict[str, Timer] = {"ours": timed(cache.ours(q)), "copy": timed(cache.read(threads))}
    if cache.cache.spec.k_format.is_quantized:
        timers[f"ours, {BASE}"] = timed(base.ours(q))
    timers |= _torch(cache, q, threads) | _vllm(cache, q, threads)
    yield from measure(
        "attend", f"decode, {CONTEXT} keys, {threads} thread{'s' * (threads > 1)}", cache.name,
        cache.nbytes, CONTEXT, timers, options.runs, cache.nbytes, cache.nbytes // 2,
    )


def _prefill(options: Options, cache: _Cache) -> Iterator[Row]:
    q = cache.queries(CHUNK)
    timers: dict[str, Timer] = {"ours": timed(cache.ours(q))} | _torch(cache, q, 1)
    label = f"prefill of {CHUNK}, {CONTEXT} keys, 1 thread"
    yield from measure("attend", label, cache.name, cache.nbytes, CHUNK, timers, options.runs)


def _check(cache: _Cache, q: np.ndarray) -> None:
    """Raise unless NumPy gives the same over the rows that were stored, 4-bit steps aside."""
    got = cache.cache.attend(0, q, cache.seq).astype(np.float32)[0].reshape(HEADS, GROUP, HEAD_DIM)
    rows = q.astype(np.float32)[0].reshape(HEADS, GROUP, HEAD_DIM) / np.sqrt(HEAD_DIM)
    scores = np.einsum("hgd,thd->hgt", rows, cache.k)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.einsum("hgt,thd->hgd", weights / weights.sum(-1, keepdims=True), cache.v)
    error = np.abs(got - want).max()
    if not error < 0.1:
        raise AssertionError(f"attention over {cache.name} is off by {error}: not timed")


def _torch(cache: _Cache, q: np.ndarray, threads: int) -> dict[str, Timer]:
    """torch's attention over contiguous K and V, in bfloat16 and in float32.

    A KV head's queries are given as rows of one head: several times faster than enable_gqa.
    """
    torch = peers.torch()
    if torch is None or cache.name not in ("bfloat16", "float32"):
        return {}
    kind = getattr(torch, cache.name)
    query = torch.from_numpy(q.astype(np.float32)).to(kind).transpose(0, 1)
    query = query.reshape(1, HEADS, GROUP * len(q), HEAD_DIM)
    given = [torch.from_numpy(x).to(kind).transpose(0, 1)[None].contiguous()
             for x in (cache.k, cache.v)]  # fmt: skip
    copies = [given, *([x.clone() for x in given] for _ in range(cache.cache.spec.num_layers - 1))]
    turns = cycle(copies)
    mask = None
    if len(q) > 1:
        mask = torch.ones(len(q), CONTEXT, dtype=torch.bool).tril(CONTEXT - len(q))
        mask = mask.repeat(GROUP, 1)

    def run() -> None:
        torch.set_num_threads(threads)
        k, v = next(turns)
        torch.nn.functional.scaled_dot_product_attention(query, k, v, attn_mask=mask)

    return {f"torch sdpa {cache.name}": timed(run)}


def _vllm(cache: _Cache, q: np.ndarray, threads: int) -> dict[str, Timer]:
    """vLLM's CPU kernel, which keeps bfloat16 in pages of 32 tokens."""
    if cache.name != "bfloat16" or peers.torch() is None or peers.vllm() is None:
        return {}
    from . import vllm_attention_peer

    try:
        peer = vllm_attention_peer.Pages(cache.k, cache.v, cache.cache.spec.num_layers)
        run = peer.decoder(q, threads)
        want = cache.cache.attend(0, q, cache.seq).astype(np.float32)
        if not np.abs(run().astype(np.float32) - want).max() < 0.02:
            raise RuntimeError("its result is another")
    except Exception as error:  # another version with another API
        note(f"peer vllm: attention not used ({type(error).__name__}: {error})")
        return {}
    return {f"vllm cpu {peer.isa}": timed(run)}
