"""Streams of a whole cache: which queue a call works on, what it waits for, what others wait for.

Storage orders every access of its own. What it cannot see is said here: that a sequence's blocks
are about to be used on a stream (``open``, ``prepare``), that tokens became valid (``commit``),
that blocks are given up while kernels of the caller's own may still read them (``free``,
``truncate``, ``record_use``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedcache.arguments import as_layer
from pagedcache.errors import DeviceError, InvalidArgumentError, PagedCacheError, shown
from pagedcache.guards import NO_STORAGE
from pagedcache.sequence import Sequence, listed, states_of

if TYPE_CHECKING:
    from pagedcache.spec import CacheSpec

Array = np.ndarray[Any, Any]


class Ordering:
    """Mixin of ``PagedKVCache``: streams, and the device's side of the bookkeeping."""

    spec: CacheSpec
    _ledger: Any
    _storage: Any
    _on_device: bool
    num_blocks: int

    # ---- public --------------------------------------------------------------------------

    def record_use(self, seqs: Iterable[Sequence], stream: Any = None) -> None:
        """Tell that kernels queued on ``stream`` so far use these sequences' blocks.

        A block that is freed later is then written by others only after those kernels: their
        stream waits, the host does not. ``stream`` as for every call; None is the default stream.
        Raises ``DeviceError`` where every layer is on the CPU and a stream is given.
        """
        seqs = listed(seqs)
        states = states_of(seqs)
        self._only_ours(seqs)
        queue = self._queue(stream)
        if queue is not None and states:
            tables = [state.places() for state in states]
            self._storage.publish(np.concatenate(tables), queue, False)

    def synchronize(self) -> None:
        """Wait until all queued work of this cache is done.

        Raises what that work reports: ``SlotError`` for a slot of a device's slot mapping that
        lay outside the pool (the token was skipped), ``DeviceError`` for a failed kernel. Returns
        at once where every layer is on the CPU.
        """
        self._ledger.layout_epoch  # noqa: B018 - refuses on a closed cache
        if self._on_device:
            self._storage.synchronize()

    def slabs(self, layer: int) -> tuple[Any, Any]:
        """K and V of one layer, all blocks, writable, without a copy.

        Float formats: ``[num_blocks, num_kv_heads, block_size, head_dim]`` (HND) or
        ``[num_blocks, block_size, num_kv_heads, head_dim]`` (NHD) of the stored dtype; quantised
        formats: uint8 ``[num_blocks, block_nbytes]``. NumPy arrays on the CPU (``Bfloat16Array``
        for bfloat16), on a GPU ``DeviceArray`` objects; torch and others read both by DLPack, the
        latter also by ``__cuda_array_interface__``. Block ids index them as they are, so kernels
        of your own can read and write what ``prepare`` made writable. The arrays keep the memory,
        not the blocks.

        Raises ``FormatError`` with ``storage=None``.
        """
        storage = self._storage
        layer = as_layer(layer, self.spec.num_layers)
        return (
            storage.slab_array(layer, "k", writable=True),
            storage.slab_array(layer, "v", writable=True),
        )

    def open_slabs(self, layer: int) -> tuple[Any, Any]:
        """K and V of one layer's open slots, writable, without a copy.

        ``[num_open_blocks, …]`` as ``slabs`` for a float format, in ``spec.open_format("k")`` and
        ``("v")``; the first axis is empty where no format keeps open blocks. ``open_slots`` says
        which block is where. Raises ``FormatError`` with ``storage=None``.
        """
        storage = self._storage
        layer = as_layer(layer, self.spec.num_layers)
        return (
            storage.open_slab_array(layer, "k", writable=True),
            storage.open_slab_array(layer, "v", writable=True),
        )

    def open_slots(self, seq: Sequence) -> Array:
        """Where the open blocks of a sequence are: int32 ``[num_blocks]``, for every block of
        its table the slot in ``open_slabs``, or -1 where the block lies in ``slabs``. A snapshot:
        ``commit`` seals blocks, and writing opens them.
        """
        state = states_of((seq,))[0]
        self._only_ours((seq,))
        places = state.places()
        first = np.int32(self.num_blocks)
        return np.where(places < first, np.int32(-1), places - first)

    # ---- for the other parts of the façade -----------------------------------------------

    def _only_ours(self, seqs: Iterable[Sequence]) -> None:
        """Refuse sequences of another cache before their blocks are taken for ours."""
        for seq in seqs:
            if seq._cache is not self:
                raise InvalidArgumentError(f"sequence {seq.seq_id} belongs to another cache")

    def _refuse_open(self, expected: str) -> None:
        """Refuse what cannot tell the open blocks of this cache from others."""
        if self._ledger.num_open:
            raise DeviceError(expected, "slots on a device, in a cache with open blocks", "store")

    def _queue(self, stream: Any) -> Any:
        """What the work of a call goes to; None where every layer is on the CPU."""
        if stream is None and not self._on_device:
            return None
        if self._storage is NO_STORAGE:
            raise DeviceError(
                "no stream with storage=None, where the engine orders its own work",
                shown(stream),
                "stream",
            )
        return self._storage.queue(stream)

    def _hand_over(self, seq: Sequence, queue: Any) -> None:
        """Make a new sequence's blocks safe to use on ``queue``, or give it up."""
        try:
            seq._acquire(queue, int(seq._state.num_cached_tokens) // self.spec.block_size)
        except BaseException:
            seq.free()
            raise

    def _ready(self, seqs: list[Sequence], slots: Array, queue: Any) -> None:
        """Make prepared sequences safe on ``queue``: to be read, and written at ``slots``."""
        for seq in seqs:
            seq._acquire(queue)
        ids = np.unique(slots // self.spec.block_size).astype(np.int32)
        self._storage.acquire(ids, queue, True)

    def _settle(self, states: list[Any], ends: list[int], stream: Any) -> None:
        """Before a commit: the blocks between each computed length and its new end become
        waitable, written by our own work or by the caller's on ``stream``."""
        queue = None if stream is None else self._queue(stream)
        if not self._on_device:
            return
        size = self.spec.block_size
        parts = [
            state.places(state.seq_len // size, max(-(-end // size), 0))
            for state, end in zip(states, ends, strict=True)
        ]
        if parts:
            self._storage.publish(np.concatenate(parts), queue, True)

    def _let_go(self, state: Any, first_block: int, stream: Any) -> None:
        """Before blocks are given up: whoever gets them waits for work that uses them now.

        Where an event cannot be recorded, the next user of the blocks records one by itself; so a
        device's failure keeps nobody from freeing.
        """
        queue = None if stream is None else self._queue(stream)
        if not self._on_device:
            return
        from pagedcache._cuda.streams import CaptureError  # not needed without a GPU

        try:
            self._storage.publish(state.places(first_block), queue, False)
        except CaptureError:
            if queue is not None:  # nobody would know of the caller's kernels
                raise
        except PagedCacheError:
            pass
