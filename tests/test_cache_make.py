"""Making and closing a cache: sizes, memory, devices, storage, refusals (SPEC F11, F15, F48)."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import weakref

import numpy as np
import pytest
from cachekit import expected, fill, make_cache, rows, whole
from devicekit import cpu_memory

import pagedcache as pc


def spec(**changes):
    values = dict(num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, kv_format="float16")
    return pc.CacheSpec(**(values | changes))


NBYTES = 2 * 2 * 2 * 4 * 8 * 2  # one block: layers x (K, V) x heads x tokens x values x bytes


def test_exactly_one_of_num_blocks_and_memory():
    # SPEC F11
    for arguments in ({}, {"num_blocks": 4, "memory": 2**20}):
        with pytest.raises(pc.InvalidArgumentError, match="exactly one of num_blocks and memory"):
            pc.PagedKVCache(spec(), **arguments)


def test_capacity_is_what_the_spec_says():
    # SPEC F11, CASE C42
    with pc.PagedKVCache(spec(), num_blocks=10) as cache:
        assert spec().block_nbytes == NBYTES
        assert cache.total_capacity == spec().storage_nbytes(10) == 10 * NBYTES
        assert cache._storage.nbytes == cache.total_capacity
        assert cache.num_free_blocks == 10
        assert cache.num_blocks == 10
        assert cache.block_size == 4


@pytest.mark.parametrize(
    ("memory", "blocks"),
    [(10 * NBYTES, 10), (11 * NBYTES - 1, 10), ("1MiB", 2**20 // NBYTES), ({"cpu": 3 * NBYTES}, 3)],
)
def test_memory_as_bytes_text_and_mapping(memory, blocks):
    # SPEC F11
    with pc.PagedKVCache(spec(), memory=memory) as cache:
        assert cache.num_blocks == blocks


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (NBYTES - 1, "does not hold one block"),
        (0, "does not hold one block"),
        ("0.4KiB", "does not hold one block"),
        (-1, "negative"),
        ("2G", "unknown unit"),
        (1.5, "not accepted"),
        ({}, "one entry for each device"),
        ({"cpu": 2**20, "cuda:0": 2**20}, "one entry for each device"),
        ({"cuda:0": 2**20}, "one entry for each device"),
    ],
)
def test_bad_memory(memory, message):
    with pytest.raises(pc.InvalidArgumentError, match=message):
        pc.PagedKVCache(spec(), memory=memory)


@pytest.mark.parametrize("count", [0, -1, 2**31, 2**63, 2**200, 1.0, True, "4", np.float64(4)])
def test_bad_num_blocks(count):
    # SPEC F11, SPEC 7: no OverflowError, no TypeError of the compiled layer
    with pytest.raises(pc.InvalidArgumentError, match="num_blocks must be"):
        pc.PagedKVCache(spec(), num_blocks=count)


def test_numpy_counts_are_counts():
    with pc.PagedKVCache(spec(), num_blocks=np.int32(5)) as cache:
        assert cache.num_blocks == 5


def test_memory_that_cannot_be_had_names_its_bytes():
    # SPEC F11: fails cleanly and says how much
    huge = spec(num_kv_heads=1024, head_dim=1024, num_layers=64)
    blocks = 2**31 - 1
    with pytest.raises(pc.StorageMemoryError) as caught:
        pc.PagedKVCache(huge, num_blocks=blocks)
    assert caught.value.nbytes == blocks * huge.block_nbytes
    assert f"{caught.value.nbytes:,} bytes" in str(caught.value)
    assert isinstance(caught.value, MemoryError)


def test_overflow_of_blocks_times_bytes_is_refused():
    # SPEC 7: integer overflow of num_blocks x bytes
    huge = spec(num_kv_heads=2**20, head_dim=2**20)
    with pytest.raises(pc.InvalidArgumentError, match=r"2\^63"):
        pc.PagedKVCache(huge, num_blocks=2**31 - 1)


def test_bytes_are_announced_before_they_are_taken(caplog):
    # SPEC F11: it says how many bytes it takes before it takes them
    huge = spec(num_kv_heads=1024, head_dim=1024, num_layers=64)
    blocks = 2**31 - 1
    with caplog.at_level(logging.INFO, logger="pagedcache"):
        with pytest.raises(pc.StorageMemoryError):
            pc.PagedKVCache(huge, num_blocks=blocks)
    assert str(blocks * huge.block_nbytes) in caplog.text


def test_slabs_are_aligned_and_one_per_layer_and_kind():
    # SPEC F11
    with pc.PagedKVCache(spec(num_layers=3), num_blocks=5) as cache:
        addresses = set()
        for layer in range(3):
            for kind in "kv":
                slab = cache._storage.slab_array(layer, kind)
                address = slab.__array_interface__["data"][0]
                assert address % 64 == 0
                assert slab.shape == (5, 2, 4, 8)
                addresses.add(address)
        assert len(addresses) == 6


# ---- placement -----------------------------------------------------------------------------


def test_devices_per_layer():
    # SPEC F15
    for device in ("cpu", ["cpu", "cpu"], ("cpu", "cpu")):
        with pc.PagedKVCache(spec(), num_blocks=2, device=device) as cache:
            assert cache.devices == ("cpu", "cpu")
            assert [cache.layer_device(i) for i in range(2)] == ["cpu", "cpu"]
            assert cache.is_on_gpu is False
            with cache.open() as seq:
                assert seq.layer_device(1) == "cpu"
                assert seq.is_on_gpu is False
                for layer in (2, -1, 2**70, 0.0):
                    with pytest.raises(pc.InvalidArgumentError, match="layer must be"):
                        seq.layer_device(layer)


@pytest.mark.parametrize("device", ["cuda:999", "CUDA:999", ["cpu", "cuda:999"]])
def test_cuda_is_refused_with_what_is_missing(device):
    # SPEC F15 F42, CASE C48
    missing = "PyCUDA is not|driver|no GPU|no cuda:999|kernels"
    with pytest.raises(pc.CudaUnavailableError, match=missing):
        pc.PagedKVCache(spec(), num_blocks=2, device=device)


@pytest.mark.parametrize("device", ["tpu", "cpu:0", "", "cuda:x", 0, None, ["cpu", 1]])
def test_no_such_device(device):
    with pytest.raises(pc.DeviceError, match='expected "cpu"'):
        pc.PagedKVCache(spec(), num_blocks=2, device=device)


@pytest.mark.parametrize("device", [[], ["cpu"], ["cpu"] * 3])
def test_one_device_per_layer(device):
    with pytest.raises(pc.InvalidArgumentError, match="devices for 2 layers"):
        pc.PagedKVCache(spec(), num_blocks=2, device=device)


def test_memory_per_device_smallest_count_rules():
    # SPEC F11: the rule for several devices, on the function that will serve them
    from pagedcache.placement import Placement, resolve_num_blocks

    geometry = spec(num_layers=3)
    layer = NBYTES // 2
    placement = Placement(("cpu", "cuda:0", "cuda:0"))
    assert placement.is_on_gpu
    assert placement.distinct == ("cpu", "cuda:0")
    budget = {"cpu": 10 * layer, "cuda:0": 8 * layer}
    assert resolve_num_blocks(geometry, placement, None, budget) == (4, 0)
    assert resolve_num_blocks(geometry, placement, None, budget | {"cpu": 3 * layer}) == (3, 0)
    with pytest.raises(pc.InvalidArgumentError, match="mapping with an entry for each"):
        resolve_num_blocks(geometry, placement, None, "1MiB")


# ---- other arguments -----------------------------------------------------------------------


def test_policies():
    with pytest.raises(pc.InvalidArgumentError, match="eviction"):
        pc.PagedKVCache(spec(), num_blocks=2, eviction="fifo")
    for bad in (-1, 1.0, True, 2**80):
        with pytest.raises(pc.InvalidArgumentError, match="partial_block_reuse"):
            pc.PagedKVCache(spec(), num_blocks=2, partial_block_reuse=bad)
    for bad in (5, 17):  # no block has so many tokens: it would never be reached
        with pytest.raises(pc.InvalidArgumentError, match="partial_block_reuse must be 0…4"):
            make_cache(2, B=4, partial_block_reuse=bad)
    with pytest.raises(pc.InvalidArgumentError, match="spec must be a CacheSpec"):
        pc.PagedKVCache({"num_layers": 2}, num_blocks=2)


def test_partial_reuse_defaults_to_a_quarter_block():
    # SPEC F40
    for option, hit in ((None, 6), (0, 4), (3, 4), (2, 6)):
        with make_cache(8, B=4, partial_block_reuse=option) as cache:
            with cache.open(range(8)) as seq:
                fill(cache, seq, range(8))
            assert cache.probe([0, 1, 2, 3, 4, 5, 90, 91]) == hit, option
    # 0 still leaves one token to compute of a prompt that is cached in full.
    for option, hit in ((0, 7), (4, 7)):
        with make_cache(8, B=4, partial_block_reuse=option) as cache:
            with cache.open(range(8)) as seq:
                fill(cache, seq, range(8))
            assert cache.probe(range(8)) == hit, option
    with make_cache(8, B=16) as cache:  # a quarter of 16: three matching tokens are too few
        with cache.open(range(16)) as seq:
            fill(cache, seq, range(16))
        assert cache.probe([0, 1, 2, 90]) == 0
        assert cache.probe([0, 1, 2, 3, 90]) == 4


@pytest.mark.parametrize("storage", ["mine", 3, {}, (1,), (1, 2, 3)])
def test_unknown_storage(storage):
    with pytest.raises(pc.FormatError, match="storage"):
        pc.PagedKVCache(spec(), num_blocks=2, storage=storage)


def test_adopted_halves_of_one_tensor():
    # SPEC F48: any block stride; the caller's bytes are the cache's bytes
    geometry = spec(kv_format="float32", num_layers=1)
    tensor = np.full((6, 2, 2, 4, 8), np.nan, np.float32)
    with pc.PagedKVCache(
        geometry, num_blocks=6, storage=([tensor[:, 0]], [tensor[:, 1]])
    ) as cache:
        with cache.open(range(6)) as seq:
            fill(cache, seq, range(6))
            k, v = expected(geometry, 0, range(6))
            first, second = seq.block_table
            np.testing.assert_array_equal(tensor[first, 0], k[:4].transpose(1, 0, 2))
            np.testing.assert_array_equal(tensor[second, 1, :, :2], v[4:].transpose(1, 0, 2))
            assert np.isnan(tensor[second, 0, :, 2:]).all()
        whole(cache)
    tensor[...] = 0  # still the caller's after close


def test_adopted_slabs_are_checked():
    # SPEC F48
    geometry = spec(num_layers=1)
    good = [np.zeros((6, 2, 4, 8), np.float16) for _ in range(2)]
    with pytest.raises(pc.ShapeError):
        pc.PagedKVCache(geometry, num_blocks=7, storage=([good[0]], [good[1]]))
    with pytest.raises(pc.FormatError):
        pc.PagedKVCache(geometry, num_blocks=6, storage=([good[0]], [good[1].view(np.int16)]))
    with pytest.raises(pc.ShapeError):
        pc.PagedKVCache(geometry, num_blocks=6, storage=([good[0]], [good[0]]))


# ---- life ----------------------------------------------------------------------------------


def test_close_is_idempotent_and_handles_raise():
    # SPEC F11
    cache = make_cache(8, layers=2)
    seq = cache.open(range(6), request_id="r")
    fill(cache, seq, range(6))
    owned = cache.allocate_sequence(3)
    assert not cache.closed
    cache.close()
    cache.close()
    assert cache.closed and seq.freed
    for call in (
        lambda: seq.seq_len,
        lambda: seq.block_table,
        lambda: seq.append(0, *rows(cache.spec, 0, [1])),
        lambda: seq.gather(0),
        lambda: seq.fork(),
        lambda: seq.prepare(1),
        lambda: seq.__enter__(),
        lambda: cache.open([1]),
        lambda: cache.stats(),
        lambda: cache.check(),
        lambda: cache.allocate_sequence(1),
        lambda: cache.sequence_tokens(owned),
        lambda: cache.block_tables([seq]),
        lambda: cache.num_free_blocks,
        lambda: cache.layout_epoch,
        lambda: cache.defragment(),
        lambda: cache.__enter__(),
    ):
        with pytest.raises(pc.FreedHandleError, match="freed or closed"):
            call()
    seq.free()
    assert "closed" in repr(cache)
    assert "freed" in repr(seq)


@cpu_memory("the NumPy array under a slab")
def test_storage_goes_with_the_last_view():
    # SPEC F11: close() gives the storage back once no view holds it
    cache = make_cache(8, layers=1)
    seq = cache.open(range(6))
    fill(cache, seq, range(6))
    storage = weakref.ref(cache._storage)
    slab = cache._storage._arrays["k"][0]
    while slab.base is not None:
        slab = slab.base
    memory = weakref.ref(slab)
    del slab
    array = seq.views(0)[1].k
    cache.close()
    gc.collect()
    assert memory() is not None
    k, _ = expected(cache.spec, 0, range(6))
    np.testing.assert_array_equal(array, k[4:].transpose(1, 0, 2))
    del array
    gc.collect()
    assert memory() is None and storage() is None


def test_storage_goes_at_once_without_views():
    # SPEC F11; handles that are kept do not keep the bytes
    cache = make_cache(8)
    seq = cache.open(range(6))
    storage = weakref.ref(cache._storage)
    cache.close()
    assert storage() is None
    assert seq.freed


def test_a_dropped_cache_needs_no_garbage_collection():
    gc.collect()
    gc.disable()
    try:
        cache = make_cache(8)
        cache.allocate_sequence(5)
        storage = weakref.ref(cache._storage)
        del cache
        assert storage() is None
    finally:
        gc.enable()


def test_a_view_outlives_the_cache_object():
    cache = make_cache(8)
    seq = cache.open(range(4))
    fill(cache, seq, range(4))
    views = seq.views(0)
    k, _ = expected(cache.spec, 0, range(4))
    cache.close()
    del cache, seq
    gc.collect()
    np.testing.assert_array_equal(views[0].k, k.transpose(1, 0, 2))


def test_context_manager_closes():
    with make_cache(4) as cache:
        seq = cache.open([1, 2])
    assert cache.closed and seq.freed
    with pytest.raises(ZeroDivisionError):
        with make_cache(4) as cache:
            raise ZeroDivisionError
    assert cache.closed


def test_repr_is_short_and_true():
    # SPEC F11
    with make_cache(8, B=4, layers=2, fmt=("q8", "q4")) as cache:
        with cache.open(range(9)):
            text, devices = repr(cache), dict.fromkeys(cache.devices)
            assert text == (
                f"<PagedKVCache: 8 blocks of 4 tokens, q8/q4 on {'+'.join(devices)}, 3 used, "
                f"{pc.sizes.format_size(cache.total_capacity)}>"
            )
    with make_cache(8, storage=None) as cache:
        assert "float32 on no storage, 0 used" in repr(cache)


@pytest.mark.parametrize(
    "action",
    [copy.copy, copy.deepcopy, pickle.dumps, lambda x: pickle.dumps(x, 0)],
    ids=["copy", "deepcopy", "pickle", "pickle0"],
)
def test_copies_are_refused(action):
    # SPEC F11
    with make_cache(8) as cache, cache.open(range(4)) as seq:
        fill(cache, seq, range(4))
        views = seq.views(0)
        for thing in (cache, seq, views, views[0], seq.packed_views(0)[0]):
            with pytest.raises(pc.CopyRefusedError) as caught:
                action(thing)
            assert isinstance(caught.value, TypeError)
        views.release()
        whole(cache)


def test_a_refused_cache_can_be_closed_and_shown():
    cache = pc.PagedKVCache.__new__(pc.PagedKVCache)
    with pytest.raises(pc.InvalidArgumentError):
        cache.__init__(spec(), num_blocks=0)
    cache.close()
    assert cache.closed
