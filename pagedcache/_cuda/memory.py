"""Memory that is given back: on the device, and pinned on the host.

All of it is taken and freed by PyCUDA with the device's primary context pushed, because PyCUDA
leaks what is released on a thread without it. Freeing never raises and may be done twice.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedcache._cuda.driver import Device, keep_for_ever

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class _Memory:
    """One allocation of PyCUDA; ``address`` and ``nbytes`` of it."""

    __slots__ = ("__weakref__", "_held", "address", "device", "nbytes", "what")

    def __init__(self, device: Device, nbytes: int, what: str) -> None:
        self._held: list[Any] = []  # popped by whoever frees: once, whatever the thread
        self.device, self.nbytes, self.what = device, nbytes, what
        if device.broken is not None:
            device.refuse(f"an allocation for {what}")
        with device.current(), device.driver.relaxed():
            try:
                held = self._take(device.pycuda, max(nbytes, 1))
            except device.pycuda.Error as error:
                raise device.failed_pycuda(error, nbytes, what) from error
            self._held.append(held)
            self.address = self._place(held)
        device.adopt(self)

    def _take(self, pycuda: Any, nbytes: int) -> Any:
        raise NotImplementedError

    def _place(self, held: Any) -> int:
        raise NotImplementedError

    def _release(self, held: Any) -> None:
        """PyCUDA's way; where it fails PyCUDA warns and leaks."""
        raise NotImplementedError

    def _release_broken(self) -> int:
        """The driver's way, for a device whose calls fail."""
        raise NotImplementedError

    def free(self) -> None:
        """Give the memory back. Idempotent; never raises; waits for the device's work."""
        try:
            held = self._held.pop()
        except (AttributeError, IndexError):
            return
        device = self.device
        if device.broken is not None or not self._released(held):
            device.quietly(self._release_broken)  # nothing in a forked child: it is the parent's
            keep_for_ever(held)  # PyCUDA would free it once more

    def _released(self, held: Any) -> bool:
        """Whether PyCUDA had its turn: not where its context cannot be pushed."""
        pushed = False
        try:
            with self.device.current(), self.device.driver.relaxed():
                pushed = True
                self._release(held)
        except Exception:
            return pushed
        return True

    def __del__(self) -> None:
        self.free()

    def __repr__(self) -> str:
        state = f"{self.nbytes:,} bytes at {self.address:#x}" if self._held else "freed"
        return f"<{type(self).__name__} for {self.what}: {state}>"


class DeviceMemory(_Memory):
    """``nbytes`` bytes of device memory at ``address``, for ``what``; not initialised.

    Raises ``StorageMemoryError`` when the device has no room, ``DeviceError`` when it is broken.
    """

    __slots__ = ()

    def _take(self, pycuda: Any, nbytes: int) -> Any:
        return pycuda.mem_alloc(nbytes)

    def _place(self, held: Any) -> int:
        return int(held)

    def _release(self, held: Any) -> None:
        held.free()

    def _release_broken(self) -> int:
        return int(self.device.driver.free_device(self.address))

    def zeroed(self) -> DeviceMemory:
        """This memory, with every byte zero for whatever stream comes next (the host waits)."""
        self.device.call("pc_cuda_fill", self.address, 0, self.nbytes, None)
        self.device.call("pc_cuda_stream_synchronize", None)
        return self


class PinnedMemory(_Memory):
    """``nbytes`` bytes of host memory that the device reads and writes by itself.

    ``array``: uint8 over it, not to be used after ``free()``. Raises as :class:`DeviceMemory`.
    """

    __slots__ = ("array",)

    array: Bytes

    def _take(self, pycuda: Any, nbytes: int) -> Any:
        return pycuda.pagelocked_empty(nbytes, np.uint8)

    def _place(self, held: Any) -> int:
        self.array = held
        return int(held.ctypes.data)

    def _release(self, held: Any) -> None:
        held.base.free()

    def _release_broken(self) -> int:
        return int(self.device.driver.free_pinned(self.address))
