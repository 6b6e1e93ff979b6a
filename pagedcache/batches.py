"""Batch paths for engines: one call a step for many sequences, and the tables kernels read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pagedcache.arguments import as_count, as_flag, as_layer
from pagedcache.arrays import as_amounts, as_slots, as_tokens
from pagedcache.bookkeeping import SlotMapping
from pagedcache.sequence import Sequence, listed, states_of

if TYPE_CHECKING:
    from pagedcache.door import Door
    from pagedcache.spec import CacheSpec

Array = np.ndarray[Any, Any]


class PageTable(NamedTuple):
    """CSR page table, int32, as FlashInfer takes it."""

    kv_indptr: Array
    """``[num_seqs + 1]``: where each sequence's ids start in ``kv_indices``."""
    kv_indices: Array
    """``[total blocks]``: block ids, sequence by sequence, in token order."""
    kv_last_page_len: Array
    """``[num_seqs]``: tokens in each last block, 1…block_size (0 only for an empty row)."""


class BatchPaths:
    """Mixin of ``PagedKVCache``: prepare, store and exports for many sequences in one call."""

    spec: CacheSpec
    _ledger: Any
    _storage: Any
    _door: Door | None
    _movers: Any
    _on_device: bool
    _queue: Any
    _only_ours: Any
    _ready: Any
    _settle: Any
    _refuse_open: Any

    def prepare(
        self, seqs: Iterable[Sequence], counts: Any, *, stream: Any = None
    ) -> SlotMapping:
        """Make the next ``counts[i]`` positions of every ``seqs[i]`` writable, in one step.

        Grows the tables and copies shared or cached blocks in the write ranges (copy-on-write),
        all or nothing. Returns one checked ``SlotMapping`` (int64, ``sum(counts)`` slots in the
        order of ``seqs``) that serves every layer, until blocks move or change hands. On a GPU the
        sequences' blocks are then safe on ``stream``, to be read and written there, by kernels of
        your own too.

        Raises ``OutOfBlocksError``, ``SequenceTooLongError`` or ``InvalidArgumentError`` (a
        sequence given twice or of another cache, counts that do not match) with nothing changed.
        """
        seqs = seqs if isinstance(seqs, (list, tuple)) else listed(seqs)
        states = states_of(seqs)
        queue = self._queue(stream)
        amounts, prepare = as_amounts(counts, "counts"), self._ledger.prepare
        if queue is None:
            mapping: SlotMapping = prepare(states, amounts)
        else:
            mapping = self._movers.run(queue, prepare, states, amounts)
            self._ready(seqs, mapping.place_slots, queue)
        return mapping

    def step(
        self,
        seqs: Iterable[Sequence],
        tokens: Any,
        counts: Any = None,
        *,
        stream: Any = None,
    ) -> SlotMapping:
        """The bookkeeping between two forward passes of a batch, in one call: commit what the last
        one computed, name the tokens that were sampled, and make their positions writable.

        1. Every sequence commits what was named and made writable before: the tokens of the
           last ``step``, or of ``prepare``. Drop rejected drafts by ``seq.truncate`` first.
        2. Its next ``counts[i]`` positions (one each by default) become writable, as ``prepare``
           makes them: the ``SlotMapping`` lists their slots in the order of ``seqs``.
        3. ``tokens`` (a list or integer array) names those of these positions that have no token
           yet, in the same order: what was sampled. A sequence that still computes its prompt,
           known since ``open``, takes none, so one call serves a batch of both kinds.

        Raises what ``commit``, ``append_tokens`` and ``prepare`` raise, with nothing changed: free
        or preempt somebody and call again. Two errors are found only when the commit is made,
        which then stands, in a cache that keeps blocks open (``CacheSpec.open_blocks``):
        ``OutOfOpenBlocksError``, as the commit frees open blocks, and a failure to copy bytes.
        Calling again commits nothing twice. ``stream``: as for ``commit`` and ``prepare``.
        """
        seqs = seqs if isinstance(seqs, (list, tuple)) else listed(seqs)
        states = states_of(seqs)
        each = None if counts is None else as_amounts(counts, "counts")
        sampled, queue, step = as_tokens(tokens), self._queue(stream), self._ledger.step
        if queue is None:
            mapping: SlotMapping = step(states, sampled, each)
            return mapping
        self._only_ours(seqs)
        self._settle(states, [state.num_prepared for state in states], stream)
        mapping = self._movers.run(queue, step, states, sampled, each)
        self._ready(seqs, mapping.place_slots, queue)
        return mapping

    def store(
        self,
        layer: int,
        k: Any,
        v: Any,
        slot_mapping: SlotMapping | Any,
        on_nonfinite: str | None = None,
        *,
        stream: Any = None,
    ) -> None:
        """Write K and V of many tokens of one layer: token ``i`` goes to ``slot_mapping[i]``.

        ``k`` and ``v``: ``[num_tokens, num_kv_heads, head_dim]`` or
        ``[num_tokens, num_kv_heads * head_dim]`` of float32, float16 or bfloat16. ``slot_mapping``
        is what ``prepare`` returned, or int64 slots of the caller's own (-1 skips a token), which
        are checked in full each time.

        For a layer on a GPU, ``k`` and ``v`` lie both on it or both on the host, and the work is
        queued on ``stream``. Slots may lie there too (int64, contiguous): nobody can check those
        on the host, so you vouch for them (they were prepared, nobody shares them); slots outside
        the pool are skipped and reported by ``synchronize()``. With device arrays throughout, and
        a float format or ``"saturate"``, only kernels are queued, so that the call can be captured
        into a CUDA graph.

        Raises, before any byte is written, ``ShapeError``, ``FormatError`` (also with
        ``storage=None``), ``DeviceError``, ``NonFiniteError``, ``StaleMappingError`` (blocks
        moved or changed hands since ``prepare``), ``SlotError`` (out of range, given twice, in a
        shared, cached or free block) or ``PendingCopyError``.
        """
        door = self._door
        if door is not None and on_nonfinite is None and stream is None:
            if door.store(layer, k, v, slot_mapping):
                return
        storage, ledger = self._storage, self._ledger
        queue = self._queue(stream)
        layer = as_layer(layer, self.spec.num_layers)
        prepared = isinstance(slot_mapping, SlotMapping)
        if not prepared and queue is not None:
            raw = storage.device_slots(slot_mapping, "slot_mapping")
            if raw is not None:
                self._refuse_open("slots on the host, which knows what is open, or prepare()")
                k, v = storage.check_rows(layer, k, v, len(raw), on_nonfinite, queue)
                storage.store_raw(layer, k, v, raw, on_nonfinite, queue)
                return
        slots = slot_mapping if prepared else as_slots(slot_mapping, "slot_mapping")
        k, v = storage.check_rows(layer, k, v, len(slots), on_nonfinite, queue)
        with ledger.pin_mapping(slots) if prepared else ledger.pin_slots(slots) as pin:
            storage.store(
                layer, k, v, pin.slots, on_nonfinite, queue, slots if prepared else None
            )

    def commit(
        self, seqs: Iterable[Sequence], counts: Any, *, stream: Any = None
    ) -> None:
        """``seq.commit(counts[i])`` for every ``seqs[i]`` in one step, all or nothing.

        ``stream`` and errors as for ``Sequence.commit``, and ``InvalidArgumentError`` for a
        sequence given twice or of another cache and for counts that do not match.
        """
        seqs = seqs if isinstance(seqs, (list, tuple)) else listed(seqs)
        states, amounts = states_of(seqs), as_amounts(counts, "counts")
        queue = self._queue(stream)
        if (self._on_device or stream is not None) and len(amounts) == len(states):
            self._only_ours(seqs)
            numbers = [as_count(amount, "counts") for amount in amounts]
            ends = [state.seq_len + n for state, n in zip(states, numbers, strict=True)]
            self._settle(states, ends, stream)
        self._movers.run(queue, self._ledger.commit_many, states, amounts)

    def append_tokens(
        self, seqs: Iterable[Sequence], tokens: Any, counts: Any = None
    ) -> None:
        """Add tokens to the known histories of many sequences in one step, all or nothing.

        ``tokens``: one per sequence, or, with ``counts``, ``sum(counts)`` of them in the order of
        ``seqs``; a list or integer array of values 0…2^32 - 1. Errors as for
        ``Sequence.append_tokens`` and ``commit``.
        """
        each = None if counts is None else as_amounts(counts, "counts")
        self._ledger.append_many(states_of(seqs), as_tokens(tokens), each)

    def block_tables(
        self, seqs: Iterable[Sequence], lengths: Any = None, *, group: int = 0
    ) -> Array:
        """Block ids of many sequences, int32 ``[num_seqs, max_blocks]``, padded with id 0.

        Row i has the ``ceil(length / block_size)`` blocks of sequence i; ``lengths`` default to
        ``seq_len``. ``[]`` gives shape (0, 0). Raises ``InvalidPositionError`` for a length past
        a table.
        """
        _only_group(group)
        states = states_of(seqs)
        return self._ledger.block_tables(states, _as_lengths(lengths))

    def page_table(
        self,
        seqs: Iterable[Sequence],
        lengths: Any = None,
        allow_empty: bool = False,
        *,
        group: int = 0,
    ) -> PageTable:
        """Block ids of many sequences as CSR (``PageTable``), with the fill of each last block.

        A sequence of length 0 raises ``InvalidArgumentError`` that names it, or with
        ``allow_empty`` gives an empty row with last length 0. ``lengths`` and other errors as
        for ``block_tables``.
        """
        _only_group(group)
        states = states_of(seqs)
        empty = as_flag(allow_empty, "allow_empty")
        rows = self._ledger.page_table(states, _as_lengths(lengths), empty)
        return PageTable(*rows)

    def take_block_copies(self) -> tuple[Array, int]:
        """Block copies the engine must make: int32 ``[n, 2]`` of (src, dst), and a ticket.

        For ``storage=None``. The list is right in order and in parallel: no dst is another pair's
        src or dst; longer chains come in the next call. Both ends stay referenced until
        ``copies_done(ticket)``, and ``commit``, ``store`` and ``defragment`` on them are refused
        before it. A cache with bytes of its own copies by itself and always gives ``[0, 2]``.
        """
        pairs, ticket = self._ledger.take_block_copies()
        return pairs, int(ticket)

    def copies_done(self, ticket: int) -> None:
        """The copies of ``ticket`` are made; ``InvalidArgumentError`` for an unknown ticket."""
        self._ledger.copies_done(as_count(ticket, "ticket"))


def _as_lengths(lengths: Any) -> list[Any] | None:
    return None if lengths is None else as_amounts(lengths, "lengths")


def _only_group(group: Any) -> None:
    # Layers may fall into groups with tables of their own one day; there is one group now.
    as_count(group, "group", most=0)
