"""Who used which block last, and on which stream: what waits for what, on the device.

The calls queued on a stream are numbered, and a block has two tags per stream: the number of the
call that last wrote it, and of the one that last used it at all. A stream that is to touch a block
waits for events of the other streams that cover their tags. Reads do not wait for reads. The host
never waits, and no event is ever asked whether it has passed.

An event says "all calls of this stream up to number N are done". Each stream keeps the last few in
a ring. The oldest one is recorded anew when the ring is full: waits that were queued
on it before keep their meaning, and a tag that only it covered is covered by all the later ones.

Between ``acquire`` and ``used`` nobody else may touch the blocks in a way that conflicts; the pins
of the bookkeeping see to that.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from pagedcache._cuda.driver import Device
from pagedcache._cuda.failures import GONE
from pagedcache._cuda.streams import CaptureError, Stream
from pagedcache.errors import CudaCallError, DeviceError, PagedCacheError
from pagedcache.guards import taking

BlockIds = np.ndarray[Any, np.dtype[np.int32]]
Tags = np.ndarray[Any, np.dtype[np.int64]]

#: Events kept per stream.
RING = 16


class Mark(NamedTuple):
    """A moment of a stream: after its call of this number."""

    stream: Stream
    number: int


class _Event(NamedTuple):
    handle: int
    covers: int  # the number of the stream's last call before it


class _Clock:
    """What is known of one stream."""

    __slots__ = ("anywhere", "done", "queued", "ring", "spare", "stream", "tags", "waited")

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.queued = 0  # the number of the last call
        self.done = 0  # calls up to this one are over: the host has waited for them
        self.anywhere = 0  # the last call that wrote blocks which nobody knows
        self.tags: tuple[Tags, Tags] | None = None  # (written, used at all), by block
        self.ring: deque[_Event] = deque()  # oldest first
        self.spare: list[int] = []  # events that are recorded nowhere
        self.waited: dict[Stream, int] = {}  # this stream comes after that call of another

    def last(self, block_ids: BlockIds, writing: bool) -> int:
        """The last call that whoever reads (or writes) one of these blocks must come after."""
        number = int(self.tags[writing][block_ids].max()) if self.tags is not None else 0
        return max(number, self.anywhere)

    def covering(self, number: int) -> _Event | None:
        """The event that covers a call and as little as possible beyond it."""
        return next((event for event in self.ring if event.covers >= number), None)

    def is_late(self, block_ids: BlockIds) -> bool:
        """Whether no event covers the last use of these blocks."""
        number = self.last(block_ids, writing=True)
        return number > self.done and self.covering(number) is None

    def events(self) -> list[int]:
        return [event.handle for event in self.ring] + self.spare


class Order:
    """The order of work on ``num_blocks`` blocks of one device.

    Block ids are int32 arrays of ids in range, in any order. Methods raise what ``Device.call``
    raises; what they queued before that only makes a stream wait longer, and the same call may be
    made again. Where a stream is being captured into a graph and an event would have to be
    recorded or waited for on it, they raise ``DeviceError`` before anything is queued.
    """

    def __init__(self, device: Device, num_blocks: int) -> None:
        self.device, self.num_blocks = device, num_blocks
        self._clocks: dict[Stream, _Clock] = {}
        self._writer: Stream | None = None  # see turn()
        self._turns = 0
        self._lock = threading.Lock()

    def __del__(self) -> None:
        if hasattr(self, "_lock"):
            self.close()

    # ---- blocks --------------------------------------------------------------------------

    def acquire(self, stream: Stream, block_ids: BlockIds, writing: bool) -> None:
        """Have ``stream`` wait for what other streams do with these blocks.

        For their writes and, when it is going to write, for their reads too. Call it before the
        work is queued. With one stream in use no call of the driver is made.
        """
        with self._lock:
            clock = self._tagged(stream)
            if len(self._clocks) > 1 and len(block_ids):
                self._come_after(
                    clock,
                    [
                        (other, other.last(block_ids, writing))
                        for other in self._clocks.values()
                        if other.queued > max(clock.waited.get(other.stream, 0), other.done)
                    ],
                )

    def used(self, stream: Stream, block_ids: BlockIds, writing: bool) -> None:
        """Note that work on these blocks has been queued on ``stream``. Makes no driver call."""
        with self._lock:
            self._note(self._tagged(stream), block_ids, writing)

    def publish(
        self, block_ids: BlockIds, stream: Stream | None = None, writing: bool = False
    ) -> None:
        """Record one event on every stream that used these blocks since its last event.

        Later acquirers then wait for no more than the work queued so far. ``stream``: a foreign
        kernel has been queued there that reads these blocks, or with ``writing`` changes them.
        """
        if not len(block_ids):
            return
        with self._lock:
            foreign = None if stream is None else self._tagged(stream)
            late = [
                clock
                for clock in self._clocks.values()
                if clock is foreign or clock.is_late(block_ids)
            ]
            try:
                self._refuse_captures([clock.stream for clock in late])
            except CaptureError:
                raise
            except PagedCacheError:
                if foreign is not None:  # the kernel is on its way, whatever the driver says
                    self._note(foreign, block_ids, writing)
                raise
            if foreign is not None:
                self._note(foreign, block_ids, writing)
            for clock in late:
                if self._record(clock) is None and clock is foreign:
                    raise DeviceError("a stream", f"{stream!r}, which was destroyed", "stream")

    def acquire_all(self, stream: Stream) -> None:
        """Have ``stream`` wait for all that other streams do: for work on unknown blocks."""
        with self._lock:
            clock = self._tagged(stream)
            self._come_after(clock, [(other, other.queued) for other in self._clocks.values()])

    def used_anywhere(self, stream: Stream) -> None:
        """Note that work was queued on ``stream`` that writes blocks which nobody knows here."""
        with self._lock:
            clock = self._tagged(stream)
            clock.queued += 1
            clock.anywhere = clock.queued
            self._turn(stream)

    def turn(self, stream: Stream) -> int:
        """A number that stays the same as long as no stream but this one writes blocks.

        Ask for it before ``acquire``: who acquired blocks then need not do so again while it
        stays.
        """
        with self._lock:
            self._turn(stream)
            return self._turns

    # ---- moments -------------------------------------------------------------------------

    def queued(self) -> dict[Stream, int]:
        """The number of the last call queued on each stream."""
        with self._lock:
            return {stream: clock.queued for stream, clock in self._clocks.items()}

    def passed(self, calls: dict[Stream, int]) -> None:
        """The host has waited for these calls: nobody needs to come after them any more."""
        with self._lock:
            for stream, number in calls.items():
                clock = self._clocks.get(stream)
                if clock is not None and number <= clock.queued:
                    clock.done = max(clock.done, number)

    def mark(self, stream: Stream) -> Mark:
        """The moment after all that is queued on ``stream`` now. Makes no driver call."""
        with self._lock:
            clock = self._clock(stream)
            clock.queued += 1
            return Mark(stream, clock.queued)

    def wait(self, stream: Stream, marks: Iterable[Mark]) -> None:
        """Have ``stream`` wait for moments of other streams."""
        with self._lock:
            clock = self._clock(stream)
            needed = []
            for other, number in marks:
                ahead = self._clocks.get(other)
                # A stream that was forgotten since, or counts anew, is done with its mark.
                if ahead is not None and number <= ahead.queued:
                    needed.append((ahead, number))
            self._come_after(clock, needed)

    def follow(self, stream: Stream, other: Stream) -> None:
        """Have ``stream`` wait for all that is queued on ``other``, also by foreign code."""
        if stream is other:
            return
        with self._lock:
            if other.forgotten and other not in self._clocks:
                return  # it was waited for, and its handle may be gone
            clock, ahead = self._clock(stream), self._clock(other)
            self._refuse_captures([stream, other])
            event = self._record(ahead)
            if event is not None:
                self._wait(clock, ahead, event)

    # ---- life ----------------------------------------------------------------------------

    def last_call(self, stream: Stream) -> int:
        """The number of the last call queued on a stream; 0 for a stream not seen yet."""
        with self._lock:
            clock = self._clocks.get(stream)
            return 0 if clock is None else clock.queued

    def forget(self, stream: Stream, number: int) -> bool:
        """Drop what is known of a stream whose calls up to ``number`` are done.

        False, and nothing is dropped, where another thread has queued more since.
        """
        with self._lock:
            clock = self._clocks.get(stream)
            if clock is None:
                return True
            if clock.queued != number:
                return False
            self._drop(clock)
        self._destroy(clock)
        return True

    def close(self) -> None:
        """Destroy the events; never raises. Idempotent."""
        with self._lock:
            clocks, self._clocks = self._clocks, {}
        for clock in clocks.values():
            self._destroy(clock)

    def _drop(self, clock: _Clock) -> None:
        del self._clocks[clock.stream]
        if self._writer is clock.stream:
            self._writer = None
        for other in self._clocks.values():
            other.waited.pop(clock.stream, None)

    def _destroy(self, clock: _Clock) -> None:
        for event in clock.events():
            self.device.give_back("pc_cuda_event_destroy", event)

    # ---- parts, under the lock -----------------------------------------------------------

    def _clock(self, stream: Stream) -> _Clock:
        clock = self._clocks.get(stream)
        if clock is None:
            clock = self._clocks[stream] = _Clock(stream)
            stream.track(self)
        return clock

    def _tagged(self, stream: Stream) -> _Clock:
        """The clock of a stream that uses blocks; all memory for it is taken here."""
        clock = self._clock(stream)
        if clock.tags is None:
            with taking(16 * self.num_blocks, f"the order of work on {stream!r}"):
                tags = np.zeros((2, self.num_blocks), np.int64)
            clock.tags = tags[0], tags[1]
        return clock

    def _note(self, clock: _Clock, block_ids: BlockIds, writing: bool) -> None:
        clock.queued += 1
        assert clock.tags is not None
        written, used = clock.tags
        used[block_ids] = clock.queued
        if writing:
            written[block_ids] = clock.queued
            self._turn(clock.stream)

    def _turn(self, stream: Stream) -> None:
        if stream is not self._writer:
            self._writer = stream
            self._turns += 1

    def _come_after(self, clock: _Clock, needed: list[tuple[_Clock, int]]) -> None:
        last: dict[Stream, tuple[_Clock, int]] = {}
        for other, number in needed:
            done = max(clock.waited.get(other.stream, 0), other.done)
            if other is not clock and number > max(done, last.get(other.stream, (other, 0))[1]):
                last[other.stream] = other, number
        if not last:
            return
        late = [other.stream for other, number in last.values() if not other.covering(number)]
        self._refuse_captures([clock.stream, *late])
        for other, number in last.values():
            event = other.covering(number) or self._record(other)
            if event is not None:
                self._wait(clock, other, event)

    def _refuse_captures(self, streams: list[Stream]) -> None:
        for stream in streams:
            stream.refuse_capture("order of streams")

    def _wait(self, clock: _Clock, other: _Clock, event: _Event) -> None:
        self.device.call("pc_cuda_stream_wait", event.handle, clock.stream.handle)
        clock.waited[other.stream] = event.covers

    def _record(self, clock: _Clock) -> _Event | None:
        """A new event on a stream; None for a stream that was destroyed: its work is done then."""
        if len(clock.ring) == RING:
            clock.spare.append(clock.ring.popleft().handle)
        if not clock.spare:
            clock.spare.append(self.device.create_event())
        handle = clock.spare[-1]
        try:
            self.device.call("pc_cuda_event_record", handle, clock.stream.handle)
        except CudaCallError as error:
            if error.code not in GONE:
                raise
            self.device.synchronize()  # the only way to come after work that is still under way
            self._drop(clock)
            self._destroy(clock)
            return None
        clock.spare.pop()
        event = _Event(handle, clock.queued)
        clock.ring.append(event)
        return event
