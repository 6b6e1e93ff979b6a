"""Push the requests of a trace through a cache, one at a time, and count what happened."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import pagedcache

from .replay_trace import Request
from .replay_values import ValueMaker

CHUNK = 2048  # tokens written or compared at a time: bounds the memory of made-up values


@dataclass
class Replay:
    """What a replay counted. Times are in seconds; ``cache_times`` has one entry per request."""

    num_blocks: int
    block_size: int
    store_format: str | None = None
    requests: int = 0
    input_tokens: int = 0
    hit_tokens: int = 0
    too_large: int = 0
    evicted_blocks: int = 0
    peak_blocks: int = 0
    peak_used_blocks: int = 0
    compared_bytes: int = 0
    differing_bytes: int = 0
    seconds: float = 0.0
    cache_times: list[float] = field(default_factory=list, repr=False)
    hit_history: list[tuple[int, int, int]] = field(default_factory=list, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Every figure under its name, ready for JSON; nothing about bytes without a store."""
        busy = sum(self.cache_times)
        figures: dict[str, Any] = {
            "requests": self.requests,
            "input_tokens": self.input_tokens,
            "hit_tokens": self.hit_tokens,
            "hit_rate": self.hit_tokens / self.input_tokens if self.input_tokens else 0.0,
            "too_large": self.too_large,
            "num_blocks": self.num_blocks,
            "block_size": self.block_size,
            "evicted_blocks": self.evicted_blocks,
            "peak_blocks": self.peak_blocks,
            "peak_used_blocks": self.peak_used_blocks,
            "seconds": self.seconds,
            "cache_seconds": busy,
            "mean_request_seconds": busy / len(self.cache_times) if self.cache_times else 0.0,
            "median_request_seconds": statistics.median(self.cache_times or [0.0]),
            "requests_per_second": self.requests / busy if busy else 0.0,
        }
        if self.store_format is not None:
            figures["format"] = self.store_format
            figures["compared_bytes"] = self.compared_bytes
            figures["differing_bytes"] = self.differing_bytes
        return figures


def replay(
    requests: Iterable[Request],
    cache: pagedcache.PagedKVCache,
    store: Store | None,
    result: Replay,
) -> Replay:
    """Open, write (with ``store``), commit and free every request; fills and returns ``result``.

    A request that the pool can never hold is counted as too large and changes nothing.
    """
    began = time.perf_counter()
    for request in requests:
        result.requests += 1
        result.input_tokens += request.input_length
        if -(-request.input_length // result.block_size) > result.num_blocks:
            result.too_large += 1
        else:
            _one(request.tokens(), cache, store, result)
        result.hit_history.append((result.input_tokens, result.hit_tokens, result.peak_blocks))
    result.seconds = time.perf_counter() - began
    result.evicted_blocks = cache.stats().evicted_blocks
    cache.check()
    return result


def _one(
    tokens: NDArray[np.uint32],
    cache: pagedcache.PagedKVCache,
    store: Store | None,
    result: Replay,
) -> None:
    clock = time.perf_counter
    t0 = clock()
    seq = cache.open(tokens)
    hits = seq.num_cached_tokens
    busy = clock() - t0
    if store is not None:
        busy += store.write(seq, tokens, hits)
    t0 = clock()
    if store is None:
        # Only ids are kept: the copies of part-matched blocks have no bytes to wait for.
        _, ticket = cache.take_block_copies()
        cache.copies_done(ticket)
    seq.commit(len(tokens) - hits)
    busy += clock() - t0
    _count_blocks(cache, seq, result)
    if store is not None:
        store.compare(seq, tokens, hits, result)
    t0 = clock()
    seq.free()
    result.cache_times.append(busy + clock() - t0)
    result.hit_tokens += hits


def _count_blocks(cache: pagedcache.PagedKVCache, seq: Any, result: Replay) -> None:
    pool = cache.pool
    holding = pool.num_cached_blocks
    # With one request at a time only its last block can hold tokens without being cached.
    if seq.seq_len and not pool.is_cached(seq.block_for_position(seq.seq_len - 1)):
        holding += 1
    result.peak_blocks = max(result.peak_blocks, holding)
    result.peak_used_blocks = max(result.peak_used_blocks, pool.num_used_blocks)


class Store:
    """Writes made-up keys and values, reads every hit back and compares it byte for byte.

    ``scratch`` is a second, small cache of the same spec: what a hit must hold is what a fresh
    store of the same values there gives. With open blocks that depends on how a block was filled,
    and a block that was read back is quantised again: there whole blocks are compared with the
    values that were given, and may be off by twice the format's bound.
    """

    def __init__(self, spec: pagedcache.CacheSpec) -> None:
        self.spec = spec
        self.values = ValueMaker(spec.num_kv_heads, spec.head_dim)
        self.num_layers = spec.num_layers
        quantised = spec.k_format.is_quantized or spec.v_format.is_quantized
        self.dtype = np.dtype(np.float32) if quantised else spec.k_format.dtype
        self.scratch = pagedcache.PagedKVCache(spec, -(-CHUNK // spec.block_size))

    def close(self) -> None:
        self.scratch.close()

    def _append(self, seq: Any, tokens: NDArray[np.uint32], start: int) -> float:
        busy = 0.0
        for layer in range(self.num_layers):
            k, v = (self.values.rows(tokens, start, layer, kind) for kind in "kv")
            t0 = time.perf_counter()
            seq.append(layer, k, v)
            busy += time.perf_counter() - t0
        return busy

    def write(self, seq: Any, tokens: NDArray[np.uint32], start: int) -> float:
        """Append K and V of the tokens from ``start`` on; returns the seconds in the cache."""
        return sum(
            self._append(seq, tokens[at : at + CHUNK], at)
            for at in range(start, len(tokens), CHUNK)
        )

    def compare(self, seq: Any, tokens: NDArray[np.uint32], hits: int, result: Replay) -> None:
        """Gather the hit tokens at every layer and count bytes that a fresh store differs in."""
        if self.spec.has_open_blocks:
            self._compare_blocks(seq, tokens, hits, result)
            return
        for at in range(0, hits, CHUNK):
            stop = min(at + CHUNK, hits)
            with self.scratch.open() as fresh:
                self._append(fresh, tokens[at:stop], at)
                for layer in range(self.num_layers):
                    got = seq.gather(layer, at, stop, dtype=self.dtype)
                    want = fresh.gather(layer, dtype=self.dtype)
                    for ours, theirs in zip(got, want, strict=True):
                        a, b = (x.reshape(-1).view(np.uint8) for x in (ours, theirs))
                        result.compared_bytes += a.size
                        result.differing_bytes += int(np.count_nonzero(a != b))

    def _compare_blocks(
        self, seq: Any, tokens: NDArray[np.uint32], hits: int, result: Replay
    ) -> None:
        from pagedcache.checks.bounds import block_bound

        size, held = self.spec.block_size, str(self.spec.open_blocks)
        step = max(CHUNK // size, 1) * size
        for at in range(0, hits - hits % size, step):
            stop = min(at + step, hits - hits % size)
            for layer in range(self.num_layers):
                pair = seq.gather(layer, at, stop, dtype=np.float32)
                formats = self.spec.k_format, self.spec.v_format
                for kind, got, fmt in zip("kv", pair, formats, strict=True):
                    given = self.values.rows(tokens[at:stop], at, layer, kind)
                    bound = 2 * block_bound(fmt.name, held, given, size)
                    result.compared_bytes += got.nbytes
                    result.differing_bytes += 4 * int((np.abs(got - given) > bound).sum())
