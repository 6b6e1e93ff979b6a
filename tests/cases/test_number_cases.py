"""Cases C38-C41, C60 and C61: numbers, seen through the façade."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from cachekit import (
    ROW_FORMATS,
    assert_holds,
    empty,
    expected,
    fill,
    make_cache,
    read,
    refused,
    stored,
    whole,
)
from devicekit import host
from formatkit import QUANTISED, block_bytes, fill_rows, group_bound

from pagedcache.errors import NonFiniteError, PagedCacheError, ShapeError


@pytest.mark.parametrize("fmt", QUANTISED)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_tokens_one_at_a_time(fmt, layout):
    # CASE C38
    # SPEC F4 F5 F6
    rng = np.random.default_rng(38)
    cache = make_cache(4, B=16, heads=2, dim=64, fmt=fmt, layout=layout)
    seq = cache.open()
    data = rng.normal(size=(2, 48, 2, 64)).astype(np.float32)
    data *= (10.0 ** rng.integers(-3, 4, size=(2, 48, 2, 1))).astype(np.float32)
    earlier: list[np.ndarray] = [np.zeros((0, 2, 64), np.float32)] * 2
    for n in range(1, 49):
        seq.append(0, data[0, n - 1 : n], data[1, n - 1 : n])
        seq.commit(1)
        got = read(seq, 0)
        for kind in (0, 1):
            np.testing.assert_array_equal(got[kind][:-1], earlier[kind])
            np.testing.assert_array_equal(got[kind], stored(data[kind, :n], fmt))
            error = np.abs(got[kind].astype(np.float64) - data[kind, :n])
            assert (error <= group_bound(data[kind, :n], fmt)).all()
        earlier = [np.array(a) for a in got]
    seq.free()
    empty(cache)


@pytest.mark.parametrize("fmt", QUANTISED)
def test_amplitudes_side_by_side(fmt):
    # CASE C39
    # SPEC F6
    rng = np.random.default_rng(39)
    cache = make_cache(2, B=16, heads=2, dim=64, fmt=fmt)
    seq = cache.open(range(16))
    data = rng.uniform(-1, 1, size=(16, 2, 64)).astype(np.float32)
    data[1::2] *= 1000
    data[:, :, 32:] *= np.float32(0.001)  # two groups of one row as well
    fill_rows(seq, data)
    k, v = read(seq, 0)
    for got in (k, v):
        error = np.abs(got.astype(np.float64) - data)
        assert (error <= group_bound(data, fmt)).all()
    small = np.abs(k[::2, :, :32] - data[::2, :, :32]).max()
    assert small < 0.5  # nothing of the 1,000s leaks


@pytest.mark.parametrize("fmt", ROW_FORMATS)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("dim", [1, 31, 33, 80, 96])
def test_head_dims_that_are_no_multiple_of_the_group(fmt, layout, dim):
    # CASE C40
    # SPEC F6 F9 F9a
    cache = make_cache(4, B=3, heads=3, dim=dim, layers=2, fmt=fmt, layout=layout)
    each = block_bytes(fmt, layout, 3, 3, dim)
    assert cache.spec.layer_block_nbytes("k") == cache.spec.layer_block_nbytes("v") == each
    assert cache.spec.block_nbytes == 4 * each
    assert cache.spec.bytes_per_value == pytest.approx(each / (3 * 3 * dim), rel=1e-12)
    assert cache.total_capacity == 4 * 4 * each
    seq = cache.open(range(8))
    fill(cache, seq, range(1, 9))
    assert_holds(cache, seq, range(1, 9))
    assert cache.memory_usage == 3 * 4 * each
    seq.free()
    empty(cache)


@pytest.mark.parametrize("fmt", ROW_FORMATS)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_a_block_full_of_nan_bytes(fmt, layout):
    # CASE C41
    # SPEC F31 F32
    heads, dim, B, n = 2, 40, 4, 3
    spec = make_cache(1, B=B, heads=heads, dim=dim, fmt=fmt, layout=layout).spec
    if spec.k_format.is_quantized:
        shape, dtype = (n, spec.layer_block_nbytes("k")), np.uint8
    else:
        shape = (n, heads, B, dim) if layout == "HND" else (n, B, heads, dim)
        dtype = spec.k_format.dtype
    slabs = [np.full(np.prod(shape) * np.dtype(dtype).itemsize, 0xFF, np.uint8) for _ in range(2)]
    k_slab, v_slab = (s.view(dtype).reshape(shape) for s in slabs)
    cache = make_cache(
        n, B=B, heads=heads, dim=dim, fmt=fmt, layout=layout, storage=([k_slab], [v_slab])
    )
    seq = cache.open(range(5))
    fill(cache, seq, range(1, 6))
    k, v = read(seq, 0)
    assert np.isfinite(k).all() and np.isfinite(v).all()
    assert_holds(cache, seq, range(1, 6))
    with seq.views(0, dtype=np.float32) as views:
        for view in views:
            assert np.isfinite(view.k).all() and np.isfinite(view.v).all()
            assert view.k.shape == (heads, view.length, dim)
    # attention over the views, cut to the length, is the attention over the rows
    q = np.linspace(-1, 1, heads * dim, dtype=np.float64).reshape(heads, dim)
    want_k, want_v = expected(cache.spec, 0, range(1, 6))

    def attend(keys, values):  # [heads, n, dim]
        score = np.einsum("hd,hnd->hn", q, keys) / 1e4
        weight = np.exp(score - score.max(-1, keepdims=True))
        return np.einsum("hn,hnd->hd", weight / weight.sum(-1, keepdims=True), values)

    with seq.packed_views(0, dtype=np.float32) as views:
        keys = np.concatenate([x.k for x in views], axis=1).astype(np.float64)
        values = np.concatenate([x.v for x in views], axis=1).astype(np.float64)
    got = attend(keys, values)
    assert np.isfinite(got).all()
    np.testing.assert_array_equal(
        got, attend(want_k.transpose(1, 0, 2).astype(np.float64),
                    want_v.transpose(1, 0, 2).astype(np.float64))
    )
    del views
    # what was not written still is what it was: nothing past the length is touched
    if not spec.k_format.is_quantized:
        used = seq.block_table.tolist()
        rest = [b for b in range(n) if b not in used]
        assert all((k_slab[b].view(np.uint8) == 0xFF).all() for b in rest)
    seq.free()
    empty(cache)


@pytest.mark.parametrize("fmt", ["float32", "float16", "bfloat16"])
def test_nan_of_the_last_owner_is_never_read(fmt):
    # CASE C41
    # SPEC F32
    cache = make_cache(2, B=4, fmt=fmt)
    nan = np.full((8, 1, 4), np.nan, np.float32)
    with cache.open(range(8)) as seq:
        seq.append(0, nan, nan)
        seq.commit(8)
        assert np.isnan(read(seq, 0)[0]).all()
    cache.reset_prefix_cache()
    with cache.open(range(50, 55)) as seq:
        fill(cache, seq, range(1, 6))
        assert_holds(cache, seq, range(1, 6))
        for view in seq.views(0):
            assert np.isfinite(host(view.k).astype(np.float32)).all()
        del view
    gc.collect()
    empty(cache)


@pytest.mark.parametrize("fmt", QUANTISED)
@pytest.mark.parametrize("policy", ["raise", "saturate"])
@pytest.mark.parametrize("amplitude", [1e-44, 1e-38, 1e-30, 1e-11, 0.0, 1e4, 6e4, 1e7, 1e30, 3e38])
def test_tiny_zero_and_huge_groups(fmt, policy, amplitude):
    # CASE C60
    # SPEC F4 F5 F7
    rng = np.random.default_rng(60)
    cache = make_cache(4, B=4, dim=64, fmt=fmt)
    x = rng.uniform(-1, 1, size=(5, 1, 64))
    x[..., 3] = 1.0
    x[..., 40] = -1.0
    with np.errstate(over="ignore", under="ignore"):
        data = (x * amplitude).astype(np.float32)
    data[2] = 1.0  # a neighbour of ordinary size
    assert np.isfinite(data).all()
    seq = cache.open(range(5))
    try:
        seq.append(0, data, -data, on_nonfinite=policy)
    except PagedCacheError:  # a defined error where a float16 scale cannot hold the group
        assert fmt in ("q8_0", "q4_0", "q4_1") and amplitude > 65504
        assert policy == "raise"
        assert (seq.num_written, seq.seq_len) == (0, 0)
        whole(cache)
        return
    seq.commit(5)
    for got, want in zip(read(seq, 0), (data, -data), strict=True):
        assert np.isfinite(got).all()
        error = np.abs(got.astype(np.float64) - want)
        bound = group_bound(want, fmt)
        if fmt in ("q8_0", "q4_0", "q4_1") and amplitude > 65504:
            # the scale saturates at the largest float16: the sign and the neighbour survive
            assert (error[2] <= bound[2]).all()
            assert (np.sign(got[got != 0]) == np.sign(want[got != 0])).all()
        else:
            assert (error <= bound).all()
    seq.free()
    empty(cache)


@pytest.mark.parametrize("fmt", QUANTISED)
def test_nonfinite_rows_are_refused_or_saturated(fmt):
    # SPEC F7
    cache = make_cache(4, B=4, dim=64, fmt=fmt)
    good = np.linspace(-2, 2, 5 * 64, dtype=np.float32).reshape(5, 1, 64)
    for value in (np.nan, np.inf, -np.inf):
        for kind in (0, 1):
            bad = good.copy()
            bad[3, 0, 40] = value
            pair = (bad, good) if kind == 0 else (good, bad)
            seq = cache.open(range(5))
            refused(cache, lambda s=seq, p=pair: s.append(0, *p), NonFiniteError, seq)
            slots = seq.prepare(5)
            refused(cache, lambda p=pair, m=slots: cache.store(0, *p, m), NonFiniteError, seq)
            assert seq.num_written == 0
            seq.append(0, *pair, on_nonfinite="saturate")
            seq.commit(5)
            clean = bad.copy()
            group = good[3, 0, 32:].copy()
            group[8] = 0
            top = np.abs(group).max()
            clean[3, 0, 40] = 0 if np.isnan(value) else np.copysign(top, value)
            got = read(seq, 0)
            np.testing.assert_array_equal(got[kind], stored(clean, fmt))
            np.testing.assert_array_equal(got[1 - kind], stored(good, fmt))
            seq.free()
            cache.reset_prefix_cache()
    empty(cache)


@pytest.mark.parametrize(("heads", "sequences"), [(10, 2), (1, 1), (3, 2), (5, 2), (8, 2)])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("fmt", ["q4", "q8", "q4_0"])
def test_sizes_come_from_kv_heads(heads, sequences, layout, fmt):
    # CASE C61
    # SPEC F6
    cache = make_cache(8, B=4, heads=heads, dim=64, fmt=fmt, layout=layout)
    assert cache.spec.layer_block_nbytes("k") == block_bytes(fmt, layout, heads, 4, 64)
    seqs = []
    for s in range(sequences):
        seq = cache.open(range(100 * s, 100 * s + 9))
        fill(cache, seq, range(100 * s + 1, 100 * s + 10))
        seqs.append(seq)
    for s, seq in enumerate(seqs):
        assert_holds(cache, seq, range(100 * s + 1, 100 * s + 10))
        with seq.packed_views(0, dtype=np.float32) as views:
            assert all(v.k.shape == (heads, v.length, 64) for v in views)
            assert all(v.num_kv_heads == heads for v in views)
    query_heads = np.zeros((1, 4 * heads, 64), np.float32)
    refused(cache, lambda: seqs[0].append(0, query_heads, query_heads), ShapeError, *seqs)
    for seq in seqs:
        seq.free()
    gc.collect()
    empty(cache)
