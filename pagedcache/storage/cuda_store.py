"""Rows into the memory of a CUDA device: checked, uploaded where they are the host's, stored."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from pagedcache._cuda.arrays import DeviceArray
from pagedcache._cuda.exchange import as_device_array
from pagedcache._cuda.streams import Stream
from pagedcache.arguments import as_layer
from pagedcache.arrays import copied
from pagedcache.errors import DeviceError, FormatError, NonFiniteError, ShapeError
from pagedcache.spec import CacheSpec
from pagedcache.storage import cuda_slabs
from pagedcache.storage.base import RAISE
from pagedcache.storage.checks import check_slots, check_whole
from pagedcache.storage.cpu import refuse_nonfinite
from pagedcache.storage.cuda_copies import CudaCopies
from pagedcache.storage.cuda_rows import Layout, Rows, dense_layout, layout_of, pair_of_rows
from pagedcache.storage.cuda_sides import OPEN, SEALED, native_geometry
from pagedcache.storage.cuda_slots import DeviceSlots, sorted_slots
from pagedcache.storage.shadows import shadow
from pagedcache.storage.slabs import KINDS, Array, Kind

_NONE_FOUND = 2**64 - 1


class CudaStores(CudaCopies):
    """See ``CudaStorage``, which is this with rows out."""

    def __init__(
        self,
        spec: CacheSpec,
        num_blocks: int,
        ordinal: int = 0,
        slabs: Any = None,
        num_open: int = 0,
    ) -> None:
        super().__init__(spec, num_blocks, ordinal, slabs, num_open)
        self._kept: WeakKeyDictionary[Any, DeviceSlots] = WeakKeyDictionary()
        self._kept_lock = threading.Lock()

    def close(self) -> None:
        """Let go of the slabs; their memory returns once no view holds it. Idempotent."""
        super().close()
        self._kept.clear()

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
        sides = self._open()
        if not isinstance(rows, DeviceArray):
            return rows  # the host's memory
        outline = shadow(rows)
        if not any(
            np.may_share_memory(outline, shadow(side[kind][layer]))
            for side in sides
            for kind in KINDS
        ):
            return rows
        return self._copy_of(rows, queue or self.queue(None))

    def _copy_of(self, rows: DeviceArray, queue: Stream) -> DeviceArray:
        """A dense copy: the rows read as tokens of one block each into a pool of their own."""
        made = self.new_array(rows.shape, rows.dtype, "a copy of rows that lie in the slabs")
        tokens, heads, head_dim = rows.shape
        if tokens:
            single = CacheSpec(1, heads, head_dim, 1, layout="NHD")
            geometry = native_geometry(self.device, single, layout_of(rows).dtype, False)
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
        self.order.acquire(queue, kept.places, True)
        try:
            for kind, rows in zip(KINDS, (k, v), strict=True):
                with self._on_device(rows, queue) as layout:
                    self._launch_kept(kind, layer, layout, kept, len(slots), policy, queue)
            kept.region.used(queue)
        finally:
            self.order.used(queue, kept.places, True)

    def _launch_kept(
        self,
        kind: Kind,
        layer: int,
        rows: Layout,
        kept: DeviceSlots,
        num_tokens: int,
        policy: int,
        queue: Stream,
    ) -> None:
        whole = self._formats[kind].group_axis == "tokens"
        if whole and kept.blocks is not None:
            side, base, stride = self.located(kind, layer, SEALED)
            self.device.call(
                "pc_cuda_store_blocks",
                side.geometry,
                base,
                stride,
                side.num_places,
                *rows,
                num_tokens,
                kept.blocks,
                kept.num_whole,
                policy,
                self._fault,
                queue.handle,
            )
        for where, slots in ((SEALED, None if whole else kept.rows), (OPEN, kept.opened)):
            if slots is not None:
                self._launch_store(kind, layer, where, rows, slots, num_tokens, policy, queue)

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

        Raises :class:`DeviceError` where the spec has open blocks: which side a slot lies on
        decides which kernel stores it, and that is decided on the host.
        """
        self._open()
        if self.spec.has_open_blocks:
            raise DeviceError(
                "slots on the host (from prepare()), as blocks of this cache are kept open until "
                "they are full",
                "a device array",
                "slot_mapping",
            )
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
                layout = layout_of(rows)
                self._launch_store(
                    kind, layer, SEALED, layout, slots.address, len(slots), policy, queue
                )
        finally:
            if ordered:
                self.order.used_anywhere(queue)

    def _launch_store(
        self,
        kind: Kind,
        layer: int,
        where: int,
        rows: Layout,
        slots: int,
        num_tokens: int,
        policy: int,
        queue: Stream,
    ) -> None:
        side, base, stride = self.located(kind, layer, where)
        self.device.call(
            "pc_cuda_store",
            side.geometry,
            base,
            stride,
            side.num_places,
            *rows,
            slots,
            num_tokens,
            policy,
            self._fault,
            queue.handle,
        )

    def _slots_on_device(self, slots: Array, mapping: Any, queue: Stream) -> DeviceSlots:
        """The device's copy of host slots; kept as long as their mapping lives."""
        with self._kept_lock:
            kept = self._kept.get(mapping) if mapping is not None else None
        if kept is None:
            queue.refuse_capture("a slot mapping of the host (pass int64 slots on the device)")
            size, axes = self.spec.block_size, {f.group_axis for f in self._formats.values()}
            check_slots(slots, self.num_places * size)
            if "tokens" in axes:
                check_whole(slots, self.num_blocks, size)
            places = np.unique(slots[slots >= 0] // size).astype(np.int32)
            by_row = axes != {"tokens"}
            lists = sorted_slots(slots, self.num_blocks, size, by_row, "tokens" in axes)
            kept = DeviceSlots(lists, places, self._staging, queue)
            if mapping is not None:
                with self._kept_lock:
                    self._kept[mapping] = kept
        elif kept.queue is not queue:
            self.order.follow(queue, kept.queue)  # the upload was queued there
        return kept

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
        with self._uploaded(integers(dense), queue) as region:
            yield dense_layout(region.address, rows.shape, rows.dtype)


def integers(dense: Array) -> Array:
    """Dense values as unsigned integers of their width: bfloat16 has no buffer format."""
    return dense.view(f"u{dense.dtype.itemsize}")
