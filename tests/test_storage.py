"""Rows in and rows out, byte for byte against the slow reference."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import numpy as np
import pytest
from devicekit import ON_CPU, cpu_memory, host
from profiles import SHORT
from reference_storage import KINDS
from storagekit import (
    ARRANGEMENTS,
    BFLOAT16,
    BY_ROW,
    DTYPES,
    FORMATS,
    LAYOUTS,
    QUANTIZED,
    Pair,
    bits,
    make_storage,
    raw_slab,
)

from pagedcache.spec import CacheSpec
from pagedcache.storage import CpuStorage

BLOCK_SIZES = (1, 2, 16, 31)
HEAD_DIMS = (32, 33, 64, 80, 96)
HEADS = (1, 3, 5, 8)


def random_rows(rng: np.random.Generator, shape: Any, dtype: Any) -> Any:
    """Rows whose amplitude differs from row to row, signed zeros among them."""
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-8, 8, (*shape[:-1], 1))
    x[rng.random(shape) < 0.05] = -0.0
    return x.astype(np.float32).astype(dtype)


# SPEC F4, F5, F6, F9a; CASES C40, C43, C45, C61: every format and layout, K and V mixed, every
# source dtype in every arrangement, odd sizes; the bytes equal the reference, padding included.
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("k_format", FORMATS)
def test_stored_bytes_and_gathered_values(k_format: str, layout: str) -> None:
    rng = np.random.default_rng(sum(map(ord, k_format + layout)))
    v_formats = itertools.cycle(FORMATS)
    arrangements = itertools.cycle(ARRANGEMENTS.values())
    geometries = list(itertools.product(BLOCK_SIZES, HEAD_DIMS, HEADS))
    for block_size, dim, heads in geometries[:: 7 if SHORT else 1]:
        pair = Pair(
            k_format, next(v_formats),
            layout=layout, heads=heads, dim=dim, block_size=block_size,
        )  # fmt: skip
        for dtype in DTYPES:
            n = min(4 * block_size, 2 * block_size + 1)
            slots = rng.permutation(4 * block_size)[:n]
            slots[rng.random(n) < 0.2] = -1
            k, v = (random_rows(rng, (n, heads, dim), dtype) for _ in KINDS)
            arrange = next(arrangements)
            pair.store(0, arrange(k), arrange(v), slots)
            pair.assert_equal()
        assert_gathers(pair, rng)


def assert_gathers(pair: Pair, rng: np.random.Generator) -> None:
    size = pair.spec.block_size
    ids = rng.permutation(4)[:3].astype(np.int32)
    positions = (ids.astype(np.int64)[:, None] * size + np.arange(size)).ravel()
    base = 7 * size  # the table covers positions from block 7 of the sequence on
    for dtype in DTYPES:
        first = int(rng.integers(0, size))
        last = int(rng.integers(first, 3 * size + 1))
        got = pair.storage.gather(0, ids, base + first, base + last, dtype)
        for kind, values in zip(KINDS, got, strict=True):
            want = pair.reference.gather(0, kind, positions[first:last], dtype)
            assert values.dtype == dtype and values.shape == want.shape
            np.testing.assert_array_equal(bits(host(values)), bits(want))


# CASE C45: the same rows arranged differently store the same bytes; zero tokens store nothing.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_arrangements_of_rows(fmt: str, dtype: Any) -> None:
    x = random_rows(np.random.default_rng(1), (7, 3, 40), dtype)
    for layout, arrange in itertools.product(LAYOUTS, ARRANGEMENTS.values()):
        pair = Pair(fmt, heads=3, dim=40, layout=layout)
        pair.store(0, arrange(x), arrange(-x), np.arange(7) + 3)
        pair.store(0, arrange(x[:0]), arrange(x[:0]), [])
        pair.assert_equal()


# SPEC F32: out of any strides is filled in place and returned.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_gather_into_strided_arrays(fmt: str, dtype: Any) -> None:
    pair = Pair(fmt, heads=3, dim=40)
    pair.fill_random()
    ids = np.array([2, 0], np.int32)
    want = [host(x) for x in pair.storage.gather(0, ids, 1, 7, dtype)]
    for name in ("contiguous", "transposed", "head-major", "strided", "backwards"):
        outs = [ARRANGEMENTS[name](np.zeros((6, 3, 40), dtype)) for _ in KINDS]
        got = pair.storage.gather(0, ids, 1, 7, None, *outs)
        for out, result, expected in zip(outs, got, want, strict=True):
            assert result is out
            np.testing.assert_array_equal(bits(out), bits(expected))
    both = np.zeros((6, 2, 3, 40), dtype)
    pair.storage.gather(0, ids, 1, 7, dtype, both[:, 0], both[:, 1])
    np.testing.assert_array_equal(bits(both[:, 1]), bits(want[1]))


# SPEC F1, F2, F3: rows of the stored dtype are copied as bits, NaN payloads and all; other dtypes
# go through float32 and round to nearest even, NaN staying NaN.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", DTYPES, ids=str)
def test_float_formats_hold_every_bit_pattern(fmt: Any, dtype: Any) -> None:
    if dtype.itemsize == 2:
        patterns = np.arange(2**16, dtype=np.uint16)
    else:
        edges = np.arange(2**16, dtype=np.uint32) << 16
        patterns = np.concatenate([edges, edges | 1, edges | 0x8000, edges | 0x1000])
    rows = patterns.view(dtype).reshape(-1, 2, 64)
    pair = Pair(str(fmt), dim=64, block_size=16, num_blocks=len(rows) // 16)
    pair.store(0, rows, rows[::-1], np.arange(len(rows)))
    pair.assert_equal()
    ids = np.arange(len(rows) // 16, dtype=np.int32)
    got = host(pair.storage.gather(0, ids, 0, len(rows), dtype)[0])
    if fmt == dtype:
        np.testing.assert_array_equal(bits(got).ravel(), patterns)
    else:
        assert np.array_equal(np.isnan(got.astype(np.float32)), np.isnan(rows.astype(np.float32)))


# CASE C43
def test_float32_rows_in_a_bfloat16_storage_are_converted() -> None:
    storage = make_storage(CacheSpec(1, 1, 4, 2, "bfloat16"), 1)
    x = np.array([[[1.0, -2.5, 3.1415927, 1e-40]]], np.float32)
    storage.store(0, *storage.check_rows(0, x, x, 1), np.array([1]))
    assert host(storage.block_array(0, "k", 0)).view(np.uint16).tolist() == [
        [[0, 0, 0, 0], [0x3F80, 0xC020, 0x4049, 0x0001]]
    ]
    got = host(storage.gather(0, np.array([0], np.int32), 1, 2, BFLOAT16)[0])
    assert got.astype(np.float32).ravel().tolist() == [1.0, -2.5, 3.140625, 2.0**-133]


# CASE C41: a reused block full of NaN bytes; what lies past the length is never read.
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_block_full_of_nan_bytes(fmt: str, layout: str) -> None:
    pair = Pair(fmt, layout=layout, block_size=16, dim=80)
    pair.fill(0xFF)
    x = random_rows(np.random.default_rng(2), (5, 2, 80), np.float32)
    pair.store(0, x, -x, np.arange(32, 37))
    pair.assert_equal()  # every byte that is not one of the five tokens is still 0xFF
    for dtype in DTYPES:
        for values in pair.storage.gather(0, np.array([2], np.int32), 0, 5, dtype):
            assert np.isfinite(host(values).astype(np.float32)).all()
        for kind in KINDS if ON_CPU else ():
            block = pair.storage.dequantize_block(0, kind, 2, 5, dtype)
            assert np.isfinite(block.astype(np.float32)).all()


# SPEC F7: saturate stores what the rules say and never poisons a neighbour.
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", QUANTIZED)
def test_saturated_values(fmt: str, layout: str) -> None:
    rng = np.random.default_rng(3)
    x = random_rows(rng, (8, 2, 80), np.float32)
    x[rng.random(x.shape) < 0.1] = np.nan
    x[rng.random(x.shape) < 0.1] = np.inf
    x[rng.random(x.shape) < 0.1] = -np.inf
    x[3, 1, :32] = np.nan
    for dtype in DTYPES:
        pair = Pair(fmt, layout=layout, dim=80)
        pair.store(0, x.astype(dtype), -x.astype(dtype), np.arange(8), "saturate")
        pair.assert_equal()
        k, v = pair.storage.gather(0, np.array([0, 1], np.int32), 0, 8, np.float32)
        assert np.isfinite(k).all() and np.isfinite(v).all()


# CASE C60: tiny, zero and huge groups in K and V, every quantised format: finite, as the reference.
@pytest.mark.parametrize("fmt", QUANTIZED)
def test_tiny_zero_and_huge_groups(fmt: str) -> None:
    amplitudes = np.array([1e-45, 1e-38, 1e-12, 0.0, 1.0, 1e5, 1e30, 3e38], np.float32)
    x = np.linspace(-1, 1, 2 * 64, dtype=np.float32).reshape(1, 2, 64) * amplitudes[:, None, None]
    pair = Pair(fmt, dim=64)
    pair.store(0, x, x[::-1], np.arange(8))
    pair.assert_equal()
    for values in pair.storage.gather(0, np.array([0, 1], np.int32), 0, 8, np.float32):
        assert np.isfinite(values).all()


def error_bound(fmt: str, groups: Any) -> Any:
    """Largest error of a group [..., 32]: half a step, and what rounding the scale may add."""
    x = groups.astype(np.float64)
    amax = np.abs(x).max(axis=-1, keepdims=True)
    least, most = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    if fmt in ("q8", "q4"):
        return np.where(amax < 1e-10, 1e-10, amax / (127 if fmt == "q8" else 7) / 2)
    half = 2.0**-11, 2.0**-25  # relative rounding of a float16, absolute of a subnormal one
    if fmt == "q8_0":
        return amax / 127 / 2 + amax * half[0] + 127 * half[1]
    if fmt == "q4_0":  # a whole step on the side where 8 is cut to 7
        return amax / 8 + amax * half[0] + 8 * half[1]
    return (most - least) * (1 / 30 + half[0]) + np.abs(least) * half[0] + 16 * half[1]


# TRAP 11, CASE C38: tokens written one at a time, all read back after each; earlier bytes stay.
# (Where scales run along the tokens: test_open_storage.py.)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", [name for name in QUANTIZED if name in BY_ROW])
def test_tokens_written_one_at_a_time(fmt: str, layout: str) -> None:
    x = random_rows(np.random.default_rng(4), (48, 2, 64), np.float32)
    x[5, 1] *= 1e-12  # below 1e-10: zero-scale groups
    groups = x.reshape(48, 2, 2, 32)
    bound = error_bound(fmt, groups) + 2.0**-20 * np.abs(groups).max(axis=3, keepdims=True)
    pair = Pair(fmt, layout=layout, dim=64, block_size=16, num_blocks=3)
    ids = np.array([2, 0, 1], np.int32)
    seen: list[bytes] = []
    for n in range(48):
        slot = int(ids[n // 16]) * 16 + n % 16
        pair.store(0, x[n : n + 1], x[n : n + 1], [slot])
        k, v = map(host, pair.storage.gather(0, ids, 0, n + 1, np.float32))
        error = np.abs(k.reshape(-1, 2, 2, 32).astype(np.float64) - groups[: n + 1])
        assert (error <= bound[: n + 1]).all()
        assert k.tobytes() == v.tobytes()
        now = [k[i].tobytes() for i in range(n + 1)]
        assert now[:n] == seen
        seen = now
    pair.assert_equal()


# CASE C39: a loud token does not blur the quiet ones beside it.
@pytest.mark.parametrize(("fmt", "top"), [("q8", 127), ("q4", 7)])
def test_amplitudes_one_and_a_thousand_in_one_block(fmt: str, top: int) -> None:
    x = np.random.default_rng(5).uniform(-1, 1, (2, 2, 64)).astype(np.float32)
    x[1] *= 1000
    pair = Pair(fmt, dim=64)
    pair.store(0, x, x, [0, 1])
    k = host(pair.storage.gather(0, np.array([0], np.int32), 0, 2, np.float32)[0])
    for token, amplitude in enumerate((1, 1000)):
        limit = amplitude / top / 2 + 2.0**-20 * amplitude
        assert np.abs(k[token].astype(np.float64) - x[token]).max() <= limit


# SPEC F30, F48: the array over a block is the storage itself, read-only; a dequantised copy has the
# same axes, cut to the length.
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_block_arrays(fmt: str, layout: str) -> None:
    pair = Pair(fmt, layout=layout, layers=2)
    pair.fill_random()
    block = pair.storage.block_array(1, "v", 3)
    if ON_CPU:
        slab = pair.storage.slab_array(1, "v")
        assert np.shares_memory(block, slab) and not block.flags.writeable
    assert host(block).tobytes() == pair.reference.blocks["v"][1, 3].tobytes()
    if fmt not in QUANTIZED:
        assert block.shape == ((2, 4, 33) if layout == "HND" else (4, 2, 33))
    for dtype, length in itertools.product(DTYPES if ON_CPU else (), (0, 1, 3, 4)):
        want = pair.reference.gather(1, "v", 12 + np.arange(length), dtype)
        want = want.transpose(1, 0, 2) if layout == "HND" else want
        got = pair.storage.dequantize_block(1, "v", 3, length, dtype)
        assert got.shape == want.shape and got.flags.c_contiguous
        np.testing.assert_array_equal(bits(got), bits(want))
    if ON_CPU:
        writable = pair.storage.block_array(1, "v", 3, writable=True)
        writable[...] = 0
        raw = raw_slab(pair.storage, 1, "v")
        assert not raw[3].any() and raw[2].any()


# CASE C61: sizes come from KV heads; long rows take the heap once per call.
@pytest.mark.parametrize(("heads", "dim"), [(10, 64), (1, 1), (1, 31), (2, 1024), (1, 65536)])
@pytest.mark.parametrize("fmt", ["float16", "q8", "q4", "q4_1", "q4k"])
def test_extreme_geometries(fmt: str, heads: int, dim: int) -> None:
    pair = Pair(fmt, heads=heads, dim=dim, block_size=2)
    for dtype in DTYPES:
        x = random_rows(np.random.default_rng(6), (5, heads, dim), dtype)
        pair.store(0, x, -x, [7, 0, 3, -1, 2])
        pair.assert_equal()
        got = host(pair.storage.gather(0, np.array([3, 0, 1], np.int32), 1, 6, BFLOAT16)[0])
        want = pair.reference.gather(0, "k", [7, 0, 1, 2, 3], BFLOAT16)
        np.testing.assert_array_equal(bits(got), bits(want))


# SPEC F11: zeroed slabs, aligned to 64 bytes; CASE C42: one answer to bytes per block.
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_slabs_and_sizes(fmt: str, layout: str) -> None:
    pair = Pair(fmt, "q4", layout=layout, layers=3, heads=3, dim=33, block_size=5)
    spec, storage = pair.spec, pair.storage
    num_open = 4 if fmt == "q4k" else 0
    assert storage.nbytes == spec.storage_nbytes(4, num_open)
    assert spec.storage_nbytes(4) == 4 * spec.block_nbytes
    total = 0
    for layer, kind in itertools.product(range(3), KINDS):
        slab = storage.slab_array(layer, kind)
        address = slab.ctypes.data if isinstance(slab, np.ndarray) else slab.address
        assert address % 64 == 0 and not raw_slab(storage, layer, kind).any()
        assert slab[0].nbytes == spec.layer_block_nbytes(kind)
        assert slab[0].nbytes == storage.block_array(layer, kind, 1).nbytes
        assert slab[0].nbytes == pair.reference.blocks[kind].shape[2]
        total += slab.nbytes
    assert total == spec.storage_nbytes(4)


# SPEC F34: many threads, each on its own blocks.
def test_threads_on_different_blocks() -> None:
    pair = Pair("q8", heads=4, dim=64, block_size=16, num_blocks=8, layers=2)
    rows = random_rows(np.random.default_rng(7), (8, 16, 4, 64), np.float32)
    failures: list[str] = []

    def work(block: int) -> None:
        slots = block * 16 + np.arange(16)
        ids = np.array([block], np.int32)
        for turn in range(50):
            x = rows[(block + turn) % 8]
            for layer in range(2):
                pair.storage.store(layer, *pair.storage.check_rows(layer, x, -x, 16), slots)
                k, v = map(host, pair.storage.gather(layer, ids, 0, 16, np.float32))
                if not np.array_equal(k, -v) or np.abs(k - x).max() > np.abs(x).max() / 250:
                    failures.append(f"block {block} layer {layer} turn {turn}")

    threads = [threading.Thread(target=work, args=(block,)) for block in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# SPEC F34: the GIL is released while bytes move: this thread keeps running during the call.
@cpu_memory("the time its copies take")
def test_the_gil_is_released() -> None:
    storage = CpuStorage(CacheSpec(1, 8, 128, 16, "q8"), 1024)
    ids = np.arange(1024, dtype=np.int32)
    outs = [np.empty((16 * 1024, 8, 128), np.float16) for _ in KINDS]
    for _ in range(5):
        span: list[float] = []

        def call(span: list[float] = span) -> None:
            span.append(time.perf_counter())
            storage.gather(0, ids, 0, 16 * 1024, None, *outs)
            span.append(time.perf_counter())

        thread = threading.Thread(target=call)
        thread.start()
        ticks = []
        while thread.is_alive():
            ticks.append(time.perf_counter())
            time.sleep(0.0005)
        thread.join()
        start, end = span
        margin = 0.2 * (end - start)
        if sum(start + margin < tick < end - margin for tick in ticks) >= 3:
            return
    pytest.fail("no Python code ran in the middle of five gather calls")
