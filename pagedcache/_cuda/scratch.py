"""Temporary device memory, taken again and again without an allocation.

A region that comes back remembers when each stream last used it. The same stream may have it again
at once; another one waits for that on the device.
"""

from __future__ import annotations

from collections import deque

from pagedcache._cuda.driver import Device
from pagedcache._cuda.memory import DeviceMemory
from pagedcache._cuda.order import Mark, Order
from pagedcache._cuda.streams import CaptureError, Stream
from pagedcache.errors import PagedCacheError, StorageMemoryError

#: Regions above this are freed instead of kept; the host waits for their streams then.
KEPT_NBYTES = 64 << 20

_LEAST = 512


class Region:
    """``nbytes`` or more bytes of device memory at ``address``, until it is released."""

    __slots__ = ("_held", "_marks", "_scratch", "address", "nbytes")

    def __init__(self, scratch: Scratch, memory: DeviceMemory, marks: dict[Stream, Mark]) -> None:
        self._held = [memory]  # popped by whoever releases: once, whatever the thread
        self._scratch, self._marks = scratch, marks
        self.address, self.nbytes = memory.address, memory.nbytes

    def used(self, stream: Stream) -> None:
        """Say that work on this memory has been queued on ``stream``; needed before release."""
        self._marks[stream] = self._scratch.order.mark(stream)

    def acquire(self, stream: Stream) -> None:
        """Have ``stream`` wait for what other streams do with this memory."""
        self._scratch.order.wait(stream, list(self._marks.values()))

    def release(self) -> None:
        """Give the memory back to its pool. Idempotent; never raises.

        Makes no driver call, unless the region is a large one.
        """
        try:
            memory = self._held.pop()
        except (AttributeError, IndexError):
            return
        self._scratch.take_back(memory, self._marks)

    def __del__(self) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Region of {self.nbytes:,} bytes at {self.address:#x}>"


class Scratch:
    """A pool of regions on one device, ordered by the same clocks as the blocks."""

    def __init__(self, device: Device, order: Order) -> None:
        self.device, self.order = device, order
        # A deque, because a finaliser may append in the middle of a call of its own thread.
        self._idle: deque[tuple[DeviceMemory, dict[Stream, Mark]]] = deque()
        self._closed = False

    def take(self, nbytes: int, stream: Stream) -> Region:
        """A region of at least ``nbytes`` bytes for work on ``stream``.

        Raises ``StorageMemoryError``, or what a wait for another stream raises; nothing is taken
        then.
        """
        size = size_class(nbytes)
        found = self._find(size, stream)
        if found is None:
            return Region(self, self._allocate(size), {})
        memory, marks = found
        try:
            self.order.wait(stream, marks.values())
        except CaptureError:
            self._idle.append(found)
            return Region(self, self._allocate(size), {})  # nobody's before: nothing to wait for
        except BaseException:
            self._idle.append(found)
            raise
        return Region(self, memory, marks)

    def _find(
        self, size: int, stream: Stream
    ) -> tuple[DeviceMemory, dict[Stream, Mark]] | None:
        """Take an idle region of this size out of the pool, rather one without a wait."""
        for others_too in (False, True):
            for entry in list(self._idle):
                memory, marks = entry
                if memory.nbytes == size and (others_too or not marks.keys() - {stream}):
                    try:
                        self._idle.remove(entry)
                    except ValueError:  # another thread was faster
                        continue
                    return entry
        return None

    def _allocate(self, size: int) -> DeviceMemory:
        try:
            return DeviceMemory(self.device, size, "temporary device memory")
        except StorageMemoryError:
            if not self._idle:
                raise
        self.trim()
        return DeviceMemory(self.device, size, "temporary device memory")

    def take_back(self, memory: DeviceMemory, marks: dict[Stream, Mark]) -> None:
        """Keep a region for the next taker, or free it, a large one once its streams are done."""
        if self._closed or (memory.nbytes > KEPT_NBYTES and _wait_for(marks)):
            memory.free()
        else:
            self._idle.append((memory, marks))

    def trim(self) -> None:
        """Free all idle regions, once the device is done with them; the host waits."""
        if self._idle and self.device.broken is None and self.device.is_usable:
            try:
                self.device.synchronize()
            except PagedCacheError:  # free() copes
                pass
        while self._idle:
            try:
                memory, _ = self._idle.pop()
            except IndexError:
                return
            memory.free()

    def close(self) -> None:
        """Free all idle regions, and the others when they are released. Never raises."""
        self._closed = True
        self.trim()


def _wait_for(marks: dict[Stream, Mark]) -> bool:
    """Whether the host could wait for streams; not for one that is captured or broken."""
    try:
        for stream in marks:
            stream.refuse_capture("freeing device memory")
            stream.synchronize()
    except PagedCacheError:
        return False
    return True


def size_class(nbytes: int) -> int:
    """The least of 512, 640, 768, 896, 1024, 1280, … that is not below ``nbytes``."""
    if nbytes <= _LEAST:
        return _LEAST
    step = 1 << ((nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step
