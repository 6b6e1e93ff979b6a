"""Open slots: blocks that are kept in a float format until they are full enough to be quantised."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import reference_formats as ref
from devicekit import ON_CPU, host
from openkit import fill_all, ints, rows
from reference_storage import KINDS, clamped
from storagekit import (
    ARRANGEMENTS,
    DTYPES,
    LAYOUTS,
    QUANTIZED,
    Pair,
    bits,
    raw_open_slab,
    raw_slab,
    snapshot,
)

from pagedcache.errors import FreedHandleError, InvalidArgumentError, NonFiniteError
from pagedcache.spec import CacheSpec

OPEN = ("float16", "bfloat16", "float32")
#: K and V: alike, of two axes, and float formats beside quantised ones, both ways round.
PAIRS = [
    *((name, name) for name in QUANTIZED),
    ("q4k", "q4_1"), ("q8", "q4k"), ("float32", "q4k"), ("q4k", "bfloat16"), ("float16", "q8_0"),
]  # fmt: skip


# Sealing an open block gives the bytes of its rows, rounded to the open format, stored straight.
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("opened", OPEN)
@pytest.mark.parametrize("fmt", QUANTIZED)
def test_sealing_is_quantising_the_open_rows(fmt: str, opened: str, layout: str) -> None:
    rng = np.random.default_rng(sum(map(ord, fmt + opened)))
    dtype = np.dtype(ref.DENSE[opened])
    for size, dim, heads in ((1, 33, 1), (16, 64, 3), (33, 40, 2)):
        pair = Pair(fmt, layout=layout, layers=2, block_size=size, dim=dim, heads=heads,
                    open_blocks=opened)  # fmt: skip
        for layer in range(2):
            k, v = rows(rng, pair, size)
            for token in rng.permutation(size):  # in any order, one by one
                one = slice(token, token + 1)
                pair.store_at(layer, k[one], v[one], [4 * size + token])
            got = pair.storage.gather(layer, ints(4), 0, size, dtype)
            for values, given in zip(got, (k, v), strict=True):
                assert np.array_equal(bits(host(values)), bits(given.astype(dtype)))
            pair.store_at(layer, k.astype(dtype), v.astype(dtype), np.arange(size))  # straight
        before = [raw_slab(pair.storage, 1, kind)[3].copy() for kind in KINDS]
        pair.copy_places([4], [1], [size])
        pair.assert_equal()
        for layer, kind in itertools.product(range(2), KINDS):
            blocks = raw_slab(pair.storage, layer, kind)
            assert np.array_equal(blocks[1], blocks[0]) and blocks[1].any()
            assert np.array_equal(blocks[3], before[KINDS.index(kind)])  # nothing beside it


# Reopening gives what the sealed block reads as, rounded and clamped to the open format.
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("opened", OPEN)
@pytest.mark.parametrize("fmt", QUANTIZED)
def test_reopening_is_reading(fmt: str, opened: str, layout: str) -> None:
    rng = np.random.default_rng(sum(map(ord, opened + fmt)))
    dtype = np.dtype(ref.DENSE[opened])
    pair = Pair(fmt, layout=layout, block_size=16, dim=70, open_blocks=opened)
    k, v = rows(rng, pair, 16)
    k[:, :, 3] *= 1e6  # beyond float16; where scales are float32, read back so
    pair.store_at(0, k, v, 32 + np.arange(16))
    sealed = [host(x) for x in pair.storage.gather(0, ints(2), 0, 16, np.float32)]
    pair.copy_places([2], [5], [16])
    pair.assert_equal()
    for read, want in zip(pair.storage.gather(0, ints(5), 0, 16, dtype), sealed, strict=True):
        inside = clamped(opened, want.reshape(-1, 70)).astype(dtype).reshape(want.shape)
        assert np.array_equal(bits(host(read)), bits(inside))
        assert np.isfinite(host(read).astype(np.float32)).all()


# SPEC F28, F40: copies between every pair of kinds of places, whole and in part, in order, in every
# layer; bytes that are not copied stay.
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("k_format", "v_format"), PAIRS)
def test_copies_between_all_places(k_format: str, v_format: str, layout: str) -> None:
    rng = np.random.default_rng(7)
    for size, opened in ((1, "float16"), (5, "bfloat16"), (33, "float32")):
        pair = Pair(k_format, v_format, layout=layout, layers=2, heads=3, block_size=size,
                    num_blocks=3, open_blocks=opened)  # fmt: skip
        fill_all(pair, rng)
        pair.assert_equal()
        places = range(6)
        for src, dst in itertools.product(places, places):
            part = int(rng.integers(0, size + 1))
            if pair.whole and dst < 3 and 0 < part < size:
                part = size
            pair.copy_places([src], [dst], [part])
        pair.assert_equal()
        src, dst = rng.integers(0, 6, (2, 12))
        pair.copy_places(src, dst, np.full(12, size))  # chains
        pair.assert_equal()


# CASE C47: single tokens, between all places that take them.
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("k_format", "v_format"), PAIRS)
def test_tokens_move_between_places(k_format: str, v_format: str, layout: str) -> None:
    rng = np.random.default_rng(8)
    pair = Pair(k_format, v_format, layout=layout, layers=2, block_size=5, num_blocks=3,
                open_blocks="float16")  # fmt: skip
    fill_all(pair, rng)
    src = rng.integers(0, 30, 40)
    dst = rng.integers(15 if pair.whole else 0, 30, 40)
    pair.storage.copy_tokens(src, dst)
    pair.reference.copy_tokens(src, dst)
    pair.assert_equal()


# SPEC F40: of a part that is copied into an open slot, every other byte of it stays.
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", [0, 4])
@pytest.mark.parametrize("fmt", ["q4k", "q8"])
def test_part_of_a_block_touches_nothing_else(fmt: str, source: int, layout: str) -> None:
    pair = Pair(fmt, layout=layout, block_size=16, dim=80, open_blocks="float16")
    fill_all(pair, np.random.default_rng(9))
    before = {kind: raw_open_slab(pair.storage, 0, kind).copy() for kind in KINDS}
    want = [host(x) for x in pair.storage.gather(0, ints(source), 0, 5, np.float16)]
    pair.copy_places([source], [5], [5])
    for kind, values in zip(KINDS, want, strict=True):
        after = raw_open_slab(pair.storage, 0, kind)
        copied = np.zeros(after.shape[1], bool)
        for head, token in itertools.product(range(2), range(5)):
            place = pair.reference.open_maps[kind][head, token]
            copied[place] = True
            assert after[1][place].tobytes() == values[token, head].tobytes()
        np.testing.assert_array_equal(after[1][~copied], before[kind][1][~copied])
        np.testing.assert_array_equal(after[[0, 2, 3]], before[kind][[0, 2, 3]])


# TRAP 11, CASE C38: tokens written one at a time through open slots, blocks sealed when they are
# full: open tokens are exact to float16, sealed ones within their format's bound, and what is
# sealed never changes again.
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", QUANTIZED)
def test_tokens_written_one_at_a_time(fmt: str, layout: str) -> None:
    pair = Pair(fmt, layout=layout, dim=64, block_size=16, num_blocks=3, open_blocks="float16")
    x = rows(np.random.default_rng(4), pair, 48)[0]
    halves = x.astype(np.float16).astype(np.float32)
    ids, opened = [2, 0, 1], [4, 3, 5]
    sealed: list[bytes] = []
    for n in range(48):
        block = n // 16
        pair.store_at(0, x[n : n + 1], x[n : n + 1], [opened[block] * 16 + n % 16])
        places = np.array([*ids[:block], opened[block]], np.int32)
        k, v = map(host, pair.storage.gather(0, places, 0, n + 1, np.float32))
        assert k.tobytes() == v.tobytes()
        assert np.array_equal(k[block * 16 :], halves[block * 16 : n + 1])
        assert [k[i].tobytes() for i in range(block * 16)] == sealed
        if n % 16 == 15:
            pair.copy_places([opened[block]], [ids[block]], [16])
            one = slice(block * 16, n + 1)
            k = host(pair.storage.gather(0, ints(ids[block]), 0, 16, np.float32)[0])
            bound = sealed_bound(fmt, halves[one]) + np.abs(x[one]) * 2.0**-11 + 2.0**-25
            assert (np.abs(k.astype(np.float64) - x[one]) <= bound).all()
            sealed += [k[i].tobytes() for i in range(16)]
    pair.assert_equal()


def sealed_bound(fmt: str, block: Any) -> Any:
    """Half a step of a value's group (32 values of a row, or the tokens of its channel), and what
    rounding the group's scale and minimum adds; for a block [16, heads, 64]."""
    axis = 0 if fmt == "q4k" else 3
    groups = block.astype(np.float64)
    if axis:
        groups = groups.reshape(16, -1, 2, 32)
    amax = np.abs(groups).max(axis=axis, keepdims=True)
    span = np.ptp(groups, axis=axis, keepdims=True)
    step = {"q8": amax / 127, "q4": amax / 7, "q8_0": amax / 127, "q4_0": amax / 4}.get(
        fmt, span / 15
    )  # q4_0 clips one side by up to a step
    bound = step / 2 + 2.0**-20 * amax
    if fmt not in ("q8", "q4"):
        bound = bound + (amax + span) * 2.0**-11 + 128 * 2.0**-25
    return np.broadcast_to(bound, groups.shape).reshape(block.shape)


# A kind with a float format keeps it in open slots, every bit of it: nothing is clamped there.
@pytest.mark.parametrize("fmt", ["float32", "float16", "bfloat16"])
def test_a_float_kind_beside_a_quantised_one(fmt: str) -> None:
    dtype = np.dtype(ref.DENSE[fmt])
    pair = Pair(fmt, "q4k", dim=64, block_size=16, num_blocks=4)
    patterns = np.arange(2**16, dtype=np.uint16)[:: 2**16 // 2048]
    patterns = patterns if dtype.itemsize == 2 else patterns.astype(np.uint32) << 16
    k = patterns.view(dtype).reshape(16, 2, 64)
    v = np.ones((16, 2, 64), dtype)
    pair.store_at(0, k, v, 64 + np.arange(16))
    pair.copy_places([4, 4], [0, 5], [16, 16])
    pair.assert_equal()
    for place in (0, 4, 5):
        assert np.array_equal(
            bits(host(pair.storage.gather(0, ints(place), 0, 16, dtype)[0])).ravel(), patterns
        )
    assert pair.storage.open_slab_array(0, "k").dtype == dtype
    assert pair.storage.open_slab_array(0, "v").dtype == np.float16


# SPEC F7: an open slot holds for a quantised format only what that could hold.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("opened", OPEN)
@pytest.mark.parametrize("fmt", ["q4k", "q8"])
def test_values_that_open_slots_refuse_or_clamp(fmt: str, opened: str, dtype: Any) -> None:
    pair = Pair(fmt, dim=64, block_size=4, open_blocks=opened)
    x = rows(np.random.default_rng(3), pair, 4, dtype)
    huge = float(dtype.type(6e4 if dtype == np.float16 else 3e38))
    x[0, 1, 1, :3] = huge, -huge, 1
    x[0, 2, 0, 40], x[1, 0, 0, 0], x[1, 3, 1, 33] = np.nan, np.inf, -np.inf
    x[0, 3, 1, :32] = np.nan
    before = snapshot(pair.storage)
    with pytest.raises(NonFiniteError):
        pair.store_at(0, *x, 16 + np.arange(4))
    with pytest.raises(NonFiniteError):  # nobody called check_rows: a device says so later
        pair.storage.store(0, *map(np.ascontiguousarray, x), 16 + np.arange(4), "raise")
        pair.storage.synchronize()
    if ON_CPU:
        raw = snapshot(pair.storage)
        assert raw[0] == before[0] and raw[2] == before[2]  # sealed blocks
    pair.store_at(0, *x, 16 + np.arange(4), "saturate")
    pair.assert_equal()
    most = float(ref.DENSE[opened](min(huge, 65504.0) if opened == "float16" else huge))
    k, v = (host(a) for a in pair.storage.gather(0, ints(4), 0, 4, np.float32))
    assert k[1, 1, :3].tolist() == [most, -most, 1] and k[2, 0, 40] == 0
    assert not k[3, 1, :32].any()
    largest = np.abs(x[1, 0, 0, 1:32].astype(np.float32)).max().astype(ref.DENSE[opened])
    assert v[0, 0, 0] == np.float32(largest)
    assert np.isfinite(k).all() and np.isfinite(v).all()


# SPEC F30, F48: arrays over open slots are the slots themselves.
@pytest.mark.parametrize("layout", LAYOUTS)
def test_arrays_of_open_slots(layout: str) -> None:
    pair = Pair("q4k", "float32", layout=layout, layers=2, block_size=4, num_blocks=3)
    fill_all(pair, np.random.default_rng(2))
    storage = pair.storage
    shape = (2, 4, 33) if layout == "HND" else (4, 2, 33)
    for kind, dtype in (("k", np.float16), ("v", np.float32)):
        whole = storage.open_slab_array(1, kind)
        assert whole.shape == (3, *shape) and whole.dtype == dtype
        block = storage.block_array(1, kind, 4)
        assert block.shape == shape and block.dtype == dtype
        assert host(block).tobytes() == pair.reference.opened[kind][1, 1].tobytes()
        assert storage.block_array(1, kind, 2).shape != shape or kind == "v"
        if ON_CPU:
            assert not block.flags.writeable and np.shares_memory(block, whole)
            assert whole.ctypes.data % 64 == 0
            want = pair.reference.gather(1, kind, 16 + np.arange(3), np.float32)
            want = want.transpose(1, 0, 2) if layout == "HND" else want
            got = storage.dequantize_block(1, kind, 4, 3, np.float32)
            assert np.array_equal(got, want)
    pair.storage.fill_blocks(ints(1, 4), 0xFF)
    for kind in KINDS:
        pair.reference.blocks[kind][:, 1] = 0xFF
        pair.reference.opened[kind][:, 1] = 0xFF
    pair.assert_equal()
    with pytest.raises(InvalidArgumentError):
        storage.open_slab_array(2, "k")
    with pytest.raises(InvalidArgumentError):
        storage.open_slab_array(0, "x")
    if ON_CPU:
        assert "3 open slots" in repr(storage)
        storage.close()
        with pytest.raises(FreedHandleError):
            storage.open_slab_array(0, "k")


# CASE C41: an open slot full of NaN bytes; what lies past the length is never read.
@pytest.mark.parametrize("fmt", ["q4k", "q4"])
def test_a_slot_full_of_nan_bytes(fmt: str) -> None:
    pair = Pair(fmt, block_size=16, dim=80, open_blocks="float16")
    pair.fill(0xFF)
    x = rows(np.random.default_rng(2), pair, 5)
    pair.store_at(0, *x, 80 + np.arange(5))
    pair.assert_equal()
    for values, given in zip(pair.storage.gather(0, ints(5), 0, 5, np.float32), x, strict=True):
        assert np.array_equal(host(values), given.astype(np.float16).astype(np.float32))
    # sealed all the same, a slot with NaN in it gives finite values
    pair.copy_places([5], [0], [16])
    pair.assert_equal()
    for values in pair.storage.gather(0, ints(0), 0, 16, np.float32):
        assert np.isfinite(host(values)).all()


# CASE C45, C43: rows in any arrangement and dtype go into open slots.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrangements_of_rows(dtype: Any) -> None:
    for layout, arrange in itertools.product(LAYOUTS, ARRANGEMENTS.values()):
        pair = Pair("q4k", "q4_1", heads=3, dim=40, layout=layout)
        k, v = rows(np.random.default_rng(1), pair, 8, dtype)
        pair.store_at(0, arrange(k), arrange(v), np.arange(8) + 19)
        pair.store_at(0, arrange(k), arrange(v), np.arange(8))
        pair.assert_equal()


# SPEC F34: rows that lie in an open slot are read before anything is written there.
def test_rows_from_the_open_slots_themselves() -> None:
    if not ON_CPU:
        pytest.skip("about the CPU's memory: views of its slots")
    pair = Pair("q4k", "q4k", layout="NHD", heads=1, dim=8, block_size=8)
    x = rows(np.random.default_rng(1), pair, 8)
    pair.store_at(0, *x, 32 + np.arange(8))
    over = [pair.storage.block_array(0, kind, 4) for kind in KINDS]
    want = [host(a).copy() for a in over]
    backwards = 32 + np.arange(8)[::-1]
    pair.storage.store(0, *pair.storage.check_rows(0, *over, 8), backwards)
    for array, before in zip(over, want, strict=True):
        assert np.array_equal(array, before[::-1])


# SPEC F48: adopted slabs hold sealed blocks; open slots are our own memory.
@pytest.mark.parametrize("layout", LAYOUTS)
def test_adopted_slabs_and_open_slots(layout: str) -> None:
    spec = CacheSpec(2, 2, 33, 4, k_format="q4k", v_format="q4_1", layout=layout)
    slabs = tuple(
        [np.zeros((4, spec.layer_block_nbytes(kind)), np.uint8) for _ in range(2)]
        for kind in KINDS
    )
    pair = Pair("q4k", "q4_1", layout=layout, layers=2, slabs=slabs)
    fill_all(pair, np.random.default_rng(3))
    pair.copy_places([4, 1], [0, 6], [4, 4])
    pair.assert_equal()
    for kind, arrays in zip(KINDS, slabs, strict=True):
        for layer in range(2):
            assert np.array_equal(arrays[layer], pair.reference.blocks[kind][layer])
            opened = pair.storage.open_slab_array(layer, kind)
            assert not any(np.may_share_memory(opened, slab) for slab in arrays)
