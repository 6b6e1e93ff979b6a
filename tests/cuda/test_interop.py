"""Arrays of other libraries through the façade: rows in, rows out, slabs adopted and lent (F47)."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cachekit import assert_holds, expected, fill, make_cache, refused, rows, whole
from devicekit import host
from gpukit import append, device_rows, on_gpu, streams_of

import pagedcache as pc
from pagedcache._cuda.arrays import DeviceArray
from pagedcache.checks.devices import upload
from pagedcache.errors import DeviceError, FormatError, ShapeError

B = 4
DTYPES = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


class Interface:
    """Only ``__cuda_array_interface__``, as CuPy and Numba have it."""

    def __init__(self, array: DeviceArray) -> None:
        self.array = array

    @property
    def __cuda_array_interface__(self) -> Any:
        return self.array.__cuda_array_interface__


class Packed:
    """Only DLPack."""

    def __init__(self, array: DeviceArray) -> None:
        self.array = array

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)


def _of_pycuda(array: np.ndarray) -> Any:
    import pycuda.gpuarray

    from pagedcache._cuda.driver import get_device

    with get_device(0).current():
        return pycuda.gpuarray.to_gpu(np.ascontiguousarray(array))


def _by_dlpack(array: np.ndarray) -> Any:
    return Packed(upload(array, "cuda:0"))


MAKERS: dict[str, Callable[[np.ndarray], Any]] = {
    "PyCUDA's GPUArray": _of_pycuda,
    "__cuda_array_interface__": lambda array: Interface(upload(array, "cuda:0")),
    "DLPack": _by_dlpack,
    "DeviceArray": lambda array: upload(array, "cuda:0"),
}


def fetched(array: Any) -> np.ndarray:
    """The values of an array that a maker made."""
    if not hasattr(array, "gpudata"):
        return host(getattr(array, "array", array))
    from pagedcache._cuda.driver import get_device

    with get_device(0).current():
        values: np.ndarray = array.get()
    return values


def let_go(*arrays: Any) -> None:
    """PyCUDA frees what it made only where its context is current."""
    for array in arrays:
        if hasattr(array, "gpudata"):
            from pagedcache._cuda.driver import get_device

            with get_device(0).current():
                array.gpudata.free()


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("maker", list(MAKERS))
def test_rows_in_and_out(maker: str, dtype: Any, cuda: Any, emulated: Any) -> None:
    # SPEC F43, F47: nothing goes through the host
    make = MAKERS[maker]
    with on_gpu(8, B=B, heads=2, dim=8, fmt="q8") as cache, cache.open() as seq:
        pair = [part.astype(dtype) for part in rows(cache.spec, 0, range(1, 7))]
        k, v = (make(part) for part in pair)
        flat = [make(part[:2].reshape(2, 16)) for part in pair]
        out = [make(np.zeros((6, 2, 8), np.float32)) for _ in "kv"]
        before = emulated.get("d2h_bytes")
        seq.append(0, k, v, on_nonfinite="saturate")
        seq.gather(0, 0, 6, out=tuple(out))
        assert emulated.get("d2h_bytes") == before
        seq.commit(6)
        slots = seq.prepare(2)
        cache.store(0, *flat, slots)
        seq.commit(2)
        with make_cache(8, B=B, heads=2, dim=8, fmt="q8", device="cpu") as judge:
            with judge.open() as twin:
                twin.append(0, *(np.concatenate((part, part[:2])) for part in pair))
                for got, want in zip(seq.gather(0), twin.gather(0), strict=True):
                    np.testing.assert_array_equal(host(got), want)
                for array, want in zip(out, twin.gather(0, 0, 6), strict=True):
                    np.testing.assert_array_equal(fetched(array), want)
        let_go(k, v, *flat, *out)


def test_bfloat16_has_no_name_in_the_interface(cuda: Any) -> None:
    # SPEC F47: our own arrays and DLPack keep the dtype; through an interface it is uint16, which
    # is refused
    with on_gpu(4, B=B, dim=4, fmt="bfloat16") as cache, cache.open() as seq:
        k, v = (
            upload(part.astype(ml_dtypes.bfloat16), "cuda:0")
            for part in rows(cache.spec, 0, [1, 2])
        )
        seq.append(0, k, v)
        got = seq.gather(0)[0]
        assert got.dtype == ml_dtypes.bfloat16
        assert Interface(got).__cuda_array_interface__["typestr"] == "<u2"
        error = refused(cache, lambda: seq.append(0, Interface(k), v), FormatError, seq)
        assert "uint16" in str(error)
        seq.append(0, Packed(k), Packed(v))
        out = tuple(upload(np.zeros((2, 1, 4), ml_dtypes.bfloat16), "cuda:0") for _ in "kv")
        seq.gather(0, 2, out=tuple(map(Packed, out)))
        for array, given in zip(out, (k, v), strict=True):
            np.testing.assert_array_equal(host(array), host(given))


def test_gathered_arrays_and_views_are_read_by_others(cuda: Any) -> None:
    # SPEC F30, F47
    with on_gpu(8, B=B, heads=2, dim=8) as cache, cache.open() as seq:
        fill(cache, seq, range(1, 7))
        want, _ = expected(cache.spec, 0, range(1, 7))
        k, _ = seq.gather(0)
        interface = k.__cuda_array_interface__
        assert (interface["version"], interface["shape"]) == (3, (6, 2, 8))
        assert interface["data"] == (k.address, False)
        view = seq.views(0)[1]
        interface = view.k.__cuda_array_interface__
        assert interface["data"][1] is True  # read-only
        assert interface["strides"] == (B * 8 * 4, 8 * 4, 4)  # cut to the length
        again = cache.open()
        again.append(0, Interface(view.k.transpose(1, 0, 2)), Interface(view.v.transpose(1, 0, 2)))
        np.testing.assert_array_equal(host(again.gather(0)[0]), want[4:])


def test_an_array_of_another_library_keeps_the_pin(cuda: Any) -> None:
    # SPEC F30, F47: DLPack's readers and the interface's keep what they were given
    core = pytest.importorskip("cuda.core.utils", reason="cuda.core is not installed")
    with on_gpu(8, B=B, dim=4) as cache, cache.open() as seq:
        fill(cache, seq, range(1, 7))
        array = seq.views(0)[0].k
        with cuda.current():
            reader = core.StridedMemoryView.from_dlpack(array, stream_ptr=-1)
        del array
        gc.collect()
        assert cache.stats().pinned == 1
        del reader
        gc.collect()
        assert cache.stats().pinned == 0


def test_slabs_are_lent_without_a_copy(cuda: Any) -> None:
    # SPEC F47, F48: kernels of an engine's own index them by block id
    for layout, shape in (("HND", (2, B, 8)), ("NHD", (B, 2, 8))):
        with on_gpu(5, B=B, heads=2, dim=8, layout=layout, fmt=("float16", "q4")) as cache:
            with cache.open() as seq:
                fill(cache, seq, range(1, 6))
                k, v = cache.slabs(0)
                assert (k.shape, k.dtype) == ((5, *shape), np.float16)
                assert (v.shape, v.dtype) == ((5, cache.spec.layer_block_nbytes("v")), np.uint8)
                assert not k.readonly and not v.readonly
                first = int(seq.block_table[0])
                want, _ = expected(cache.spec, 0, range(1, 5))
                got = host(k[first]).astype(np.float32)
                np.testing.assert_array_equal(
                    got.transpose(1, 0, 2) if layout == "HND" else got, want
                )
                assert k.address == cache._storage.slab_array(0, "k").address


# ---- slabs adopted ---------------------------------------------------------------------------


def adopted(fmt: str, layout: str = "HND", num_blocks: int = 6) -> Any:
    """One device tensor ``[num_blocks, 2, …]`` per layer, as vLLM has them, full of NaN bytes."""
    spec = make_cache(1, B=B, heads=2, dim=32, fmt=fmt, layout=layout, storage=None).spec
    shape, dtype = (num_blocks, 2, *spec.k_block_shape), spec.k_format.dtype
    nbytes = int(np.prod(shape)) * dtype.itemsize
    whole_ = np.full(nbytes, 0xFF, np.uint8).view(dtype).reshape(shape)
    return [upload(whole_, "cuda:0") for _ in range(2)]


@pytest.mark.parametrize("wrap", [Interface, lambda array: array], ids=["interface", "ours"])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("fmt", ["float32", "float16", "q8", "q4_0"])
def test_adopted_halves_of_one_tensor(fmt: str, layout: str, wrap: Any, cuda: Any) -> None:
    # SPEC F48 on a GPU: the caller's bytes are the cache's bytes, whatever the block stride
    tensors = adopted(fmt, layout)
    storage = tuple([wrap(tensor[:, half]) for tensor in tensors] for half in range(2))
    options: dict[str, Any] = {"B": B, "layers": 2, "heads": 2, "dim": 32, "layout": layout}
    with make_cache(6, fmt=fmt, device="cuda:0", storage=storage, **options) as cache:
        with make_cache(6, fmt=fmt, device="cuda:0", **options) as own:
            seqs = [c.open(range(6)) for c in (cache, own)]
            for c, seq in zip((cache, own), seqs, strict=True):
                fill(c, seq, range(1, 7))
                with seq.fork() as child:
                    fill(c, child, [50])
                    assert_holds(c, child, [1, 2, 3, 4, 5, 6, 50])
            for layer in range(2):
                for half in range(2):
                    theirs = host(tensors[layer])[int(seqs[0].block_table[0]), half]
                    ours = host(own.slabs(layer)[half])[int(seqs[1].block_table[0])]
                    same = theirs.view(np.uint8) == ours.view(np.uint8)
                    # bytes of padding are never written: 0xFF in theirs, zero in ours
                    assert same[ours.view(np.uint8) != 0].all()
            assert_holds(cache, seqs[0], range(1, 7))
            assert cache.defragment() >= 0
            whole(cache)
    # still the caller's after close
    assert host(tensors[0]).shape[0] == 6


def test_adopted_device_arrays_are_checked(cuda: Any, emulated: Any) -> None:
    # SPEC F48, CASE C49
    emulated.set("devices", 2)
    spec = pc.CacheSpec(1, 2, 8, B, "float16")
    shape = (6, 2, B, 8)

    def slab(dtype: Any = np.float16, device: str = "cuda:0", shape: Any = shape) -> Any:
        return upload(np.zeros(shape, dtype), device)

    good, both = slab(), slab(shape=(6, 2, *shape[1:]))
    freed = slab()
    freed.owner.free()
    for wrong, kind in (
        (np.zeros(shape, np.float16), DeviceError),
        (slab(device="cuda:1"), DeviceError),
        (freed, DeviceError),
        (slab(np.float32), FormatError),
        (slab(shape=(5, *shape[1:])), ShapeError),
        (good.with_owner(good, readonly=True), FormatError),
        (good, ShapeError),  # the same memory twice
        (slab(shape=(6, B, 2, 8)).transpose(0, 2, 1, 3), ShapeError),  # not dense in a block
        (good.with_layout(shape, (16, *good.strides[1:])), ShapeError),  # blocks overlap
        ("text", pc.PagedCacheError),
        (None, pc.PagedCacheError),
    ):
        with pytest.raises(kind):
            pc.PagedKVCache(spec, 6, device="cuda:0", storage=([good], [wrong]))
        with pytest.raises(kind):
            pc.PagedKVCache(spec, 6, device="cuda:0", storage=([wrong], [good]))
    with pytest.raises(DeviceError):  # a device array for a layer on the CPU
        pc.PagedKVCache(spec, 6, storage=([good], [slab()]))
    storage = ([both[:, 0]], [both[:, 1]])
    with pc.PagedKVCache(spec, 6, device="cuda:0", storage=storage) as cache:
        out = both[:, 0][0].transpose(1, 0, 2)
        seq = cache.open()
        append(cache, seq, range(1, 5))
        with pytest.raises(ShapeError):  # an output over the cache's own memory
            seq.gather(0, out=(out, slab(shape=(4, 2, 8))))


def test_adopted_layers_on_several_devices(cuda: Any, emulated: Any) -> None:
    # SPEC F48, F15
    emulated.set("devices", 2)
    devices = ["cuda:1", "cpu", "cuda:0"]
    shape = (6, 1, B, 4)
    storage = tuple(
        [
            np.zeros(shape, np.float32) if name == "cpu" else upload(
                np.zeros(shape, np.float32), name
            )
            for name in devices
        ]
        for _ in "kv"
    )  # fmt: skip
    with make_cache(6, B=B, layers=3, device=devices, storage=storage) as cache:
        with cache.open() as seq:
            fill(cache, seq, range(1, 6))
            block = int(seq.block_table[0])
            for layer in range(3):
                want, _ = expected(cache.spec, layer, range(1, 5))
                got = host(storage[0][layer])[block, 0]
                np.testing.assert_array_equal(got, want[:, 0])
    for wrong in (
        (storage[0][::-1], storage[1]), (storage[0][:2], storage[1]), (storage[0], storage[1][1:]),
    ):  # fmt: skip
        with pytest.raises(pc.PagedCacheError):
            make_cache(6, B=B, layers=3, device=devices, storage=wrong)


# ---- streams of other libraries ----------------------------------------------------------------


def test_streams_of_other_libraries(cuda: Any) -> None:
    # SPEC F49: every kind of stream object is the same stream by its handle
    with streams_of(cuda, 1) as (stream,):

        class Torch:
            device_index, cuda_stream = 0, stream.handle

        class CuPy:
            ptr, device_id = stream.handle, 0

        class Protocol:
            def __cuda_stream__(self) -> tuple[int, int]:
                return 0, stream.handle

        with on_gpu(4, B=B, dim=4) as cache, cache.open(stream=stream) as seq:
            given = device_rows(cache, 0, [1])
            kinds = (stream, stream.handle, Torch(), CuPy(), Protocol())
            for kind in kinds:
                seq.append(0, *given, stream=kind)
            got, _ = seq.gather(0, stream=Protocol())
            want, _ = expected(cache.spec, 0, [1] * len(kinds))
            np.testing.assert_array_equal(host(got), want)
            assert cache._storage.streams.resolve(Torch()) is cache._storage.streams.resolve(CuPy())
