"""The stub driver as tests see it: knobs, counters, injected failures."""

from __future__ import annotations

import ctypes

#: Counters of what exists; all must come back to where they were before a test.
LIVE = (
    "live_allocations", "live_bytes", "live_pinned", "live_registered", "live_streams",
    "live_events", "live_graphs",
)  # fmt: skip


class Stub:
    """The stub that this process has loaded. Raises OSError or AttributeError where it has none."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._get = library.pc_stub_get
        self._get.argtypes, self._get.restype = [ctypes.c_char_p], ctypes.c_longlong
        self._set = library.pc_stub_set
        self._set.argtypes = [ctypes.c_char_p, ctypes.c_longlong]
        self._fail = library.pc_stub_fail
        self._fail.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_int]
        self._fail.restype = None
        self._break = library.pc_stub_break
        self._break.argtypes, self._break.restype = [ctypes.c_int, ctypes.c_int], None
        self._reset = library.pc_stub_reset
        self._reset.restype = None
        self._describe = library.pc_stub_describe
        self._describe.argtypes, self._describe.restype = [ctypes.c_char_p, ctypes.c_size_t], None
        self.library = library
        #: Names of calls that fail() was told of since reset().
        self.told_to_fail: set[str] = set()

    def get(self, name: str) -> int:
        """A knob, a counter, or ``"calls:cuMemAlloc"``, the calls of that name since reset()."""
        return int(self._get(name.encode()))

    def set(self, name: str, value: int) -> None:
        """Set a knob: devices, total_memory, async, free_waits, poison_max, queue_length."""
        if self._set(name.encode(), value):
            raise KeyError(f"the stub driver has no knob {name!r}")

    def fail(self, call: str, nth: int = 1, code: int = 2, times: int = 0) -> None:
        """The nth call of this name from now on gives ``code``; ``times`` times, 0: for ever.

        Versions are left out of names: ``"cuMemAlloc"``. ``nth=0`` ends a failure.
        """
        self.told_to_fail.add(call)
        self._fail(call.encode(), nth, code, times)

    def sticky(self, code: int, device: int = 0) -> None:
        """Break a device as a failed kernel does: every call gives ``code``; 0 repairs it."""
        self._break(device, code)

    def current_context(self) -> int:
        """Address of the context that is current on this thread, 0 for none."""
        context = ctypes.c_void_p()
        self.library.cuCtxGetCurrent(ctypes.byref(context))
        return context.value or 0

    def live(self) -> dict[str, int]:
        """How much exists of what must be given back."""
        return {name: self.get(name) for name in LIVE}

    def describe(self) -> str:
        """Address and bytes of the live allocations."""
        text = ctypes.create_string_buffer(4000)
        self._describe(text, len(text))
        return text.value.decode()

    def reset(self) -> None:
        """Knobs as the process began, no failures, nothing captured or queued, counts from zero."""
        self._reset()
        self.told_to_fail.clear()
