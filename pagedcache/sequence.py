"""One request's handle: opening, writing, committing, forking and giving back.

What a handle shows (lengths, tables, slots, gathered arrays, views) is in ``reading.py``.

How far a sequence goes, in tokens from its start::

    0 … seq_len        computed: committed as valid, matchable by others once a block is full
    … num_written      bytes of every layer stored by this sequence's own append
    … num_tokens       known or opened for
    … num_blocks * block_size   room in the table
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from pagedcache.arguments import as_count, as_flag, as_layer, as_position
from pagedcache.arrays import as_tokens
from pagedcache.errors import FreedHandleError, InvalidArgumentError, InvalidPositionError
from pagedcache.pointers import SequencePointers
from pagedcache.reading import AppendedViews, SequenceReading

if TYPE_CHECKING:
    from pagedcache.bookkeeping import SlotMapping


class AppendResult(NamedTuple):
    """What ``append`` gives back; unpacks as ``views, start``."""

    views: AppendedViews
    """Views of the layer up to the new end; nothing is pinned until they are looked at."""
    start: int
    """Position of the first token written."""


class Sequence(SequenceReading, SequencePointers):
    """One token stream that owns a block table of a ``PagedKVCache``.

    Made by ``cache.open`` or ``seq.fork``, never directly. A context manager: leaving the block
    frees it. Writers of one handle must take turns; readers may run beside a writer. After
    ``free()`` (or the cache's ``close()``) every use raises ``FreedHandleError``.
    """

    __slots__ = ()

    # ---- tokens --------------------------------------------------------------------------

    def allocate_for_tokens(
        self,
        tokens: Any,
        *,
        resumed: bool = False,
        allocate_upto: int | None = None,
        stream: Any = None,
    ) -> int:
        """Match the longest cached prefix of ``tokens`` and take blocks for the rest.

        What ``cache.open(tokens)`` does, for a handle that was opened without tokens; salt,
        adapter and extra keys are those given to ``open``, arguments and errors are the same.
        Returns ``num_cached_tokens``. Raises ``InvalidArgumentError`` when the sequence holds
        tokens or blocks already, ``OutOfBlocksError`` with nothing changed.
        """
        cache, state = self._cache, self._state
        queue = cache._queue(stream)
        cache._movers.run(
            queue,
            cache._ledger.allocate_tokens,
            state,
            as_tokens(tokens),
            -1 if allocate_upto is None else as_count(allocate_upto, "allocate_upto"),
            as_flag(resumed, "resumed"),
        )
        if queue is not None:
            self._acquire(queue, int(state.num_cached_tokens) // cache.spec.block_size)
        return int(state.num_cached_tokens)

    def append_token(self, token: int) -> None:
        """Add one token (0…2^32 - 1) to the known history; takes no block.

        Raises ``InvalidArgumentError`` for a value outside uint32 and ``SequenceTooLongError``.
        """
        self._cache._ledger.append_token(self._state, token)

    def append_tokens(self, tokens: Any) -> None:
        """Add tokens (list, tuple, range or integer array) to the known history, as above."""
        self._cache._ledger.append_tokens(self._state, as_tokens(tokens))

    # ---- writing -------------------------------------------------------------------------

    def append(
        self,
        layer: int,
        k: Any,
        v: Any,
        *,
        on_nonfinite: str | None = None,
        stream: Any = None,
    ) -> AppendResult:
        """Write new tokens of one layer at that layer's own written end.

        ``k`` and ``v``: ``[new_tokens, num_kv_heads, head_dim]`` or
        ``[new_tokens, num_kv_heads * head_dim]`` of float32, float16 or bfloat16, any strides;
        for a layer on a GPU both on that GPU, or both on the host, and the work is queued on
        ``stream``. The table grows and shared or cached blocks are copied as needed. Returns the
        views of the layer so far and the start position.

        Raises, before any byte is written, ``ShapeError``, ``FormatError`` (also with
        ``storage=None``), ``DeviceError``, ``NonFiniteError`` (quantised formats under
        ``"raise"``), ``SequenceTooLongError`` or ``OutOfBlocksError``.
        """
        return self._write(layer, k, v, -1, on_nonfinite, stream)

    def append_kv(
        self,
        layer: int,
        k: Any,
        v: Any,
        start_pos: int,
        *,
        on_nonfinite: str | None = None,
        stream: Any = None,
    ) -> AppendResult:
        """Write tokens of one layer from position ``start_pos`` on; arrays, result and errors as
        for ``append``.

        Raises ``InvalidPositionError`` when ``start_pos`` lies past the layer's written end (a
        gap would hold bytes nobody wrote).
        """
        start = as_position(start_pos, "start_pos", lambda: self.written(layer))
        if start < 0:  # to the ledger, -1 would mean the written end
            raise InvalidPositionError(start, self.written(layer), "start_pos")
        return self._write(layer, k, v, start, on_nonfinite, stream)

    def _write(
        self, layer: Any, k: Any, v: Any, start: int, on_nonfinite: str | None, stream: Any
    ) -> AppendResult:
        cache, state = self._cache, self._state
        storage, ledger = cache._storage, cache._ledger
        layer = as_layer(layer, cache.spec.num_layers)
        queue = cache._queue(stream)
        k, v = storage.check_rows(layer, k, v, None, on_nonfinite, queue)
        num_tokens = len(k)
        if queue is None:
            start, pin = ledger.begin_append(state, layer, num_tokens, start)
        else:
            start, pin = cache._movers.run(
                queue, ledger.begin_append, state, layer, num_tokens, start
            )
        try:
            storage.store(layer, k, v, pin.slots, on_nonfinite, queue)
        except BaseException:
            pin.release()
            raise
        ledger.end_append(state, layer, start, num_tokens, pin)
        return AppendResult(AppendedViews(self, layer, start + num_tokens, stream), start)

    def prepare(self, num_tokens: int, *, stream: Any = None) -> SlotMapping:
        """Make the next ``num_tokens`` positions writable and return their ``SlotMapping``.

        Grows the table and copies shared or cached blocks in the write range (copy-on-write), all
        or nothing. The mapping serves ``cache.store`` for every layer. Raises
        ``OutOfBlocksError`` or ``SequenceTooLongError`` with nothing changed.
        """
        return self._cache.prepare((self,), (num_tokens,), stream=stream)

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks that ``prepare(num_tokens)`` would take now: growth and copies-on-write."""
        count = as_count(num_tokens, "num_tokens")
        return int(self._cache._ledger.prepare_blocks_needed(self._state, count))

    # ---- lengths -------------------------------------------------------------------------

    def commit(self, num_tokens: int, *, stream: Any = None) -> None:
        """Mark the next ``num_tokens`` tokens computed.

        Blocks that become full and whose tokens are known become cached blocks. Tokens of unknown
        value may be committed; their block and all behind it are then never cached. ``stream``:
        where kernels of your own wrote the tokens; what our calls queued is known. A hit on
        another stream waits, on the device, for one event that this call records.

        Where part-filled blocks are open (``CacheSpec.open_blocks``), a block is quantised once it
        is full and ``block_size`` tokens behind the end, and cached then; on a GPU that is queued
        on ``stream``.

        Raises ``InvalidPositionError`` past the table's end or past what the sequence's own
        ``append`` wrote in every layer, ``PendingCopyError`` while the engine owes a block copy.
        """
        cache, state, count = self._cache, self._state, as_count(num_tokens, "num_tokens")
        if not cache._on_device and stream is None:
            cache._ledger.commit(state, count)
            return
        queue = cache._queue(stream)
        cache._settle([state], [state.seq_len + count], stream)
        cache._movers.run(queue, cache._ledger.commit, state, count)

    def truncate(self, length: int, *, stream: Any = None) -> None:
        """Rewind to ``length`` tokens: blocks past it are released, tokens past it forgotten.

        What cached blocks promise stays true: a later write copies first. ``stream``: where
        kernels of your own may still read the blocks that are released. Raises
        ``InvalidPositionError`` unless ``0 <= length <= num_tokens``.
        """
        count = as_position(length, "length", lambda: self.num_tokens)
        cache, state = self._cache, self._state
        if (cache._on_device or stream is not None) and count >= 0:
            cache._let_go(state, count // cache.spec.block_size, stream)
        cache._ledger.truncate(state, count)

    # ---- life ----------------------------------------------------------------------------

    def fork(self, *, request_id: Any = None) -> Sequence:
        """A second sequence with the same tokens that shares all blocks; no bytes are copied.

        O(blocks). Whoever writes first to a shared block gets a copy of it. ``request_id`` names
        the child (the parent's is not taken over); as for ``cache.open`` it must not be live.
        """
        return self._cache._admit(lambda ledger: ledger.fork(self._state), request_id)

    def free(self, *, stream: Any = None) -> None:
        """Give every block back, the tail first; idempotent.

        Cached blocks stay matchable until their storage is needed. Views keep their blocks. Full
        blocks that are still open are quantised first, so that they are cached too; not so where a
        handle is dropped without this call, or a view or a fork still holds them.
        ``stream``: where kernels of your own may still use the blocks; who gets them next comes
        after those kernels, on the device.
        """
        if not self._state.freed:
            cache = self._cache
            try:
                if cache._on_device or stream is not None:
                    queue = cache._queue(stream)
                    cache._let_go(self._state, 0, stream)
                    self._drop_pointers(None if stream is None else queue)
                    cache._movers.run(queue, cache._ledger.free, self._state)
                else:
                    cache._ledger.free(self._state)
            except FreedHandleError:
                return  # close() came first, in another thread: it frees every sequence
            cache._handles.forget(self.seq_id, self.request_id)

    def __enter__(self) -> Sequence:
        if self._state.freed:
            raise FreedHandleError(f"sequence {self.seq_id}")
        return self

    def __exit__(self, *exc: object) -> None:
        self.free()


def states_of(seqs: Any) -> list[Any]:
    """Bookkeeping states of an iterable of sequences, or ``InvalidArgumentError``.

    Whether they belong to the cache at hand is the ledger's to check.
    """
    if not isinstance(seqs, (list, tuple)):
        seqs = listed(seqs)
    try:
        return [seq._state for seq in seqs]
    except AttributeError:
        pass
    for seq in seqs:
        if not isinstance(seq, Sequence):
            kind = type(seq).__name__
            raise InvalidArgumentError(f"expected a list of sequences of this cache, got {kind}")
    raise InvalidArgumentError("a Sequence is made by cache.open() or seq.fork(), not by itself")


def listed(seqs: Any) -> list[Any]:
    """The sequences as a list of its own; ``InvalidArgumentError`` for what holds none."""
    if isinstance(seqs, Sequence):
        raise InvalidArgumentError("expected a list of sequences, got one Sequence")
    try:
        return list(seqs)
    except (TypeError, OverflowError, MemoryError):
        kind = type(seqs).__name__
        raise InvalidArgumentError(
            f"expected a list of sequences of this cache, got {kind}"
        ) from None
