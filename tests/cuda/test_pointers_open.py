"""Pointer tables of sequences with open blocks: addresses of open slots, and which entries are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpukit import streams_of

import pagedcache as pc

LAYERS = 2
B = 4


@pytest.fixture
def cache(cuda: Any) -> Any:
    spec = pc.CacheSpec(LAYERS, 2, 32, B, k_format="q4k", v_format="bfloat16")
    with pc.PagedKVCache(spec, 24, device="cuda:0", num_open_blocks=7) as made:
        yield made


def write(seq: pc.Sequence, count: int) -> None:
    rows = np.ones((count, 2, 32), np.float32)
    for layer in range(LAYERS):
        seq.append(layer, rows, rows)
    seq.commit(count)


def expected(cache: Any, seq: pc.Sequence, layer: int) -> tuple[list[int], list[int], list[bool]]:
    """Addresses of K and of V from the arrays over the slabs, and what is open."""
    slabs, opened = cache.slabs(layer), cache.open_slabs(layer)
    slots = cache.open_slots(seq).tolist()
    made = [
        [
            (slab.address + block * slab.strides[0])
            if slot < 0
            else own.address + slot * own.strides[0]
            for block, slot in zip(seq.block_table.tolist(), slots, strict=True)
        ]
        for slab, own in zip(slabs, opened, strict=True)
    ]
    return made[0], made[1], [slot >= 0 for slot in slots]


def check(cache: Any, seq: pc.Sequence, **options: Any) -> pc.PointerTables:
    for layer in reversed(range(LAYERS)):
        tables = seq.layer_device_ptr_tables(layer, **options)
        for got in (tables, seq.layer_block_ptr_tables(layer)):
            shown = np.asarray(got.k).tolist(), np.asarray(got.v).tolist(), got.is_open.tolist()
            assert shown == expected(cache, seq, layer)
            assert (got.k_format.name, got.v_format.name) == ("q4k", "bfloat16")
    return tables


def test_entries_follow_blocks_to_open_slots_and_back(cache: Any) -> None:
    # SPEC F45
    seq = cache.open(range(10))
    assert check(cache, seq).is_open.tolist() == [False] * 3
    write(seq, 10)  # two blocks at once, and the tail
    first = check(cache, seq)
    assert first.is_open.tolist() == [False, False, True]
    write(seq, 3)
    assert check(cache, seq).is_open.tolist() == [False, False, True, True]
    for _ in range(3):
        write(seq, 1)
    sealed = check(cache, seq)
    assert sealed.is_open.tolist() == [False, False, False, True]
    assert sealed.k.address == first.k.address  # the same table, brought up to date
    seq.truncate(5)
    write(seq, 1)
    assert check(cache, seq).is_open.tolist() == [False, True]
    twin = seq.fork()
    write(twin, 1)
    assert cache.open_slots(twin)[1] != cache.open_slots(seq)[1]
    check(cache, twin)
    check(cache, seq)
    assert seq.layer_device_ptr_tables(1, 1).is_open.tolist() == [False]
    twin.free()
    seq.free()


def test_only_entries_that_changed_are_written(cache: Any, emulated: Any) -> None:
    # SPEC F45
    seq = cache.open(range(3 * B))
    for _ in range(3 * B):
        write(seq, 1)
    cache.extend(seq.seq_id, B)
    write(seq, B - 1)
    assert check(cache, seq).is_open.tolist() == [False, False, True, True]
    write(seq, 1)  # seals the third block
    before = emulated.get("h2d_bytes"), emulated.get("launches")
    tables = seq.layer_device_ptr_tables(0)
    assert tables.is_open.tolist() == [False, False, False, True]
    assert emulated.get("h2d_bytes") - before[0] == 2 * 4  # from the first that changed on
    assert emulated.get("launches") - before[1] == 1
    check(cache, seq)
    seq.free()


def test_many_sequences(cache: Any) -> None:
    # SPEC F45
    seqs = [cache.open(range(100 * i, 100 * i + n)) for i, n in enumerate((1, 9, 4))]
    for seq, count in zip(seqs, (1, 9, 4), strict=True):
        write(seq, count)
    tables = cache.device_ptr_tables(seqs, 1)
    assert tables.is_open.tolist() == [
        [True, False, False], [False, False, True], [False, False, False]
    ]  # fmt: skip
    for kind in range(2):
        for row, seq in zip(np.asarray(tables[kind]), seqs, strict=True):
            want = expected(cache, seq, 1)[kind]
            assert row.tolist() == want + [0] * (3 - len(want))
    for seq in seqs:
        seq.free()


def test_on_streams_of_ones_own(cache: Any, cuda: Any, emulated: Any) -> None:
    # SPEC F45 F49
    emulated.set("async", 1)
    with streams_of(cuda, 2) as (one, two):
        seq = cache.open(range(2 * B + 1))
        write(seq, 2 * B + 1)
        check(cache, seq, stream=one)
        write(seq, 2 * B)
        check(cache, seq, stream=two)
        check(cache, seq, stream=one)
        seq.free(stream=two)
