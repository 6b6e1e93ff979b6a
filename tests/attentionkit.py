"""Attention once more, slowly, in float64: what every kernel is compared with.

One sequence at a time; nothing of the package is used. ``length`` keys lie at positions 0 …
length - 1, and the queries are the last ones: query i of n stands at length - n + i.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Options:
    """The options of ``attend`` for one sequence. ``start``: the first key that exists."""

    scale: float | None = None
    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    sinks: Array | None = None
    start: int = 0


def mask(num_queries: int, length: int, options: Options) -> NDArray[np.bool_]:
    """[query, key]: which keys a query attends to."""
    positions = length - num_queries + np.arange(num_queries)[:, None]
    keys = np.arange(length)[None, :]
    allowed = keys >= options.start
    if options.causal:
        allowed = allowed & (keys <= positions)
    if options.window is not None:
        allowed = allowed & (positions - keys < options.window)
    return np.broadcast_to(allowed, (num_queries, length))


def attend(q: Array, k: Array, v: Array, options: Options) -> tuple[Floats, Floats]:
    """(out [queries, query heads, channels], lse [queries, query heads]).

    ``q`` [queries, query heads, channels]; ``k``, ``v`` [keys, heads, channels]; query head h reads
    head h // (query heads / heads). A query without keys gives zeros.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    num_queries, num_q_heads, _ = q.shape
    group = num_q_heads // k.shape[1]
    allowed = mask(num_queries, len(k), options)
    out = np.zeros((num_queries, num_q_heads, v.shape[2]))
    lse = np.full((num_queries, num_q_heads), -np.inf)
    scale = 1 / math.sqrt(q.shape[2]) if options.scale is None else options.scale
    for head in range(num_q_heads):
        # Keys that nobody attends to may hold anything: they are left out, not multiplied by 0.
        for i in range(num_queries):
            mine = np.flatnonzero(allowed[i])
            scores = scale * (k[mine, head // group] @ q[i, head])
            if options.soft_cap is not None:
                scores = options.soft_cap * np.tanh(scores / options.soft_cap)
            sink = -np.inf if options.sinks is None else float(options.sinks[head])
            most = max(scores.max(initial=-np.inf), sink)
            if most == -np.inf:
                continue
            weights = np.exp(scores - most)
            total = weights.sum() + np.exp(sink - most)
            out[i, head] = weights @ v[mine, head // group] / total
            lse[i, head] = most + np.log(total)
    return out, lse


def tolerance(q: Array, k: Array, v: Array, out: Floats, dtype: Any, options: Options) -> Floats:
    """How far a result in float32 arithmetic, rounded to ``dtype``, may lie from ``out``.

    A score is off by 2^-20 of what its products add up to at most, and weights by that and some
    more; both shift the result by no more than that share of the largest value. Then it is rounded.
    """
    q, k, v = (np.abs(np.asarray(x, np.float64)) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    allowed = mask(len(q), len(k), options)
    scale = 1 / math.sqrt(q.shape[2]) if options.scale is None else abs(options.scale)
    rounding = {4: 2.0**-23, 2: 2.0**-8 if "bfloat" in str(dtype) else 2.0**-11}
    step = rounding[np.dtype(dtype).itemsize]
    bound = np.zeros_like(out)
    for i in range(len(q)):
        mine = np.flatnonzero(allowed[i])
        for head in range(q.shape[1]):
            if len(mine):
                products = scale * (k[mine, head // group] @ q[i, head]).max()
                largest = v[mine, head // group].max(axis=0)
                bound[i, head] = (2.0**-19 * products + 2.0**-18) * largest
    return bound + step * np.abs(out) + 2.0**-24 * (np.dtype(dtype).itemsize == 2) + 1e-30


def assert_close(
    got: Array,
    got_lse: Array | None,
    q: Array,
    k: Array,
    v: Array,
    options: Options,
    what: Any = "",
) -> None:
    """A result is within ``tolerance`` of the reference, its log-sum-exp too."""
    out, lse = attend(q, k, v, options)
    bound = tolerance(q, k, v, out, got.dtype, options)
    off = np.abs(np.asarray(got, np.float64) - out)
    assert got.shape == out.shape, what
    assert np.isfinite(np.asarray(got, np.float64)).all(), what
    worst = np.unravel_index(np.argmax(off / bound), off.shape) if off.size else ()
    assert (off <= bound).all(), (what, worst, got[worst], out[worst], bound[worst])
    if got_lse is not None:
        assert got_lse.dtype == np.float32 and got_lse.shape == lse.shape, what
        none = np.isneginf(lse)
        np.testing.assert_array_equal(np.isneginf(got_lse), none, err_msg=str(what))
        np.testing.assert_allclose(
            got_lse[~none], lse[~none], rtol=2e-6, atol=3e-5, err_msg=str(what)
        )
