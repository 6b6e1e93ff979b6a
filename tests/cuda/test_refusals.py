"""What users got wrong, or we did, in ways that the sweeps had not tried."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import pagedcache as pc

SALTS = itertools.count()
SPEC = pc.CacheSpec(num_layers=1, num_kv_heads=2, head_dim=32, block_size=4)


def make(**options: Any) -> pc.PagedKVCache:
    return pc.PagedKVCache(SPEC, 16, **{"device": "cuda:0", **options})


def rows(count: int, value: float) -> np.ndarray:
    return np.full((count, 2, 32), value, np.float16)


def filled(cache: pc.PagedKVCache, count: int = 6, **options: Any) -> pc.Sequence:
    seq = cache.open(range(count), salt=str(next(SALTS)), **options)  # no hits
    seq.append(0, rows(count, 1), rows(count, 2), **options)
    seq.commit(count, **options)
    return seq


def up(array: np.ndarray) -> pc.DeviceArray:
    from pagedcache.checks.devices import upload

    made: pc.DeviceArray = upload(array, "cuda:0")
    return made


@pytest.fixture
def streams(emulated: Any) -> Any:
    import pycuda.driver as driver

    from pagedcache._cuda.driver import get_device

    emulated.set("async", 1)
    with get_device(0).current():
        made = [driver.Stream(1) for _ in range(3)]
        yield made
        driver.Context.synchronize()
        made.clear()


def test_small_uploads_keep_few_events(emulated: Any) -> None:
    # SPEC F49
    with make() as cache:
        for _ in range(400):
            filled(cache, 1).free()
        assert emulated.get("live_events") <= 300


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_sequences_of_another_cache(cuda: Any, device: str) -> None:
    # SPEC F49, CASE C59
    with make(device=device) as ours, pc.PagedKVCache(SPEC, 64, device=device) as theirs:
        seq = filled(theirs, 60)
        for call in (
            lambda: ours.record_use([seq]),
            lambda: ours.commit([seq], [1]),
            lambda: ours.prepare([seq], [1]),
        ):
            with pytest.raises(pc.InvalidArgumentError, match="another cache|not of this"):
                call()
        seq.free()


def test_a_store_by_device_slots_is_ordered(streams: list[Any]) -> None:
    # SPEC F49
    with make() as cache:
        seq = filled(cache, stream=streams[0])
        before = [np.asarray(x).copy() for x in seq.gather(0, stream=streams[2])]
        slots = cache.prepare([seq], [2], stream=streams[0])
        raw = up(np.asarray(slots))
        k, v = up(rows(2, 3)), up(rows(2, 4))
        cache.store(0, k, v, raw, stream=streams[1])  # on another stream than it was prepared
        seq.commit(2)
        got_k, got_v = seq.gather(0, stream=streams[2])
        np.testing.assert_array_equal(np.asarray(got_k), np.concatenate([before[0], rows(2, 3)]))
        np.testing.assert_array_equal(np.asarray(got_v), np.concatenate([before[1], rows(2, 4)]))
        seq.free()


def test_finished_streams_are_let_go_of(emulated: Any) -> None:
    # SPEC F49
    import pycuda.driver as driver

    from pagedcache._cuda.driver import get_device

    with make() as cache, get_device(0).current():
        before = emulated.get("live_streams")
        for _ in range(20):
            stream = driver.Stream()
            filled(cache, stream=stream).free(stream=stream)
        del stream
        cache.synchronize()
        gc.collect()
        assert emulated.get("live_streams") == before


def test_after_synchronize_nobody_waits(emulated: Any, streams: list[Any]) -> None:
    # SPEC F49
    with make() as cache:
        seq = filled(cache, stream=streams[0])
        cache.synchronize()
        waits = emulated.get("calls:cuStreamWaitEvent")
        k, _ = seq.gather(0, stream=streams[1])
        assert emulated.get("calls:cuStreamWaitEvent") == waits
        np.testing.assert_array_equal(np.asarray(k), rows(6, 1))
        seq.free()


def test_out_that_overlaps_itself(cuda: Any) -> None:
    # SPEC F32, CASE C45
    with make() as cache, make(device="cpu") as host:
        for each in (cache, host):
            seq = filled(each)
            one = np.lib.stride_tricks.as_strided(np.zeros(64, np.float16), (6, 2, 32), (0, 64, 2))
            with pytest.raises(pc.ShapeError, match="elements of their own"):
                seq.gather(0, out=(one, np.zeros((6, 2, 32), np.float16)))
            seq.free()
        seq = filled(cache)
        good = up(np.zeros((6, 2, 32), np.float16))
        bad = good.with_layout((6, 2, 32), (0, 64, 2))
        with pytest.raises(pc.ShapeError, match="elements of their own"):
            seq.gather(0, out=(bad, good))
        # Rows that lie apart, heads reversed: no element twice.
        wide = up(np.zeros((12, 2, 32), np.float16))[::2, ::-1]
        seq.gather(0, out=(wide, good))
        np.testing.assert_array_equal(np.asarray(wide), rows(6, 1))
        seq.free()


def test_streams_named_by_device(streams: list[Any]) -> None:
    # SPEC F15 F49
    with make() as cache:
        for name in ("cuda", "cuda:0", "CUDA:0"):
            filled(cache, stream={name: streams[0]}).free(stream={name: streams[1]})
        for wrong in ({"cuda:1": streams[0]}, {"cpu": streams[0]}, {3: streams[0]}):
            with pytest.raises(pc.DeviceError, match="stream"):
                cache.open([1], stream=wrong)
    with pc.PagedKVCache(SPEC, memory={"cuda": "1MiB"}, device="cuda") as cache:
        assert cache.devices == ("cuda:0",)


def test_an_array_is_no_stream(cuda: Any) -> None:
    # SPEC F49
    with make() as cache:
        for wrong in (up(rows(1, 0)), np.zeros(3)):
            with pytest.raises(pc.InvalidArgumentError, match="stream: expected"):
                cache.open([1], stream=wrong)


def test_streams_without_storage() -> None:
    # SPEC F48 F49
    with pc.PagedKVCache(SPEC, 4, storage=None) as cache, cache.open([1]) as seq:
        for call in (lambda: seq.free(stream=0), lambda: cache.open([1], stream=0)):
            with pytest.raises(pc.DeviceError, match="stream: expected no stream with storage="):
                call()


def test_arrays_by_hand_and_of_others(cuda: Any) -> None:
    # SPEC F47
    spec = pc.CacheSpec(1, 2, 32, 4, "bfloat16")
    values = np.arange(6 * 64, dtype=np.float32).reshape(6, 2, 32).astype(ml_dtypes.bfloat16)
    integers = up(values.view(np.uint16))

    class Foreign:  # as a library without a name for bfloat16 gives it
        __cuda_array_interface__ = integers.__cuda_array_interface__

    k = pc.DeviceArray.of(Foreign()).view(ml_dtypes.bfloat16)
    v = pc.DeviceArray(k.address, k.shape, None, k.dtype, "cuda:0", owner=integers)
    with pc.PagedKVCache(spec, 4, device="cuda") as cache, cache.open(range(6)) as seq:
        seq.append(0, k, v)
        for got in seq.gather(0):
            np.testing.assert_array_equal(np.asarray(got), values)
    with pytest.raises(pc.DeviceError, match="an array in device memory"):
        pc.DeviceArray.of(values)
    with pytest.raises(pc.DeviceError, match='"cuda:N"'):
        pc.DeviceArray(k.address, k.shape, None, k.dtype, "tpu")
