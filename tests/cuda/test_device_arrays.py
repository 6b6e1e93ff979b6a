"""Arrays in device memory: facts, slices, copies to the host, and what other libraries are told."""

from __future__ import annotations

import ctypes
import gc
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedcache._cuda.arrays import DeviceArray, dense_strides
from pagedcache._cuda.memory import DeviceMemory
from pagedcache._cuda.streams import Stream
from pagedcache.errors import (
    CudaCallError,
    FormatError,
    InvalidArgumentError,
    InvalidPositionError,
)

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Gpu:
    """Enough of a ``Device`` for what needs no driver."""

    name, ordinal = "cuda:0", 0


def array(shape: tuple[int, ...], dtype: Any = np.float32, **more: Any) -> DeviceArray:
    gpu: Any = Gpu()
    return DeviceArray(0x10000, shape, None, dtype, gpu, **more)


def on_device(cuda: Any, values: np.ndarray, **more: Any) -> DeviceArray:
    """Values in device memory of their own."""
    memory = DeviceMemory(cuda, values.nbytes, "a test")
    where = Stream(cuda, 0, None, 0)
    cuda.staging.write(memory.address, np.ascontiguousarray(values), where)
    where.synchronize()
    return DeviceArray(memory.address, values.shape, None, values.dtype, cuda, memory, **more)


# ---- facts --------------------------------------------------------------------------------------


def test_facts() -> None:  # SPEC F47
    x = array((4, 3, 5), np.float16)
    assert (x.shape, x.strides, x.dtype) == ((4, 3, 5), (30, 10, 2), np.float16)
    assert (x.ndim, x.size, x.itemsize, x.nbytes, len(x)) == (3, 60, 2, 120, 4)
    assert (x.device, x.readonly, x.stream, x.is_contiguous) == ("cuda:0", False, None, True)
    assert x.span() == (0x10000, 0x10000 + 120)
    assert repr(x) == "<DeviceArray [4, 3, 5] of float16 on cuda:0>"
    assert array((2,), BFLOAT16).dtype == BFLOAT16


def test_an_array_without_axes_or_values() -> None:  # SPEC F47
    scalar = array(())
    assert (scalar.size, scalar.nbytes, scalar.ndim, scalar.is_contiguous) == (1, 4, 0, True)
    with pytest.raises(TypeError, match="without axes"):
        len(scalar)
    empty = array((3, 0, 2))
    assert (empty.size, empty.nbytes, empty.is_contiguous) == (0, 0, True)
    assert empty.span() == (0x10000, 0x10000)


keys = st.one_of(
    st.integers(-5, 5),
    st.slices(6),
    st.just(Ellipsis),
    st.builds(slice, st.integers(-9, 9), st.integers(-9, 9), st.sampled_from([-3, -1, 1, 2])),
)


@given(
    shape=st.lists(st.integers(0, 6), min_size=1, max_size=4).map(tuple),
    key=st.one_of(keys, st.lists(keys, max_size=5).map(tuple)),
)
def test_slices_are_numpys(shape: tuple[int, ...], key: Any) -> None:  # SPEC F30, F47
    x = array(shape)
    twin = np.ndarray(shape, np.float32, bytearray(max(x.nbytes, 1)))
    try:
        keys = key if isinstance(key, tuple) else (key,)
        # With an ellipsis NumPy gives an array without axes instead of a scalar of its own.
        wanted = twin[keys if ... in keys else (*keys, ...)]
    except IndexError:
        with pytest.raises((InvalidArgumentError, InvalidPositionError)):
            x[key]
        return
    found = x[key]
    assert found.shape == wanted.shape
    if wanted.size:
        assert found.strides == wanted.strides
        moved = wanted.__array_interface__["data"][0] - twin.__array_interface__["data"][0]
        assert found.address - x.address == moved


@pytest.mark.parametrize(
    ("key", "error"),
    [
        (4, InvalidPositionError),
        (-5, InvalidPositionError),
        ((0, 0, 0), InvalidArgumentError),
        ((..., ...), InvalidArgumentError),
        (True, InvalidArgumentError),
        (np.True_, InvalidArgumentError),
        (1.0, InvalidArgumentError),
        ("0", InvalidArgumentError),
        (None, InvalidArgumentError),
        ([0, 1], InvalidArgumentError),
        (slice(0, 2, 0), InvalidArgumentError),
        (slice("a"), InvalidArgumentError),
    ],
)
def test_what_is_no_index(key: Any, error: Any) -> None:  # SPEC 7
    with pytest.raises(error, match="index|position"):
        array((4, 3))[key]


def test_transposing() -> None:  # SPEC F30
    x = array((2, 3, 4))
    assert (x.transpose(1, 0, 2).shape, x.transpose(1, 0, 2).strides) == ((3, 2, 4), (16, 48, 4))
    assert x.transpose((2, -3, 1)).shape == (4, 2, 3)
    assert x.transpose().shape == (4, 3, 2)
    assert not x.transpose().is_contiguous
    for axes in ((0, 1), (0, 0, 1), (0, 1, 3, 2), ("a", 0, 1)):
        with pytest.raises(InvalidArgumentError, match="axes"):
            x.transpose(*axes)
    assert array(()).transpose().shape == ()


def test_other_dtypes_of_the_same_bytes() -> None:  # SPEC F47
    x = array((4, 6), BFLOAT16)[1:, ::2].view(np.uint16)
    assert (x.dtype, x.shape, x.strides, x.address) == (np.uint16, (3, 3), (12, 4), 0x1000C)
    with pytest.raises(FormatError, match="a dtype of 2 bytes, got float32"):
        x.view(np.float32)


def test_what_is_derived_keeps_owner_stream_and_readonly() -> None:  # SPEC F30
    owner = type("Owner", (), {})()
    x = array((4, 4), owner=owner, stream=0x77, readonly=True)
    for y in (x[1], x[1:, ::-1], x.transpose(), x.view(np.uint32), x.with_layout((16,), (4,))):
        assert (y.owner, y.stream, y.readonly) == (owner, 0x77, True)
    other = object()
    assert (x.with_owner(other).owner, x.with_owner(other).readonly) == (other, True)
    assert x.with_owner(other, readonly=False).readonly is False
    assert (x.owner, x.readonly) == (owner, True)
    assert x.with_layout((2, 2), (8, 4), 16).address == 0x10010
    alive = weakref.ref(owner)
    last = x[2, 1:]
    del owner, x, y
    gc.collect()
    assert alive() is not None
    del last
    gc.collect()
    assert alive() is None


def test_dense_strides() -> None:
    assert dense_strides((4, 3, 5), 2) == (30, 10, 2)
    assert dense_strides((), 4) == ()
    assert dense_strides((2, 0, 3), 4) == (12, 12, 4)


# ---- to the host --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16, np.uint8, np.uint64, np.bool])
def test_a_copy_on_the_host(cuda: Any, dtype: Any) -> None:  # SPEC F32, F47
    values = np.random.default_rng(1).integers(0, 100, (5, 7, 3)).astype(dtype)
    x = on_device(cuda, values)
    for found in (x.get(), np.asarray(x), np.array(x), np.asarray(x, dtype)):
        assert found.dtype == dtype
        assert found.tobytes() == values.tobytes()
    assert np.asarray(x, np.float64).tolist() == values.astype(np.float64).tolist()
    with pytest.raises(ValueError, match="as a copy only"):
        np.asarray(x, copy=False)
    x.get()[...] = 0  # it is the caller's own
    assert x.get().tobytes() == values.tobytes()


def test_slices_on_the_host(cuda: Any) -> None:  # SPEC F30, F32
    values = np.arange(8 * 6 * 10, dtype=np.float32).reshape(8, 6, 10)
    x = on_device(cuda, values)
    for key in (
        3,
        (..., 0),
        (slice(None, None, -1), slice(1, 4)),
        (slice(2, 7, 2), slice(None), slice(9, 0, -3)),
        (2, 3, 4),
        slice(5, 5),
    ):
        assert np.array_equal(x[key].get(), values[key])
    assert np.array_equal(x.transpose(2, 0, 1).get(), values.transpose(2, 0, 1))
    assert np.array_equal(x.transpose()[1:3, ::-2].get(), values.transpose()[1:3, ::-2])


def test_large_gaps_are_not_copied(cuda: Any, emulated: Any) -> None:  # SPEC F32
    """A few tokens of each of many blocks: the host needs no room for the whole slab."""
    values = np.arange(40 * 50_000, dtype=np.float32).reshape(40, 50_000)
    x = on_device(cuda, values)
    copies = emulated.get("calls:cuMemcpyAsync")
    assert np.array_equal(x[:, 100:200].get(), values[:, 100:200])
    assert emulated.get("calls:cuMemcpyAsync") == copies + 40


def test_after_its_own_stream(cuda: Any, emulated: Any) -> None:  # SPEC F49
    emulated.set("async", 1)
    with cuda.current():
        maker = cuda.pycuda.Stream(1)
    x = on_device(cuda, np.zeros(1000, np.uint8))
    cuda.call("pc_cuda_fill", x.address, 7, 1000, maker.handle)
    assert not x.get().any()  # the default stream does not wait for that one
    for stream in (maker, maker.handle, Stream(cuda, maker.handle, None, 1)):
        cuda.call("pc_cuda_fill", x.address, 8, 1000, maker.handle)
        x.stream = stream
        assert (x.get() == 8).all()
        assert (x[:10].get() == 8).all()
        cuda.call("pc_cuda_fill", x.address, 9, 1000, maker.handle)
        x.stream = None
        assert (x.get(stream) == 9).all()


def test_a_copy_that_fails(cuda: Any, emulated: Any) -> None:  # SPEC F46
    x = on_device(cuda, np.arange(10))
    emulated.fail("cuMemcpyAsync", 1, 1, 1)
    with pytest.raises(CudaCallError, match="pc_cuda_copy"):
        x.get()
    assert x.get().tolist() == list(range(10))


# ---- the CUDA array interface -------------------------------------------------------------------


def test_the_interface() -> None:  # SPEC F47
    x = array((4, 3))
    assert x.__cuda_array_interface__ == {
        "version": 3,
        "shape": (4, 3),
        "typestr": "<f4",
        "data": (0x10000, False),
        "strides": None,
        "stream": None,
    }
    part = array((4, 3), BFLOAT16, stream=0x50, readonly=True)[1:, 1:].__cuda_array_interface__
    assert (part["typestr"], part["strides"]) == ("<u2", (6, 2))
    assert (part["data"], part["stream"]) == ((0x10008, True), 0x50)
    assert array((0, 3)).__cuda_array_interface__["data"] == (0, False)
    assert array((2, 8), np.uint8).__cuda_array_interface__["typestr"] == "|u1"


def test_streams_in_the_interface() -> None:  # SPEC F49
    gpu: Any = Gpu()
    handles = {None: None, 0: 1, 1: 1, 0x99: 0x99}
    for stream, entry in handles.items():
        assert array((2,), stream=stream).__cuda_array_interface__["stream"] == entry
    default, own = Stream(gpu, 0, None, 0), Stream(gpu, 0x88, None, 1)
    assert array((2,), stream=default).__cuda_array_interface__["stream"] == 1
    assert array((2,), stream=own).__cuda_array_interface__["stream"] == 0x88


# ---- DLPack -------------------------------------------------------------------------------------


@pytest.fixture
def ffi() -> Any:
    return pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")


def test_dlpack_is_read(cuda: Any, ffi: Any) -> None:  # SPEC F47
    x = on_device(cuda, np.arange(24, dtype=np.float32).reshape(4, 6))
    tensor = ffi.from_dlpack(x)
    assert tuple(tensor.shape) == (4, 6)
    assert tuple(tensor.strides) == (6, 1)
    assert tensor.data_ptr() == x.address
    assert str(tensor.dtype) == "float32"
    assert (tensor.device.dlpack_device_type(), tensor.device.index) == (2, 0)
    part = ffi.from_dlpack(x[::-1, 1::2])
    assert (tuple(part.shape), tuple(part.strides)) == ((4, 3), (-6, 2))
    assert part.data_ptr() == x.address + 3 * 24 + 4
    assert tuple(ffi.from_dlpack(x[2:2]).shape) == (0, 6)
    assert tuple(ffi.from_dlpack(x[1, 2]).shape) == ()


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(np.float16, "float16"), (BFLOAT16, "bfloat16"), (np.uint8, "uint8"), (np.uint64, "uint64")],
)
def test_dtypes_by_dlpack(cuda: Any, ffi: Any, dtype: Any, name: str) -> None:  # SPEC F47
    x = on_device(cuda, np.arange(6).astype(dtype))
    assert str(ffi.from_dlpack(x).dtype) == name


def test_a_reader_keeps_the_memory_alive(cuda: Any, ffi: Any, emulated: Any) -> None:  # SPEC F47
    x = on_device(cuda, np.arange(6, dtype=np.float32))
    assert emulated.get("live_allocations") == 1
    tensor = ffi.from_dlpack(x[2:])
    del x
    gc.collect()
    assert emulated.get("live_allocations") == 1
    del tensor
    gc.collect()
    assert emulated.get("live_allocations") == 0


def test_a_capsule_that_nobody_reads(cuda: Any, ffi: Any, emulated: Any) -> None:  # SPEC F47
    x = on_device(cuda, np.arange(6, dtype=np.float32))
    for version in (None, (0, 8), (1, 0), (1, 3)):
        capsule = x.__dlpack__(max_version=version)
        name = "dltensor_versioned" if version and version >= (1, 0) else "dltensor"
        assert f'"{name}"' in repr(capsule)
        del capsule
    del x
    gc.collect()
    assert emulated.get("live_allocations") == 0


def test_readonly_arrays_only_where_the_reader_knows(cuda: Any, ffi: Any) -> None:  # SPEC F30
    x = on_device(cuda, np.arange(6, dtype=np.float32), readonly=True)
    for version in (None, (0, 8)):
        with pytest.raises(BufferError, match="read-only"):
            x.__dlpack__(max_version=version)
    assert x.__dlpack__(max_version=(1, 0)) is not None
    with pytest.raises(BufferError, match="read-only"):
        ffi.from_dlpack(x)


def test_what_dlpack_refuses(cuda: Any, ffi: Any) -> None:  # SPEC 7
    x = on_device(cuda, np.arange(6, dtype=np.float32))
    assert x.__dlpack_device__() == (2, 0)
    assert x.__dlpack__(dl_device=(2, 0), copy=False) is not None
    with pytest.raises(BufferError, match="not on"):
        x.__dlpack__(dl_device=(1, 0))
    with pytest.raises(BufferError, match="without a copy"):
        x.__dlpack__(copy=True)
    with pytest.raises(BufferError, match="in elements"):
        x.with_layout((2,), (6,)).__dlpack__()
    for stream in (0, -2, True, "1"):
        with pytest.raises(InvalidArgumentError, match="stream"):
            x.__dlpack__(stream=stream)


def test_a_reader_waits_for_the_maker(cuda: Any, ffi: Any, emulated: Any) -> None:  # SPEC F49
    emulated.set("async", 1)
    with cuda.current():
        maker, reader = cuda.pycuda.Stream(1), cuda.pycuda.Stream(1)
    for number, told in ((reader.handle, reader), (1, None), (None, None)):
        x = on_device(cuda, np.zeros(100, np.uint8), stream=maker)
        cuda.call("pc_cuda_fill", x.address, 5, 100, maker.handle)
        x.__dlpack__(stream=number)
        x.stream = told  # what the reader queues there
        assert (x.get() == 5).all()
    waits = emulated.get("stream_waits")
    x = on_device(cuda, np.zeros(100, np.uint8), stream=maker)
    x.__dlpack__(stream=maker.handle)  # the same stream
    x.__dlpack__(stream=-1)  # no order wanted
    x.stream = None
    x.__dlpack__(stream=1)
    x.__dlpack__(stream=None)
    assert emulated.get("stream_waits") == waits
    assert emulated.get("live_events") <= 5  # the staging's own


def test_no_wait_under_capture(cuda: Any, ffi: Any, emulated: Any) -> None:  # SPEC F49
    """The same stream on both sides: nothing is recorded and the capture stays whole."""
    with cuda.current():
        stream = cuda.pycuda.Stream()
        x = on_device(cuda, np.arange(6, dtype=np.float32), stream=stream)
        handle, graph = ctypes.c_void_p(stream.handle), ctypes.c_void_p()
        assert emulated.library.cuStreamBeginCapture_v2(handle, 0) == 0
        assert x.__dlpack__(stream=stream.handle) is not None
        assert x.__cuda_array_interface__["stream"] == stream.handle
        assert emulated.library.cuStreamEndCapture(handle, ctypes.byref(graph)) == 0
        assert emulated.library.cuGraphDestroy(graph) == 0
    assert emulated.get("capture_violations") == 0
