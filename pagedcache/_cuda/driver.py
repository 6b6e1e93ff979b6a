"""One ``Device`` per GPU: its primary context, its library, and one door for every call."""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from collections.abc import Callable
from ctypes import byref, c_void_p
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakSet

from pagedcache._cuda.failures import GONE, STICKY, failure, pycuda_code
from pagedcache._cuda.libcuda import Driver, open_driver
from pagedcache._cuda.library import Library, load
from pagedcache._cuda.probes import FORKED, SPAWN, import_pycuda
from pagedcache._cuda.probes import problem as problem
from pagedcache.arguments import as_count
from pagedcache.errors import (
    CudaCallError,
    CudaUnavailableError,
    DeviceError,
    ForkedProcessError,
    FreedHandleError,
    PagedCacheError,
)

if TYPE_CHECKING:
    from pagedcache._cuda.staging import Staging

#: Calls that wait, for other streams than a captured one, and launches, which may load a kernel.
_UNSAFE_BESIDE_CAPTURES = (
    "pc_cuda_event_synchronize",
    "pc_cuda_stream_synchronize",
    "pc_cuda_store",
    "pc_cuda_store_blocks",
    "pc_cuda_load",
    "pc_cuda_attend",
    "pc_cuda_read",
    "pc_cuda_find_nonfinite",
    "pc_cuda_copy_blocks",
    "pc_cuda_copy_tokens",
    "pc_cuda_convert",
    "pc_cuda_move_blocks",
    "pc_cuda_fill_blocks",
    "pc_cuda_build_pointers",
)


class _Pushed:
    """The context of a device on top of this thread's stack, for the length of a ``with``."""

    __slots__ = ("_before", "_device")

    def __init__(self, device: Device) -> None:
        self._device = device

    def __enter__(self) -> None:
        device = self._device
        device.refuse_strangers()
        self._before = device.driver.current()
        try:
            device._context.push()
        except device.pycuda.Error as error:
            self._put_back()
            raise device.failed_pycuda(error) from error

    def __exit__(self, *_: object) -> None:
        device = self._device
        try:
            device._context.pop()
        except device.pycuda.Error as error:
            device._unwind(error)
        finally:
            self._put_back()

    def _put_back(self) -> None:
        """PyCUDA puts back what it knows; what torch made current it does not know."""
        driver = self._device.driver
        if driver.current() != self._before:
            driver.put_back(self._before)


class Device:
    """A GPU that can be used. Made by :func:`get_device`; works from any thread.

    ``ordinal``, ``name`` ("cuda:0"), ``library``, ``pycuda`` (its driver module). ``broken``: None,
    or the error after which no call on this device can succeed any more.
    """

    def __init__(self, ordinal: int, pycuda: Any, driver: Driver, library: Library) -> None:
        self.ordinal, self.name = ordinal, f"cuda:{ordinal}"
        self.library, self.driver = library, driver
        self.broken: DeviceError | None = None
        self.pycuda = pycuda
        self._functions = dict(library.functions)
        for name in _UNSAFE_BESIDE_CAPTURES:
            self._functions[name] = partial(driver.call_relaxed, self._functions[name])
        self._owners: WeakSet[Any] = WeakSet()
        self._staging: Staging | None = None
        self._lock = threading.Lock()
        self._stranger = False  # a forked child
        self._finished = False  # the interpreter exits
        try:
            pycuda.init()
            # The primary context is the one that torch, CuPy and the runtime API use.
            self._context = pycuda.Device(ordinal).retain_primary_context()
        except pycuda.Error as error:
            raise self.failed_pycuda(error) from error
        self._handle: int = self._context.handle

    def __repr__(self) -> str:
        return f"<Device {self.name}{', broken' * (self.broken is not None)}>"

    # ---- calls ---------------------------------------------------------------------------

    def current(self) -> _Pushed:
        """``with device.current():`` makes its primary context current; may be nested.

        Needed around what PyCUDA does itself. The context that was current before, whoever made
        it so, is current again afterwards. Raises ``ForkedProcessError`` in a forked child and
        ``CudaCallError`` when the driver refuses.
        """
        return _Pushed(self)

    def call(self, name: str, *args: Any) -> None:
        """Call a function of the library, with the context current and the GIL released.

        Raises ``StorageMemoryError`` when CUDA is out of memory, ``CudaCallError`` for any other
        code, ``DeviceError`` that names the first error when the device is broken, and
        ``ForkedProcessError`` in a forked child.
        """
        self.refuse_strangers()
        if self.broken is not None:
            self.refuse(name)
        code = self._run(self._functions[name], args)
        if code:
            raise self.failed(name, code)

    def give_back(self, name: str, *args: Any) -> None:
        """As :meth:`call` for what releases something: on a broken device too, and no error."""
        self.quietly(self._functions[name], *args)

    def quietly(self, function: Callable[..., int], *args: Any) -> int:
        """Call what returns a CUDA code; the code is the caller's.

        The context is current then if the driver lets it: what gives back is called in any case.
        """
        return self._run(function, args, anyway=True) if self.is_usable else 0

    @property
    def is_usable(self) -> bool:
        """False in a forked child and while the interpreter exits: no call of the driver then."""
        return not (self._stranger or self._finished)

    def _run(self, function: Any, args: tuple[Any, ...], anyway: bool = False) -> int:
        driver = self.driver
        before = driver.current()
        if before == self._handle:
            return int(function(*args))
        code = int(driver.set_current(self._handle))
        if code and not anyway:
            driver.put_back(before)
            return code
        try:
            return int(function(*args))
        finally:
            driver.put_back(before)

    def create_event(self) -> int:
        """A new event, as a handle for ``pc_cuda_event_*``; the caller destroys it."""
        event = c_void_p()
        self.call("pc_cuda_event_create", byref(event))
        return event.value or 0

    def ordinal_of_stream(self, handle: int) -> int:
        """The GPU that a stream belongs to, this one where the driver does not say.

        Raises ``CudaCallError`` for a handle that is no stream.
        """
        ordinals: list[int] = []

        def ask() -> int:
            code, ordinal = self.driver.device_of_stream(handle)
            ordinals.append(ordinal)
            return code

        code = 0 if self.broken is not None else self.quietly(ask)
        if code in GONE:
            raise self.failed("cuStreamGetCtx", code)
        return ordinals[0] if ordinals and not code else self.ordinal

    def synchronize(self) -> None:
        """Wait for all work on the device. Raises the error of work that failed."""
        if self.broken is not None:
            self.refuse("cuCtxSynchronize")
        with self.current():
            try:
                self.pycuda.Context.synchronize()
            except self.pycuda.Error as error:
                raise self.failed_pycuda(error) from error

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the device's memory."""
        if self.broken is not None:
            self.refuse("cuMemGetInfo")
        with self.current():
            try:
                free, total = self.pycuda.mem_get_info()
            except self.pycuda.Error as error:
                raise self.failed_pycuda(error) from error
        return int(free), int(total)

    def num_multiprocessors(self) -> int:
        """How many multiprocessors work side by side."""
        with self.current():
            try:
                return int(self.pycuda.Device(self.ordinal).multiprocessor_count)
            except self.pycuda.Error as error:
                raise self.failed_pycuda(error) from error

    @property
    def staging(self) -> Staging:
        """Pinned memory for copies between host and device; made when first used."""
        from pagedcache._cuda.staging import Staging

        with self._lock:
            if self._staging is None:
                self._staging = Staging(self)
            return self._staging

    # ---- errors --------------------------------------------------------------------------

    def failed(self, call: str, code: int, nbytes: int = 0, what: str = "") -> PagedCacheError:
        """The error for a code that a function of the library returned; not raised here."""
        name, text = self.library.error_name(code), self.library.error_text(code)
        what = what or f"the work of {call} on {self.name}"
        return self._noted(failure(call, code, name, text, nbytes, what))

    def failed_pycuda(self, error: Exception, nbytes: int = 0, what: str = "") -> PagedCacheError:
        """The error for an exception of PyCUDA; not raised here."""
        call, code = pycuda_code(error, self.driver)
        name, text = self.driver.error_name(code), self.driver.error_text(code)
        what = what or f"the work of {call} on {self.name}"
        return self._noted(failure(call, code, name, text, nbytes, what))

    def _noted(self, error: PagedCacheError) -> PagedCacheError:
        if isinstance(error, CudaCallError) and error.code in STICKY and self.broken is None:
            self.broken = error
        return error

    def refuse(self, call: str) -> NoReturn:
        """Raise the error for a call on a device that is broken."""
        raise DeviceError(
            f"{self.name} to work", f"a device that broke earlier ({self.broken})", call
        ) from self.broken

    def refuse_strangers(self) -> None:
        if self._stranger:
            error = ForkedProcessError(f"the CUDA device {self.name}")
            error.add_note(SPAWN)
            raise error
        if self._finished:
            raise FreedHandleError(f"{self.name} (the interpreter is exiting)")

    def _unwind(self, error: Exception) -> None:
        """Take the context off PyCUDA's stack although the driver refused.

        PyCUDA aborts the process when a thread ends with a context on that stack.
        """
        try:
            self._context.pop()  # what failed once may have passed
        except self.pycuda.Error:
            self.broken = self.broken or DeviceError(
                f"{self.name} to work", f"a context that cannot be popped ({error})"
            )
            self._context.detach()

    # ---- life ----------------------------------------------------------------------------

    def adopt(self, owner: Any) -> None:
        """Have ``owner.free()`` called before the interpreter exits, if it still lives then."""
        self._owners.add(owner)

    def _finish(self) -> None:
        for owner in list(self._owners):
            owner.free()
        self._staging = None
        self._finished = True

    def _abandon(self) -> None:
        self._stranger = True
        self._lock = threading.Lock()  # a thread that is not here may have held it
        keep_for_ever(self._context)


def keep_for_ever(thing: Any) -> None:
    """Give ``thing`` a reference that nobody drops: its destructor must not call the driver."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


# ---- the devices of this process -----------------------------------------------------------

_devices: dict[int, Device] = {}
_devices_lock = threading.Lock()
_hooked = False
_forked = False


def get_device(ordinal: int = 0) -> Device:
    """The GPU ``cuda:<ordinal>``; the same object for every caller, made by the first.

    Raises ``CudaUnavailableError`` that says what is missing and how to get it, and
    ``InvalidArgumentError`` for what is no ordinal.
    """
    device = _devices.get(ordinal) if type(ordinal) is int else None
    if device is not None:
        return device
    ordinal = as_count(ordinal, "ordinal of the CUDA device", most=1023)
    with _devices_lock:
        if ordinal not in _devices:
            _devices[ordinal] = _make(ordinal)
        return _devices[ordinal]


def _make(ordinal: int) -> Device:
    global _hooked
    if _forked:
        raise CudaUnavailableError(FORKED)
    reason = problem(ordinal)
    if reason is not None:
        raise CudaUnavailableError(reason)
    device = Device(ordinal, import_pycuda(), open_driver(), load())
    if not _hooked:
        _hooked = True
        atexit.register(_finish_devices)
        os.register_at_fork(after_in_child=_abandon_devices)
    return device


def open_devices() -> list[Device]:
    """The devices that this process has used so far."""
    return list(_devices.values())


def _finish_devices() -> None:
    for device in open_devices():
        device._finish()


def _abandon_devices() -> None:
    global _devices_lock, _forked
    _devices_lock = threading.Lock()
    _forked = True
    for device in open_devices():
        device._abandon()
    _devices.clear()
