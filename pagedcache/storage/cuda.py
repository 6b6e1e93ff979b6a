"""Storage in the memory of one CUDA device: work is queued on the caller's stream.

Nothing waits on the host but what says so: arrays of the host coming out, NaN and Inf looked for
in device arrays (``on_nonfinite="raise"`` with quantised formats), the pinned ring when it is
full, and :meth:`CudaStorage.synchronize`. Blocks used on several streams are ordered on the
device; see ``_cuda/order.py``.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from pagedcache._cuda.arrays import DeviceArray
from pagedcache._cuda.exchange import as_device_array
from pagedcache._cuda.scratch import Region
from pagedcache._cuda.streams import Stream
from pagedcache.arguments import as_layer
from pagedcache.arrays import copied, overlap
from pagedcache.errors import DeviceError, FormatError, NonFiniteError, ShapeError
from pagedcache.formats import KVFormat
from pagedcache.spec import LAYOUTS, CacheSpec
from pagedcache.storage import cuda_slabs
from pagedcache.storage.base import RAISE
from pagedcache.storage.checks import check_ids, check_slots
from pagedcache.storage.cpu import filled, host_out, refuse_nonfinite
from pagedcache.storage.cuda_copies import CudaCopies
from pagedcache.storage.cuda_pointers import PointerTable, batch_of_pointers, pointers_of
from pagedcache.storage.cuda_rows import (
    Layout,
    Rows,
    Shape,
    dense_layout,
    device_out,
    layout_of,
    pair_of_rows,
)
from pagedcache.storage.shadows import shadow
from pagedcache.storage.slabs import KINDS, Array, Kind, covers

_NONE_FOUND = 2**64 - 1


class CudaStorage(CudaCopies):
    """K and V of every layer for ``num_blocks`` blocks on ``cuda:<ordinal>``.

    ``slabs=None`` takes zeroed device memory, one allocation per layer and kind;
    ``slabs=(k_slabs, v_slabs)`` adopts the caller's device arrays.
    Raises :class:`CudaUnavailableError`, :class:`StorageMemoryError` or :class:`DeviceError`;
    nothing is kept then.
    """

    def __init__(
        self,
        spec: CacheSpec,
        num_blocks: int,
        ordinal: int = 0,
        slabs: Any = None,
        num_open: int = 0,
    ) -> None:
        if num_open or spec.has_open_blocks:
            raise FormatError("a format without open blocks on a GPU", repr(spec), "spec")
        super().__init__(spec, num_blocks, ordinal, slabs)
        self._kept: WeakKeyDictionary[Any, _Kept] = WeakKeyDictionary()
        self._kept_lock = threading.Lock()

    def close(self) -> None:
        """Let go of the slabs; their memory returns once no view holds it. Idempotent."""
        super().close()
        self._kept.clear()

    # ---- rows in -------------------------------------------------------------------------

    def _rows(self, k: Any, v: Any, num_tokens: int | None, queue: Any) -> tuple[Rows, Rows]:
        queue = queue or self.queue(None)
        spec = self.spec
        pair = pair_of_rows(k, v, self.device, spec.num_kv_heads, spec.head_dim, num_tokens)
        for rows in pair:
            if isinstance(rows, DeviceArray):
                self._follow(queue, rows)
        return pair

    def _follow(self, queue: Stream, array: DeviceArray) -> None:
        """Where an array says on which stream it is being made, come after that."""
        if array.stream is not None:
            self.order.follow(queue, self.streams.resolve(array.stream))

    def _refuse_nonfinite(self, pairs: list[tuple[Kind, Rows]], queue: Any) -> None:
        queue = queue or self.queue(None)
        found: list[tuple[Kind, DeviceArray]] = []
        for kind, rows in pairs:
            if not isinstance(rows, DeviceArray):
                refuse_nonfinite(kind, rows)
            elif rows.size:
                found.append((kind, rows))
        if not found:
            return
        queue.refuse_capture('on_nonfinite="raise" ("saturate" does not wait)')
        firsts = np.empty(len(found), np.uint64)
        with self._temporary(firsts.nbytes, queue) as region:
            for index, (_, rows) in enumerate(found):
                self.device.call(
                    "pc_cuda_find_nonfinite",
                    *layout_of(rows),
                    *rows.shape,
                    region.address + 8 * index,
                    queue.handle,
                )
            self._staging.read(region.address, firsts, queue)
        for (kind, rows), first in zip(found, firsts.tolist(), strict=True):
            if first != _NONE_FOUND:
                raise NonFiniteError(kind, first, self._value(rows, first, queue))

    def _value(self, rows: DeviceArray, index: int, queue: Stream) -> float:
        place = np.unravel_index(index, rows.shape)
        at = rows.address + sum(
            int(i) * stride for i, stride in zip(place, rows.strides, strict=True)
        )
        value = np.empty(1, f"u{rows.dtype.itemsize}")
        self._staging.read(at, value, queue)
        return float(value.view(rows.dtype)[0])

    def _apart(self, layer: int, rows: Rows, queue: Any) -> Rows:
        slabs = self._open()
        if not isinstance(rows, DeviceArray):
            return rows  # the host's memory
        outline = shadow(rows)
        if not any(
            np.may_share_memory(outline, shadow(slabs[kind][layer])) for kind in KINDS
        ):
            return rows
        return self._copy_of(rows, queue or self.queue(None))

    def _copy_of(self, rows: DeviceArray, queue: Stream) -> DeviceArray:
        """A dense copy: the rows read as tokens of one block each into a pool of their own."""
        made = self.new_array(rows.shape, rows.dtype, "a copy of rows that lie in the slabs")
        tokens, heads, head_dim = rows.shape
        if tokens:
            geometry = ctypes.create_string_buffer(len(self._geometry["k"]))
            code = layout_of(rows).dtype
            self.device.call(
                "pc_cuda_geometry", geometry, code, LAYOUTS["NHD"], heads, 1, head_dim
            )
            with self._uploaded(np.arange(tokens, dtype=np.int64), queue) as slots:
                self.device.call(
                    "pc_cuda_store",
                    geometry,
                    made.address,
                    made.strides[0],
                    tokens,
                    *layout_of(rows),
                    slots.address,
                    tokens,
                    RAISE,
                    None,
                    queue.handle,
                )
        return made

    def _store(
        self, layer: int, k: Rows, v: Rows, slots: Array, policy: int, queue: Any, mapping: Any
    ) -> None:
        self._open()
        queue = queue or self.queue(None)
        if not len(slots):
            return
        kept = self._slots_on_device(slots, mapping, queue)
        self.order.acquire(queue, kept.block_ids, True)
        try:
            for kind, rows in zip(KINDS, (k, v), strict=True):
                with self._on_device(rows, queue) as layout:
                    self._launch_store(kind, layer, layout, kept.region.address, len(slots),
                                       policy, queue)
            kept.region.used(queue)
        finally:
            self.order.used(queue, kept.block_ids, True)

    def device_slots(self, x: Any, what: str) -> DeviceArray | None:
        """See :class:`Storage`."""
        return as_device_array(x, what)

    def store_raw(
        self,
        layer: int,
        k: Any,
        v: Any,
        slots: DeviceArray,
        on_nonfinite: str | None = None,
        queue: Any = None,
    ) -> None:
        """:meth:`store` by slots that lie on the device (int64 ``[num_tokens]``, contiguous).

        Nobody can check them here: the kernel skips those outside the pool and the next
        :meth:`synchronize` reports one of them. Which blocks they name is not known either: the
        stream waits for all that others queued, and others for this. Captured into a graph, only
        kernels are queued, and their order is the caller's.
        """
        self._open()
        layer = as_layer(layer, self.spec.num_layers)
        policy = self._policy(on_nonfinite)
        queue = queue or self.queue(None)
        slots = cuda_slabs.on_device(slots, "slot_mapping", self.device)
        if slots.dtype != np.int64:
            raise FormatError("int64", slots.dtype, "slot_mapping")
        if slots.ndim != 1 or (slots.size > 1 and slots.strides != (8,)):
            got = f"shape {slots.shape}, strides {slots.strides}"
            raise ShapeError("a flat, contiguous array", got, "slot_mapping")
        if slots.size and slots.address % 8:  # a kernel's fault would break the device
            raise FormatError("slots at a multiple of 8 bytes", hex(slots.address), "slot_mapping")
        if not all(isinstance(rows, DeviceArray) for rows in (k, v)):
            raise DeviceError(f"k and v on {self.device.name}", "host arrays", "k, v")
        if not len(slots) == len(k) == len(v):
            raise ShapeError(f"{len(k)} slots, one per token", len(slots), "slot_mapping")
        self._follow(queue, slots)
        if not len(slots):
            return
        # In a graph the kernels run when nobody here knows of it: commit(stream=) tells.
        ordered = not queue.is_captured()
        if ordered:
            self.order.acquire_all(queue)
        try:
            for kind, rows in zip(KINDS, (k, v), strict=True):
                self._launch_store(
                    kind, layer, layout_of(rows), slots.address, len(slots), policy, queue
                )
        finally:
            if ordered:
                self.order.used_anywhere(queue)

    def _launch_store(
        self,
        kind: Kind,
        layer: int,
        rows: Layout,
        slots: int,
        num_tokens: int,
        policy: int,
        queue: Stream,
    ) -> None:
        slab = self._open()[kind][layer]
        self.device.call(
            "pc_cuda_store",
            self._geometry[kind],
            slab.address,
            slab.strides[0],
            self.num_blocks,
            *rows,
            slots,
            num_tokens,
            policy,
            self._fault,
            queue.handle,
        )

    def _slots_on_device(self, slots: Array, mapping: Any, queue: Stream) -> _Kept:
        """The device's copy of host slots; kept as long as their mapping lives."""
        with self._kept_lock:
            kept = self._kept.get(mapping) if mapping is not None else None
        if kept is None:
            queue.refuse_capture("a slot mapping of the host (pass int64 slots on the device)")
            size = self.spec.block_size
            check_slots(slots, self.num_blocks * size)
            ids = np.unique(slots[slots >= 0] // size).astype(np.int32)
            kept = _Kept(self._staging.upload(slots, queue), ids, queue)
            if mapping is not None:
                with self._kept_lock:
                    self._kept[mapping] = kept
        elif kept.queue is not queue:
            self.order.follow(queue, kept.queue)  # the upload was queued there
        return kept

    # ---- pointers ------------------------------------------------------------------------

    def pointer_table(self) -> PointerTable:
        """A table of pointers for one sequence, empty so far."""
        return PointerTable(self)

    def block_pointers(self, layer: int, block_ids: Array) -> tuple[Array, Array]:
        """See ``cuda_pointers.pointers_of``."""
        return pointers_of(self, layer, block_ids)

    def pointer_batch(
        self, layer: int, block_ids: Array, queue: Any
    ) -> tuple[DeviceArray, DeviceArray]:
        """Pointers to K and V of one layer for a table of ids (-1: 0), in new device memory."""
        return batch_of_pointers(self, layer, block_ids, queue or self.queue(None))

    # ---- rows out ------------------------------------------------------------------------

    def out_array(self, layer: int, x: Any, what: str) -> Any:
        """What :meth:`gather` fills for the caller's ``x``: device arrays where they are, host
        arrays through pinned memory."""
        array = as_device_array(x, what)
        return filled(x, what) if array is None else array

    def _load(
        self,
        layer: int,
        ids: Array,
        first: int,
        fmt: KVFormat,
        shape: Shape,
        out_k: Any,
        out_v: Any,
        queue: Any,
    ) -> tuple[Any, Any]:
        queue = queue or self.queue(None)
        check_ids(ids, self.num_blocks)
        outs = [
            self._out(out_k, "out_k", shape, fmt, queue),
            self._out(out_v, "out_v", shape, fmt, queue),
        ]
        outlines = [shadow(out) if isinstance(out, DeviceArray) else out for out in outs]
        if overlap(*outlines):
            raise ShapeError("out_k and out_v that share no memory", "overlapping arrays", "out")
        for out, outline, name in zip((out_k, out_v), outlines, ("out_k", "out_v"), strict=True):
            if out is not None and covers(self._outlines(), outline):
                raise ShapeError("memory apart from the slabs", "an array over them", name)
        if not shape[0]:
            return outs[0], outs[1]
        for out in (out_k, out_v):
            if isinstance(out, DeviceArray):
                self._follow(queue, out)
        self.order.acquire(queue, ids, False)
        try:
            with self._uploaded(ids, queue) as table:
                for kind, out in zip(KINDS, outs, strict=True):
                    self._load_one(kind, layer, table.address, first, out, shape, queue)
        finally:
            self.order.used(queue, ids, False)
        return outs[0], outs[1]

    def _out(self, out: Any, what: str, shape: Shape, fmt: KVFormat, queue: Stream) -> Any:
        if out is None:
            made = self.new_array(shape, fmt.dtype, f"the {fmt.name} copy of {shape}")
            made.stream = queue
            return made
        if isinstance(out, DeviceArray):
            return device_out(out, what, self.device, shape, fmt)
        return host_out(out, what, shape, fmt)

    def _load_one(
        self, kind: Kind, layer: int, table: int, first: int, out: Any, shape: Shape, queue: Stream
    ) -> None:
        if isinstance(out, DeviceArray):
            self._launch_load(kind, layer, table, first, layout_of(out), shape[0], queue)
            return
        dense = out if out.flags.c_contiguous else np.empty(shape, out.dtype)
        with self._temporary(dense.nbytes, queue) as region:
            layout = dense_layout(region.address, shape, out.dtype)
            self._launch_load(kind, layer, table, first, layout, shape[0], queue)
            self._staging.read(region.address, _integers(dense), queue)
        if dense is not out:
            out[...] = dense

    def _launch_load(
        self,
        kind: Kind,
        layer: int,
        table: int,
        first: int,
        rows: Layout,
        num_tokens: int,
        queue: Stream,
    ) -> None:
        slab = self._open()[kind][layer]
        self.device.call(
            "pc_cuda_load",
            self._geometry[kind],
            slab.address,
            slab.strides[0],
            table,
            None,
            first,
            *rows,
            num_tokens,
            queue.handle,
        )

    @contextmanager
    def _on_device(self, rows: Rows, queue: Stream) -> Iterator[Layout]:
        """Rows as kernels take them; those of the host are uploaded for this call."""
        if isinstance(rows, DeviceArray):
            yield layout_of(rows)
            return
        try:
            dense = np.ascontiguousarray(rows)
        except MemoryError:
            dense = copied(rows, "rows for the device")
        with self._uploaded(_integers(dense), queue) as region:
            yield dense_layout(region.address, rows.shape, rows.dtype)


class _Kept:
    """Slots of a mapping on the device, and the blocks they lie in."""

    __slots__ = ("block_ids", "queue", "region")

    def __init__(self, region: Region, block_ids: Array, queue: Stream) -> None:
        self.region, self.block_ids, self.queue = region, block_ids, queue


def _integers(dense: Array) -> Array:
    """Dense values as unsigned integers of their width: bfloat16 has no buffer format."""
    return dense.view(f"u{dense.dtype.itemsize}")
