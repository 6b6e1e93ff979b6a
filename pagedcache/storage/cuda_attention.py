"""Attention in the memory of a CUDA device: the work is cut on the host, and done by one launch."""

from __future__ import annotations

from contextlib import ExitStack
from ctypes import addressof, byref
from typing import Any

import numpy as np

from pagedcache._cuda.arrays import DeviceArray
from pagedcache._cuda.attention import Call, Slab, partial_nbytes
from pagedcache._cuda.streams import Stream
from pagedcache.arguments import as_layer
from pagedcache.errors import InvalidPositionError, ShapeError
from pagedcache.storage.attention import AttentionArrays, AttentionBatch, AttentionOptions
from pagedcache.storage.checks import check_ids
from pagedcache.storage.cuda_attention_arrays import CudaAttentionArrays
from pagedcache.storage.cuda_attention_tables import AttentionTables
from pagedcache.storage.cuda_rows import Layout, dense_layout, layout_of
from pagedcache.storage.cuda_sides import OPEN, SEALED
from pagedcache.storage.cuda_store import integers
from pagedcache.storage.slabs import KINDS, Kind


class CudaAttention(CudaAttentionArrays):
    """See ``CudaStorage``, which is this with rows out."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._attention = AttentionTables(self)

    def close(self) -> None:
        """Let go of the slabs; their memory returns once no view holds it. Idempotent."""
        super().close()
        self._attention.close()

    def attend(
        self,
        layer: int,
        arrays: AttentionArrays,
        batch: AttentionBatch,
        options: AttentionOptions,
        queue: Any = None,
    ) -> None:
        """See :class:`Storage`. Queued on ``queue``; only arrays of the host are waited for.

        Refused while the stream is captured: the tables of a batch are the host's, and a graph
        would keep those of one step. ``pc_cuda_attend()`` itself reads them on the device.
        """
        self._open()
        layer = as_layer(layer, self.spec.num_layers)
        queue = queue or self.queue(None)
        queue.refuse_capture("attention to sequences, whose tables are the host's,")
        self._check_batch(batch, len(arrays.q))
        if not len(arrays.q):
            return
        self.order.acquire(queue, batch.places, False)
        try:
            self._attend(layer, arrays, batch, options, queue)
        finally:
            self.order.used(queue, batch.places, False)
        for result in (arrays.result, arrays.result_lse):
            self._lead(queue, result)

    def _check_batch(self, batch: AttentionBatch, total: int) -> None:
        places, indptr, lengths, q_lens, starts = batch
        check_ids(places, self.num_places)
        if not len(lengths) == len(q_lens) == len(starts) == len(indptr) - 1:
            counts = [len(each) for each in batch[1:]]
            raise ShapeError("one of each per sequence, and one more indptr", counts, "attend")
        blocks = np.diff(indptr)
        if indptr[0] < 0 or indptr[-1] > len(places) or (blocks < 0).any():
            raise ShapeError(f"ascending, up to {len(places)} places", indptr.tolist(), "indptr")
        if (q_lens < 0).any() or q_lens.sum() != total:
            raise ShapeError(f"q_lens that add up to {total}", q_lens.tolist(), "q_lens")
        for what, least, values, most in (
            ("lengths", q_lens, lengths, blocks * self.spec.block_size),
            ("starts", 0, starts, lengths),
        ):
            wrong = np.flatnonzero((values < least) | (values > most))
            if len(wrong):
                i = int(wrong[0])
                raise InvalidPositionError(int(values[i]), int(most[i]), f"{what}[{i}]")

    def _attend(
        self,
        layer: int,
        arrays: AttentionArrays,
        batch: AttentionBatch,
        options: AttentionOptions,
        queue: Stream,
    ) -> None:
        heads, group = self.spec.num_kv_heads, arrays.q.shape[1] // self.spec.num_kv_heads
        on_device = isinstance(arrays.sinks, DeviceArray)
        tables = self._attention.of(
            batch, group, options, None if on_device else arrays.sinks, queue
        )
        call = Call()
        for kind in KINDS:
            setattr(call, kind, self._slab(kind, layer, SEALED))
            if self.num_open:
                setattr(call, f"open_{kind}", self._slab(kind, layer, OPEN))
        call.num_blocks, call.places = self.num_blocks, tables.places
        call.items, call.num_items, call.group = tables.items, tables.num_items, group
        call.scale, call.soft_cap = options.scale, options.soft_cap or 0.0
        call.causal, call.window = options.causal, min(options.window or 0, 1 << 62)
        call.sinks = arrays.sinks.address if on_device else tables.sinks
        try:
            if not tables.num_parts:
                self._launch_attend(call, arrays, queue)
                return
            nbytes = partial_nbytes(self.device.library, self.spec.head_dim)
            tickets = self._attention.tickets(tables.num_tickets * heads, queue)
            with self._temporary(tables.num_parts * heads * nbytes, queue) as region:
                call.partials, call.tickets = region.address, tickets.address
                try:
                    self._launch_attend(call, arrays, queue)
                finally:
                    tickets.used(queue)
        finally:
            tables.region.used(queue)

    def _slab(self, kind: Kind, layer: int, where: int) -> Slab:
        side, base, stride = self.located(kind, layer, where)
        return Slab(addressof(side.geometry), base % 2**64, stride)

    def _launch_attend(self, call: Call, arrays: AttentionArrays, queue: Stream) -> None:
        """Launch with queries and results where they are, or by way of pinned memory."""
        out, lse = arrays.out, arrays.lse
        if isinstance(arrays.q, DeviceArray):
            address = None if lse is None else lse.address
            self._launch_on(call, layout_of(arrays.q), layout_of(out), address, queue)
            return
        dense = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
        with ExitStack() as stack:
            q = stack.enter_context(self._on_device(arrays.q, queue))
            nbytes = dense.nbytes + (0 if lse is None else lse.nbytes)
            region = stack.enter_context(self._temporary(nbytes, queue))
            # float32 before what may be 16 bits wide
            to_lse = None if lse is None else region.address
            at = region.address + nbytes - dense.nbytes
            self._launch_on(call, q, dense_layout(at, out.shape, out.dtype), to_lse, queue)
            self._staging.read(at, integers(dense), queue)
            if to_lse is not None:
                self._staging.read(to_lse, lse, queue)
        if dense is not out:
            out[...] = dense

    def _launch_on(
        self, call: Call, q: Layout, out: Layout, lse: int | None, queue: Stream
    ) -> None:
        call.q, call.out, call.lse, call.dtype = q.address, out.address, lse, q.dtype
        call.q_strides[:] = q[1:4]
        call.out_strides[:] = out[1:4]
        self.device.call("pc_cuda_attend", byref(call), queue.handle)
