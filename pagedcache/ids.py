"""The id-based style: sequences named by unique, never reused integers.

The same sequences as ``cache.open`` makes: an id works on a handle's sequence too
(``seq.seq_id``), and ``cache.sequence(seq_id)`` gives the handle of an id. Sequences made by id
live until ``free_sequence``, whether or not anybody holds a handle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagedcache.arguments import as_count, as_integer, as_position
from pagedcache.arrays import as_tokens
from pagedcache.errors import OutOfBlocksError, SequenceNotFoundError, SequenceTooLongError
from pagedcache.sequence import Sequence

if TYPE_CHECKING:
    from pagedcache.handles import Handles
    from pagedcache.spec import CacheSpec


class IdStyle:
    """Mixin of ``PagedKVCache``; every method raises ``InvalidArgumentError`` for a value that
    is no integer and, unless it says otherwise, ``SequenceNotFoundError`` for an unknown id.
    """

    spec: CacheSpec
    _handles: Handles
    _ledger: Any
    _storage: Any
    _movers: Any
    _queue: Any
    _settle: Any
    _let_go: Any

    def allocate_sequence(self, num_tokens: int) -> int:
        """Make a sequence with room for ``num_tokens`` tokens and none computed; returns its id.

        Raises ``OutOfBlocksError`` or ``SequenceTooLongError`` with nothing changed.
        """
        count = as_count(num_tokens, "num_tokens")
        ledger = self._ledger
        self._refuse_early(ledger, count)
        return self._own(ledger.open(as_tokens(()), room=count))

    def _refuse_early(self, ledger: Any, num_tokens: int) -> None:
        """Raise what the ledger does not: a request that no sequence and no pool can hold."""
        longest, pool = self.spec.max_seq_len, ledger.pool
        if longest is not None and num_tokens > longest:
            raise SequenceTooLongError(num_tokens, longest)
        needed, available = -(-num_tokens // self.spec.block_size), pool.num_free_blocks
        if needed > available:
            raise OutOfBlocksError(needed, available, pool.num_blocks)

    def fork_sequence(self, seq_id: int) -> int:
        """Fork a sequence (all blocks shared, copied when written); returns the child's id."""
        return self._own(self._ledger.fork(self._find(seq_id)))

    def free_sequence(self, seq_id: int, *, stream: Any = None) -> None:
        """Give a sequence's blocks back. An unknown or freed id: nothing happens.

        ``stream`` as for ``Sequence.free``.
        """
        try:
            state = self._find(seq_id)
        except SequenceNotFoundError:
            return
        seq = self._handles.handle(int(state.serial))
        if seq is not None:
            seq.free(stream=stream)  # type: ignore[attr-defined]
        else:
            self._let_go(state, 0, stream)
            self._movers.run(self._queue(stream), self._ledger.free, state)
            self._handles.forget(int(state.serial))

    def extend(self, seq_id: int, num_tokens: int) -> None:
        """Make room for ``num_tokens`` more tokens.

        Raises ``OutOfBlocksError`` or ``SequenceTooLongError`` with nothing changed.
        """
        count = as_count(num_tokens, "num_tokens")
        self._ledger.extend(self._find(seq_id), count)

    def sequence_tokens(self, seq_id: int) -> int:
        """Tokens the sequence holds: its computed length, 0 right after ``allocate_sequence``."""
        return int(self._find(seq_id).seq_len)

    def update_tokens(self, seq_id: int, num_tokens: int, *, stream: Any = None) -> None:
        """Set the computed length: growing commits, shrinking cuts the length and keeps blocks; the
        length it has already changes nothing. ``stream`` as for ``Sequence.commit``.

        Never changes what another sequence sees. Raises ``InvalidPositionError`` past the room
        of the table.
        """
        state = self._find(seq_id)
        count = as_position(num_tokens, "num_tokens", lambda: self._room(state))
        self._settle([state], [count], stream)
        self._movers.run(self._queue(stream), self._ledger.set_computed, state, count)

    def block_at(self, seq_id: int, position: int) -> int:
        """Id of the block that holds ``position``, for reading.

        The offset inside it is ``position % block_size``. Raises ``InvalidPositionError`` past
        the room of the table.
        """
        state = self._find(seq_id)
        place = as_position(position, "position", lambda: self._room(state))
        return int(state.block_for_position(place))

    def writable_block_at(self, seq_id: int, position: int, *, stream: Any = None) -> int:
        """Id of the block that holds ``position``, for writing: a shared block is copied first.

        Raises ``InvalidPositionError``, or ``OutOfBlocksError`` with nothing changed when the
        copy finds no block.
        """
        state = self._find(seq_id)
        place = as_position(position, "position", lambda: self._room(state))
        queue = self._queue(stream)
        block = int(self._movers.run(queue, self._ledger.make_writable, state, place))
        if queue is not None:
            index = place // self.spec.block_size
            self._storage.acquire(state.places(index, index + 1), queue, True)
        return block

    def sequence(self, seq_id: int) -> Sequence:
        """The handle of a live sequence."""
        state = self._find(seq_id)
        seq = self._handles.handle(int(state.serial))
        if isinstance(seq, Sequence):
            return seq
        made = Sequence(self, state)  # type: ignore[arg-type]
        self._handles.add(made)
        return made

    def live_sequences(self) -> list[int]:
        """Ids of all live sequences, ascending."""
        self._ledger.layout_epoch  # noqa: B018 - refuses on a closed cache
        return self._handles.live_ids()

    def _find(self, seq_id: Any) -> Any:
        number = as_integer(seq_id, "seq_id")
        self._ledger.layout_epoch  # noqa: B018 - refuses on a closed cache
        return self._handles.state(number)

    def _room(self, state: Any) -> int:
        return int(state.num_blocks) * self.spec.block_size

    def _own(self, state: Any) -> int:
        seq_id = int(state.serial)
        self._handles.own(seq_id, state)
        return seq_id
