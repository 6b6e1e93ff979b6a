"""Host arrays to the device and back, through a ring of pinned memory.

The device copies by itself from pinned memory only; anything else would stop the host until the
copy is done. An array is cut into pieces; each takes the next room in the ring and gives it back
when its copy has passed. The host waits when the ring is full, and for what it reads.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import numpy as np

from pagedcache._cuda.driver import Device
from pagedcache._cuda.memory import Bytes, PinnedMemory
from pagedcache._cuda.scratch import Region, Scratch
from pagedcache._cuda.streams import Stream
from pagedcache.errors import FormatError, PagedCacheError

RING_NBYTES = 8 << 20

#: Copies under way at a time, each with an event of its own.
MOST_PIECES = 256

_ALIGNMENT = 64


class _Piece:
    """Room in the ring. ``event``: None while a thread still fills or empties it."""

    __slots__ = ("event", "held", "nbytes", "offset")

    def __init__(self, offset: int, nbytes: int) -> None:
        self.offset, self.nbytes = offset, nbytes
        self.event: int | None = None
        self.held = True  # by the thread that took it


class _Ring:
    """Pinned memory handed out in order and reclaimed in the same order."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        self._memory: PinnedMemory | None = None
        self._pieces: deque[_Piece] = deque()  # oldest first
        self._spare: list[int] = []
        self._turn = threading.Condition()

    def take(self, nbytes: int, *, wait: bool = True) -> _Piece | None:
        """Room for ``nbytes`` bytes, at most half of the ring.

        Where the room is held by another thread ``wait=False`` returns None. A thread that holds
        room itself must not wait.
        """
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        with self._turn:
            if self._memory is None:
                self._memory = PinnedMemory(self.device, self.nbytes, "pinned staging memory")
            while (offset := self._room(size)) is None or len(self._pieces) >= MOST_PIECES:
                oldest = self._pieces[0]
                if oldest.held:
                    if not wait:
                        return None
                    self._turn.wait()
                else:
                    self._reclaim(oldest)
            piece = _Piece(offset, size)
            self._pieces.append(piece)
            return piece

    def _room(self, size: int) -> int | None:
        while self._pieces and not self._pieces[0].held and self._pieces[0].event is None:
            self._pieces.popleft()
        if not self._pieces:
            return 0
        first, last = self._pieces[0].offset, self._pieces[-1]
        end = last.offset + last.nbytes
        if last.offset < first:  # wrapped around
            return end if first - end >= size else None
        if self.nbytes - end >= size:
            return end
        return 0 if first >= size else None

    def _reclaim(self, piece: _Piece) -> None:
        assert piece.event is not None
        self.device.call("pc_cuda_event_synchronize", piece.event)
        self._spare.append(piece.event)
        piece.event = None

    def view(self, piece: _Piece, nbytes: int) -> Bytes:
        assert self._memory is not None
        return self._memory.array[piece.offset : piece.offset + nbytes]

    def address(self, piece: _Piece) -> int:
        assert self._memory is not None
        return self._memory.address + piece.offset

    def queued(self, piece: _Piece, stream: Stream) -> None:
        """Say that the copy of a piece has been queued."""
        with self._turn:
            event = self._spare.pop() if self._spare else None
        if event is None:
            event = self.device.create_event()
        try:
            self.device.call("pc_cuda_event_record", event, stream.handle)
        except BaseException:
            with self._turn:
                self._spare.append(event)
            raise
        piece.event = event

    def let_go(self, piece: _Piece) -> None:
        """The thread is done with a piece; the room is reclaimed once its event has passed."""
        with self._turn:
            piece.held = False
            self._turn.notify_all()

    def finish(self, piece: _Piece) -> None:
        """Wait for a piece's copy."""
        if piece.event is not None:
            self.device.call("pc_cuda_event_synchronize", piece.event)
            with self._turn:
                self._spare.append(piece.event)
            piece.event = None

    def close(self) -> None:
        with self._turn:
            events = [p.event for p in self._pieces if p.event is not None] + self._spare
            for event in events:
                self.device.give_back("pc_cuda_event_synchronize", event)
                self.device.give_back("pc_cuda_event_destroy", event)
            self._pieces.clear()
            self._spare = []
            if self._memory is not None:
                self._memory.free()
                self._memory = None


class Staging:
    """Copies between host arrays and device memory, queued on a stream.

    Arrays are C-contiguous, of any size and dtype. All methods raise what ``Device.call`` and the
    allocations raise, and ``DeviceError`` while the stream is captured. ``ring_nbytes`` bytes of
    pinned memory are taken with the first copy.
    """

    def __init__(
        self, device: Device, scratch: Scratch | None = None, ring_nbytes: int = RING_NBYTES
    ) -> None:
        self.device, self._scratch = device, scratch
        self._ring = _Ring(device, ring_nbytes)
        self._most = max(ring_nbytes // 4 // _ALIGNMENT * _ALIGNMENT, _ALIGNMENT)

    def upload(self, array: np.ndarray[Any, Any], stream: Stream) -> Region:
        """A region that holds the array's bytes, once ``stream`` gets there.

        The array may be changed as soon as the call returns. Nothing is kept when it fails.
        """
        if self._scratch is None:
            raise TypeError("this staging has no scratch memory to upload to")
        stream.refuse_capture("an upload of a host array")
        region = self._scratch.take(array.nbytes, stream)
        try:
            self.write(region.address, array, stream)
        finally:
            region.used(stream)
        return region

    def write(self, address: int, array: np.ndarray[Any, Any], stream: Stream) -> None:
        """Copy a host array to device memory; it may be changed as soon as the call returns."""
        source = as_bytes(array)
        stream.refuse_capture("a copy of a host array")
        for start in range(0, len(source), self._most):
            part = source[start : start + self._most]
            piece = self._ring.take(len(part))
            assert piece is not None
            try:
                self._ring.view(piece, len(part))[:] = part
                self._copy(address + start, self._ring.address(piece), len(part), piece, stream)
            finally:
                self._ring.let_go(piece)

    def read(self, address: int, out: np.ndarray[Any, Any], stream: Stream) -> None:
        """Fill a host array from device memory, after what is queued on ``stream``; waits."""
        target = as_bytes(out)
        stream.refuse_capture("a copy to a host array")
        pending: deque[tuple[_Piece, Bytes]] = deque()
        try:
            for start in range(0, len(target), self._most):
                part = target[start : start + self._most]
                piece = self._ring.take(len(part), wait=not pending)
                while piece is None:
                    self._empty(pending)
                    piece = self._ring.take(len(part), wait=not pending)
                pending.append((piece, part))
                self._copy(self._ring.address(piece), address + start, len(part), piece, stream)
                if len(pending) > 1:
                    self._empty(pending)
            while pending:
                self._empty(pending)
        finally:
            for piece, _ in pending:
                self._ring.let_go(piece)

    def _empty(self, pending: deque[tuple[_Piece, Bytes]]) -> None:
        piece, part = pending[0]
        self._ring.finish(piece)
        part[:] = self._ring.view(piece, len(part))
        pending.popleft()
        self._ring.let_go(piece)

    def _copy(self, to: int, origin: int, nbytes: int, piece: _Piece, stream: Stream) -> None:
        self.device.call("pc_cuda_copy", to, origin, nbytes, stream.handle)
        try:
            self._ring.queued(piece, stream)
        except PagedCacheError:
            # The copy is on its way and nothing says when it is done: wait for it here.
            self.device.give_back("pc_cuda_stream_synchronize", stream.handle)
            raise

    def close(self) -> None:
        """Give back the pinned memory; waits for copies under way; never raises. Idempotent."""
        self._ring.close()

    def __del__(self) -> None:
        if hasattr(self, "_ring"):
            self._ring.close()


def as_bytes(array: np.ndarray[Any, Any]) -> Bytes:
    """The bytes of a C-contiguous array, shared; ``FormatError`` for any other array."""
    if not array.flags.c_contiguous:
        raise FormatError("a C-contiguous array", f"strides {array.strides}", "host array")
    return array.reshape(-1).view(np.uint8)
