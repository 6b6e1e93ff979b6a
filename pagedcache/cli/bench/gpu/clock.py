"""Time on the device, between two CUDA events.

A GPU that waits for the host to queue the next call measures the host. So each measurement gives
the device work to begin with (copies of a buffer of no interest), long enough that all calls
between the two events are queued before the first of them starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from pagedcache._cuda.driver import Device
from pagedcache._cuda.memory import DeviceMemory

from ..timing import Timer

_SAMPLE_SECONDS = 10e-3  # aimed at by repeating short functions
_MOST_REPEATS = 50
_MOST_AHEAD = 300  # copies; drivers hold about a thousand calls per stream
_BUFFER_NBYTES = 64 << 20


class Clock:
    """Makes timers of functions that queue work on the default stream. A context manager."""

    def __init__(self, device: Device) -> None:
        self.device = device
        half = min(_BUFFER_NBYTES, device.memory_info()[0] // 16)
        self._buffer, self._half = DeviceMemory(device, 2 * half, "a copy to begin with"), half
        with device.current():
            self._events: list[Any] = [device.pycuda.Event() for _ in range(2)]
        self._copy_seconds = 0.0

    def __enter__(self) -> Clock:
        for _ in range(2):  # the first copy warms up
            self._copy_seconds = self._between(lambda: self._ahead(8)) / 8
        return self

    def __exit__(self, *_: object) -> None:
        with self.device.current():  # PyCUDA leaks what it cannot release in its context
            self.device.pycuda.Context.synchronize()
            self._events.clear()
        self._buffer.free()

    def timer(self, function: Callable[[], object]) -> Timer:
        """A timer of a function that can be called again and again with the same cost."""
        repeats = copies = 0

        def work() -> None:
            for _ in range(repeats):
                function()

        def measure() -> float:
            nonlocal repeats, copies
            if not repeats:
                repeats, copies = self._plan(function)
            self._ahead(copies)
            return self._between(work) / repeats

        return measure

    def _plan(self, function: Callable[[], object]) -> tuple[int, int]:
        """(calls in one measurement, copies that keep the device busy while they are queued)."""
        function()  # the first call compiles, allocates, uploads
        self.device.synchronize()
        began = time.perf_counter()
        function()
        queued = time.perf_counter() - began
        self.device.synchronize()
        once = time.perf_counter() - began
        longest = _MOST_AHEAD * self._copy_seconds / (1.5 * queued)
        repeats = int(max(1, min(_SAMPLE_SECONDS / once, _MOST_REPEATS, longest)))
        copies = 1 + int(1.5 * queued * repeats / self._copy_seconds)
        return repeats, min(copies, _MOST_AHEAD)

    def _ahead(self, copies: int) -> None:
        first, second = self._buffer.address, self._buffer.address + self._half
        for _ in range(copies):
            self.device.call("pc_cuda_copy", second, first, self._half, None)

    def _between(self, work: Callable[[], object]) -> float:
        start, stop = self._events
        with self.device.current():
            start.record()
            work()
            stop.record()
            stop.synchronize()
            # Its resolution is half a microsecond: nothing takes no time at all.
            return max(float(start.time_till(stop)) * 1e-3, 5e-7)
