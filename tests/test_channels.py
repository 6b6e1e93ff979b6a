"""q4k: one scale per channel over the tokens of a block (include/pagedcache/channels.h)."""

from __future__ import annotations

import itertools
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
import reference_formats as ref
from devicekit import host
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from storagekit import DTYPES, LAYOUTS, bits, make_storage, raw_slab

from pagedcache.arithmetic import dequantize, quantize
from pagedcache.errors import NonFiniteError
from pagedcache.spec import CacheSpec

BLOCK_SIZES = (1, 3, 16, 31, 32, 33, 64)
HEAD_DIMS = (1, 7, 31, 32, 33, 64, 80, 96, 128)
Floats = NDArray[np.float32]


def stored(x: Any, layout: str = "HND", policy: str = "raise") -> tuple[Any, Floats]:
    """(bytes of K's block, rows as they read back) of a block ``[tokens, heads, dim]``."""
    tokens, heads, dim = x.shape
    spec = CacheSpec(1, heads, dim, tokens, k_format="q4k", v_format="q4k", layout=layout)
    storage = make_storage(spec, 2)
    ready = storage.check_rows(0, x, x, tokens, policy)
    storage.store(0, *ready, tokens + np.arange(tokens), policy)
    raw = [raw_slab(storage, 0, kind) for kind in ("k", "v")]
    assert np.array_equal(raw[0], raw[1]) and not raw[0][0].any()
    back = storage.gather(0, np.array([1], np.int32), 0, tokens, np.float32)
    return raw[0][1].copy(), host(back[0])


def rough(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Values whose size and offset differ from channel to channel, zeros of both signs, a few
    channels that are constant, tiny or huge."""
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-9, 9, (1, *shape[1:])))
    x += rng.standard_normal((1, *shape[1:])) * np.exp2(rng.integers(-9, 9, (1, *shape[1:])))
    kind = rng.random((1, *shape[1:]))
    x = np.where(kind < 0.08, x[:1], x)  # constant
    x = np.where((kind > 0.08) & (kind < 0.12), x * 1e-38, x)
    x = np.where((kind > 0.12) & (kind < 0.16), x * 1e33, x)
    x = np.where((kind > 0.16) & (kind < 0.20), 0.0, x)
    x = np.where(rng.random(shape) < 0.05, -0.0, x)
    return np.clip(x, -3e38, 3e38).astype(np.float32)


# SPEC F6, F9a, F10: every byte, padding included, is that of the independent model.
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_small_block(layout: str) -> None:
    rng = np.random.default_rng(1)
    for tokens, heads, dim in itertools.product(range(1, 6), range(1, 4), range(1, 10)):
        x = rough(rng, (tokens, heads, dim))
        block, back = stored(x, layout)
        assert np.array_equal(block, ref.pack_block("q4k", layout, x))
        assert np.array_equal(bits(back), bits(ref.round_trip_channels(x)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", BLOCK_SIZES)
def test_block_sizes_and_head_dims(tokens: int, layout: str) -> None:
    rng = np.random.default_rng(tokens)
    heads = itertools.cycle((1, 3, 8))
    for dim in HEAD_DIMS:
        for dtype in DTYPES:
            x = rough(rng, (tokens, next(heads), dim))
            if dtype.itemsize == 2:
                x = np.clip(x, -6e4, 6e4)
            given_rows = x.astype(dtype)
            block, back = stored(given_rows, layout)
            wide = given_rows.astype(np.float32)
            assert np.array_equal(block, ref.pack_block("q4k", layout, wide))
            assert np.array_equal(bits(back), bits(ref.round_trip_channels(wide)))


# SPEC F10: the arithmetic of a group is q4_1's, whichever way its values lie; a group of fewer
# tokens is one whose missing values repeat the last.
@pytest.mark.parametrize("tokens", BLOCK_SIZES)
def test_columns_read_back_as_groups_of_q4_1(tokens: int) -> None:
    x = rough(np.random.default_rng(tokens), (tokens, 3, 40))
    _, back = stored(x)
    for first in range(0, tokens, 32):
        part = x[first : first + 32]
        filled = np.concatenate([part, np.repeat(part[-1:], 32 - len(part), axis=0)])
        columns = np.ascontiguousarray(filled.transpose(1, 2, 0))
        for name in ("q4_1", "q4k"):  # a flat buffer of q4k has no tokens: rows of 32
            want = dequantize(quantize(columns, name)).transpose(2, 0, 1)[: len(part)]
            got = back[first : first + 32]
            assert np.array_equal(bits(got), bits(np.ascontiguousarray(want)))


# A second oracle for the groups: ggml's own Python package.
def test_groups_are_those_of_ggml() -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((32, 2, 64)) * 3 + rng.standard_normal((1, 2, 64))).astype(np.float32)
    block, back = stored(x)
    columns = np.ascontiguousarray(x.transpose(1, 2, 0)).reshape(-1, 32)
    theirs = gguf.quantize(columns, gguf.GGMLQuantizationType.Q4_1)
    planes = block.reshape(2, 32 * 32 + 64 * 4)  # per head: 32 rows of nibbles, 64 scales
    assert np.array_equal(planes[:, 1024:].reshape(-1, 4), theirs[:, :4])
    rows = planes[:, :1024].reshape(2, 32, 32)
    nibbles = np.stack([rows & 15, rows >> 4], axis=3).reshape(2, 32, 64)
    halves = np.concatenate([theirs[:, 4:] & 15, theirs[:, 4:] >> 4], axis=1)
    assert np.array_equal(nibbles.transpose(0, 2, 1).reshape(-1, 32), halves)
    values = gguf.dequantize(theirs, gguf.GGMLQuantizationType.Q4_1)
    assert np.array_equal(back.transpose(1, 2, 0).reshape(-1, 32), values)


# SPEC F7: Inf acts as its channel's largest finite magnitude, NaN as 0; no channel beside it and
# no other group of tokens changes.
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 16, 33, 64])
def test_saturation_stays_in_its_group(tokens: int, layout: str) -> None:
    rng = np.random.default_rng(tokens)
    clean = rng.standard_normal((tokens, 2, 35)).astype(np.float32)
    dirty, tamed = clean.copy(), clean.copy()
    last = tokens - 1
    dirty[last, 1, 34], dirty[0, 0, 3] = np.inf, -np.inf
    dirty[0, 1, 7] = np.nan
    dirty[:, 0, 9] = [np.nan, np.inf] * (tokens // 2) + [-np.inf] * (tokens % 2)
    group = slice(last // 32 * 32, tokens)
    tamed[last, 1, 34] = np.abs(np.append(clean[group, 1, 34][:-1], 0)).max()
    tamed[0, 0, 3] = -np.abs(np.append(clean[1:32, 0, 3], 0)).max()
    tamed[0, 1, 7] = 0
    tamed[:, 0, 9] = 0
    if tokens == 1:  # a group with no finite value is all zeros
        tamed[0, 1, 34] = tamed[0, 0, 3] = 0
    block, back = stored(dirty, layout, "saturate")
    assert np.array_equal(block, stored(tamed, layout)[0])
    assert np.array_equal(block, ref.pack_block("q4k", layout, dirty))
    assert np.isfinite(back).all()
    same = np.ones(clean.shape, bool)
    same[group, 1, 34] = same[:32, 0, 3] = same[:32, 1, 7] = same[:, 0, 9] = False
    assert np.array_equal(back[same], stored(clean, layout)[1][same])
    with pytest.raises(NonFiniteError):
        stored(dirty, layout)


# CASE C60: constant groups, zeros of both signs, ranges that float16 cannot hold.
def test_groups_at_the_edges() -> None:
    x = np.zeros((16, 1, 12), np.float32)
    x[:, 0, 0] = 3.140625  # a float16
    x[:, 0, 1] = 1 / 3
    x[:, 0, 2] = -0.0
    x[:, 0, 3] = [0.0, -0.0] * 8
    x[:, 0, 4] = 1e-45
    x[:, 0, 5] = 1e9
    x[:, 0, 6] = -1e9
    x[:8, 0, 7], x[8:, 0, 7] = 3e38, -3e38
    x[:8, 0, 8], x[8:, 0, 8] = 65504, -65504
    x[:, 0, 9] = np.linspace(1e-30, 2e-30, 16)
    x[0, 0, 10] = 15
    x[:, 0, 11] = 100 + np.arange(16) / 16
    back = stored(x)[1][:, 0]
    assert (back[:, 0] == 3.140625).all()
    assert (back[:, 1] == np.float32(np.float16(1 / 3))).all()
    # zeros read back as +0, whatever sign the minimum kept: it is added to a quant of +0
    assert not back[:, 2:5].any() and not np.signbit(back[:, 2:5]).any()
    # minimum and scale end at 65504: 16 times that at most
    assert (back[:, 5] == 16 * 65504).all() and (back[:, 6] == -65504).all()
    assert (back[:8, 7] == 14 * 65504).all() and (back[8:, 7] == -65504).all()
    assert (np.abs(back[:, 8] - x[:, 0, 8]) <= 2.0**-11 * 131008).all()
    assert not back[:, 9].any()
    assert back[:, 10].tolist() == [15] + [0] * 15
    # CASE C39: an offset a hundred times the range costs the range's step, not the offset's
    assert (np.abs(back[:, 11] - x[:, 0, 11]) <= 15 / 16 / 30 + 100 * 2.0**-11).all()


def error_bound(x: Floats) -> NDArray[np.float64]:
    """Largest error of each value of a block [tokens, heads, dim] that float16 scales can hold.

    Half a step; the scale is rounded to float16 (times up to 15 steps) and so is the minimum, each
    by 2^-11 or, where it is subnormal, by 2^-25; float32 arithmetic adds some 2^-22.
    """
    out = np.empty(x.shape, np.float64)
    for first in range(0, len(x), 32):
        group = x[first : first + 32].astype(np.float64)
        least, span = group.min(axis=0), np.ptp(group, axis=0)
        largest = np.abs(group).max(axis=0)
        bound = span / 30 + 15 * np.maximum(span / 15 * 2.0**-11, 2.0**-25)
        bound += np.maximum(np.abs(least) * 2.0**-11, 2.0**-25) + largest * 2.0**-21
        out[first : first + 32] = bound
    return out


# CASE C38
@given(
    seed=st.integers(0, 2**32 - 1), tokens=st.sampled_from(BLOCK_SIZES),
    dim=st.integers(1, 100), size=st.integers(-20, 15), offset=st.integers(-20, 15),
)  # fmt: skip
def test_errors_stay_within_the_bound(
    seed: int, tokens: int, dim: int, size: int, offset: int
) -> None:
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (tokens, 2, dim)) * 2.0**size
    x = (x + rng.uniform(-1, 1, (1, 2, dim)) * 2.0**offset).astype(np.float32)
    back = stored(x)[1]
    assert (np.abs(back.astype(np.float64) - x) <= error_bound(x)).all()


# Real keys have a few large channels, which a scale per token cannot serve and one per channel
# can. The figures are those of a separate program in float64 (KIVI, Liu et al. 2024).
@pytest.mark.parametrize(
    ("block_size", "k_error", "v_error"), [(16, "0.0319", "0.0792"), (32, "0.0396", "0.0792")]
)
def test_real_keys_and_values(block_size: int, k_error: str, v_error: str) -> None:
    with files("pagedcache").joinpath("data/smollm2_kv_sample.npz").open("rb") as file:
        sample = np.load(file)
        k, v = sample["k"], sample["v"]
    layers, tokens, heads, dim = k.shape
    spec = CacheSpec(layers, heads, dim, block_size, "q4k")
    storage = make_storage(spec, tokens // block_size)
    ids = np.arange(tokens // block_size, dtype=np.int32)
    read = []
    for layer in range(layers):
        ready = storage.check_rows(layer, k[layer], v[layer], tokens)
        storage.store(layer, *ready, np.arange(tokens))
        read.append([host(x) for x in storage.gather(layer, ids, 0, tokens, np.float32)])
    for index, (x, expected) in enumerate(((k, k_error), (v, v_error))):
        error = np.stack([pair[index] for pair in read]).astype(np.float64) - x
        rmse = np.sqrt((error**2).sum() / (x.astype(np.float64) ** 2).sum())
        assert f"{rmse:.3g}" == expected
        assert rmse < (0.146, 0.0986)[index] / (3, 1.2)[index]  # what Q4 loses of K and of V
