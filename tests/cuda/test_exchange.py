"""Arrays of other libraries on a device: found, described, and refused where they are elsewhere."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from processkit import assert_clean, run_program

from pagedcache._cuda import exchange
from pagedcache._cuda.arrays import DeviceArray
from pagedcache._cuda.driver import get_device
from pagedcache._cuda.exchange import as_device_array, check_pointer
from pagedcache._cuda.memory import DeviceMemory, PinnedMemory
from pagedcache._cuda.order import Order
from pagedcache._cuda.streams import Stream, Streams
from pagedcache.errors import (
    CudaUnavailableError,
    DeviceError,
    FormatError,
    InvalidArgumentError,
)


@pytest.fixture
def memory(cuda: Any) -> Any:
    made = DeviceMemory(cuda, 4096, "a test").zeroed()
    yield made
    made.free()


class Interface:
    """An object with a ``__cuda_array_interface__`` of these entries, like CuPy's arrays."""

    def __init__(self, address: int, **entries: Any) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (4, 3),
            "typestr": "<f4",
            "data": (address, False),
        } | entries


# ---- what does not lie on a device --------------------------------------------------------------


@pytest.mark.parametrize(
    "x", [np.zeros(3), [1.0, 2.0], 3, None, "text", memoryview(b"abc"), SimpleNamespace()]
)
def test_not_on_a_device(x: Any) -> None:  # SPEC F47
    """Nothing of CUDA is looked for: this works on a machine without it."""
    assert as_device_array(x, "k") is None


def test_host_arrays_by_dlpack() -> None:  # SPEC F47
    host = np.zeros(3)
    for kind in (1, 3):  # kDLCPU, kDLCUDAHost: pinned, but the host's
        x = SimpleNamespace(__dlpack__=host.__dlpack__, __dlpack_device__=lambda k=kind: (k, 0))
        assert as_device_array(x, "k") is None


def test_our_own_are_passed_on(cuda: Any, memory: Any) -> None:  # SPEC F47
    x = DeviceArray(memory.address, (4,), None, np.float32, cuda, memory)
    assert as_device_array(x, "k") is x


# ---- __cuda_array_interface__ -------------------------------------------------------------------


def test_an_interface(cuda: Any, memory: Any) -> None:  # SPEC F47
    x = Interface(memory.address, stream=None)
    found = as_device_array(x, "k")
    assert found is not None
    assert (found.address, found.shape, found.strides) == (memory.address, (4, 3), (12, 4))
    assert (found.dtype, found.device, found.readonly) == (np.float32, "cuda:0", False)
    assert (found.owner, found.stream, found.gpu) == (x, None, cuda)
    x = Interface(memory.address + 64, version=2, strides=(-12, 4), data=(memory.address, True))
    found = as_device_array(x, "k")
    assert found is not None
    assert (found.strides, found.readonly, found.stream) == ((-12, 4), True, None)


def test_pycudas_arrays(cuda: Any) -> None:  # SPEC F47
    with cuda.current():
        from pycuda import gpuarray

        theirs = gpuarray.to_gpu(np.arange(12, dtype=np.float16).reshape(3, 4))
        found = as_device_array(theirs, "k")
        assert found is not None
        assert (found.shape, found.dtype, found.strides) == ((3, 4), np.float16, (8, 2))
        assert found.get().tolist() == theirs.get().tolist()
        assert found[:, 1].get().tolist() == [1, 5, 9]
        check_pointer(found, cuda)
        theirs.gpudata.free()


@pytest.mark.parametrize(("given", "kept"), [(None, None), (1, 1), (0x7000, 0x7000)])
def test_the_producers_stream(cuda: Any, memory: Any, given: Any, kept: Any) -> None:  # SPEC F49
    found = as_device_array(Interface(memory.address, stream=given), "k")
    assert found is not None and found.stream == kept
    old = as_device_array(Interface(memory.address, stream=given, version=2), "k")
    assert old is not None and old.stream is None  # version 2 has no such entry


def test_ours_comes_after_theirs(cuda: Any, memory: Any, emulated: Any) -> None:  # SPEC F49
    emulated.set("async", 1)
    with cuda.current():
        theirs, ours = cuda.pycuda.Stream(1), cuda.pycuda.Stream(1)
    streams, order = Streams(cuda), Order(cuda, 1)
    cuda.call("pc_cuda_fill", memory.address, 1, 48, theirs.handle)
    found = as_device_array(Interface(memory.address, stream=theirs.handle, typestr="<u4"), "k")
    assert found is not None
    order.follow(streams.resolve(ours), streams.resolve(found.stream))
    assert (found.get(ours) == 0x01010101).all()


def test_the_per_thread_stream_is_followed_at_once(
    cuda: Any, memory: Any, emulated: Any
) -> None:  # SPEC F49
    emulated.set("async", 1)
    cuda.call("pc_cuda_fill", memory.address, 1, 48, 2)
    waits = emulated.get("stream_waits")
    found = as_device_array(Interface(memory.address, stream=2, typestr="<u4"), "k")
    assert found is not None and found.stream == 1
    assert emulated.get("stream_waits") == waits + 1
    assert emulated.get("live_events") == 0
    assert (found.get() == 0x01010101).all()


@pytest.mark.parametrize("stream", [0, -1, True, "1", 2**64, 1.0])
def test_what_is_no_stream(cuda: Any, memory: Any, stream: Any) -> None:  # SPEC 7
    with pytest.raises(InvalidArgumentError, match="k: __cuda_array_interface__ has no stream"):
        as_device_array(Interface(memory.address, stream=stream), "k")


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"version": 1}, "version 2 or 3, got 1"),
        ({"version": "x"}, "cannot be read"),
        ({"shape": None}, "cannot be read"),
        ({"shape": (-1, 3)}, "a shape and as many strides"),
        ({"strides": (4,)}, "a shape and as many strides"),
        ({"strides": "ab"}, "cannot be read"),
        ({"typestr": "nonsense"}, "cannot be read"),
        ({"data": 7}, "cannot be read"),
        ({"data": ("x", False)}, "cannot be read"),
        ({"mask": np.zeros(3)}, "an array without mask"),
    ],
)
def test_unusable_interfaces(cuda: Any, memory: Any, entries: Any, words: str) -> None:  # SPEC 7
    with pytest.raises(FormatError, match=words) as caught:
        as_device_array(Interface(memory.address, **entries), "v")
    assert caught.value.what == "v"


def test_an_interface_that_raises(cuda: Any) -> None:  # SPEC 7
    class Broken:
        @property
        def __cuda_array_interface__(self) -> Any:
            raise RuntimeError("the memory was donated")

    with pytest.raises(FormatError, match="the memory was donated"):
        as_device_array(Broken(), "k")
    missing = SimpleNamespace(__cuda_array_interface__={"version": 3})
    with pytest.raises(FormatError, match="KeyError"):
        as_device_array(missing, "k")


def test_an_empty_interface_has_no_address(cuda: Any, emulated: Any) -> None:  # SPEC F47
    emulated.set("devices", 2)
    empty = Interface(0, shape=(0, 3))
    found = as_device_array(empty, "k")
    assert found is not None and (found.shape, found.device) == ((0, 3), "cuda:0")
    other: Any = SimpleNamespace(name="cuda:1", ordinal=1)
    found = as_device_array(empty, "k", other)
    assert found is not None and found.device == "cuda:1"
    check_pointer(found, other)


@pytest.mark.parametrize("what", ["host", "pinned", "freed"])
def test_an_address_that_is_not_the_devices(cuda: Any, what: str) -> None:  # CASE C49, SPEC 7
    host = np.zeros((4, 3), np.float32)
    pinned = PinnedMemory(cuda, 100, "a test")
    freed = DeviceMemory(cuda, 100, "a test")
    freed.free()
    address, words = {
        "host": (host.ctypes.data, "host memory or a freed buffer at 0x"),
        "pinned": (pinned.address, "pinned host memory at 0x"),
        "freed": (freed.address, "host memory or a freed buffer at 0x"),
    }[what]
    with pytest.raises(DeviceError, match="memory of a CUDA device") as caught:
        as_device_array(Interface(address), "k")
    assert words in str(caught.value)
    array = DeviceArray(address, (4, 3), None, np.float32, cuda)
    with pytest.raises(DeviceError, match="v: expected memory of cuda:0, got") as caught:
        check_pointer(array, cuda, "v")
    assert words in str(caught.value)
    pinned.free()


@pytest.mark.usefixtures("cuda", "emulated")
def test_memory_of_another_device() -> None:  # CASE C49
    """In a process of its own: a second device stays with the process that used it."""
    done = run_program(
        """
        from types import SimpleNamespace
        from pagedcache._cuda.driver import get_device
        from pagedcache._cuda.exchange import as_device_array, check_pointer
        from pagedcache._cuda.memory import DeviceMemory
        first, second = get_device(0), get_device(1)
        memory = DeviceMemory(second, 64, "x")
        entry = {"version": 2, "shape": (4,), "typestr": "<f4", "data": (memory.address, False)}
        found = as_device_array(SimpleNamespace(__cuda_array_interface__=entry), "k")
        print(found.device, found.gpu is second)
        check_pointer(found, second)
        try:
            check_pointer(found, first)
        except Exception as error:
            print(type(error).__name__, error)
        found.gpu = first  # whoever says so
        try:
            check_pointer(found, first, "k")
        except Exception as error:
            print(str(error).partition(" at ")[0])
        """,
        PC_STUB_DEVICES="2",
    )
    assert_clean(
        done,
        "cuda:1 True\n"
        "DeviceError array: expected memory of cuda:0, got memory of cuda:1\n"
        "k: expected memory of cuda:0, got memory of cuda:1",
    )


def test_the_last_byte_is_looked_at_too(
    cuda: Any, memory: Any, emulated: Any
) -> None:  # SPEC 7
    inside = DeviceArray(memory.address, (1024,), None, np.float32, cuda)
    check_pointer(inside, cuda)
    check_pointer(inside[::-1], cuda)
    check_pointer(inside.with_layout((0, 7), (4, 4), 10**6), cuda)
    for outside in (
        DeviceArray(memory.address, (1 << 20,), None, np.float32, cuda),
        inside.with_layout((2,), (1 << 30,)),
        inside.with_layout((2,), (-(1 << 30),)),
    ):
        with pytest.raises(DeviceError, match="host memory or a freed buffer"):
            check_pointer(outside, cuda)


def test_managed_memory_is_the_devices(cuda: Any) -> None:  # SPEC F47
    with cuda.current():
        theirs = cuda.pycuda.managed_zeros(12, np.float32, mem_flags=1)
        address = theirs.ctypes.data
        assert exchange.locate(cuda, address)[0] == 3
        found = as_device_array(Interface(address), "k")
        assert found is not None and found.gpu is cuda
        check_pointer(found, cuda)
        theirs.base.free()


# ---- torch --------------------------------------------------------------------------------------


class Tensor:
    """What is read of a torch tensor; there is no torch with CUDA on a machine without a GPU."""

    def __init__(self, address: int, name: str, device: str = "cuda", index: Any = 0) -> None:
        self.device = SimpleNamespace(type=device, index=index)
        self.dtype, self.requires_grad, self.address = f"torch.{name}", True, address
        self.shape, self.layout, self.negated = (4, 3), "strided", False

    def is_neg(self) -> bool:
        return self.negated

    def data_ptr(self) -> int:
        if self.address < 0:
            raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")
        return self.address

    def stride(self) -> tuple[int, int]:
        return 3, 1

    @property
    def __cuda_array_interface__(self) -> Any:
        raise RuntimeError("Can't get __cuda_array_interface__ on Variable that requires grad")


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = SimpleNamespace(
        Tensor=Tensor,
        strided="strided",
        cuda=SimpleNamespace(current_stream=lambda device: SimpleNamespace(cuda_stream=0x700)),
    )
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float32", np.float32),
        ("float16", np.float16),
        ("bfloat16", ml_dtypes.bfloat16),
        ("int64", np.int64),
        ("bool", np.bool),
    ],
)
def test_tensors(cuda: Any, memory: Any, torch: Any, name: str, dtype: Any) -> None:  # SPEC F47
    size = np.dtype(dtype).itemsize
    tensor = Tensor(memory.address, name)
    found = as_device_array(tensor, "k")
    assert found is not None
    assert (found.dtype, found.shape, found.strides) == (dtype, (4, 3), (3 * size, size))
    assert (found.address, found.owner, found.device) == (memory.address, tensor, "cuda:0")
    assert found.stream == 0x700  # torch's current one
    torch.cuda.current_stream = lambda device: SimpleNamespace(cuda_stream=0)
    found = as_device_array(tensor, "k")
    assert found is not None and found.stream == 1


def test_tensors_elsewhere(cuda: Any, torch: Any) -> None:  # CASE C49
    assert as_device_array(Tensor(0, "float32", "cpu", None), "k") is None
    with pytest.raises(DeviceError, match="a tensor on a CUDA device or the CPU"):
        as_device_array(Tensor(0, "float32", "xpu"), "k")
    with pytest.raises(CudaUnavailableError, match="there is no cuda:9"):
        as_device_array(Tensor(0, "float32", index=9), "k")


def test_tensors_that_numpy_cannot_name(cuda: Any, torch: Any) -> None:  # SPEC 7
    with pytest.raises(FormatError, match="qint32"):
        as_device_array(Tensor(0, "qint32"), "k")
    sparse = Tensor(0, "float32")
    sparse.layout = "sparse_coo"
    with pytest.raises(FormatError, match="a strided tensor, got one of layout sparse_coo"):
        as_device_array(sparse, "k")


def test_tensors_whose_memory_is_not_what_they_show(cuda: Any, torch: Any) -> None:  # SPEC 7
    negated = Tensor(0x1000, "float32")
    negated.negated = True
    with pytest.raises(FormatError, match=r"k: .*x\.resolve_neg\(\)\), got a lazily negated one"):
        as_device_array(negated, "k")
    with pytest.raises(FormatError, match="a tensor with memory of its own, got none .*storage"):
        as_device_array(Tensor(-1, "float32"), "k")


# ---- DLPack -------------------------------------------------------------------------------------


class Producer:
    """DLPack alone, and a note of what it was asked for."""

    def __init__(self, array: DeviceArray, device: Any = None) -> None:
        self.array, self.device, self.asked = array, device, []  # type: ignore[var-annotated]

    def __dlpack_device__(self) -> Any:
        return self.device or self.array.__dlpack_device__()

    def __dlpack__(self, **asked: Any) -> Any:
        self.asked.append(asked)
        return self.array.__dlpack__(**asked)


def test_dlpack_alone(cuda: Any, memory: Any) -> None:  # SPEC F47
    x = DeviceArray(memory.address, (4, 6), None, np.float16, cuda, memory)[::-1, ::2]
    producer = Producer(x)
    found = as_device_array(producer, "k")
    assert found is not None
    assert (found.address, found.shape, found.strides) == (x.address, (4, 3), (-12, 4))
    assert (found.dtype, found.device, found.readonly) == (np.float16, "cuda:0", False)
    assert found.stream == 1  # the producer was told to have the default stream wait
    assert producer.asked[0]["stream"] == 1
    readonly = as_device_array(Producer(x.with_owner(memory, readonly=True)), "k")
    assert readonly is not None and readonly.readonly
    assert cuda.driver.current() == 0


def test_dlpack_keeps_its_producer_alive(cuda: Any, emulated: Any) -> None:  # SPEC F47
    own = DeviceMemory(cuda, 64, "a test")
    found = as_device_array(Producer(DeviceArray(own.address, (4,), None, "f4", cuda, own)), "k")
    assert found is not None
    del own
    gc.collect()
    assert emulated.get("live_allocations") == 1
    part = found[1:]
    del found
    gc.collect()
    assert emulated.get("live_allocations") == 1
    del part
    gc.collect()
    assert emulated.get("live_allocations") == 0


def test_dlpack_of_another_library(cuda: Any, memory: Any) -> None:  # SPEC F47
    ffi = pytest.importorskip("tvm_ffi")
    x = DeviceArray(memory.address, (4, 6), None, np.float32, cuda, memory)
    theirs = ffi.from_dlpack(x)
    found = as_device_array(theirs, "k")
    assert found is not None
    assert (found.address, found.shape, found.dtype) == (x.address, (4, 6), np.float32)


def test_dlpack_waits_for_the_producer(
    cuda: Any, memory: Any, emulated: Any
) -> None:  # SPEC F49
    emulated.set("async", 1)
    with cuda.current():
        theirs, ours = cuda.pycuda.Stream(1), cuda.pycuda.Stream(1)
    cuda.call("pc_cuda_fill", memory.address, 3, 48, theirs.handle)
    x = DeviceArray(memory.address, (48,), None, np.uint8, cuda, memory, stream=theirs)
    found = as_device_array(Producer(x), "k")
    assert found is not None
    streams, order = Streams(cuda), Order(cuda, 1)
    order.follow(streams.resolve(ours), streams.resolve(found.stream))
    assert (found.get(ours) == 3).all()


def test_a_producer_that_fails(cuda: Any, memory: Any) -> None:  # SPEC 7
    x = DeviceArray(memory.address, (4,), None, np.float32, cuda, memory)
    producer = Producer(x.with_layout((2,), (6,)))  # it cannot say this in DLPack
    with pytest.raises(FormatError, match="Producer, of which none is to be had"):
        as_device_array(producer, "k")
    silent = SimpleNamespace(__dlpack__=None, __dlpack_device__=lambda: "nonsense")
    with pytest.raises(FormatError, match="that does not describe itself"):
        as_device_array(silent, "k")
    with pytest.raises(CudaUnavailableError, match="there is no cuda:9"):
        as_device_array(Producer(x, (2, 9)), "k")
    assert cuda.driver.current() == 0


def test_dlpack_of_another_device_than_announced(cuda: Any, memory: Any) -> None:  # SPEC 7
    class Liar(Producer):
        def __dlpack__(self, **asked: Any) -> Any:
            return np.zeros(4).__dlpack__()

    x = DeviceArray(memory.address, (4,), None, np.float32, cuda, memory)
    with pytest.raises(FormatError, match=r"capsule of cuda:0, as announced, got .*\(1, 0\)"):
        as_device_array(Liar(x), "k")


def test_dlpack_from_before_versions(cuda: Any, memory: Any) -> None:  # SPEC F47
    class Old(Producer):
        def __dlpack__(self, stream: Any = None) -> Any:
            return self.array.__dlpack__(stream=stream)

    x = DeviceArray(memory.address, (4, 3), None, ml_dtypes.bfloat16, cuda, memory)
    found = as_device_array(Old(x), "k")
    assert found is not None and not found.readonly
    assert (found.address, found.shape, found.dtype) == (x.address, (4, 3), ml_dtypes.bfloat16)


def test_a_stream_object_of_ours_is_followed(cuda: Any, memory: Any) -> None:  # SPEC F49
    """An array may carry the Stream itself, as views of a slab do."""
    with cuda.current():
        made = cuda.pycuda.Stream()
    stream = Stream(cuda, made.handle, made, 1)
    x = DeviceArray(memory.address, (4,), None, np.float32, cuda, memory, stream=stream)
    assert Streams(cuda).resolve(x.stream).handle == made.handle
    assert get_device(0) is cuda
