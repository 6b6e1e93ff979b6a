"""The few functions of the driver that are called without PyCUDA: who is current, and what failed.

PyCUDA keeps a stack of contexts of its own and puts back only what it knows. A context that torch
or cuda.core made current is put back by these functions; PyCUDA's exceptions, which carry a text
and no code, get their code from the driver's own texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CDLL, byref, c_char_p, c_int, c_uint, c_void_p
from functools import cache

from pagedcache.errors import CudaUnavailableError

FILE_NAME = "libcuda.so.1"

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class Driver:
    """The loaded driver. Methods return CUDA codes (0 is success) beside their results."""

    def __init__(self, handle: CDLL) -> None:
        self.init = handle.cuInit
        self.init.argtypes = [c_uint]
        self._count = handle.cuDeviceGetCount
        self._count.argtypes = [c_void_p]
        self._get_current = handle.cuCtxGetCurrent
        self._get_current.argtypes = [c_void_p]
        self.set_current = handle.cuCtxSetCurrent
        self.set_current.argtypes = [c_void_p]
        self._stream_context, self._device = handle.cuStreamGetCtx, handle.cuCtxGetDevice
        self._stream_context.argtypes = [c_void_p, c_void_p]
        self._device.argtypes = [c_void_p]
        self._exchange_mode = handle.cuThreadExchangeStreamCaptureMode
        self._exchange_mode.argtypes = [c_void_p]
        self.free_device = handle.cuMemFree_v2
        self.free_pinned = handle.cuMemFreeHost
        self.free_device.argtypes = self.free_pinned.argtypes = [c_void_p]
        self._error_name, self._error_text = handle.cuGetErrorName, handle.cuGetErrorString
        for function in (self._error_name, self._error_text):
            function.argtypes = [c_int, c_void_p]

    def device_count(self) -> tuple[int, int]:
        """(code, number of GPUs this process may use)."""
        code, count = int(self.init(0)), c_int(0)
        if not code:
            code = int(self._count(byref(count)))
        return code, count.value

    def current(self) -> int:
        """Address of the context that is current on this thread, 0 for none."""
        context = c_void_p()
        return (context.value or 0) if not self._get_current(byref(context)) else 0

    def put_back(self, context: int) -> None:
        """Make a context current that was so before, 0 for none."""
        if self.set_current(context):
            self.set_current(context)  # a refusal may pass; it must not stay ours

    def device_of_stream(self, stream: int) -> tuple[int, int]:
        """(code, ordinal of the GPU) of a stream; a context must be current."""
        context, ordinal = c_void_p(), c_int(-1)
        code = int(self._stream_context(stream, byref(context)))
        if code:
            return code, -1
        before = self.current()
        if before != context.value:
            code = int(self.set_current(context.value))
        try:
            return code or int(self._device(byref(ordinal))), ordinal.value
        finally:
            if before != context.value:
                self.put_back(before)

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        """A block in which this thread may take and free memory and wait, during a capture too.

        Without it such a call, of this thread or of any, would be refused and spoil a capture that
        was begun in CUDA's default mode, as torch's are. A finaliser may make one at any time.
        """
        mode = c_int(_RELAXED)
        refused = self._exchange_mode(byref(mode))
        try:
            yield
        finally:
            if not refused:
                self._exchange_mode(byref(mode))

    def call_relaxed(self, function: Callable[..., int], *args: object) -> int:
        """A call as inside :meth:`relaxed`, in less time."""
        mode = c_int(_RELAXED)
        refused = self._exchange_mode(byref(mode))
        try:
            return int(function(*args))
        finally:
            if not refused:
                self._exchange_mode(byref(mode))

    def error_name(self, code: int) -> str:
        """The driver's name of a code, such as ``"CUDA_ERROR_OUT_OF_MEMORY"``."""
        return self._words(self._error_name, code)

    def error_text(self, code: int) -> str:
        """The driver's words for a code, such as ``"out of memory"``."""
        return self._words(self._error_text, code)

    def _words(self, function: object, code: int) -> str:
        words = c_char_p()
        assert callable(function)
        function(code, byref(words))
        return words.value.decode(errors="replace") if words.value else f"CUDA error {code}"

    @cache  # noqa: B019 - the one Driver lives as long as the process
    def codes(self) -> dict[str, int]:
        """Text -> code for every code that has a text of its own."""
        texts = {code: self.error_text(code) for code in range(1, 1000)}
        return {text: code for code, text in reversed(texts.items())}


@cache
def open_driver() -> Driver:
    """The NVIDIA driver of this machine.

    Raises ``CudaUnavailableError`` when there is none; a later call looks again.
    """
    try:
        return Driver(CDLL(FILE_NAME))
    except (OSError, AttributeError) as error:
        raise CudaUnavailableError(
            f"there is no NVIDIA driver ({error}): install one for this GPU, or run the container "
            "with GPU access (docker run --gpus all)"
        ) from None
