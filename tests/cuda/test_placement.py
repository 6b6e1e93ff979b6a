"""Layers of one cache on the CPU and on two GPUs (SPEC F15); arrays in the wrong place (C49)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
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
from pagedcache._cuda.memory import PinnedMemory
from pagedcache.checks.devices import upload
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


# ---- arrays in the wrong place -----------------------------------------------------------------


class Described(SimpleNamespace):
    """An object with a ``__cuda_array_interface__`` of its own making."""


def described(address: int, shape: Any = (2, 1, 4), typestr: str = "<f4", **more: Any) -> Any:
    interface = {"version": 3, "shape": shape, "typestr": typestr, "data": (address, False)}
    return Described(__cuda_array_interface__={**interface, **more})


def writers(
    cache: pc.PagedKVCache, seq: pc.Sequence, layer: int, k: Any, v: Any
) -> dict[str, Callable[[], Any]]:
    """Every call that takes K and V of two tokens."""
    slots = seq.prepare(2)
    return {
        "append": lambda: seq.append(layer, k, v),
        "append_kv": lambda: seq.append_kv(layer, k, v, 1),
        "store": lambda: cache.store(layer, k, v, slots),
        "store raw": lambda: cache.store(layer, k, v, slots.slots),
        "store on the device": lambda: cache.store(layer, k, v, upload(slots.slots, "cuda:0")),
    }


def all_refused(
    cache: pc.PagedKVCache, seq: pc.Sequence, layer: int, k: Any, v: Any, *words: str,
    kind: Any = DeviceError,
) -> None:  # fmt: skip
    for name, call in writers(cache, seq, layer, k, v).items():
        error = refused(cache, call, kind, seq)
        if name != "store on the device":
            assert all(word in str(error) for word in words), (name, str(error))


def test_k_and_v_in_different_places(two_gpus: Any) -> None:
    # SPEC F43, CASE C49: the error names both, nothing is written
    with mixed(heads=1, dim=4) as cache, cache.open() as seq:
        fill(cache, seq, range(1, 7))
        pairs = {
            "the host": rows(cache.spec, 2, [8, 9]),
            "cuda:0": device_rows(cache, 2, [8, 9]),
            "cuda:1": device_rows(cache, 0, [8, 9]),
        }
        for layer, right in ((0, "cuda:1"), (2, "cuda:0"), (3, "cuda:1")):
            for k_place, (k, _) in pairs.items():
                for v_place, (_, v) in pairs.items():
                    if k_place == v_place in ("the host", right):
                        continue
                    words = (f"k on {k_place}", f"v on {v_place}", right)
                    all_refused(cache, seq, layer, k, v, *words)
        for place in ("cuda:0", "cuda:1"):  # a layer on the CPU
            k, v = pairs[place]
            for pair in ((k, v), (k, pairs["the host"][1]), (pairs["the host"][0], v)):
                all_refused(cache, seq, 1, *pair, "CPU")
        for layer in range(4):
            seq.append(layer, *pairs[FOUR[layer] if FOUR[layer] != "cpu" else "the host"])
        whole(cache)


def test_addresses_that_are_no_device_memory(cuda: Any, emulated: Any) -> None:
    # SPEC 7, CASE C49: a host pointer, pinned memory, a freed buffer, one byte too many
    with on_gpu(4, B=B, dim=4) as cache, cache.open() as seq:
        fill(cache, seq, range(1, 7))
        k, v = device_rows(cache, 0, [8, 9])
        heap = np.zeros((2, 1, 4), np.float32)
        pinned = PinnedMemory(cuda, 4096, "a test")
        gone = upload(heap, "cuda:0")
        freed = gone.address
        gone.owner.free()
        wrong = {
            "heap": described(heap.ctypes.data),
            "pinned": described(pinned.address),
            "freed": described(freed),
            "null": described(0),
            "small": described(8),
            "past the end": described(k.address + 4),
            "before the start": described(k.address - 4),
            "long strides": described(k.address, strides=(2**40, 16, 4)),
            "backwards": described(k.address, strides=(-32, 16, 4)),
        }
        for name, array in wrong.items():
            for pair in ((array, v), (k, array)):
                for how, call in writers(cache, seq, 0, *pair).items():
                    refused(cache, call, DeviceError, seq), (name, how)
            for out in ((array, v), (k, array)):
                refused(cache, lambda: seq.gather(0, 0, 2, dtype=np.float32, out=out),  # noqa: B023
                        DeviceError, seq)
        assert_holds(cache, seq, range(1, 7))
        seq.append(0, described(k.address), described(v.address, strides=(16, 16, 4)))
        seq.commit(2)
        assert_holds(cache, seq, [*range(1, 7), 8, 9])
        pinned.free()


def test_our_own_arrays_whose_memory_is_gone(cuda: Any, emulated: Any) -> None:
    # SPEC 7: a DeviceArray outlives its memory only where somebody frees it by hand
    with on_gpu(4, B=B, dim=4) as cache, cache.open() as seq:
        fill(cache, seq, range(1, 3))
        k, v = device_rows(cache, 0, [8, 9])
        k.owner.free()
        all_refused(cache, seq, 0, k, v, "freed")
        assert_holds(cache, seq, range(1, 3))


def test_dtypes_shapes_and_descriptions_that_do_not_fit(cuda: Any) -> None:
    # SPEC 7, CASE C44: as for host arrays
    with on_gpu(4, B=B, dim=4) as cache, cache.open() as seq:
        fill(cache, seq, range(1, 3))
        k, v = device_rows(cache, 0, [8, 9])
        for dtype in (np.float64, np.int8, np.complex64, np.uint16, bool):
            bad = upload(np.zeros((2, 1, 4), dtype), "cuda:0")
            all_refused(cache, seq, 0, bad, v, "k", kind=pc.FormatError)
            all_refused(cache, seq, 0, k, bad, "v", kind=pc.FormatError)
        for shape in ((2, 1, 3), (2, 5), (8,), (2, 4, 1), (1, 2, 1, 4), ()):
            bad = upload(np.zeros(shape, np.float32), "cuda:0")
            all_refused(cache, seq, 0, bad, v, "k", kind=pc.ShapeError)
        one = upload(np.zeros((1, 1, 4), np.float32), "cuda:0")
        all_refused(cache, seq, 0, k, one, "v", kind=pc.ShapeError)
        for bad in (
            described(k.address, typestr=">f4"),
            described(k.address, typestr="|V4"),
            described(k.address, typestr="nonsense"),
            described(k.address, shape=(2, -1, 4)),
            described(k.address, shape=None),
            described(k.address, strides=(16, 16)),
            described(k.address, mask=described(k.address)),
            described(k.address, version=1),
            Described(__cuda_array_interface__=None),
            Described(__cuda_array_interface__={}),
            Described(__cuda_array_interface__=7),
        ):
            all_refused(cache, seq, 0, bad, v, kind=pc.PagedCacheError)
        assert_holds(cache, seq, range(1, 3))


def test_outputs_that_do_not_fit(two_gpus: Any) -> None:
    # SPEC F32, CASE C49
    with on_gpu(4, B=B, dim=4) as cache, cache.open() as seq:
        fill(cache, seq, range(1, 4))
        shape = (3, 1, 4)
        fine, other = (upload(np.zeros(shape, np.float32), "cuda:0") for _ in "kv")
        k_slab, _ = cache.slabs(0)
        over = k_slab.with_layout(shape, (16, 16, 4))
        bad = [
            (upload(np.zeros(shape, np.float32), "cuda:1"), DeviceError),
            (upload(np.zeros(shape, np.float16), "cuda:0"), pc.FormatError),
            (upload(np.zeros((4, 1, 4), np.float32), "cuda:0"), pc.ShapeError),
            (fine.with_owner(fine, readonly=True), pc.FormatError),
            (fine, pc.ShapeError),  # the same memory twice
            (fine[::-1], pc.ShapeError),
            (over, pc.ShapeError),
            (host(k_slab), (pc.ShapeError, pc.FormatError)),
            ([1], pc.InvalidArgumentError),
        ]
        for array, kind in bad:
            refused(cache, lambda: seq.gather(0, out=(fine, array)), kind, seq)  # noqa: B023
        seq.gather(0, out=(fine, other))
        mixed_out = np.zeros(shape, np.float32)
        seq.gather(0, out=(mixed_out, other[::-1]))  # one on the host, one backwards
        want_k, want_v = expected(cache.spec, 0, range(1, 4))
        np.testing.assert_array_equal(host(fine), want_k)
        np.testing.assert_array_equal(mixed_out, want_k)
        np.testing.assert_array_equal(host(other), want_v[::-1])


def test_rows_that_lie_in_the_slabs_themselves(cuda: Any) -> None:
    # SPEC F24: read as they were before the call, whatever the order of the kernel's threads
    with on_gpu(4, B=B, dim=4) as cache, cache.open() as seq:
        fill(cache, seq, range(1, 9))
        k_slab, v_slab = cache.slabs(0)
        first = int(seq.block_table[0])
        given = [slab[first].transpose(1, 0, 2)[::-1] for slab in (k_slab, v_slab)]
        seq.append_kv(0, *given, 0)
        assert_holds(cache, seq, [4, 3, 2, 1, 5, 6, 7, 8])
