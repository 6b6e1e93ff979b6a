"""Pointer tables: the addresses of a sequence's blocks, on the device and on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pagedcache as pc

LAYERS = 3
B = 4


def make_cache(num_blocks: int = 32, device: Any = "cuda:0", **options: Any) -> pc.PagedKVCache:
    spec = pc.CacheSpec(
        num_layers=LAYERS, num_kv_heads=2, head_dim=32, block_size=B, k_format="q8",
        v_format="float16",
    )
    return pc.PagedKVCache(spec, num_blocks, device=device, **options)


def write(seq: pc.Sequence, count: int) -> None:
    rows = np.ones((count, 2, 32), np.float32)
    for layer in range(LAYERS):
        seq.append(layer, rows, rows)
    seq.commit(count)


def expected(cache: pc.PagedKVCache, seq: pc.Sequence, layer: int) -> tuple[Any, Any]:
    """Addresses worked out from the slabs' own and the bytes of a block."""
    slabs = cache.slabs(layer)
    nbytes = [cache.spec.layer_block_nbytes(kind) for kind in ("k", "v")]
    return tuple(
        [slab.address + int(block) * size for block in seq.block_table]
        for slab, size in zip(slabs, nbytes, strict=True)
    )


def check(cache: pc.PagedKVCache, seq: pc.Sequence, **options: Any) -> pc.PointerTables:
    """All layers' tables, on the device and on the host, are what they must be."""
    for layer in reversed(range(LAYERS)):
        tables = seq.layer_device_ptr_tables(layer, **options)
        k, v = expected(cache, seq, layer)
        for got in (tables, seq.layer_block_ptr_tables(layer)):
            assert np.asarray(got.k).tolist() == k
            assert np.asarray(got.v).tolist() == v
            assert got.k.dtype == got.v.dtype == np.uint64
            assert (got.num_blocks, got.block_size) == (len(k), B)
            assert (got.k_format.name, got.v_format.name) == ("q8", "float16")
    return tables


def behind(tables: pc.PointerTables, room: int) -> list[int]:
    """The entries from the end of a table up to ``room``."""
    whole = tables.k.with_layout((room,), (8,))
    return np.asarray(whole)[tables.num_blocks :].tolist()


def test_tables_name_the_blocks_of_every_layer(cuda: Any) -> None:
    # SPEC F45
    with make_cache() as cache, cache.open(range(3 * B + 1)) as seq:
        tables = check(cache, seq)
        assert behind(tables, 16) == [0] * 12
        two = seq.layer_device_ptr_tables(1, 2)
        assert np.asarray(two.k).tolist() == expected(cache, seq, 1)[0][:2]
        assert two.num_blocks == 2
        with pytest.raises(pc.InvalidPositionError):
            seq.layer_device_ptr_tables(0, 5)
        with pytest.raises(pc.InvalidArgumentError):
            seq.layer_device_ptr_tables(LAYERS)


def test_nothing_exists_before_it_is_asked_for_and_all_goes_with_the_sequence(
    emulated: Any,
) -> None:
    # SPEC F45
    with make_cache() as cache:
        seq = cache.open(range(2 * B))
        write(seq, 2 * B)
        seq.layer_block_ptr_tables(0)
        before, launches = emulated.live(), emulated.get("launches")
        seq.layer_block_ptr_tables(1)
        assert (emulated.live(), emulated.get("launches")) == (before, launches)
        check(cache, seq)
        assert seq._pointers
        seq.free()
        assert not seq._pointers


def test_a_table_that_is_right_is_not_written_again(emulated: Any) -> None:
    # SPEC F45
    with make_cache() as cache, cache.open(range(2 * B)) as seq:
        seq.layer_device_ptr_tables(0)
        launches, copies = emulated.get("launches"), emulated.get("copies")
        for layer in range(LAYERS):
            seq.layer_device_ptr_tables(layer)
        assert (emulated.get("launches"), emulated.get("copies")) == (launches, copies)


def test_growth_writes_only_what_is_new_in_one_launch_for_all_layers(emulated: Any) -> None:
    # SPEC F45
    with make_cache(64) as cache, cache.open(range(2 * B)) as seq:
        first = check(cache, seq)
        launches, bytes_up = emulated.get("launches"), emulated.get("h2d_bytes")
        cache.extend(seq.seq_id, 3 * B)
        grown = seq.layer_device_ptr_tables(0)
        assert emulated.get("launches") - launches == 1
        assert emulated.get("h2d_bytes") - bytes_up == 3 * 4  # three ids
        assert check(cache, seq).k.address == first.k.address  # the same array, longer
        assert grown.num_blocks == 5
        cache.extend(seq.seq_id, 20 * B)  # beyond its room: a new one
        moved = check(cache, seq)
        assert moved.num_blocks == 25
        assert behind(moved, 32) == [0] * 7


def test_after_copy_on_write(cuda: Any) -> None:
    # SPEC F45, CASE C50
    with make_cache() as cache:
        seq = cache.open(range(3 * B + 2))
        write(seq, 3 * B + 2)
        twin = seq.fork()
        check(cache, seq)
        check(cache, twin)
        write(twin, 1)
        assert twin.block_table[3] != seq.block_table[3]
        check(cache, twin)
        check(cache, seq)


def test_after_truncate_no_pointer_is_left_over(cuda: Any) -> None:
    # SPEC F45, CASE C50
    with make_cache() as cache, cache.open(range(5 * B)) as seq:
        write(seq, 5 * B)
        check(cache, seq)
        seq.truncate(B + 1)
        tables = check(cache, seq)
        assert tables.num_blocks == 2
        assert behind(tables, 16) == [0] * 14
        other = cache.open(range(100, 100 + 6 * B))  # takes what was released
        write(seq, 2 * B)
        check(cache, seq)
        check(cache, other)


def test_after_defragment(cuda: Any) -> None:
    # SPEC F45, CASE C50
    with make_cache() as cache:
        fillers = [cache.open(range(10 * i, 10 * i + B)) for i in range(4)]
        seq = cache.open(range(100, 100 + 3 * B))
        check(cache, seq)
        for filler in fillers:
            filler.free()
        before = seq.block_table.tolist()
        assert cache.defragment() > 0
        assert seq.block_table.tolist() != before
        check(cache, seq)


def test_ask_on_streams_of_ones_own(emulated: Any) -> None:
    # SPEC F45 F49
    import pycuda.driver as driver

    emulated.set("async", 1)
    with make_cache() as cache, cache.open(range(2 * B)) as seq:
        device = cache._storage.device
        with device.current():
            streams = [driver.Stream() for _ in range(2)]
        check(cache, seq, stream=streams[0])
        cache.extend(seq.seq_id, B)
        check(cache, seq, stream=streams[1])
        check(cache, seq)
        with device.current():
            driver.Context.synchronize()
            del streams


def test_many_sequences_in_one_table(cuda: Any) -> None:
    # SPEC F45
    with make_cache() as cache:
        seqs = [cache.open(range(100 * i, 100 * i + n)) for i, n in enumerate((1, 9, 4))]
        for seq, count in zip(seqs, (1, 9, 4), strict=True):
            write(seq, count)
        tables = cache.device_ptr_tables(seqs, 2)
        assert tables.num_blocks == 3
        for kind in range(2):
            got = np.asarray(tables[kind])
            assert got.shape == (3, 3)
            for row, seq in zip(got, seqs, strict=True):
                want = expected(cache, seq, 2)[kind]
                assert row.tolist() == want + [0] * (3 - len(want))
        short = cache.device_ptr_tables(seqs, 0, [1, 5, 0])
        want = expected(cache, seqs[1], 0)[0][:2]
        assert np.asarray(short.k)[1].tolist() == want
        assert np.asarray(short.k)[2].tolist() == [0, 0]
        assert np.asarray(cache.device_ptr_tables([], 0).k).shape == (0, 0)
        with pytest.raises(pc.InvalidPositionError):
            cache.device_ptr_tables(seqs, 0, [5, 5, 5])


def test_a_layer_on_the_cpu_is_an_error(cuda: Any) -> None:
    # SPEC F45
    with make_cache(device=["cuda:0", "cpu", "cuda:0"]) as cache, cache.open(range(B)) as seq:
        for call in (seq.layer_device_ptr_tables, seq.layer_block_ptr_tables):
            with pytest.raises(pc.DeviceError, match="a layer on a GPU.*layer 1 on the CPU"):
                call(1)
        with pytest.raises(pc.DeviceError, match="layer 1 on the CPU"):
            cache.device_ptr_tables([seq], 1)
        k = seq.layer_device_ptr_tables(2).k
        assert np.asarray(k).tolist() == [
            cache.slabs(2)[0].address + int(seq.block_table[0]) * cache.slabs(2)[0].strides[0]
        ]


def test_a_cache_of_the_cpu_has_no_pointer_tables() -> None:
    # SPEC F45
    with make_cache(device="cpu") as cache, cache.open(range(B)) as seq:
        with pytest.raises(pc.DeviceError, match="a layer on a GPU"):
            seq.layer_device_ptr_tables(0)


@pytest.mark.parametrize(
    "call", ["cuMemAlloc", "cuMemcpyAsync", "pc_stub_enqueue", "cuEventRecord"]
)
def test_a_failure_leaves_the_old_table(emulated: Any, call: str) -> None:
    # SPEC F45 F46, CASE C51
    with make_cache(64) as cache, cache.open(range(2 * B)) as seq:
        old = check(cache, seq)
        for more in (B, 20 * B):  # in place, then into a larger one
            cache.extend(seq.seq_id, more)
            emulated.fail(call, 1, 1)
            try:
                seq.layer_device_ptr_tables(0)
                failed = False
            except pc.PagedCacheError:
                failed = True
            emulated.fail(call, 0)
            assert failed or call == "cuMemAlloc"  # memory that is at hand needs no allocation
            assert np.asarray(old.k).tolist() == expected(cache, seq, 0)[0][:2]
            check(cache, seq)
        cache.check()
