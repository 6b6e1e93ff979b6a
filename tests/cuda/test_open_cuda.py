"""Open slots in device memory: taken and given back with the rest, refused where nobody knows the
places, and ordered between streams like blocks. What they hold is judged by the CPU's tests."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from devicekit import host
from gpukit import streams_of

import pagedcache as pc
from pagedcache._cuda.arrays import DeviceArray
from pagedcache._cuda.driver import get_device
from pagedcache.checks.devices import upload
from pagedcache.errors import DeviceError, ShapeError, StorageMemoryError
from pagedcache.storage.cpu import CpuStorage
from pagedcache.storage.cuda import CudaStorage
from pagedcache.storage.placed import make_storage

B = 4
SPEC = pc.CacheSpec(2, 2, 32, B, kv_format="q4k")


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def rows(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    k, v = np.random.default_rng(seed).standard_normal((2, count, 2, 32), np.float32)
    return k, v


@pytest.fixture
def storage(cuda: Any) -> Iterator[Any]:
    made = CudaStorage(SPEC, 6, num_open=3)
    yield made
    made.close()


# ---- memory ------------------------------------------------------------------------------------


def test_open_slots_are_taken_with_the_slabs_or_nothing_is(cuda: Any, emulated: Any) -> None:
    # SPEC F11, CASE C51
    CudaStorage(SPEC, 6, num_open=3).close()
    gc.collect()
    cuda.staging.close()
    before = emulated.live()
    for nth in itertools.count(1):
        emulated.fail("cuMemAlloc", nth, 2)
        try:
            made = CudaStorage(SPEC, 6, num_open=3)
        except StorageMemoryError as error:
            assert "open blocks" in str(error) or nth not in range(5, 9), str(error)
            assert error.nbytes is not None
            held = error  # keeps frames, and they must keep nothing
            assert emulated.live() == before, nth
            del held
        else:
            emulated.fail("cuMemAlloc", 0)
            made.close()
            break
    assert nth >= 9  # 2 layers of K and V, sealed and open, then the tables
    gc.collect()


def test_sizes(storage: Any) -> None:
    # SPEC F30
    nbytes = 6 * SPEC.block_nbytes + 3 * SPEC.open_block_nbytes
    assert storage.nbytes == nbytes and storage.num_places == 9
    assert "6 blocks and 3 open slots" in repr(storage)
    array = storage.open_slab_array(1, "k")
    assert array.shape == (3, 2, B, 32) and array.dtype == np.float16 and array.readonly
    assert storage.block_array(1, "k", 7).address == array.address + array.strides[0]
    none = CudaStorage(pc.CacheSpec(1, 1, 4, B, kv_format="q8", open_blocks="bfloat16"), 2)
    assert none.open_slab_array(0, "v").shape == (0, 1, B, 4)
    none = CudaStorage(pc.CacheSpec(1, 1, 4, B, kv_format="float32"), 2)
    assert none.open_slab_array(0, "k").shape == (0, 1, B, 4)


def test_layers_on_two_devices_fail_together(cuda: Any, emulated: Any) -> None:
    # SPEC F11 F15
    emulated.set("devices", 2)
    make_storage(SPEC, 6, ["cuda:0", "cuda:1"], None, 3).close()
    gc.collect()
    for device in (cuda, get_device(1)):
        device.staging.close()
    before = emulated.live()
    # The first device takes 2 slabs, 2 open ones and a table; the sixth call is the second's.
    emulated.fail("cuMemAlloc", 6, 2)
    with pytest.raises(StorageMemoryError) as caught:
        make_storage(SPEC, 6, ["cuda:0", "cuda:1"], None, 3)
    emulated.fail("cuMemAlloc", 0)
    for device in (cuda, get_device(1)):
        device.staging.close()
    now = emulated.live()
    assert now["live_allocations"] == before["live_allocations"], caught.value


def test_adopted_slabs_get_open_slots_of_their_own(cuda: Any) -> None:
    # SPEC F48
    slabs = [
        [upload(np.zeros((6, SPEC.layer_block_nbytes(kind)), np.uint8), "cuda:0") for _ in range(2)]
        for kind in ("k", "v")
    ]
    storage = CudaStorage(SPEC, 6, slabs=slabs, num_open=3)
    twin = CpuStorage(SPEC, 6, 3)
    for each in (storage, twin):
        each.store(0, *each.check_rows(0, *rows(B), B), 6 * B + np.arange(B))
        each.copy_blocks(ints(6), ints(4), ints(B))
    for kind, given in zip(("k", "v"), slabs, strict=True):
        assert host(given[0])[4].tobytes() == twin.slab_array(0, kind)[4].tobytes()
        assert not host(given[0])[5].any()


# ---- arrays over open slots --------------------------------------------------------------------


def test_rows_that_lie_in_open_slots_are_copied_first(storage: Any) -> None:
    """A store that reads what it writes, one token further on."""
    # CASE C45
    k, v = rows(2 * B)
    storage.store(0, *storage.check_rows(0, k, v, 2 * B), 6 * B + np.arange(2 * B))
    want = [host(part) for part in storage.gather(0, ints(6, 7), 0, B, np.float16)]
    inside = [
        storage.open_slab_array(0, kind, writable=True)[0].transpose((1, 0, 2)) for kind in "kv"
    ]
    ready = storage.check_rows(0, *inside, B)
    assert all(part.address != given.address for part, given in zip(ready, inside, strict=True))
    storage.store(0, *ready, 6 * B + 1 + np.arange(B))
    got = [host(part) for part in storage.gather(0, ints(6, 7), 1, 1 + B, np.float16)]
    for a, b in zip(want, got, strict=True):
        np.testing.assert_array_equal(a, b)


def test_nothing_is_read_into_open_slots(storage: Any) -> None:
    slab = storage.open_slab_array(0, "k", writable=True)
    out = slab.with_layout((B, 2, 32), (128, 64, 2))
    other = storage.new_array((B, 2, 32), np.dtype(np.float16), "out")
    with pytest.raises(ShapeError, match="memory apart from the slabs"):
        storage.gather(0, ints(6), 0, B, None, out, other)


# ---- slots -------------------------------------------------------------------------------------


def test_slots_on_the_device_are_refused(storage: Any) -> None:
    """Which place a slot names decides which kernel stores it, so the host must know."""
    # SPEC F33
    k, v = (upload(part, "cuda:0") for part in rows(2))
    slots = upload(np.array([24, 25]), "cuda:0")
    before = host(storage.open_slab_array(0, "k")).tobytes()
    for made in (storage, CudaStorage(SPEC, 6)):
        with pytest.raises(DeviceError, match="slots on the host .*kept open until they are full"):
            made.store_raw(0, k, v, slots)
    assert host(storage.open_slab_array(0, "k")).tobytes() == before
    with pc.PagedKVCache(SPEC, 6, device="cuda:0") as cache, cache.open() as seq:
        seq.prepare(2)
        with pytest.raises(DeviceError):
            cache.store(0, k, v, slots)


class Mapping:
    """Stands for a slot mapping: kept on the device as long as it lives."""


def test_one_mapping_of_both_kinds_of_places(storage: Any, emulated: Any) -> None:
    """Whole blocks, open tails and skipped tokens in one list, uploaded once for all layers."""
    # SPEC F33 F43
    block = np.arange(B)
    slots = np.concatenate(
        [8 * B + block[1:3], 3 * B + block, [-1], 6 * B + block[:1], 5 * B + block]
    )
    twin = CpuStorage(SPEC, 6, 3)
    mapping = Mapping()
    count = len(slots)
    for layer in range(2):
        k, v = rows(count, layer)
        given = [upload(part, "cuda:0") for part in (k, v)]
        ready = storage.check_rows(layer, *given, count)
        before = emulated.get("h2d_bytes")
        storage.store(layer, *ready, slots, mapping=mapping)
        # Two lists of slots and one of two whole blocks; nothing for the second layer.
        uploaded = 8 * (2 * count + 2 * 2)
        assert emulated.get("h2d_bytes") - before == (0 if layer else uploaded)
        twin.store(layer, *twin.check_rows(layer, k, v, count), slots)
    for layer in range(2):
        for kind in ("k", "v"):
            for name in ("slab_array", "open_slab_array"):
                got, want = (getattr(each, name)(layer, kind) for each in (storage, twin))
                assert host(got).tobytes() == want.tobytes(), (layer, kind, name)


def test_a_decode_step_of_open_blocks_is_one_launch_for_each_of_k_and_v(
    storage: Any, emulated: Any
) -> None:
    # SPEC F43
    k, v = (upload(part, "cuda:0") for part in rows(3))
    ready = storage.check_rows(0, k, v, 3, "saturate")
    launches = emulated.get("launches")
    storage.store(0, *ready, np.array([24, 30, 32]), "saturate")
    assert emulated.get("launches") - launches == 2
    launches = emulated.get("launches")
    storage.copy_blocks(ints(6, 7, 8), ints(0, 1, 2), ints(B, B, B))  # K and V differ
    assert emulated.get("launches") - launches == 2
    launches = emulated.get("launches")
    storage.gather(0, ints(0, 1, 2, 6), 0, 4 * B)  # sealed, then open
    assert emulated.get("launches") - launches == 4


def test_copies_of_all_ways_keep_their_order(storage: Any) -> None:
    """Chains that seal, reopen and copy; a target written twice."""
    # SPEC F28  # CASE C56
    twin = CpuStorage(SPEC, 6, 3)
    rng = np.random.default_rng(4)
    for each in (storage, twin):
        for layer in range(2):
            ready = each.check_rows(layer, *rows(3 * B, layer), 3 * B)
            each.store(layer, *ready, 6 * B + np.arange(3 * B))
        each.copy_blocks(ints(6, 7, 8), ints(0, 1, 2), ints(B, B, B))
    for _ in range(20):
        src, dst = rng.integers(0, 9, (2, 12)).astype(np.int32)
        part = rng.integers(0, B + 1, 12).astype(np.int32)
        counts = np.where(dst < 6, np.where(part > 1, B, 0), part).astype(np.int32)
        for each in (storage, twin):
            each.copy_blocks(src, dst, counts)
        _same(storage, twin)
    for _ in range(10):
        src, dst = rng.integers(0, 9 * B, 15), 6 * B + rng.integers(0, 3 * B, 15)
        for each in (storage, twin):
            each.copy_tokens(src, dst)
        _same(storage, twin)
    for byte in (0x5A, 0):
        for each in (storage, twin):
            each.fill_blocks(ints(8, 0, 6, 5), byte)
        _same(storage, twin)


def _same(storage: Any, twin: Any) -> None:
    for layer in range(2):
        for kind in ("k", "v"):
            for name in ("slab_array", "open_slab_array"):
                got, want = (getattr(each, name)(layer, kind) for each in (storage, twin))
                assert host(got).tobytes() == want.tobytes(), (layer, kind, name)


# ---- streams -----------------------------------------------------------------------------------


def test_streams_are_ordered_by_places(cuda: Any, emulated: Any) -> None:
    """Stored on one stream, sealed on another, the open slot used again on a third: all runs as
    late as the waits allow."""
    # SPEC F34 F49, CASE C52
    emulated.set("async", 1)
    storage, twin = CudaStorage(SPEC, 6, num_open=1), CpuStorage(SPEC, 6, 1)
    with streams_of(cuda, 3) as streams:
        queues = [storage.queue(stream) for stream in streams]
        gathered: list[tuple[DeviceArray, np.ndarray]] = []
        for turn in range(12):
            k, v = rows(B, turn)
            one, two, three = (queues[(turn + i) % 3] for i in range(3))
            slots = 6 * B + np.arange(B)
            for each, first, second, third in ((storage, one, two, three), (twin, *[None] * 3)):
                each.store(0, *each.check_rows(0, k, v, B, None, first), slots, None, first)
                each.copy_blocks(ints(6), ints(turn % 6), ints(B), second)
                each.copy_blocks(ints((turn + 3) % 6), ints(6), ints(2), third)  # over the open
                pair = each.gather(0, ints(turn % 6, 6), 0, B + 2, None, queue=first)
                if each is storage:
                    got = pair
            gathered += zip(got, pair, strict=True)
        for device_rows, want in gathered:
            np.testing.assert_array_equal(host(device_rows), want)
        _same(storage, twin)
