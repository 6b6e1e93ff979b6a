"""Cases C42-C45: sizes, dtypes and strides of what comes in."""

from __future__ import annotations

import gc

import ml_dtypes
import numpy as np
import pytest
from cachekit import (
    ROW_FORMATS,
    empty,
    fill,
    make_cache,
    read,
    refused,
    stored,
    whole,
)
from formatkit import block_bytes, fill_rows

import pagedcache as pc
from pagedcache.errors import FormatError, ShapeError


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("fmt", [*ROW_FORMATS, ("q8", "q4"), ("float16", "q8_0")], ids=str)
def test_bytes_per_block_has_one_answer(fmt, layout):
    # CASE C42
    # SPEC F9 F17
    pair = (fmt, fmt) if isinstance(fmt, str) else fmt
    heads, dim, B, layers, n = 3, 48, 5, 2, 4
    cache = make_cache(n, B=B, heads=heads, dim=dim, layers=layers, fmt=fmt, layout=layout)
    spec = cache.spec
    k_bytes, v_bytes = (block_bytes(f, layout, heads, B, dim) for f in pair)
    block = layers * (k_bytes + v_bytes)
    assert spec.layer_block_nbytes("k") == k_bytes
    assert spec.layer_block_nbytes("v") == v_bytes
    assert spec.block_nbytes == block
    assert spec.storage_nbytes(n) == cache.total_capacity == n * block
    assert spec.blocks_for(n * block) == n and spec.blocks_for(n * block - 1) == n - 1
    assert spec.token_nbytes == block / B
    values = 2 * layers * heads * B * dim
    assert spec.bytes_per_value == pytest.approx(block / values, rel=1e-12)
    assert spec.fp32_block_nbytes == 4 * values
    assert cache.memory_usage == 0 and cache.memory_savings == 1.0
    seq = cache.open(range(2 * B))
    fill(cache, seq, range(1, 2 * B + 1))
    assert cache.memory_usage == 2 * block
    assert cache.fp32_equivalent_memory == 2 * 4 * values
    assert cache.memory_savings == pytest.approx(block / (4 * values), rel=1e-12)
    assert cache.utilization == 0.5
    # the bytes of the raw views of one block, all layers
    total = 0
    for layer in range(layers):
        with seq.views(layer, 0, B) as views:
            (view,) = views
            total += view.k.nbytes + view.v.nbytes
    del view
    assert total == block
    by_memory = pc.PagedKVCache(spec, memory=3 * block + block - 1)
    assert by_memory.pool.num_blocks == 3 and by_memory.total_capacity == 3 * block
    seq.free()
    gc.collect()
    empty(cache)


def test_a_float32_array_in_a_bfloat16_cache_is_converted():
    # CASE C43
    # SPEC F2
    x = np.array([1.0, 1.00390625, 1.01171875, 3.14159265, -2.5e38, 1e-40, 65504, 0.1], np.float32)
    data = np.broadcast_to(x, (6, 1, 8)).copy()
    for fmt, dtype in (("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)):
        cache = make_cache(2, B=4, dim=8, fmt=fmt)
        seq = cache.open(range(6))
        with np.errstate(over="ignore"):
            want = data.astype(dtype)
        fill_rows(seq, data)
        for got in seq.gather(0):
            assert got.dtype == dtype
            np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))
        for got in seq.gather(0, dtype=np.float32):
            np.testing.assert_array_equal(got, want.astype(np.float32))
        seq.free()
    # and every other direction between the float formats
    for fmt in ("float32", "float16", "bfloat16"):
        cache = make_cache(4, B=4, dim=8, fmt=fmt)
        for source in (np.float32, np.float16, ml_dtypes.bfloat16):
            half = np.linspace(-3, 3, 48, dtype=np.float32).reshape(6, 1, 8).astype(source)
            seq = cache.open()
            fill_rows(seq, half)
            want = stored(half.astype(np.float32), fmt)
            np.testing.assert_array_equal(read(seq, 0)[0], want)
            seq.free()


@pytest.mark.parametrize(
    ("array", "name"),
    [
        (np.zeros((2, 1, 4), np.float64), "float64"),
        (np.zeros((2, 1, 4), np.int8), "int8"),
        (np.zeros((2, 1, 4), np.uint8), "uint8"),
        (np.zeros((2, 1, 4), np.int64), "int64"),
        (np.zeros((2, 1, 4), bool), "bool"),
        (np.zeros((2, 1, 4), np.complex64), "complex64"),
        (np.zeros((2, 1, 4), np.longdouble), "longdouble|float128|float96|float64"),
        (np.zeros((2, 1, 4), object), "object"),
        (np.zeros((2, 1, 4), "U3"), "U3|str"),
        (np.zeros((2, 1, 4), "S3"), "S3|bytes"),
        (np.zeros((2, 1, 4), "M8[s]"), "datetime64"),
        (np.zeros((2, 1, 4), [("a", "f4")]), "void|'a'"),
        (np.zeros((2, 1, 4), ml_dtypes.float8_e4m3fn), "float8_e4m3fn"),
        ([[[1.0, 2.0, 3.0, 4.0]], [[1.0]]], "list"),
        ([[[1.0, 2.0, 3.0, 4.0]]], "list|float64"),
        ("words", "U5|str"),
        (None, "None|object"),
        (1.5, "float"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_dtypes_that_are_not_stored(array, name):
    # CASE C44
    # SPEC F10
    good = np.zeros((2, 1, 4), np.float32)
    for fmt in ("float32", "q8"):
        cache = make_cache(4, B=4, fmt=fmt)
        seq = cache.open(range(6))
        slots = seq.prepare(2)
        for call in (
            lambda s=seq: s.append(0, array, good),
            lambda s=seq: s.append(0, good, array),
            lambda s=seq: s.append_kv(0, array, array, 0),
            lambda c=cache, m=slots: c.store(0, array, good, m),
            lambda c=cache, m=slots: c.store(0, good, array, m),
        ):
            e = refused(cache, call, (FormatError, ShapeError), seq)
            assert any(part in str(e) for part in name.split("|")), str(e)
        seq.free()
        empty(cache)


def source_arrays() -> list[tuple[str, np.ndarray]]:
    rng = np.random.default_rng(45)
    base = rng.normal(size=(6, 2, 8)).astype(np.float32)
    wide = rng.normal(size=(12, 4, 16)).astype(np.float32)
    frozen = base.copy()
    frozen.flags.writeable = False
    raw = np.zeros(base.nbytes + 1, np.uint8)
    odd = raw[1:].view(np.float32).reshape(base.shape)
    odd[...] = base
    return [
        ("contiguous", base),
        ("transposed", np.ascontiguousarray(base.transpose(1, 2, 0)).transpose(2, 0, 1)),
        ("Fortran", np.asfortranarray(base)),
        ("strided", wide[::2, 1::2, ::2]),
        ("offset", wide[3:9, 1:3, 5:13]),
        ("negative", base[::-1, ::-1, ::-1]),
        ("negative rows", base[::-1]),
        ("broadcast", np.broadcast_to(base[:1], base.shape)),
        ("read-only", frozen),
        ("misaligned", odd),
        ("flat rows", base.reshape(6, 16)),
        ("flat strided", wide.reshape(12, 64)[::2, 3:51:3]),
        ("float16", base.astype(np.float16)[::-1]),
        ("bfloat16", base.astype(ml_dtypes.bfloat16).transpose(1, 0, 2).copy().transpose(1, 0, 2)),
        ("empty", base[:0]),
        ("big-endian", base.astype(">f4")),
        ("big-endian half", base.astype(">f2")),
    ]


@pytest.mark.parametrize("fmt", ["float32", "float16", "bfloat16", "q8", "q4", "q4_0"])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_strides_are_as_good_as_contiguous(fmt, layout):
    # CASE C45
    # SPEC F24
    for name, array in source_arrays():
        cache = make_cache(4, B=4, heads=2, dim=8, fmt=fmt, layout=layout)
        seq, plain = cache.open(), cache.open()
        native = array.astype(array.dtype.newbyteorder("=")) if "big" in name else array
        dense = np.ascontiguousarray(native).reshape(-1, 2, 8).copy()
        plain.append(0, dense, dense)
        try:
            seq.append(0, array, array[::-1][::-1])
        except FormatError as e:
            assert "big" in name, name  # a clear error is allowed for a foreign byte order
            assert "f4" in str(e) or "f2" in str(e) or "endian" in str(e).lower()
            assert seq.num_written == 0
            continue
        n = len(array)
        assert seq.num_written == n
        for a, b in zip(read(seq, 0, 0, n), read(plain, 0, 0, n), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=name)
        want = stored(dense.astype(np.float32), fmt)
        np.testing.assert_array_equal(read(seq, 0, 0, n)[0], want, err_msg=name)
        whole(cache)


@pytest.mark.parametrize(
    "shape", [(2, 1, 3), (2, 2, 4), (2, 3), (2, 5), (8,), (), (2, 1, 4, 1), (2, 4, 1), (1, 2, 1, 4)]
)
def test_wrong_shapes(shape):
    # CASE C45
    # SPEC F24
    cache = make_cache(4, B=4)
    seq = cache.open(range(6))
    bad, good = np.zeros(shape, np.float32), np.zeros((2, 1, 4), np.float32)
    refused(cache, lambda: seq.append(0, bad, good), ShapeError, seq)
    refused(cache, lambda: seq.append(0, good, bad), ShapeError, seq)
    refused(cache, lambda: seq.append(0, good, good[:1]), ShapeError, seq)
