"""Tools of the façade tests: small caches, rows that name their writer, whole-state checks.

Every written token gets its own number (a *mark*). Its K and V rows are computed from the
mark, the layer and the place in the row, so a row read back names the one write it came from
and a swapped head, layer, token or tensor shows. What a format must return for a row is
computed here with NumPy alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from devicekit import host, placement
from profiles import PROFILE

import pagedcache as pc
from pagedcache.errors import PagedCacheError

ROW_FORMATS = ("float32", "float16", "bfloat16", "q8", "q4", "q8_0", "q4_0", "q4_1")


def by_profile(short: Any, full: Any, deep: Any = None) -> Any:
    """The value for the running profile (``deep`` defaults to 20 times ``full``)."""
    if PROFILE == "short":
        return short
    if PROFILE == "deep":
        return full * 20 if deep is None else deep
    return full


def make_cache(
    num_blocks: int = 8,
    *,
    B: int = 4,
    layers: int = 1,
    heads: int = 1,
    dim: int = 4,
    fmt: str | tuple[str, str] = "float32",
    layout: str = "HND",
    max_seq_len: int | None = None,
    open_blocks: str | None = None,
    **cache_options: Any,
) -> pc.PagedKVCache:
    """A small cache on the tests' device; ``fmt`` is one format or (K format, V format)."""
    formats: dict[str, Any] = (
        {"kv_format": fmt} if isinstance(fmt, str) else {"k_format": fmt[0], "v_format": fmt[1]}
    )
    spec = pc.CacheSpec(
        num_layers=layers,
        num_kv_heads=heads,
        head_dim=dim,
        block_size=B,
        layout=layout,
        max_seq_len=max_seq_len,
        open_blocks=open_blocks,
        **formats,
    )
    if cache_options.get("storage", "own") == "own":  # adopted arrays are the CPU's
        cache_options.setdefault("device", placement(layers))
    return pc.PagedKVCache(spec, num_blocks=num_blocks, **cache_options)


def rows(spec: Any, layer: int, marks: Any) -> tuple[np.ndarray, np.ndarray]:
    """float32 K and V of the given marks, ``[n, num_kv_heads, head_dim]``; exact in float32."""
    m = np.asarray(marks, dtype=np.float32).reshape(-1, 1, 1)
    head = np.arange(spec.num_kv_heads, dtype=np.float32).reshape(1, -1, 1)
    place = np.arange(spec.head_dim, dtype=np.float32).reshape(1, 1, -1) % 4
    k = m * 64 + layer * 16 + (head % 4) * 4 + place
    return k, -(k + np.float32(0.5))


def _quantised(x: np.ndarray, fmt: str) -> np.ndarray:
    """The float32 values that a row-grouped format gives back, by the rules of SPEC F4, F5."""
    dim = x.shape[-1]
    groups = -(-dim // 32)
    padded = np.zeros(x.shape[:-1] + (groups * 32,), np.float32)
    padded[..., :dim] = x
    g = padded.reshape(x.shape[:-1] + (groups, 32))
    amax = np.abs(g).max(axis=-1, keepdims=True)
    one = np.float32(1)
    if fmt in ("q8", "q4"):
        zero = amax < np.float32(1e-10)
        scale = amax / np.float32(127 if fmt == "q8" else 7)
        inverse = one / np.where(zero, one, scale)
        p = g * inverse
        q = np.sign(p) * np.floor(np.abs(p) + np.float32(0.5))
        q = np.clip(q, -127, 127) if fmt == "q8" else np.clip(q, -8, 7)
        out = np.where(zero, np.float32(0), (q * scale).astype(np.float32))
        out = np.where(q == 0, np.float32(0), out)
    elif fmt == "q8_0":
        d = amax / np.float32(127)
        inverse = np.where(d != 0, one / np.where(d == 0, one, d), np.float32(0))
        p = g * inverse
        q = np.sign(p) * np.floor(np.abs(p) + np.float32(0.5))
        out = q * d.astype(np.float16).astype(np.float32)
    elif fmt == "q4_0":
        at = np.abs(g).argmax(axis=-1)[..., None]
        top = np.take_along_axis(g, at, axis=-1)
        d = top / np.float32(-8)
        inverse = np.where(d != 0, one / np.where(d == 0, one, d), np.float32(0))
        q = np.minimum(np.trunc(g * inverse + np.float32(8.5)), 15)
        out = (q - 8) * d.astype(np.float16).astype(np.float32)
    elif fmt == "q4_1":
        low, high = g.min(axis=-1, keepdims=True), g.max(axis=-1, keepdims=True)
        d = (high - low) / np.float32(15)
        inverse = np.where(d != 0, one / np.where(d == 0, one, d), np.float32(0))
        q = np.minimum(np.trunc((g - low) * inverse + np.float32(0.5)), 15)
        half = np.float16
        out = q * d.astype(half).astype(np.float32) + low.astype(half).astype(np.float32)
    else:
        raise AssertionError(fmt)
    return out.astype(np.float32).reshape(padded.shape)[..., :dim]


def stored(x: np.ndarray, fmt: Any) -> np.ndarray:
    """float32 values that ``fmt`` gives back for the float32 array ``x`` ``[..., head_dim]``."""
    name = fmt if isinstance(fmt, str) else fmt.name
    if name == "float32":
        return x
    if name == "float16":
        return x.astype(np.float16).astype(np.float32)
    if name == "bfloat16":
        return x.astype(ml_dtypes.bfloat16).astype(np.float32)
    return _quantised(x, name)


def expected(spec: Any, layer: int, marks: Any) -> tuple[np.ndarray, np.ndarray]:
    """float32 K and V that reading the given marks back must give."""
    k, v = rows(spec, layer, marks)
    return stored(k, spec.k_format), stored(v, spec.v_format)


def write(seq: pc.Sequence, spec: Any, marks: Any) -> None:
    """Append the rows of ``marks`` to every layer."""
    for layer in range(spec.num_layers):
        seq.append(layer, *rows(spec, layer, marks))


def fill(cache: pc.PagedKVCache, seq: pc.Sequence, marks: Any) -> None:
    """Append the rows of ``marks`` to every layer and commit them."""
    write(seq, cache.spec, marks)
    seq.commit(len(marks))


def cached_prompt(
    cache: pc.PagedKVCache, tokens: Any, first_mark: int = 1, **open_options: Any
) -> tuple[list[int], list[int]]:
    """Open, write, commit and free a prompt; its block ids and its marks."""
    with cache.open(tokens, **open_options) as seq:
        hit = seq.num_cached_tokens
        marks = list(range(first_mark, first_mark + len(tokens) - hit))
        fill(cache, seq, marks)
        return [int(b) for b in seq.block_table], marks


def read(seq: pc.Sequence, layer: int, start: int = 0, stop: int | None = None) -> Any:
    """float32 (K, V) of a token range, in the CPU's memory."""
    k, v = seq.gather(layer, start, stop, dtype=np.float32)
    return host(k), host(v)


def assert_holds(
    cache: pc.PagedKVCache, seq: pc.Sequence, marks: Sequence[int], start: int = 0
) -> None:
    """Every layer of ``seq`` holds exactly ``marks`` at positions ``start`` and on."""
    for layer in range(cache.spec.num_layers):
        k, v = read(seq, layer, start, start + len(marks))
        want_k, want_v = expected(cache.spec, layer, marks)
        np.testing.assert_array_equal(k, want_k)
        np.testing.assert_array_equal(v, want_v)


def whole(cache: pc.PagedKVCache) -> None:
    """The pool is whole: ``check()`` passes and free + cached + used == total."""
    cache.check()
    pool = cache.pool
    assert pool.num_free_blocks + pool.num_used_blocks == pool.num_blocks
    assert 0 <= pool.num_cached_blocks <= pool.num_blocks


def empty(cache: pc.PagedKVCache) -> None:
    """The pool is whole and nobody holds a block."""
    whole(cache)
    assert cache.pool.num_used_blocks == 0
    assert cache.num_free_blocks == cache.pool.num_blocks
    stats = cache.stats()
    assert stats.sequences_active == 0
    assert stats.sequences_allocated == stats.sequences_freed
    assert stats.pinned == 0


def snapshot(cache: pc.PagedKVCache, *seqs: pc.Sequence, prompts: Any = ()) -> dict[str, Any]:
    """All that must be the same after a refused operation, the stored values included.

    ``prompts`` are token lists (or keyword dicts of ``probe``) whose hit lengths belong to it.
    """
    pool = cache.pool
    stats = cache.stats()
    shot: dict[str, Any] = {
        "free": pool.num_free_blocks,
        "cached": pool.num_cached_blocks,
        "used": pool.num_used_blocks,
        "refs": [pool.ref_count(b) for b in range(pool.num_blocks)],
        "is_cached": [pool.is_cached(b) for b in range(pool.num_blocks)],
        "counts": [
            getattr(stats, name)
            for name in (
                "sequences_allocated sequences_freed sequences_active blocks_allocated "
                "blocks_freed blocks_used pinned cow_copies partial_copies defragmentations "
                "blocks_moved evicted_blocks evicted_tokens hit_tokens tokens_saved"
            ).split()
        ],
        "epoch": cache.layout_epoch,
        "probes": [
            cache.probe(**p) if isinstance(p, dict) else cache.probe(p) for p in prompts
        ],
    }
    for i, seq in enumerate(seqs):
        shot[f"seq{i}"] = (
            seq.seq_len,
            seq.num_tokens,
            seq.num_written,
            seq.num_cached_tokens,
            seq.block_table.tolist(),
        )
        for layer in range(cache.spec.num_layers):
            try:
                k, v = read(seq, layer)
            except pc.FormatError:  # no own bytes
                continue
            shot[f"seq{i} layer{layer}"] = (k.tobytes(), v.tobytes())
    return shot


def refused(
    cache: pc.PagedKVCache,
    call: Callable[[], Any],
    kind: type[BaseException] | tuple[type[BaseException], ...] = PagedCacheError,
    *seqs: pc.Sequence,
    prompts: Any = (),
) -> Any:
    """``call`` raises a typed error and nothing has changed; returns the error."""
    before = snapshot(cache, *seqs, prompts=prompts)
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, PagedCacheError)
    assert snapshot(cache, *seqs, prompts=prompts) == before
    cache.check()
    return caught.value
