"""What the attention kernel reads besides queries and blocks, on the device: kept between calls.

The items of the plan, the places and the sinks are uploaded in one copy. All layers of one step use
the same: the tables of the last call are kept, and used again where a call needs no others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import proxy

import numpy as np

from pagedcache._cuda.scratch import Region
from pagedcache._cuda.streams import Stream
from pagedcache.storage.attention import AttentionBatch, AttentionOptions
from pagedcache.storage.cuda_plan import plan
from pagedcache.storage.slabs import Array

if TYPE_CHECKING:
    from pagedcache.storage.cuda_base import CudaBase

#: CTAs that a multiprocessor works on side by side, by their use of shared memory.
_CTAS_EACH = 2


class Tables(NamedTuple):
    """Addresses on the device, and what a launch is to be told beside them."""

    made_of: tuple[Any, ...]
    region: Region
    items: int
    num_items: int
    places: int
    sinks: int | None
    num_parts: int
    num_tickets: int


class AttentionTables:
    """Tables of the last batch, and each stream's tickets."""

    def __init__(self, storage: CudaBase) -> None:
        self._storage: CudaBase = proxy(storage)  # which keeps these; a cycle would keep memory
        self._kept: Tables | None = None
        self._tickets: dict[Stream, Region] = {}
        self._num_ctas = 0

    def of(
        self,
        batch: AttentionBatch,
        group: int,
        options: AttentionOptions,
        sinks: Array | None,
        queue: Stream,
    ) -> Tables:
        """Tables for a batch, right on ``queue``; ``sinks``: float32, of the host. Say
        ``region.used`` once work that reads them is queued."""
        given = (group, options.causal, options.window, sinks, *batch)
        kept = self._kept
        if kept is not None and _same(kept.made_of, given):
            kept.region.acquire(queue)
            return kept
        spec = self._storage.spec
        made = plan(
            batch,
            block_size=spec.block_size,
            num_heads=spec.num_kv_heads,
            group=group,
            causal=options.causal,
            window=options.window,
            num_ctas=self._ctas(),
        )
        parts = [made.items, batch.places] + ([] if sinks is None else [sinks])
        raw = np.concatenate([part.view(np.uint8) for part in parts])
        region = self._storage.upload(raw, queue)
        at = region.address + made.items.nbytes
        self._kept = tables = Tables(
            tuple(part.copy() if isinstance(part, np.ndarray) else part for part in given),
            region,
            region.address,
            len(made.items),
            at,
            None if sinks is None else at + batch.places.nbytes,
            made.num_parts,
            made.num_tickets,
        )
        return tables

    def tickets(self, count: int, queue: Stream) -> Region:
        """``count`` zeroed words or more of this stream's own; the kernel leaves them zero."""
        region = self._tickets.get(queue)
        if region is None or region.nbytes < 4 * count:
            region = self._storage.take_region(4 * count, queue)
            try:
                self._storage.device.call(
                    "pc_cuda_fill", region.address, 0, region.nbytes, queue.handle
                )
            finally:
                region.used(queue)
            for stream in [stream for stream in self._tickets if stream.forgotten]:
                del self._tickets[stream]
            self._tickets[queue] = region
        return region

    def close(self) -> None:
        """Let go of the memory."""
        self._kept = None
        self._tickets.clear()

    def _ctas(self) -> int:
        if not self._num_ctas:
            self._num_ctas = _CTAS_EACH * self._storage.device.num_multiprocessors()
        return self._num_ctas


def _same(made_of: tuple[Any, ...], given: tuple[Any, ...]) -> bool:
    return all(
        np.array_equal(a, b)
        if isinstance(a, np.ndarray) and isinstance(b, np.ndarray)
        else type(a) is type(b) and a == b
        for a, b in zip(made_of, given, strict=True)
    )
