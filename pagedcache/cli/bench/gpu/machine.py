"""The GPU that is measured: arrays on it, and the plain copy that others are compared with."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np

from pagedcache._cuda.arrays import DeviceArray
from pagedcache._cuda.driver import get_device
from pagedcache._cuda.memory import DeviceMemory
from pagedcache.checks.devices import upload

from ...output import note
from ..rows import Options
from ..store import HEAD_DIM, HEADS, make_rows
from ..timing import Timer
from .clock import Clock

TOKEN_NBYTES = 2 * HEADS * HEAD_DIM * 4  # K and V of one token in float32
_ARRAYS = 6  # of that size per token, alive at once: sources, results, the pool, two to copy
_PATTERN = 4096  # different tokens; more repeat them
_READ_NBYTES = 512 << 20  # several times any cache


class Machine:
    """One GPU and its clock. A context manager: leaving it gives the memory back."""

    def __init__(self, options: Options) -> None:
        self.name = options.device
        self.device = get_device(int(self.name.partition(":")[2]))
        self.clock = Clock(self.device)
        self._rows: dict[tuple[int, Any], tuple[DeviceArray, DeviceArray]] = {}
        self._copied: DeviceMemory | None = None

    def __enter__(self) -> Machine:
        self.clock.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.forget()
        self.clock.__exit__()

    def forget(self) -> None:
        """Free the rows and the memory of the plain copy."""
        self._rows.clear()
        if self._copied is not None:
            self._copied.free()
            self._copied = None

    def timer(self, function: Callable[[], object]) -> Timer:
        """See ``Clock.timer``."""
        return self.clock.timer(function)

    def fitting(self, tokens: int) -> int:
        """``tokens``, or as many as half of the free memory holds; says so when they are fewer."""
        free, least = self.device.memory_info()[0], tokens
        while least > 1 and _ARRAYS * least * TOKEN_NBYTES > free // 2:
            least //= 2
        if least < tokens:
            note(f"pagedcache bench: {self.name}: {least:,} tokens at a time, not {tokens:,}: "
                 f"{free >> 20:,} MiB are free")
        return least

    def rows(self, count: int, dtype: Any) -> tuple[DeviceArray, DeviceArray]:
        """Random K and V ``[count, HEADS, HEAD_DIM]`` on the device."""
        key = count, dtype
        if key not in self._rows:
            shape = (count, HEADS, HEAD_DIM)
            k, v = (
                upload(np.resize(rows, shape), self.name)
                for rows in make_rows(min(count, _PATTERN), dtype)
            )
            self._rows[key] = k, v
        return self._rows[key]

    def empty(self, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        """A new array on the device; its values are whatever was there."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        memory = DeviceMemory(self.device, nbytes, "a result of the benchmark")
        return DeviceArray(memory.address, shape, None, dtype, self.device, owner=memory)

    def copy(self, nbytes: int) -> Timer:
        """A plain copy of ``nbytes`` bytes from device memory to device memory."""
        half = -(-nbytes // 256) * 256
        if self._copied is None or self._copied.nbytes < 2 * half:
            if self._copied is not None:
                self._copied.free()
            self._copied = DeviceMemory(self.device, 2 * half, "a plain copy")
        source, target = self._copied.address, self._copied.address + half

        def copy() -> None:
            self.device.call("pc_cuda_copy", target, source, nbytes, None)

        return self.timer(copy)

    def read(self, nbytes: int) -> Timer:
        """A plain read of ``nbytes`` bytes, somewhere else each time: no cache holds them."""
        size = -(-nbytes // 256) * 256
        parts = max(1, -(-_READ_NBYTES // size))
        if self._copied is None or self._copied.nbytes < parts * size + 256:
            if self._copied is not None:
                self._copied.free()
            self._copied = DeviceMemory(self.device, parts * size + 256, "a plain read")
        first, end = self._copied.address, self._copied.address + parts * size
        places = cycle(range(first, end, size))

        def read() -> None:
            self.device.call("pc_cuda_read", next(places), nbytes // 16 * 16, end, None)

        return self.timer(read)


def check(got: DeviceArray, given: DeviceArray, what: str) -> None:
    """``AssertionError`` unless the first rows read back as they were given, nearly."""
    first = [np.asarray(array[:64]).astype(np.float32) for array in (got, given)]
    error = float(np.abs(first[0] - first[1]).max())
    if not error < 0.8:  # one step of a 4-bit format for values up to 5
        raise AssertionError(f"{what} is wrong by {error}: not timed")
