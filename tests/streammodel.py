"""A slow model of CUDA streams, which imports nothing from the package, and a device that has one.

A stream is a queue: what is queued later comes later. An event holds a moment of the stream it was
last recorded on; a stream that waits for it comes after that moment, whatever is recorded on the
event afterwards. So every operation has a vector clock, and of two operations the first comes
before the second exactly if its number is within the second one's clock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

Moment = dict[int, int]  # stream -> the number of its last operation that has happened before


@dataclass
class Operation:
    """Work on blocks, as it was queued."""

    stream: int
    number: int
    reads: set[int]
    writes: set[int]
    after: Moment

    def conflicts(self, other: Operation) -> set[int]:
        """The blocks for which the two must not run at the same time."""
        return (
            (self.writes & other.writes)
            | (self.writes & other.reads)
            | (self.reads & other.writes)
        )

    def comes_before(self, other: Operation) -> bool:
        return other.after.get(self.stream, 0) >= self.number


class StreamModel:
    """Streams by handle, events by handle, and all work that was queued."""

    def __init__(self) -> None:
        self._now: dict[int, Moment] = {}  # by stream: what its next operation comes after
        self._host: Moment = {}  # what the host has waited for; all later work comes after it
        self.events: dict[int, Moment | None] = {}
        self.operations: list[Operation] = []
        self._numbers: Counter[int] = Counter()

    def moment(self, stream: int) -> Moment:
        return self._now.setdefault(stream, dict(self._host))

    def queue(self, stream: int, reads: set[int], writes: set[int]) -> Operation:
        self._numbers[stream] += 1
        moment = self.moment(stream)
        moment[stream] = self._numbers[stream]
        made = Operation(stream, self._numbers[stream], reads, writes, dict(moment))
        self.operations.append(made)
        return made

    def unordered(self, operation: Operation) -> list[Operation]:
        """Earlier work that conflicts with ``operation`` and does not come before it."""
        earlier = self.operations[: self.operations.index(operation)]
        return [o for o in earlier if o.conflicts(operation) and not o.comes_before(operation)]

    def create_event(self) -> int:
        handle = 0x1000 + len(self.events)
        self.events[handle] = None
        return handle

    def record(self, event: int, stream: int) -> None:
        self.events[event] = dict(self.moment(stream))

    def wait(self, event: int, stream: int) -> None:
        merge(self.moment(stream), self.events[event] or {})

    def finish(self, stream: int) -> None:
        """The host waits for a stream: all that is queued from now on comes after it."""
        done = dict(self.moment(stream))
        for moment in (self._host, *self._now.values()):
            merge(moment, done)


def merge(moment: Moment, other: Moment) -> None:
    for stream, number in other.items():
        moment[stream] = max(moment.get(stream, 0), number)


class ModelDevice:
    """Stands in for a ``Device``: its calls go to a :class:`StreamModel` and are counted.

    ``fail_in``: the call of this number from now on raises ``error``; 0 for none. ``captured`` and
    ``destroyed``: handles of streams; a call on a destroyed one raises ``gone``.
    """

    ordinal, name, broken = 0, "cuda:0", None

    def __init__(self, error: Exception, gone: Exception | None = None) -> None:
        self.model = StreamModel()
        self.calls: Counter[str] = Counter()
        self.captured: set[int] = set()
        self.destroyed: set[int] = set()
        self.gone = gone or error
        self.live_events: set[int] = set()
        self.error = error
        self.fail_in = 0

    def _begin(self, name: str) -> None:
        self.calls[name] += 1
        if self.fail_in:
            self.fail_in -= 1
            if not self.fail_in:
                raise self.error

    def call(self, name: str, *args: Any) -> None:
        self._begin(name)
        if args[-1] in self.destroyed:  # the stream is the last argument
            raise self.gone
        if name == "pc_cuda_event_record":
            assert args[0] in self.live_events
            assert args[1] not in self.captured, "recorded on a stream that is being captured"
            self.model.record(*args)
        elif name == "pc_cuda_stream_wait":
            assert args[0] in self.live_events
            assert args[1] not in self.captured, "waited on a stream that is being captured"
            self.model.wait(*args)
        elif name == "pc_cuda_stream_capturing":
            args[0]._obj.value = args[1] in self.captured
        elif name == "pc_cuda_stream_synchronize":
            self.model.finish(args[0])
        else:
            raise AssertionError(f"unexpected call of {name}")

    def ordinal_of_stream(self, handle: int) -> int:
        return self.ordinal

    def synchronize(self) -> None:
        self.calls["synchronize"] += 1
        for stream in list(self.model._now):
            self.model.finish(stream)

    def create_event(self) -> int:
        self._begin("pc_cuda_event_create")
        event = self.model.create_event()
        self.live_events.add(event)
        return event

    def give_back(self, name: str, *args: Any) -> None:
        assert name == "pc_cuda_event_destroy"
        self.live_events.remove(args[0])

    @property
    def order_calls(self) -> int:
        """Calls that tie streams together: events made or recorded, and waits."""
        names = ("event_create", "event_record", "stream_wait")
        return sum(self.calls[f"pc_cuda_{name}"] for name in names)
