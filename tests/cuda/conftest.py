"""Fixtures of the tests on CUDA: a GPU, or the emulation that cuda_emulation/run.py sets up."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from cuda_emulation.driver_stub import Stub

#: The folder of the emulation's libraries; set by the runner.
EMULATION = os.environ.get("PAGEDCACHE_CUDA_EMULATION", "")
#: "", "address" or "thread": what the emulated kernels were compiled with.
SANITIZER = os.environ.get("PAGEDCACHE_CUDA_SANITIZER", "")


@pytest.fixture(scope="session")
def _stub() -> Stub | None:
    if not EMULATION:
        return None
    gc.collect()
    gc.freeze()  # each test collects twice: only what tests made is looked at then
    return Stub()


@pytest.fixture(scope="session")
def _device(_stub: Stub | None) -> Any:
    """``cuda:0``, or the reason why there is none."""
    from pagedcache._cuda import driver

    return driver.problem(0) or driver.get_device(0)


@pytest.fixture
def cuda(_device: Any) -> Any:
    """The device ``cuda:0`` (a ``pagedcache._cuda.driver.Device``), emulated or real."""
    if isinstance(_device, str):
        pytest.skip(f"no CUDA: {_device}")
    return _device


@pytest.fixture
def emulated(_stub: Stub | None) -> Stub:
    """The stub driver under this process: ``get``, ``set``, ``fail``, ``sticky``, ``live``."""
    if _stub is None:
        pytest.skip("needs the emulated driver: python tests/cuda_emulation/run.py")
    return _stub


@pytest.fixture
def unsanitized() -> None:
    """For tests of faults that a sanitizer ends the process for."""
    if SANITIZER:
        pytest.skip(f"the {SANITIZER} sanitizer reports this by ending the process")


@pytest.fixture
def unraced() -> None:
    """For tests with races on purpose."""
    if SANITIZER == "thread":
        pytest.skip("the thread sanitizer reports this race")


@pytest.fixture
def faults_survive() -> None:
    """For tests of kernels that touch memory that is not there."""
    if SANITIZER == "thread":
        pytest.skip("the thread sanitizer ends the process when memory is not there")


_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    if report.failed:
        item.stash[_failed] = True
    return report


def _devices() -> list[Any]:
    from pagedcache._cuda import driver

    return list(driver._devices.values())


def _repair(stub: Stub) -> None:
    """The driver as the process began; devices work; no device keeps staging memory."""
    stub.reset()
    for device in _devices():
        device.broken = None
    gc.collect()
    for device in _devices():
        if device._staging is not None:
            device._staging.close()


@pytest.fixture(autouse=True)
def _nothing_is_left(_stub: Stub | None, request: pytest.FixtureRequest) -> Iterator[None]:
    """Under emulation: what a test made on the device is gone after it, and nothing was overrun."""
    if _stub is None:
        yield
        return
    _repair(_stub)
    before, context = _stub.live(), _stub.current_context()
    yield
    # What cannot be popped stays current.
    popped = not _stub.told_to_fail & {"cuCtxPopCurrent", "cuCtxSetCurrent"}
    same_context = _stub.current_context() == context
    overruns = _stub.get("overruns")
    bad_frees = _stub.get("bad_frees")
    request.node.funcargs.clear()  # else the values of fixtures would still live
    _repair(_stub)
    _stub.library.cuCtxSetCurrent(ctypes.c_void_p(context))  # the next test begins as this one did
    if request.node.stash.get(_failed, False):
        return  # the traceback holds on to things
    left = {name: n - before[name] for name, n in _stub.live().items() if n > before[name]}
    assert same_context or not popped, "another context is current than before the test"
    assert not left, f"left behind: {left}; live allocations: {_stub.describe()}"
    assert not overruns + _stub.get("overruns"), "bytes beside an allocation were written"
    assert not bad_frees + _stub.get("bad_frees"), "an address was freed that is none"
