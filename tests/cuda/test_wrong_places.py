"""Arrays on the wrong device, addresses that are none, descriptions that do not fit (CASE C49)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cachekit import assert_holds, expected, fill, make_cache, refused, rows, whole
from devicekit import host
from gpukit import device_rows, on_gpu

import pagedcache as pc
from pagedcache._cuda.memory import PinnedMemory
from pagedcache.checks.devices import upload
from pagedcache.errors import DeviceError

B = 4
FOUR = ["cuda:1", "cpu", "cuda:0", "cuda:1"]


@pytest.fixture
def two_gpus(cuda: Any, emulated: Any) -> Any:
    emulated.set("devices", 2)
    return emulated


def mixed(num_blocks: int = 12, **options: Any) -> pc.PagedKVCache:
    defaults = {"B": B, "layers": 4, "heads": 2, "dim": 40, "device": FOUR}
    return make_cache(num_blocks, **(defaults | options))


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
