"""One device per GPU: what is missing, whose context is current, what a failed call becomes."""

from __future__ import annotations

import ctypes
import pickle
import sys
import threading
from typing import Any

import numpy as np
import pytest
from processkit import assert_clean, run_program

from pagedcache._cuda import driver, libcuda, library
from pagedcache._cuda.driver import get_device, problem
from pagedcache._cuda.failures import STICKY
from pagedcache._cuda.memory import DeviceMemory
from pagedcache.errors import (
    CudaCallError,
    CudaUnavailableError,
    DeviceError,
    InvalidArgumentError,
    StorageMemoryError,
)

EMULATION_ONLY = pytest.mark.usefixtures("cuda", "emulated")


def current_context(device: Any) -> int:
    return device.driver.current()


# ---- what is missing --------------------------------------------------------------------------


def test_nothing_is_missing(cuda: Any) -> None:  # SPEC F42
    assert problem() is None
    assert problem(0) is None


def test_nothing_runs_at_import() -> None:  # SPEC F42, DESIGN 1
    done = run_program(
        """
        import importlib, pkgutil, sys
        import pagedcache
        # integrations import the framework that they are for
        left_out = ("__main__", "_peer", "libpagedcache_cuda", ".integrations")
        def import_all(path, prefix):
            for found in pkgutil.iter_modules(path, prefix):
                if not found.name.endswith(left_out):
                    module = importlib.import_module(found.name)
                    import_all(getattr(module, "__path__", []), found.name + ".")
        import_all(pagedcache.__path__, "pagedcache.")
        print(sorted({name.partition(".")[0] for name in sys.modules} & {"pycuda", "cuda"}))
        print("libcuda" in open("/proc/self/maps").read())
        """
    )
    assert done.stdout.split() == ["[]", "False"], done.stderr


def test_without_pycuda(monkeypatch: pytest.MonkeyPatch, cuda: Any) -> None:  # CASE C48
    monkeypatch.setitem(sys.modules, "pycuda", None)
    monkeypatch.setitem(sys.modules, "pycuda.driver", None)
    reason = problem()
    assert reason is not None
    assert reason.startswith("PyCUDA is not installed: pip install 'pagedcache[cuda]'")
    assert "driver" not in reason.partition(":")[0]


def test_a_pycuda_that_does_not_load(
    monkeypatch: pytest.MonkeyPatch, cuda: Any, tmp_path: Any
) -> None:  # CASE C48
    package = tmp_path / "pycuda"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "driver.py").write_text("import no_such_part", encoding="utf-8")
    for name in [name for name in sys.modules if name.partition(".")[0] == "pycuda"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    reason = problem()
    assert reason is not None
    assert reason.startswith("PyCUDA cannot be loaded (No module named 'no_such_part')")
    assert "pip install 'pagedcache[cuda]'" in reason


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch, cuda: Any) -> None:  # CASE C48
    monkeypatch.setattr(libcuda, "FILE_NAME", "libnothing.so.1")
    libcuda.open_driver.cache_clear()
    try:
        reason = problem()
    finally:
        monkeypatch.undo()
        libcuda.open_driver.cache_clear()
    assert reason is not None
    assert reason.startswith("there is no NVIDIA driver (libnothing.so.1: cannot open shared")
    assert "install one" in reason
    assert reason.count("NVIDIA driver") == 1  # said once, although two probes need it


@EMULATION_ONLY
def test_without_a_driver_pycuda_is_not_blamed() -> None:  # CASE C48
    """PyCUDA links to the driver, so that its import fails too where there is none."""
    done = run_program(
        "from pagedcache._cuda.driver import problem; print(problem())",
        without=("LD_LIBRARY_PATH",),
    )
    if done.stdout.startswith("None"):
        pytest.skip("this machine has a driver of its own")
    assert done.stdout.startswith("there is no NVIDIA driver (libcuda.so.1:"), done
    assert "PyCUDA" not in done.stdout


@EMULATION_ONLY
def test_without_a_gpu() -> None:  # CASE C48
    done = run_program(
        """
        from pagedcache._cuda.driver import get_device, problem
        print(problem())
        try:
            get_device(0)
        except Exception as error:
            print(type(error).__name__, error.reason == problem())
        """,
        PC_STUB_DEVICES="0",
    )
    reason, error = done.stdout.splitlines()
    assert reason.startswith("there is no GPU (the driver finds none)")
    assert "nvidia-smi" in reason
    assert error == "CudaUnavailableError True"


def test_there_are_fewer_gpus(emulated: Any, cuda: Any) -> None:  # CASE C48
    assert problem(1) == (
        "there is no cuda:1: the driver finds 1 GPU (cuda:0); see nvidia-smi and "
        "CUDA_VISIBLE_DEVICES"
    )
    emulated.set("devices", 3)
    assert problem(2) is None
    reason = problem(7)
    assert reason is not None and "finds 3 GPUs (cuda:0 to cuda:2)" in reason
    with pytest.raises(CudaUnavailableError, match="there is no cuda:7") as caught:
        get_device(7)
    assert caught.value.reason == reason


def test_a_driver_that_does_not_start(emulated: Any, cuda: Any) -> None:  # CASE C48
    emulated.fail("cuInit", 1, 999, 0)
    reason = problem()
    assert reason is not None
    assert reason.startswith("the NVIDIA driver does not start (CUDA_ERROR_UNKNOWN: unknown error)")


def test_a_driver_older_than_the_kernels(
    monkeypatch: pytest.MonkeyPatch, cuda: Any
) -> None:  # CASE C48
    """The driver starts, but it does not know the CUDA version that nvcc built the library for."""
    monkeypatch.setattr(library.Library, "device_count", lambda self: (35, 0))
    reason = problem()
    assert reason is not None
    assert reason.startswith("the NVIDIA driver is too old for the compiled kernels")
    assert "newer" in reason and "PAGEDCACHE_CUDA=on" in reason
    monkeypatch.undo()
    assert problem() is None


def test_all_that_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, cuda: Any) -> None:
    monkeypatch.setitem(sys.modules, "pycuda", None)  # CASE C48
    monkeypatch.setenv(library.PATH_VARIABLE, "/nowhere/lib.so")
    reason = problem()
    assert reason is not None
    first, _, second = reason.partition("; ")
    assert first.startswith("PyCUDA is not installed")
    assert second.startswith("the kernel library /nowhere/lib.so")


@pytest.mark.parametrize("bad", [-1, True, "0", 1.0, None, 2**70])
def test_what_is_no_ordinal(bad: Any) -> None:  # SPEC 7
    with pytest.raises(InvalidArgumentError, match="ordinal of the CUDA device"):
        get_device(bad)


# ---- contexts -----------------------------------------------------------------------------------


def test_one_device_for_all(cuda: Any) -> None:  # SPEC F42
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(get_device(0))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [cuda] * 4
    assert get_device(np.int64(0)) is cuda
    assert (cuda.name, cuda.ordinal, repr(cuda)) == ("cuda:0", 0, "<Device cuda:0>")


def test_nothing_stays_pushed(cuda: Any) -> None:  # SPEC F42
    before = current_context(cuda)
    cuda.call("pc_cuda_stream_synchronize", None)
    cuda.synchronize()
    cuda.memory_info()
    DeviceMemory(cuda, 100, "a test").free()
    assert cuda.pycuda.Context.get_current() is None
    assert current_context(cuda) == before


def test_the_primary_context_is_used(cuda: Any) -> None:  # SPEC F42
    shared = cuda.pycuda.Device(0).retain_primary_context()
    with cuda.current():
        assert current_context(cuda) == shared.handle
        with cuda.current():
            cuda.call("pc_cuda_stream_synchronize", None)
            assert current_context(cuda) == shared.handle
        assert current_context(cuda) == shared.handle


def test_the_callers_context_comes_back(cuda: Any) -> None:  # SPEC F42
    """PyCUDA's own, not the primary one, on its stack; errors in between included."""
    own = cuda.pycuda.Device(0).make_context()
    try:
        cuda.call("pc_cuda_stream_synchronize", None)
        DeviceMemory(cuda, 100, "a test").free()
        with pytest.raises(ZeroDivisionError), cuda.current():
            1 // 0  # noqa: B018
        assert current_context(cuda) == own.handle
        assert cuda.pycuda.Context.get_current() == own
    finally:
        own.pop()
        own.detach()


def test_the_callers_context_comes_back_when_ours_cannot_be_pushed(
    emulated: Any, cuda: Any
) -> None:  # SPEC F42, F46
    """PyCUDA takes theirs off the driver's stack before it pushes ours."""
    own = cuda.pycuda.Device(0).make_context()
    try:
        emulated.fail("cuCtxPushCurrent", 1, 999, 1)
        with pytest.raises(CudaCallError, match="cuCtxPushCurrent"), cuda.current():
            pass
        assert current_context(cuda) == own.handle
        assert cuda.pycuda.Context.get_current() == own
    finally:
        own.pop()
        own.detach()


def test_a_context_that_pycuda_does_not_know_comes_back(emulated: Any, cuda: Any) -> None:
    """As torch does it: another device is made current behind PyCUDA's back."""
    emulated.set("devices", 2)  # SPEC F42
    theirs = cuda.pycuda.Device(1).retain_primary_context()
    mine = cuda.pycuda.Device(0).retain_primary_context()
    mine.push()
    try:
        cuda.driver.set_current(theirs.handle)
        cuda.call("pc_cuda_stream_synchronize", None)
        assert current_context(cuda) == theirs.handle
        cuda.synchronize()
        DeviceMemory(cuda, 100, "a test").free()
        assert current_context(cuda) == theirs.handle
    finally:
        mine.pop()


def test_beside_autoprimaryctx_and_cuda_core(cuda: Any, emulated: Any) -> None:  # SPEC F42
    pytest.importorskip("cuda.core")
    for first in (
        "import pycuda.autoprimaryctx",
        "from cuda.core import Device; Device(0).set_current()",
        "import pycuda.autoinit",
    ):
        done = run_program(
            f"""
            {first}
            import numpy as np
            from pagedcache._cuda.driver import get_device
            from pagedcache._cuda.memory import DeviceMemory
            device = get_device(0)
            before = device.driver.current()
            memory = DeviceMemory(device, 64, "a test").zeroed()
            device.synchronize()
            print(before != 0, device.driver.current() == before)
            """
        )
        assert_clean(done, "True True")


def test_threads_push_and_pop_in_balance(cuda: Any) -> None:  # SPEC F34, F42
    left: list[int] = []

    def work() -> None:
        for turn in range(25):
            memory = DeviceMemory(cuda, 1000 + turn, "a test")
            cuda.call("pc_cuda_fill", memory.address, 1, memory.nbytes, None)
            with pytest.raises(CudaCallError):
                cuda.call("pc_cuda_event_record", None, None)
            memory.free()
        left.append(current_context(cuda))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert left == [0] * 4


@pytest.mark.parametrize("call", ["cuCtxPushCurrent", "cuCtxPopCurrent", "cuCtxSetCurrent"])
def test_a_context_call_that_fails_once(emulated: Any, cuda: Any, call: str) -> None:  # SPEC F46
    def work() -> None:
        memory = DeviceMemory(cuda, 100, "a test")
        cuda.call("pc_cuda_fill", memory.address, 1, memory.nbytes, None)
        memory.free()

    for nth in (1, 2, 3, 4):
        emulated.fail(call, nth, 999, 1)
        try:
            work()
        except CudaCallError as error:
            assert error.call in ("cuCtxPushCurrent", "pc_cuda_fill")
            assert error.code == 999
        emulated.fail(call, 0)
        assert current_context(cuda) == 0
        assert cuda.pycuda.Context.get_current() is None
        work()
    assert cuda.broken is None


@EMULATION_ONLY
def test_a_context_that_cannot_be_popped_does_not_abort() -> None:  # SPEC F46
    """PyCUDA aborts a process whose thread ends with a context on its stack."""
    done = run_program(
        """
        import ctypes
        from pagedcache._cuda.driver import get_device
        stub = ctypes.CDLL("libcuda.so.1")
        device = get_device(0)
        device.synchronize()
        stub.pc_stub_fail(b"cuCtxPopCurrent", 1, 999, 0)
        device.synchronize()
        print(device.broken.expected, "/", "cannot be popped" in str(device.broken))
        stub.pc_stub_fail(b"cuCtxPopCurrent", 0, 0, 0)
        print(device.driver.current())
        """
    )
    assert_clean(done, "cuda:0 to work / True\n0")


# ---- errors -------------------------------------------------------------------------------------


def test_a_failed_call_names_itself(cuda: Any) -> None:  # SPEC F46
    with pytest.raises(CudaCallError) as caught:
        cuda.call("pc_cuda_event_record", None, None)
    error = caught.value
    assert error.call == "pc_cuda_event_record"
    assert error.code in (1, 400)
    assert error.name.startswith("cudaError")
    assert error.text in str(error) and error.cure in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert cuda.broken is None


def test_out_of_memory_in_a_call(emulated: Any, cuda: Any) -> None:  # SPEC F46
    emulated.fail("cuEventCreate", 1, 2, 1)
    with pytest.raises(StorageMemoryError) as caught:
        cuda.create_event()
    assert caught.value.nbytes == 0
    assert caught.value.what == "the work of pc_cuda_event_create on cuda:0"
    assert cuda.broken is None


@pytest.mark.parametrize("code", [1, 201, 400, 709, 801, 999])
def test_codes_that_do_not_break_a_device(emulated: Any, cuda: Any, code: int) -> None:
    emulated.fail("cuStreamSynchronize", 1, code, 1)  # SPEC F46
    with pytest.raises(CudaCallError) as caught:
        cuda.call("pc_cuda_stream_synchronize", None)
    assert caught.value.code == code
    assert cuda.broken is None
    cuda.call("pc_cuda_stream_synchronize", None)


@pytest.mark.parametrize("code", [214, 700, 702, 710, 715, 716, 717, 718, 719])
def test_a_sticky_code_breaks_the_device(emulated: Any, cuda: Any, code: int) -> None:  # SPEC F46
    assert code in STICKY
    memory = DeviceMemory(cuda, 100, "a test")
    event = cuda.create_event()
    emulated.sticky(code)
    with pytest.raises(CudaCallError) as first:
        cuda.call("pc_cuda_stream_synchronize", None)
    assert first.value.code == code
    assert cuda.broken is first.value
    assert repr(cuda) == "<Device cuda:0, broken>"
    for refused in (
        lambda: cuda.call("pc_cuda_fill", memory.address, 0, 1, None),
        cuda.synchronize,
        cuda.memory_info,
        cuda.create_event,
        lambda: DeviceMemory(cuda, 100, "another test"),
        memory.zeroed,
    ):
        with pytest.raises(DeviceError, match="cuda:0 to work, got a device that broke") as later:
            refused()
        assert str(first.value) in str(later.value)  # the origin
        assert later.value.__cause__ is first.value
    cuda.give_back("pc_cuda_event_destroy", event)
    memory.free()
    assert emulated.get("live_events") == 0
    assert current_context(cuda) == 0


@pytest.mark.parametrize(
    ("call", "code", "do"),
    [
        ("cuCtxSynchronize", 719, "synchronize"),
        ("cuCtxSynchronize", 700, "synchronize"),
        ("cuMemGetInfo", 214, "memory_info"),
    ],
)
def test_pycudas_exceptions_have_codes(
    emulated: Any, cuda: Any, call: str, code: int, do: str
) -> None:  # SPEC F46
    emulated.fail(call, 1, code, 1)
    with pytest.raises(CudaCallError) as caught:
        getattr(cuda, do)()
    assert (caught.value.call, caught.value.code) == (call, code)
    assert caught.value.name.startswith("CUDA_ERROR_")
    assert cuda.broken is caught.value
    assert current_context(cuda) == 0


def test_every_code_comes_back_through_pycuda(emulated: Any, cuda: Any) -> None:  # SPEC F46
    """PyCUDA tells a text only; the driver's own words say which code it was."""
    codes = [
        code for code in range(1, 1000)
        if code != 2 and not cuda.driver.error_text(code).startswith("CUDA error")
    ]  # fmt: skip
    assert len(codes) > 10
    for code in codes:
        emulated.fail("cuMemGetInfo", 1, code, 1)
        with pytest.raises(CudaCallError) as caught:
            cuda.memory_info()
        assert caught.value.code == code
        cuda.broken = None


def test_memory_info(cuda: Any) -> None:  # SPEC F42
    free, total = cuda.memory_info()
    memory = DeviceMemory(cuda, 1 << 20, "a test")
    assert 0 < cuda.memory_info()[0] <= free <= total
    memory.free()


# ---- forks and exits ---------------------------------------------------------------------------


@EMULATION_ONLY
def test_a_forked_child_is_refused() -> None:  # SPEC 7
    done = run_program(
        """
        import os, sys
        import numpy as np
        from pagedcache._cuda.driver import get_device, problem
        from pagedcache._cuda.memory import DeviceMemory
        device = get_device(0)
        memory, lost = DeviceMemory(device, 100, "x"), [DeviceMemory(device, 100, "y")]
        event = device.create_event()
        child = os.fork()
        if not child:
            for call in (
                lambda: device.call("pc_cuda_stream_synchronize", None),
                device.synchronize,
                lambda: DeviceMemory(device, 100, "z"),
                lambda: device.current().__enter__(),
                lambda: get_device(0),
                lambda: get_device(3),
            ):
                try:
                    call()
                    print("nothing raised")
                except Exception as error:
                    notes = getattr(error, "__notes__", [])
                    print(type(error).__name__, "spawn" in str(error) + "".join(notes))
            print("spawn" in problem())
            lost.clear()
            memory.free()
            device.give_back("pc_cuda_event_destroy", event)
            sys.exit()
        status = os.waitpid(child, 0)[1]
        device.synchronize()
        memory.free()
        print(status, device.memory_info()[0] == device.memory_info()[1] - 100)
        """
    )
    refused = ["ForkedProcessError True"] * 4 + ["CudaUnavailableError True"] * 2
    assert_clean(done, "\n".join([*refused, "True", "0 True"]))


@EMULATION_ONLY
@pytest.mark.parametrize("held", ["", "DeviceMemory", "PinnedMemory"])
@pytest.mark.parametrize("ending", ["sys.exit()", "held.clear(); sys.exit()", "os._exit(0)"])
def test_a_forked_child_ends_quietly(held: str, ending: str) -> None:  # SPEC 7
    """What belongs to the parent is not given back by the child, which may not call the driver."""
    done = run_program(
        f"""
        import os, sys
        from pagedcache._cuda.driver import get_device
        from pagedcache._cuda.memory import DeviceMemory, PinnedMemory
        held = [kind(get_device(0), 100, "x") for kind in [{held}]]
        get_device(0).synchronize()
        child = os.fork()
        if not child:
            {ending}
        print(os.waitpid(child, 0)[1])
        """
    )
    assert_clean(done, "0")


@EMULATION_ONLY
@pytest.mark.parametrize(
    "context", ["", "import pycuda.autoprimaryctx", "import pycuda.autoinit"]
)
@pytest.mark.parametrize("how", ["globals", "cycle", "thread", "atexit", "error", "broken"])
def test_the_interpreter_exits_with_everything_alive(context: str, how: str) -> None:  # SPEC F42
    done = run_program(
        f"""
        import atexit, sys, threading
        {context or "pass"}
        def late():
            global memory
            memory.free()
            try:
                device.call("pc_cuda_stream_synchronize", None)
            except Exception as error:
                print(type(error).__name__)
        if {how!r} == "atexit":
            atexit.register(late)  # runs after ours
        import numpy as np
        from pagedcache._cuda.arrays import DeviceArray
        from pagedcache._cuda.driver import get_device
        from pagedcache._cuda.memory import DeviceMemory, PinnedMemory
        from pagedcache._cuda.order import Order
        from pagedcache._cuda.scratch import Scratch
        from pagedcache._cuda.staging import Staging
        from pagedcache._cuda.streams import Streams
        device = get_device(0)
        with device.current():
            stream = device.pycuda.Stream()
        def make():
            global memory, held
            memory, pinned = DeviceMemory(device, 4096, "x"), PinnedMemory(device, 4096, "y")
            streams, order = Streams(device), Order(device, 8)
            ids = np.arange(3, dtype=np.int32)
            for s in (streams.resolve(stream), streams.default):
                order.acquire(s, ids, True)
                order.used(s, ids, True)
            scratch = Scratch(device, order)
            staging = Staging(device, scratch)
            region = staging.upload(np.arange(1000), s)
            array = DeviceArray(memory.address, (64, 64), None, np.uint8, device, owner=memory)
            array.get()
            held = [pinned, streams, order, scratch, staging, region, array]
            held.append(held)
        if {how!r} == "thread":
            worker = threading.Thread(target=make)
            worker.start()
            worker.join()
        else:
            make()
        if {how!r} == "cycle":
            del memory, held
        if {how!r} == "broken":
            import ctypes
            ctypes.CDLL("libcuda.so.1").pc_stub_break(0, 700)
            try:
                device.synchronize()
            except Exception as error:
                print(error.code)
        print("end")
        sys.stdout.flush()
        if {how!r} == "error":
            raise SystemExit(0)
        """
    )
    said = {"atexit": "end\nFreedHandleError", "broken": "700\nend"}.get(how, "end")
    if context and how == "broken":  # their own context cannot be left cleanly either
        assert done.stdout.strip() == said
        return
    assert_clean(done, said)


@EMULATION_ONLY
@pytest.mark.parametrize("ending", ["", "raise SystemExit(3)", "del cache, held", "1 / 0"])
@pytest.mark.parametrize("asynchronous", ["0", "1"])
def test_the_interpreter_exits_with_a_cache_in_use(
    ending: str, asynchronous: str
) -> None:  # SPEC F42
    done = run_program(
        f"""
        import numpy as np
        import pagedcache as pc
        spec = pc.CacheSpec(num_layers=2, num_kv_heads=2, head_dim=32, block_size=4)
        cache = pc.PagedKVCache(spec, num_blocks=16, device="cuda:0")
        gpu = pc._cuda.driver.get_device(0)
        with gpu.current():
            stream = gpu.pycuda.Stream(1)
        rows = np.random.default_rng(0).standard_normal((10, 2, 32)).astype(np.float32)
        seq = cache.open(list(range(10)), stream=stream)
        for layer in range(2):
            seq.append(layer, rows, rows, stream=stream)
        seq.commit(10, stream=stream)
        held = [seq.gather(0, stream=stream), seq.views(1), seq.fork(), cache.open(list(range(9)))]
        held.append(held)
        cache.me = held
        print("end")
        {ending or "pass"}
        """,
        PC_STUB_ASYNC=asynchronous,
    )
    assert done.stdout == "end\n"
    if ending.startswith("1"):
        assert done.stderr.rstrip().endswith("ZeroDivisionError: division by zero")
        assert done.stderr.count("Error") == 1
        assert done.returncode == 1
    else:
        assert (done.stderr, done.returncode) == ("", 3 if ending.startswith("raise") else 0)


def test_owners_are_freed_at_exit() -> None:  # SPEC F42
    """What is adopted is freed by the exit hook, while the context can still be pushed."""
    freed: list[str] = []

    class Owner:
        def free(self) -> None:
            freed.append("freed")

    class Nothing:
        pass

    device: Any = object.__new__(driver.Device)
    device._owners, device._staging, device._finished = {Owner()}, Nothing(), False
    device._finish()
    assert freed == ["freed"]
    assert device._finished and device._staging is None


def test_opaque_arguments_reach_ctypes(cuda: Any) -> None:  # SPEC F42
    """A mistake in a call of ours raises, and leaves no context behind."""
    with pytest.raises(ctypes.ArgumentError):
        cuda.call("pc_cuda_fill", object(), 0, 1, None)
    assert current_context(cuda) == 0
