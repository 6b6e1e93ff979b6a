"""Cases C38-C41, C47, C56 and C60 once more, where the newest blocks of a sequence are open."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from cachekit import cached_prompt, empty, expected, make_cache, read, rows, whole
from devicekit import cpu_memory, host, placement
from formatkit import block_bytes
from reference_formats import BY_CHANNEL, QUANTIZED, round_trip, round_trip_channels
from reference_storage import clamped

import pagedcache as pc

LAYOUTS = ["HND", "NHD"]


def opened(x: np.ndarray) -> np.ndarray:
    """Rows [n, heads, dim] as an open block of float16 gives them back."""
    flat = clamped("float16", x.reshape(-1, x.shape[-1])).astype(np.float16)
    return flat.astype(np.float32).reshape(x.shape)


def sealed(x: np.ndarray, fmt: str) -> np.ndarray:
    """A whole block as its format gives it back."""
    if fmt in BY_CHANNEL:
        return round_trip_channels(x)
    return round_trip(fmt, x.reshape(-1, x.shape[-1])).reshape(x.shape)


def written_one_by_one(x: np.ndarray, fmt: str, size: int) -> np.ndarray:
    """What a sequence of these rows reads as: blocks are sealed once they are full and one block
    behind its end, from what they held open."""
    held, n = opened(x), len(x)
    blocks = [held[i : i + size] for i in range(0, n, size)]
    ready = [i for i in range(len(blocks)) if (i + 2) * size <= n]
    return np.concatenate([sealed(b, fmt) if i in ready else b for i, b in enumerate(blocks)])


def open_cache(fmt: str, num_blocks: int, **sizes: Any) -> pc.PagedKVCache:
    layers = sizes.pop("layers", 1)
    storage = {"storage": sizes.pop("storage")} if "storage" in sizes else {}
    options = {name: sizes.pop(name) for name in ("partial_block_reuse",) if name in sizes}
    spec = pc.CacheSpec(layers, k_format=fmt, v_format=fmt, open_blocks="float16", **sizes)
    where = {} if storage else {"device": placement(layers)}
    return pc.PagedKVCache(spec, num_blocks, **where, **storage, **options)


@pytest.mark.parametrize("fmt", QUANTIZED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_one_at_a_time(fmt: str, layout: str) -> None:
    # CASE C38, TRAP 11
    # SPEC F4 F5 F6
    rng = np.random.default_rng(38)
    cache = open_cache(fmt, 4, block_size=16, num_kv_heads=2, head_dim=64, layout=layout)
    seq = cache.open()
    data = rng.normal(size=(2, 49, 2, 64)).astype(np.float32)
    data *= (10.0 ** rng.integers(-3, 4, size=(2, 49, 2, 1))).astype(np.float32)
    for n in range(1, 50):
        seq.append(0, data[0, n - 1 : n], data[1, n - 1 : n])
        seq.commit(1)
        for got, given in zip(read(seq, 0), data, strict=True):
            np.testing.assert_array_equal(got, written_one_by_one(given[:n], fmt, 16))
    assert cache.open_slots(seq).tolist()[:2] == [-1, -1]
    assert cache.stats().blocks_sealed == 2
    seq.free()
    empty(cache)


@pytest.mark.parametrize("fmt", QUANTIZED)
def test_amplitudes_side_by_side(fmt: str) -> None:
    # CASE C39
    # SPEC F6
    rng = np.random.default_rng(39)
    cache = open_cache(fmt, 4, block_size=16, num_kv_heads=2, head_dim=64)
    data = rng.uniform(-1, 1, size=(33, 2, 64)).astype(np.float32)
    if fmt in BY_CHANNEL:  # the loud neighbour is a channel
        data[:, :, 1::2] *= 1000
        quiet: Any = (slice(None), slice(None), slice(0, None, 2))
    else:
        data[1::2] *= 1000
        quiet = (slice(0, None, 2), slice(None), slice(None))
    seq = cache.open()
    for row in data:
        seq.append(0, row[None], row[None])
        seq.commit(1)
    step = {"q8": 127, "q4": 7, "q8_0": 127, "q4_0": 4}.get(fmt, 7.5)  # of 1; q4_0 clips a side
    for got in read(seq, 0):
        assert np.abs(got[quiet] - data[quiet]).max() <= 0.5 / step * 1.01 + 0.002


@pytest.mark.parametrize("fmt", ["q4k", "q4"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [1, 31, 33, 80, 96])
def test_head_dims_that_are_no_multiple_of_the_group(fmt: str, layout: str, dim: int) -> None:
    # CASE C40 C42
    # SPEC F6 F9 F9a
    cache = open_cache(
        fmt, 4, block_size=3, num_kv_heads=3, head_dim=dim, layers=2, layout=layout
    )
    each = block_bytes(fmt, layout, 3, 3, dim)
    spec = cache.spec
    assert spec.layer_block_nbytes("k") == spec.layer_block_nbytes("v") == each
    assert spec.bytes_per_value == pytest.approx(each / (3 * 3 * dim), rel=1e-12)
    slot = 2 * 2 * 3 * 3 * dim * 2  # layers, K and V, tokens, heads, values, bytes
    assert cache.total_capacity == 4 * 4 * each + cache.num_open_blocks * slot
    seq = cache.open(range(8))
    given = [rows(spec, layer, range(1, 9)) for layer in range(2)]
    for layer in range(2):
        seq.append(layer, *given[layer])
    seq.commit(8)
    for layer in range(2):
        for got, x in zip(read(seq, layer), given[layer], strict=True):
            # two blocks were filled whole by one write; the third waits
            want = [sealed(x[:3], fmt), sealed(x[3:6], fmt), opened(x[6:])]
            np.testing.assert_array_equal(got, np.concatenate(want))
    assert cache.memory_usage == 3 * 4 * each + slot
    seq.free()
    empty(cache)


@cpu_memory("NumPy arrays adopted as slabs")
@pytest.mark.parametrize("fmt", ["q4k", "q4", "q8_0"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_and_slots_full_of_nan_bytes(fmt: str, layout: str) -> None:
    # CASE C41
    # SPEC F31 F32
    heads, dim, size, n = 2, 40, 4, 3
    nbytes = block_bytes(fmt, layout, heads, size, dim)
    slabs = [np.full((n, nbytes), 0xFF, np.uint8) for _ in range(2)]
    cache = open_cache(
        fmt, n, block_size=size, num_kv_heads=heads, head_dim=dim, layout=layout,
        storage=([slabs[0]], [slabs[1]]),
    )  # fmt: skip
    cache._storage.fill_blocks(np.arange(n, 2 * n, dtype=np.int32), 0xFF)
    seq = cache.open(range(6))
    given = rows(cache.spec, 0, range(1, 7))
    seq.append(0, *given)
    seq.commit(6)
    want = [np.concatenate([sealed(x[:4], fmt), opened(x[4:])]) for x in given]
    for got, values in zip(read(seq, 0), want, strict=True):
        np.testing.assert_array_equal(got, values)
    with seq.views(0, dtype=np.float32) as views:
        for view in views:
            assert np.isfinite(view.k).all() and np.isfinite(view.v).all()
            assert view.k.shape == (heads, view.length, dim)
        shown = np.concatenate([view.k for view in views], axis=1)
    np.testing.assert_array_equal(shown, want[0].transpose(1, 0, 2))
    del views, view
    # nothing past the length was touched, and no other block or slot
    (place,) = [slot for slot in cache.open_slots(seq).tolist() if slot >= 0]
    for slab in cache.open_slabs(0):
        waiting = slab[place] if layout == "NHD" else slab[place].transpose(1, 0, 2)
        assert (waiting[2:].view(np.uint16) == 0xFFFF).all()
        others = np.delete(slab, place, axis=0)
        assert (others.view(np.uint16) == 0xFFFF).all()
    written = int(seq.block_table[0])
    for slab in slabs:
        assert (np.delete(slab, written, axis=0) == 0xFF).all()
    seq.free()
    gc.collect()
    empty(cache)


@cpu_memory("NumPy arrays adopted as slabs")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", ["q4k", "q4", "q8_0"])
def test_one_token_of_a_sealed_block_is_copied_alone(fmt: str, layout: str) -> None:
    # CASE C47
    # SPEC F40
    cache = open_cache(
        fmt, 4, block_size=4, num_kv_heads=2, head_dim=32, layout=layout, partial_block_reuse=1
    )
    cache._storage.fill_blocks(np.arange(4, 8, dtype=np.int32), 0xA5)
    (source,), marks = cached_prompt(cache, [5, 6, 7, 8])
    slabs = [host(slab) for slab in cache.slabs(0)]
    before = [slab.copy() for slab in slabs]
    seq = cache.open([5, 99, 100])  # one token in common
    assert seq.num_cached_tokens == 1 and seq.block_table[0] != source
    for got, x in zip(read(seq, 0), rows(cache.spec, 0, marks), strict=True):
        np.testing.assert_array_equal(got, opened(sealed(x, fmt))[:1])
    (place,) = cache.open_slots(seq).tolist()
    for slab in cache.open_slabs(0):
        waiting = slab[place] if layout == "NHD" else slab[place].transpose(1, 0, 2)
        assert (waiting[1:].view(np.uint16) == 0xA5A5).all()
        assert (np.delete(slab, place, axis=0).view(np.uint16) == 0xA5A5).all()
    for slab, old in zip(slabs, before, strict=True):  # sealed blocks are as they were
        np.testing.assert_array_equal(slab, old)
    seq.free()
    empty(cache)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", ["q4k", "q8"])
def test_defragment_moves_bytes_and_leaves_slots_where_they_are(fmt: str, layout: str) -> None:
    # CASE C56
    # SPEC F20
    cache = open_cache(
        fmt, 16, block_size=4, num_kv_heads=2, head_dim=33, layers=2, layout=layout
    )
    seqs = []
    for i in range(5):
        seq = cache.open()
        for layer in range(2):
            seq.append(layer, *rows(cache.spec, layer, range(10 * i + 1, 10 * i + 11)))
        seq.commit(10)
        seqs.append(seq)
    for seq in seqs[::2]:
        seq.free()
    cache.reset_prefix_cache()
    kept = seqs[1::2]

    def raw(seq: pc.Sequence) -> list[bytes]:
        out = []
        for layer in range(2):
            with seq.views(layer) as views:
                out += [host(x).tobytes() for view in views for x in (view.k, view.v)]
        return out

    before = [(raw(seq), cache.open_slots(seq).tolist()) for seq in kept]
    tables = [seq.block_table.tolist() for seq in kept]
    assert cache.defragment() > 0
    whole(cache)
    assert [seq.block_table.tolist() for seq in kept] != tables
    assert [(raw(seq), cache.open_slots(seq).tolist()) for seq in kept] == before
    for seq in kept:
        seq.free()
    gc.collect()
    empty(cache)


@pytest.mark.parametrize("fmt", QUANTIZED)
@pytest.mark.parametrize("one_by_one", [True, False])
@pytest.mark.parametrize("amplitude", [1e-44, 1e-38, 1e-30, 1e-11, 0.0, 1e4, 6e4, 1e7, 1e30, 3e38])
def test_tiny_zero_and_huge_groups(fmt: str, amplitude: float, one_by_one: bool) -> None:
    # CASE C60
    # SPEC F4 F5 F7
    rng = np.random.default_rng(60)
    cache = open_cache(fmt, 4, block_size=4, num_kv_heads=1, head_dim=64)
    x = rng.uniform(-1, 1, size=(12, 1, 64))
    with np.errstate(over="ignore", under="ignore"):
        data = (x * amplitude).astype(np.float32)
    data[2], data[:, 0, 7] = 1.0, 0.5  # neighbours of ordinary size, a token and a channel
    seq = cache.open()
    for part in np.split(data, 12) if one_by_one else [data]:
        seq.append(0, part, -part)
        seq.commit(len(part))
    for got, given in zip(read(seq, 0), (data, -data), strict=True):
        want = written_one_by_one(given, fmt, 4)
        if not one_by_one:
            want = np.concatenate([sealed(given[i : i + 4], fmt) for i in (0, 4, 8)])
        np.testing.assert_array_equal(got, want)
        assert np.isfinite(got).all()
    seq.free()
    empty(cache)


def test_an_open_float_format_gives_exact_rows_until_a_block_is_sealed() -> None:
    # SPEC F32
    cache = make_cache(8, B=4, dim=4, fmt=("q4k", "float32"))
    seq = cache.open()
    marks = range(1, 8)
    seq.append(0, *rows(cache.spec, 0, marks))
    k, v = read(seq, 0)
    plain = make_cache(8, B=4, dim=4).spec
    want_k, want_v = expected(plain, 0, marks)
    np.testing.assert_array_equal(v, want_v)  # V is float32 in its blocks and in its slot
    np.testing.assert_array_equal(k[4:], want_k[4:])  # integers, which float16 holds
    assert np.abs(k[:4] - want_k[:4]).max() <= 3 * 64 / 15 / 2 + 1
    seq.free()
    empty(cache)
