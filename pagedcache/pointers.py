"""Pointer tables: where blocks lie, as addresses, for kernels that take pointers instead of ids.

Our own kernels use the int32 block table and one (base, stride) per layer; FlashInfer,
FlashAttention and vLLM do too. Pointer tables serve kernels that were written for blocks
allocated one by one, and mixed allocations.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pagedcache.arguments import as_layer
from pagedcache.errors import DeviceError
from pagedcache.formats import KVFormat

if TYPE_CHECKING:
    from pagedcache.sequence import Sequence
    from pagedcache.spec import CacheSpec

Array = np.ndarray[Any, Any]


class PointerTables(NamedTuple):
    """Where the blocks of one layer lie."""

    k: Any
    """Addresses of the blocks of K, uint64: on the device (``k.address`` is the pointer to give to
    a kernel), or a NumPy array from ``layer_block_ptr_tables``."""
    v: Any
    """Addresses of the blocks of V, as ``k``."""
    num_blocks: int
    """Entries of each."""
    block_size: int
    """Tokens per block."""
    k_format: KVFormat
    """Format of the blocks of K."""
    v_format: KVFormat
    """Format of the blocks of V."""
    is_open: Array
    """NumPy bool, of the shape of ``k``: blocks that are open (``CacheSpec.open_blocks``); their
    addresses are those of their open slots, in the formats ``spec.open_format("k")`` and
    ``("v")``."""


class SequencePointers:
    """The pointer tables of a ``Sequence``."""

    __slots__ = ()

    _cache: Any
    _state: Any

    def _pointer_tables(self) -> dict[Any, Any]:
        """The tables that exist, by the storage of their GPU."""
        raise NotImplementedError

    def layer_device_ptr_tables(
        self, layer: int, num_blocks: int | None = None, *, stream: Any = None
    ) -> PointerTables:
        """Device arrays with the addresses of this sequence's first ``num_blocks`` blocks (all for
        None) in one layer, uint64 ``[num_blocks]`` each, ready on ``stream``.

        Nothing exists before it is asked for. One table serves all layers of a GPU; it is kept
        and grows with the sequence: only entries that changed are written, by one kernel (after
        growth, copy-on-write, truncate, defragment). Ask again after each of those: the addresses
        of the tables stay the same until they outgrow their room, their contents are brought up
        to date by this call. They go with the sequence (``free(stream=)`` tells who still reads).

        Raises ``DeviceError`` for a layer on the CPU, ``InvalidPositionError`` past the table,
        ``StorageMemoryError``; the tables are as before then.
        """
        cache = self._cache
        places = self._state.places()
        count = len(self.layer_block_ids(layer, num_blocks))  # type: ignore[attr-defined]
        queue = cache._queue(stream)
        part, local, own = _part(cache, layer, queue)
        table = self._pointer_tables().get(part)
        if table is None:
            table = self._pointer_tables().setdefault(part, part.pointer_table())
        k, v = table.arrays(local, places, own)
        return _named(cache, k[:count], v[:count], places[:count], count)

    def layer_block_ptr_tables(self, layer: int, num_blocks: int | None = None) -> PointerTables:
        """The same addresses as NumPy arrays, uint64; nothing is queued or kept on the device."""
        count = len(self.layer_block_ids(layer, num_blocks))  # type: ignore[attr-defined]
        part, local, _ = _part(self._cache, layer, None)
        places = self._state.places(0, count)
        k, v = part.block_pointers(local, places)
        return _named(self._cache, k, v, places, len(places))

    def _drop_pointers(self, queue: Any = None) -> None:
        """Give the tables back; ``queue``: kernels there may still read them."""
        tables = self._pointer_tables()
        while tables:
            part, table = tables.popitem()
            table.close(queue.get(part.device.name) if isinstance(queue, dict) else queue)


class BatchPointers:
    """The pointer tables of many sequences: mixin of ``PagedKVCache``."""

    spec: CacheSpec
    _storage: Any
    _queue: Any
    page_table: Any

    def device_ptr_tables(
        self,
        seqs: Iterable[Sequence],
        layer: int,
        lengths: Any = None,
        *,
        stream: Any = None,
    ) -> PointerTables:
        """Addresses of the blocks of many sequences in one layer, on the device.

        ``k`` and ``v``: uint64 ``[num_seqs, max_blocks]``, row i the ``ceil(length / block_size)``
        blocks of sequence i (``lengths`` default to ``seq_len``), padded with 0; made anew by
        each call, by one kernel, and ready on ``stream``; ``num_blocks`` is ``max_blocks``. Their
        memory goes with the arrays: keep them while a kernel reads them. Errors as for
        ``block_tables`` and ``Sequence.layer_device_ptr_tables``.
        """
        from pagedcache.sequence import listed  # which imports this module

        queue = self._queue(stream)
        part, local, own = _part(self, layer, queue)
        seqs = listed(seqs)
        table = self.page_table(seqs, lengths, True)
        counts = np.diff(table.kv_indptr)
        most = int(counts.max(initial=0))
        ids = np.full((len(counts), most), -1, np.int32)
        for row, seq, count in zip(ids, seqs, counts.tolist(), strict=True):
            row[:count] = seq._state.places(0, count)
        k, v = part.pointer_batch(local, ids, own)
        return _named(self, k, v, ids, most)


def _part(cache: Any, layer: Any, queue: Any) -> tuple[Any, int, Any]:
    """The GPU's storage that holds a layer, the layer's number there, and its queue."""
    name = cache.layer_device(as_layer(layer, cache.spec.num_layers))
    if name == "cpu":
        raise DeviceError("a layer on a GPU", f"layer {layer} on the CPU", "pointer tables")
    part, local = cache._storage.on_layer(layer)
    return part, local, queue.get(name) if isinstance(queue, dict) else queue


def _named(cache: Any, k: Any, v: Any, places: Any, num_blocks: int) -> PointerTables:
    spec = cache.spec
    is_open = places >= cache.num_blocks
    return PointerTables(k, v, num_blocks, spec.block_size, spec.k_format, spec.v_format, is_open)
