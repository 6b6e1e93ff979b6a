"""Tools of the attention tests: caches with random rows, batches, and how far a result may be off.

The values come from ``attentionkit.attend``: NumPy, float64, over what ``gather`` gives back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from attentionkit import Options, attend, mask
from cachekit import make_cache
from devicekit import host
from numpy.typing import NDArray

import pagedcache as pc

Array = NDArray[Any]

FORMATS = tuple(pc.FORMATS)
DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
#: Half the distance of neighbours, relative, and the least normal number.
ROUNDING = {DTYPES[0]: (2.0**-24, 0.0), DTYPES[1]: (2.0**-11, 2.0**-25), DTYPES[2]: (2.0**-8, 0.0)}


DEFAULTS = Options()


@dataclass
class Shape:
    """What a cache of these tests is."""

    fmt: Any = "float32"
    layout: str = "HND"
    block_size: int = 16
    heads: int = 2
    group: int = 1
    dim: int = 64
    layers: int = 1
    open_blocks: str | None = None

    def cache(self, num_tokens: int) -> pc.PagedKVCache:
        """A cache with room for so many tokens of a few sequences, and some more."""
        return make_cache(
            num_tokens // self.block_size + 16,
            B=self.block_size,
            layers=self.layers,
            heads=self.heads,
            dim=self.dim,
            fmt=self.fmt,
            layout=self.layout,
            open_blocks=self.open_blocks,
        )

    def rows(self, rng: np.random.Generator, n: int) -> tuple[Array, Array]:
        """K and V of n tokens. K has channels that are large for every token, as keys have, and V
        a mean, so that scales and minima matter."""
        shape = (n, self.heads, self.dim)
        k = rng.standard_normal(shape, np.float32) + 3 * np.sin(np.arange(self.dim))
        v = rng.standard_normal(shape, np.float32) + np.float32(0.5)
        return k.astype(np.float32), v

    def queries(self, rng: np.random.Generator, n: int, dtype: Any = np.float32) -> Array:
        q = rng.standard_normal((n, self.heads * self.group, self.dim), np.float32)
        return q.astype(dtype)


def fill(cache: pc.PagedKVCache, seq: pc.Sequence, shape: Shape, rng: Any, n: int) -> None:
    """Append n random tokens to every layer and commit them."""
    for layer in range(shape.layers):
        seq.append(layer, *shape.rows(rng, n))
    seq.commit(n)


def scattered(cache: pc.PagedKVCache, shape: Shape, rng: Any, lengths: Sequence[int]) -> list[Any]:
    """Sequences of these lengths whose blocks lie in each other's midst."""
    seqs = [cache.open() for _ in lengths]
    left = list(lengths)
    while any(left):
        for i, seq in enumerate(seqs):
            n = min(left[i], int(rng.integers(1, 3 * shape.block_size + 1)))
            if n:
                fill(cache, seq, shape, rng, n)
                left[i] -= n
    return seqs


def _with_offsets(x: Array) -> Array:
    """Magnitudes of what is summed up in place of ``x`` [token, head, channel].

    Formats with a minimum are added up as a number times the scale and an offset, each of which
    may be larger than the value: in all at most |x| + 2 |offset|. The offset is in the middle of
    its group, of 32 values of the row or of a channel's in some tokens: at most the largest
    magnitude there. NaN is of tokens that nobody sees.
    """
    x = np.nan_to_num(x.astype(np.float64))
    size = np.abs(x)
    dim = x.shape[2]
    padded = np.zeros((*x.shape[:2], -(-dim // 32) * 32))
    padded[..., :dim] = x
    groups = padded.reshape(*x.shape[:2], padded.shape[2] // 32, 32)
    middle = np.abs(groups.max(3) + groups.min(3)) / 2 + (groups.max(3) - groups.min(3)) / 30
    by_row = np.repeat(middle, 32, 2)[..., :dim]
    by_channel = np.broadcast_to(size.max(0, initial=0.0), size.shape)
    return size + 2 * np.maximum(by_row, by_channel)


def bound(q: Array, k: Array, v: Array, out: Array, options: Options) -> Array:
    """How far a result in float32 arithmetic may lie from ``out``.

    u = 2^-24. A sum is off by at most its longest chain of additions times u times what the
    magnitudes add up to. Scores: at least 4 lanes share the d products, of a query that was
    scaled (2 roundings) with keys that were decoded (3), and they are rounded a few times more
    (soft cap, base 2): e = (d / 4 + 16) * u * |scale| * |q| · K. A weight is then off by a factor
    of exp(2 e) at most, besides 2^-21 for the power of two and for putting parts together. Results
    are sums of weighted values, at most 512 in a chain and then 64 parts, divided by such a sum of
    weights: 2 * (600 u + 2 e + 2^-21) times the weighted mean of V. K and V: ``_with_offsets``.
    Then the result is rounded to q's dtype.
    """
    unit = 2.0**-24
    scale = 1 / math.sqrt(q.shape[2]) if options.scale is None else abs(options.scale)
    allowed = mask(len(q), len(k), options)
    group = q.shape[1] // k.shape[1]
    sizes_k, sizes_v = _with_offsets(k), _with_offsets(v)
    off = np.zeros(out.shape)
    relative, least = ROUNDING[q.dtype]
    for i, head in np.ndindex(*q.shape[:2]):
        mine = np.flatnonzero(allowed[i])
        if not len(mine):
            continue
        own_q, own = q[i, head].astype(np.float64), head // group
        score = (q.shape[2] / 4 + 16) * unit * scale * (sizes_k[mine, own] @ np.abs(own_q)).max()
        plain = scale * np.sign(options.scale or 1) * (k[mine, own].astype(np.float64) @ own_q)
        if options.soft_cap is not None:
            score += 8 * unit * options.soft_cap
            plain = options.soft_cap * np.tanh(plain / options.soft_cap)
        sink = -np.inf if options.sinks is None else float(options.sinks[head])
        weights = np.exp(plain - max(plain.max(), sink))
        weights /= weights.sum() + np.exp(sink - max(plain.max(), sink))
        share = 2 * (600 * unit + 2 * score + 2.0**-21)
        off[i, head] = share * (weights @ sizes_v[mine, own])
    return off * (1 + relative) + np.abs(out) * relative + least + 1e-37


def assert_attends(
    result: Any, lse: Any, q: Array, k: Array, v: Array, options: Options, what: Any
) -> None:
    """A result is what float64 gives over the same K and V, within ``bound``."""
    got = np.asarray(host(result))
    assert got.dtype == q.dtype and got.shape == q.shape, what
    out, want_lse = attend(q, k, v, options)
    off = np.abs(got.astype(np.float64) - out)
    allowed = bound(q, k, v, out, options)
    bad = ~(off <= allowed)  # NaN is bad
    assert not bad.any(), (what, np.argwhere(bad)[0], off.max(), allowed[bad][0])
    if lse is not None:
        got_lse = np.asarray(host(lse))
        assert got_lse.dtype == np.float32 and got_lse.shape == want_lse.shape, what
        none = np.isneginf(want_lse)
        np.testing.assert_array_equal(np.isneginf(got_lse), none, err_msg=str(what))
        rounding = 2.0**-22 * (1 + np.abs(want_lse[~none]))
        scale = 1 / math.sqrt(q.shape[2]) if options.scale is None else abs(options.scale)
        sizes = scale * np.abs(q.astype(np.float64)).sum(2) * _with_offsets(k).max(initial=0.0)
        slack = (600 + 2 * (q.shape[2] / 4 + 16) * sizes) * 2.0**-24
        assert (np.abs(got_lse[~none] - want_lse[~none]) <= rounding + slack[~none]).all(), what


def check_batch(
    cache: pc.PagedKVCache,
    seqs: Sequence[pc.Sequence],
    q: Array,
    q_lens: Sequence[int],
    options: Options = DEFAULTS,
    *,
    starts: Sequence[int] | None = None,
    layer: int = 0,
    what: Any = "",
) -> tuple[Any, Any]:
    """Attend for a batch and compare every sequence with the reference; the result and lse."""
    keywords = {name: getattr(options, name)
                for name in ("scale", "causal", "window", "soft_cap", "sinks")}  # fmt: skip
    out, lse = cache.attend(
        layer, q, seqs, q_lens=q_lens, starts=starts, return_lse=True, **keywords
    )
    at = 0
    for i, (seq, count) in enumerate(zip(seqs, q_lens, strict=True)):
        k, v = (host(x) for x in seq.gather(layer, dtype=np.float32))
        mine = replace(options, start=0 if starts is None else starts[i])
        part = slice(at, at + count)
        assert_attends(host(out)[part], host(lse)[part], q[part], k, v, mine, (what, i))
        at += count
    return out, lse
