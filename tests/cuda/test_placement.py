"""Layers of one cache on the CPU and on two GPUs (SPEC F15); arrays in the wrong place (C49)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cachekit import (
    assert_holds,
    empty,
    expected,
    fill,
    make_cache,
    refused,
    rows,
    whole,
)
from devicekit import host
from gpukit import device_rows, on_gpu, streams_of

import pagedcache as pc
from pagedcache.errors import DeviceError

B = 4
FOUR = ["cuda:1", "cpu", "cuda:0", "cuda:1"]
FORMATS = ["float32", "float16", "q8", ("q4", "bfloat16")]


@pytest.fixture
def two_gpus(cuda: Any, emulated: Any) -> Any:
    emulated.set("devices", 2)
    return emulated


def mixed(num_blocks: int = 12, **options: Any) -> pc.PagedKVCache:
    defaults = {"B": B, "layers": 4, "heads": 2, "dim": 40, "device": FOUR}
    return make_cache(num_blocks, **(defaults | options))


# ---- who lives where ---------------------------------------------------------------------------


def test_names_of_devices(two_gpus: Any) -> None:
    # SPEC F15
    for device, want in (
        ("cuda", "cuda:0"), ("cuda:0", "cuda:0"), ("CUDA:1", "cuda:1"), ("cuda:01", "cuda:1"),
    ):  # fmt: skip
        with make_cache(2, layers=2, device=device) as cache, cache.open() as seq:
            assert cache.devices == (want, want)
            assert cache.layer_device(1) == seq.layer_device(0) == want
            assert cache.is_on_gpu and seq.is_on_gpu
            assert f"on {want}" in repr(cache)
    with make_cache(2, layers=2, device=["cuda:1", "cpu"]) as cache:
        assert cache.devices == ("cuda:1", "cpu") and cache.is_on_gpu
        assert [cache.layer_device(i) for i in range(2)] == ["cuda:1", "cpu"]
        assert "on cuda:1+cpu" in repr(cache)
        for layer in (2, -1, 2**70, 0.0):
            with pytest.raises(pc.InvalidArgumentError, match="layer must be"):
                cache.layer_device(layer)


def test_a_gpu_that_is_not_there(two_gpus: Any) -> None:
    # SPEC F42, CASE C48
    before = two_gpus.live()
    for device in ("cuda:7", ["cuda:0", "cuda:7"], ["cpu", "cuda:7"]):
        with pytest.raises(pc.CudaUnavailableError) as caught:
            make_cache(2, layers=2, device=device)
        assert "cuda:7" in caught.value.reason and "2 GPUs" in caught.value.reason
    del caught
    assert two_gpus.live()["live_bytes"] == before["live_bytes"]


def test_each_layer_takes_the_memory_of_its_device(two_gpus: Any) -> None:
    # SPEC F11, F15
    used = [two_gpus.get(f"live_bytes:{i}") for i in range(2)]
    with mixed(100, fmt="q8") as cache:
        layer = 100 * cache.spec.layer_block_nbytes("k") * 2
        taken = [two_gpus.get(f"live_bytes:{i}") - used[i] for i in range(2)]
        assert layer <= taken[0] < layer + 4096  # and a small table
        assert 2 * layer <= taken[1] < 2 * layer + 4096
        assert cache.total_capacity == cache._storage.nbytes == 4 * layer
    assert [two_gpus.get(f"live_bytes:{i}") for i in range(2)] == used


def test_memory_per_device_and_the_smallest_count_rules(two_gpus: Any) -> None:
    # SPEC F11, F15
    spec = pc.CacheSpec(4, 2, 40, B, "q8")
    layer = spec.layer_block_nbytes("k") * 2
    budget = {"cpu": 9 * layer, "cuda:0": 30 * layer, "cuda:1": 30 * layer}
    for change, blocks in (({}, 9), ({"cuda:1": 10 * layer}, 5), ({"cuda:0": 4 * layer}, 4)):
        with pc.PagedKVCache(spec, memory=budget | change, device=FOUR) as cache:
            assert cache.num_blocks == blocks
    for wrong in (
        {k: v for k, v in budget.items() if k != "cpu"}, budget | {"cuda:2": layer}, "1GiB",
        {**budget, "cuda:1": layer},
    ):  # fmt: skip
        with pytest.raises(pc.InvalidArgumentError):
            pc.PagedKVCache(spec, memory=wrong, device=FOUR)


# ---- one life on three devices -----------------------------------------------------------------


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_every_operation_reaches_every_layer(fmt: Any, layout: str, two_gpus: Any) -> None:
    # SPEC F15, F22, F28, F40: hits, copies and moves are the same in all layers
    with mixed(fmt=fmt, layout=layout, partial_block_reuse=1) as cache:
        low = cache.open(range(900, 908))
        with cache.open(range(10)) as seq:
            fill(cache, seq, range(1, 11))
            child = seq.fork()
            fill(cache, child, [50, 51, 52])
            fill(cache, seq, [60])
            assert_holds(cache, child, [*range(1, 11), 50, 51, 52])
            assert_holds(cache, seq, [*range(1, 11), 60])
            child.truncate(9)
            fill(cache, child, [70])
            assert_holds(cache, child, [*range(1, 10), 70])
            whole(cache)
        with cache.open([*range(6), 99, 98]) as hit:  # one block shared, two tokens copied
            assert hit.num_cached_tokens == 6
            assert_holds(cache, hit, range(1, 7))
        low.free()
        assert cache.defragment() > 0
        assert_holds(cache, child, [*range(1, 10), 70])
        with cache.open(range(10)) as again:
            assert again.num_cached_tokens == 8
            assert_holds(cache, again, range(1, 9))
        slots = cache.prepare([child], [2])
        for layer in range(4):
            cache.store(layer, *rows(cache.spec, layer, [80, 81]), slots)
        child.commit(2)
        assert_holds(cache, child, [*range(1, 10), 70, 80, 81])
        child.free()
        empty(cache)


def test_arrays_come_from_the_device_of_their_layer(two_gpus: Any) -> None:
    # SPEC F15, F30
    with mixed() as cache, cache.open() as seq:
        fill(cache, seq, range(1, 7))
        for layer, device in enumerate(FOUR):
            k, v = seq.gather(layer)
            views = list(seq.views(layer))
            assert [view.device for view in views] == [device] * 2
            slabs = cache.slabs(layer)
            for array in (k, v, views[0].k, views[1].v, *slabs):
                if device == "cpu":
                    assert isinstance(array, np.ndarray)
                else:
                    assert array.device == device
            want, _ = expected(cache.spec, layer, range(1, 7))
            np.testing.assert_array_equal(host(k), want)


def test_rows_of_each_gpu_go_to_its_layers(two_gpus: Any) -> None:
    # SPEC F43
    with mixed(fmt="q8") as cache, cache.open() as seq:
        for layer, device in enumerate(FOUR):
            if device == "cpu":
                seq.append(layer, *rows(cache.spec, layer, range(1, 7)))
            else:
                seq.append(layer, *device_rows(cache, layer, range(1, 7)))
        seq.commit(6)
        assert_holds(cache, seq, range(1, 7))


# ---- streams ---------------------------------------------------------------------------------


def test_streams_by_device(cuda: Any, two_gpus: Any) -> None:
    # SPEC F49, F15
    from pagedcache._cuda.driver import get_device

    two_gpus.set("async", 1)
    with streams_of(cuda, 2) as first, streams_of(get_device(1), 2) as second:
        by_device = {"cuda:0": first[0], "cuda:1": second[0]}
        others = {"cuda:0": first[1], "cuda:1": second[1]}
        with mixed(partial_block_reuse=1) as cache:
            seq = cache.open(range(9), stream=by_device)
            for layer in range(4):
                seq.append(layer, *rows(cache.spec, layer, range(1, 10)), stream=by_device)
            seq.commit(9)
            with cache.open([*range(6), 70], stream=others) as hit:
                assert hit.num_cached_tokens == 6
                for layer in range(4):
                    k, v = hit.gather(layer, 0, 6, dtype=np.float32, stream=others)
                    want = expected(cache.spec, layer, range(1, 7))
                    np.testing.assert_array_equal(host(k), want[0])
                    np.testing.assert_array_equal(host(v), want[1])
            for wrong in (
                {"cuda:0": second[0]},
                {"cuda:1": first[0]},
                {"cuda:2": first[0]},
                {"cpu": first[0]},
                first[0],  # which of the two GPUs?
            ):
                refused(cache, lambda: seq.free(stream=wrong), DeviceError, seq)  # noqa: B023
                refused(cache, lambda: cache.open([1], stream=wrong), DeviceError, seq)  # noqa: B023
            refused(cache, lambda: cache.open([1], stream={"cuda:0": "x"}),
                    pc.InvalidArgumentError, seq)
            seq.free(stream=by_device)


def test_a_stream_of_another_gpu_is_refused(cuda: Any, two_gpus: Any) -> None:
    # SPEC F49, CASE C49
    from pagedcache._cuda.driver import get_device

    class Stream:  # as torch shows one
        def __init__(self, index: int, handle: int) -> None:
            self.device_index, self.cuda_stream = index, handle

    with streams_of(cuda, 1) as first, streams_of(get_device(1), 1) as second:
        with on_gpu(4, B=B) as cache, cache.open() as seq:
            for wrong in (Stream(1, first[0].handle), Stream(1, second[0].handle)):
                error = refused(cache, lambda: seq.prepare(1, stream=wrong), DeviceError, seq)  # noqa: B023
                assert "cuda:0" in str(error) and "cuda:1" in str(error)
            seq.prepare(1, stream=Stream(0, first[0].handle))


def test_a_stream_for_a_cache_without_gpu(cuda: Any) -> None:
    # SPEC F49
    with streams_of(cuda, 1) as (stream,), make_cache(4, B=B, device="cpu") as cache:
        seq = cache.open(range(5))
        fill(cache, seq, range(1, 6))
        for call in (
            lambda: cache.open([1], stream=stream),
            lambda: seq.append(0, *rows(cache.spec, 0, [1]), stream=stream),
            lambda: seq.gather(0, stream=stream),
            lambda: seq.views(0, stream=stream),
            lambda: seq.prepare(1, stream=stream),
            lambda: cache.defragment(stream=stream),
            lambda: cache.record_use([seq], stream),
            lambda: seq.commit(0, stream=stream),
            lambda: seq.truncate(1, stream=stream),
            lambda: seq.free(stream=stream),
        ):
            refused(cache, call, DeviceError, seq)
