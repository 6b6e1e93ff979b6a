"""Bytes that no query may see never matter, NaN least of all (CASE C41): 0 * NaN would be NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attendkit import FORMATS, Shape, assert_attends, fill
from attentionkit import Options
from cachekit import make_cache
from devicekit import host

import pagedcache as pc

GROUPS = (1, 2, 3, 4, 8)


def poisoned(shape: Shape, num_blocks: int) -> pc.PagedKVCache:
    """A cache of which every byte, of open slots too, is 0xFF: NaN in every float format and as
    every scale."""
    cache = make_cache(
        num_blocks, B=shape.block_size, heads=shape.heads, dim=shape.dim, fmt=shape.fmt,
        layout=shape.layout, open_blocks=shape.open_blocks,
    )  # fmt: skip
    storage = cache._storage
    places = np.arange(cache.num_blocks + getattr(storage, "num_open", 0), dtype=np.int32)
    storage.fill_blocks(places, 0xFF)
    return cache


@pytest.mark.parametrize("layout", ("HND", "NHD"))
@pytest.mark.parametrize("fmt", FORMATS)
def test_slots_past_the_length(fmt: str, layout: str) -> None:
    """Five tokens in blocks full of NaN, and one more at a time, over the ends of blocks."""
    rng = np.random.default_rng(0)
    for group, block_size in ((1, 16), (4, 3), (3, 32)):
        shape = Shape(fmt, layout, block_size, heads=2, group=group, dim=40)
        with poisoned(shape, 40) as cache, cache.open() as seq:
            fill(cache, seq, shape, rng, 5)
            for length in range(5, 40):
                n = min(1 + length % 4, length)
                q = shape.queries(rng, n)
                out, lse = cache.attend(0, q, seq, return_lse=True)
                k, v = (host(x) for x in seq.gather(0, dtype=np.float32))
                assert np.isfinite(k).all() and np.isfinite(v).all()
                assert_attends(out, lse, q, k, v, Options(), (group, length))
                fill(cache, seq, shape, rng, 1)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("fmt", ("float32", "float16", "bfloat16"))
def test_keys_past_the_causal_edge(fmt: str, group: int) -> None:
    """Token t of NaN makes the queries from t on NaN, and no query before it, in every tile."""
    rng = np.random.default_rng(1)
    shape = Shape(fmt, heads=1, group=group, dim=64)
    with make_cache(40, B=16, heads=1, dim=64, fmt=fmt) as cache, cache.open() as seq:
        fill(cache, seq, shape, rng, 80)
        nan = np.full((1, 1, 64), np.nan, np.float32)
        k, v = shape.rows(rng, 1)
        for kv, bad in ((nan, v), (k, nan), (nan, nan)):
            last = seq.seq_len
            seq.append(0, *([kv, bad] if kv is nan else [k, bad]))
            seq.commit(1)
            for n in (2, 3, 5, 9, 33, 81):
                q = shape.queries(rng, n)
                out, lse = (host(x) for x in cache.attend(0, q, seq, return_lse=True))
                keys, values = (host(x)[:last] for x in seq.gather(0, dtype=np.float32))
                assert_attends(out[:-1], lse[:-1], q[:-1], keys, values, Options(), (n, group))
                assert np.isnan(out[-1]).all()
            seq.truncate(last)


@pytest.mark.parametrize("group", GROUPS)
def test_keys_before_the_window_and_before_the_start(group: int) -> None:
    rng = np.random.default_rng(2)
    shape = Shape("float32", heads=1, group=group, dim=33, block_size=16)
    with make_cache(90, B=16, heads=1, dim=33) as cache, cache.open() as seq:
        nan = np.full((1, 1, 33), np.nan, np.float32)
        k, v = shape.rows(rng, 600)
        for at in (0, 99, 511, 512, 540):
            k[at], v[at] = nan, nan
        seq.append(0, k, v)
        seq.commit(600)
        for n, window in ((1, 59), (7, 52), (50, 9), (59, 1)):
            q = shape.queries(rng, n)
            out, lse = cache.attend(0, q, seq, window=window, return_lse=True)
            assert_attends(out, lse, q, k, v, Options(window=window), (n, window))
        for n in (1, 20, 100):
            q = shape.queries(rng, n)
            out, lse = cache.attend(0, q, seq, starts=[541], return_lse=True)
            assert_attends(out, lse, q, k, v, Options(start=541), n)


@pytest.mark.parametrize("fmt", ("bfloat16", "q8", "q4_1"))
def test_neighbours_in_a_batch(fmt: str) -> None:
    """A sequence full of NaN beside another: each result is its own."""
    rng = np.random.default_rng(3)
    shape = Shape((fmt, "float16"), heads=2, group=2, dim=64)
    with make_cache(40, heads=2, dim=64, B=16, fmt=shape.fmt) as cache:
        good, bad = cache.open(), cache.open()
        fill(cache, good, shape, rng, 70)
        k, v = shape.rows(rng, 70)
        bad.append(0, k, np.full_like(v, np.nan))
        bad.commit(70)
        q = shape.queries(rng, 24)
        q_lens = [1, 10, 3, 10]
        out: Any = host(cache.attend(0, q, [bad, good, bad, good], q_lens=q_lens))
        k, v = (host(x) for x in good.gather(0, dtype=np.float32))
        for part in (slice(1, 11), slice(14, 24)):
            assert_attends(out[part], None, q[part], k, v, Options(), part)
        assert np.isnan(out[:1]).all() and np.isnan(out[11:14]).all()
