"""Which handles of a cache are alive: found by id and by request, owned by the id-based style."""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakValueDictionary, ref

from pagedcache.errors import (
    FreedHandleError,
    InvalidArgumentError,
    SequenceNotFoundError,
    shown,
)
from pagedcache.reading import SequenceReading


class _Kept(ref[SequenceReading]):
    """A weak reference that knows the id it is kept under."""

    __slots__ = ("seq_id",)
    seq_id: int


class Handles:
    """Registry of one cache. It keeps no handle alive: a dropped sequence gives its blocks back.

    Sequences made by id are kept by their bookkeeping state (no cycle through the cache) until
    ``free_sequence``; their handles are made when somebody asks for them.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a request id may have a hash of its own
        # A plain dictionary: nobody runs over it, so it may change at any time, and every open()
        # and free() passes here. Ids are never used twice.
        self._by_id: dict[int, _Kept] = {}
        owner = ref(self)

        def gone(kept: Any) -> None:
            handles = owner()
            if handles is not None:
                handles._by_id.pop(kept.seq_id, None)

        self._gone = gone
        self._by_request: WeakValueDictionary[Any, SequenceReading] = WeakValueDictionary()
        self._claimed: set[Any] = set()
        self._owned: dict[int, Any] = {}
        self._closed = False

    def claim(self, request_id: Any) -> None:
        """Keep others from opening ``request_id`` until ``add`` or ``unclaim``.

        Raises ``InvalidArgumentError`` when it is live, or no hashable value.
        """
        try:
            hash(request_id)
        except TypeError:
            kind = type(request_id).__name__
            raise InvalidArgumentError(f"request_id must be hashable, got {kind}") from None
        with self._lock:
            holder = self._by_request.get(request_id)
            if request_id in self._claimed or (holder is not None and not holder.freed):
                raise InvalidArgumentError(
                    f"request {shown(request_id)} is live; free it first or choose another id"
                )
            self._claimed.add(request_id)

    def unclaim(self, request_id: Any) -> None:
        """End of a claim that led to no sequence."""
        with self._lock:
            self._claimed.discard(request_id)

    def add(self, seq: SequenceReading) -> None:
        """Register a new handle; ``FreedHandleError`` when the cache was closed meanwhile."""
        kept = _Kept(seq, self._gone)
        kept.seq_id = seq.seq_id
        with self._lock:
            self._refuse_closed()
            self._by_id[kept.seq_id] = kept
            if seq.request_id is not None:
                self._by_request[seq.request_id] = seq
                self._claimed.discard(seq.request_id)

    def own(self, seq_id: int, state: Any) -> None:
        """Keep a sequence of the id-based style alive."""
        with self._lock:
            self._refuse_closed()
            self._owned[seq_id] = state

    def _refuse_closed(self) -> None:
        if self._closed:
            raise FreedHandleError("this cache")

    def forget(self, seq_id: int, request_id: Any = None) -> None:
        """A sequence was freed."""
        self._by_id.pop(seq_id, None)  # one step each, so that no lock is needed
        self._owned.pop(seq_id, None)
        if request_id is None:
            return
        with self._lock:
            holder = self._by_request.get(request_id)
            if holder is not None and holder.seq_id == seq_id:
                del self._by_request[request_id]

    def state(self, seq_id: int) -> Any:
        """Bookkeeping state of a live sequence; ``SequenceNotFoundError`` for another id."""
        state = self._owned.get(seq_id)
        if state is None:
            seq = self.handle(seq_id)
            if seq is None or seq.freed:
                raise SequenceNotFoundError(seq_id)
            state = seq._state
        return state

    def handle(self, seq_id: int) -> SequenceReading | None:
        """The existing handle of an id, if there is one."""
        kept = self._by_id.get(seq_id)
        return None if kept is None else kept()

    def live_ids(self) -> list[int]:
        """Ids of the live sequences, ascending."""
        with self._lock:
            found = set(self._owned)
            found.update(seq.seq_id for seq in self._alive() if not seq.freed)
        return sorted(found)

    def _alive(self) -> list[SequenceReading]:
        """The handles that exist; safe from finalizers that open or free while it is made.

        Collection may start at any allocation, in this thread, inside the lock: so nothing may
        run over a dictionary while objects are made. One copy of its values comes first.
        """
        references = list(self._by_id.values())
        return [seq for seq in (reference() for reference in references) if seq is not None]

    def close(self) -> list[Any]:
        """Refuse new handles and return the states of all live ones."""
        with self._lock:
            self._closed = True
            states = {seq.seq_id: seq._state for seq in self._alive()}
            states.update(self._owned)
            self._owned.clear()
            for seq in self._alive():
                seq._pointers.clear()
        return list(states.values())
