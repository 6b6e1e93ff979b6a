"""What every call on a CUDA device's storage needs: its slabs, streams, uploads, and the order."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from pagedcache._cuda.arrays import DeviceArray
from pagedcache._cuda.driver import get_device
from pagedcache._cuda.memory import DeviceMemory
from pagedcache._cuda.order import Order
from pagedcache._cuda.scratch import Region, Scratch
from pagedcache._cuda.staging import Staging
from pagedcache._cuda.streams import Stream, Streams
from pagedcache.arguments import as_layer
from pagedcache.errors import FreedHandleError, NonFiniteError, SlotError
from pagedcache.spec import LAYOUTS, CacheSpec
from pagedcache.storage import cuda_slabs
from pagedcache.storage.base import Storage
from pagedcache.storage.checks import check_ids
from pagedcache.storage.queues import by_device
from pagedcache.storage.shadows import shadow
from pagedcache.storage.slabs import KINDS, Array, Kind

_E_NONFINITE = 1  # include/pagedcache/status.h


class CudaBase(Storage):
    """See ``CudaStorage``, which is this with copies and rows."""

    ordered = True

    def __init__(
        self, spec: CacheSpec, num_blocks: int, ordinal: int = 0, slabs: Any = None
    ) -> None:
        super().__init__(spec, num_blocks)
        self.adopted = slabs is not None
        device = self.device = get_device(ordinal)
        self.streams = Streams(device)
        self.streams.default.refuse_capture("making a cache")
        self._geometry = {kind: self._native(kind) for kind in KINDS}
        self._slabs: cuda_slabs.Slabs | None = (
            cuda_slabs.adopt(device, spec, self.num_blocks, slabs)
            if self.adopted
            else cuda_slabs.allocate(device, spec, self.num_blocks)
        )
        try:
            self.order = Order(device, self.num_blocks)
            self._scratch = Scratch(device, self.order)
            self._staging = Staging(device, self._scratch)
            # The slabs of K, those of V, then the fault word of raw device slots.
            tables = [cuda_slabs.describe(self._slabs[kind]) for kind in KINDS]
            table = np.concatenate([*tables, np.zeros((1, 2), np.int64)])
            self._tables = DeviceMemory(device, table.nbytes, "the table of slabs")
            self._fault = self._tables.address + table.nbytes - 16
            self._staging.write(self._tables.address, table, self.queue(None))
            device.synchronize()
        except BaseException:
            cuda_slabs.give_back(self._slabs)  # the error may keep this object for long
            self._slabs = None
            raise

    def _native(self, kind: Kind) -> Any:
        library, spec = self.device.library, self.spec
        geometry = ctypes.create_string_buffer(library.pc_cuda_geometry_nbytes())
        self.device.call(
            "pc_cuda_geometry",
            geometry,
            self._formats[kind].code,
            LAYOUTS[spec.layout],
            spec.num_kv_heads,
            spec.block_size,
            spec.head_dim,
        )
        return geometry

    def close(self) -> None:
        """Let go of the slabs; their memory returns once no view holds it. Idempotent."""
        self._slabs = None

    def queue(self, stream: Any) -> Stream:
        """The stream of the caller's object: None, an int handle, one of PyCUDA, torch, CuPy
        or cuda.core, or a mapping with one for this device. Raises :class:`DeviceError` or
        :class:`InvalidArgumentError`."""
        if isinstance(stream, Mapping):
            stream = by_device(stream, [self.device.name]).get(self.device.name)
        return self.streams.resolve(stream)

    def __repr__(self) -> str:
        state = "closed" if self._slabs is None else f"{self.nbytes:,} bytes"
        return f"<CudaStorage on {self.device.name}: {self.num_blocks} blocks, {state}>"

    def _open(self) -> cuda_slabs.Slabs:
        slabs = self._slabs
        if slabs is None:
            raise FreedHandleError("this storage")
        if self.device.broken is not None:
            self.device.refuse("a call on its storage")
        return slabs

    def slab_array(self, layer: int, kind: Kind, *, writable: bool = False) -> DeviceArray:
        """Return a whole slab without a copy: ``[num_blocks, *shape of block_array]``."""
        layer = as_layer(layer, self.spec.num_layers)
        slab = self._open()[self._kind(kind)][layer]
        return slab.with_owner(slab, readonly=not writable)

    def block_array(
        self, layer: int, kind: Kind, block_id: int, *, writable: bool = False, queue: Any = None
    ) -> DeviceArray:
        """One block's device array over the slab; see :class:`Storage`."""
        slab = self.slab_array(layer, kind, writable=writable)
        check_ids(np.array([block_id], np.int64), self.num_blocks)
        block: DeviceArray = slab[block_id]
        block.stream = queue
        return block

    def on_layer(self, layer: int) -> tuple[CudaBase, int]:
        """This storage and the layer's number in it; see ``PlacedStorage``."""
        return self, as_layer(layer, self.spec.num_layers)

    # ---- order ---------------------------------------------------------------------------

    def acquire(self, block_ids: Array, queue: Any, writing: bool) -> None:
        """See :class:`Storage`."""
        self._open()
        self.order.acquire(queue or self.queue(None), block_ids, writing)

    def turn(self, queue: Any) -> int:
        """See :class:`Storage`."""
        return self.order.turn(queue or self.queue(None))

    def publish(self, block_ids: Array, queue: Any = None, writing: bool = False) -> None:
        """See :class:`Storage`."""
        self._open()
        self.order.publish(block_ids, queue, writing)

    def synchronize(self) -> None:
        """Wait for the device; raise :class:`SlotError` for a raw slot that was skipped.

        Nobody waits for what was queued before any more, and streams that only did that work are
        let go of.
        """
        self._open()
        self.streams.refuse_captures("synchronize()")
        calls = self.order.queued()
        self.device.synchronize()
        self.order.passed(calls)
        self.streams.forget_finished(calls)
        fault = np.empty(2, np.int64)
        queue = self.queue(None)
        self._staging.read(self._fault, fault, queue)
        if fault[0]:
            self._staging.write(self._fault, np.zeros(2, np.int64), queue)
            if fault[0] == _E_NONFINITE:
                raise NonFiniteError("a stored row", int(fault[1]), float("nan"))
            end = self.num_blocks * self.spec.block_size
            reason = f"outside -1…{end - 1} in a slot mapping on the device; it was skipped"
            raise SlotError(int(fault[1]), reason)

    # ---- parts of a call -----------------------------------------------------------------

    @contextmanager
    def _changing(self, queue: Stream, read: Array, written: Array) -> Iterator[None]:
        """A block of calls that read and write blocks, ordered with other streams."""
        read, written = (_block_ids(ids) for ids in (read, written))
        self.order.acquire(queue, written, True)
        self.order.acquire(queue, read, False)
        try:
            yield
        finally:
            self.order.used(queue, read, False)
            self.order.used(queue, written, True)

    @contextmanager
    def _uploaded(self, array: Array, queue: Stream) -> Iterator[Region]:
        region = self._staging.upload(array, queue)
        try:
            yield region
        finally:
            region.used(queue)
            region.release()

    @contextmanager
    def _temporary(self, nbytes: int, queue: Stream) -> Iterator[Region]:
        region = self._scratch.take(nbytes, queue)
        try:
            yield region
        finally:
            region.used(queue)
            region.release()

    def new_array(self, shape: tuple[int, ...], dtype: Any, what: str) -> DeviceArray:
        """A dense array in device memory of its own, not filled."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        memory = DeviceMemory(self.device, max(nbytes, 1), what)
        return DeviceArray(memory.address, shape, None, dtype, self.device, owner=memory)

    def _outlines(self) -> dict[Kind, list[Array]]:
        slabs = self._open()
        return {kind: [shadow(slab) for slab in slabs[kind]] for kind in KINDS}

    def take_region(self, nbytes: int, queue: Stream) -> Region:
        """Device memory from the pool of regions, to be used on ``queue`` first."""
        return self._scratch.take(nbytes, queue)

    def build_pointers(
        self,
        layer: int,
        num_layers: int,
        table: int,
        capacity: int,
        first: int,
        block_ids: Array,
        queue: Stream,
    ) -> None:
        """Write entries ``first …`` of K and V of ``num_layers`` layers from ``layer`` on."""
        slabs, step = self._tables.address, 16 * self.spec.num_layers
        with self._uploaded(block_ids, queue) as region:
            self.device.call(
                "pc_cuda_build_pointers",
                slabs + 16 * layer,
                slabs + step + 16 * layer,
                slabs + 16 * layer,
                slabs + step + 16 * layer,
                self.num_blocks,
                num_layers,
                region.address,
                first,
                len(block_ids),
                table,
                capacity,
                queue.handle,
            )

    def _geometries(self) -> Iterator[tuple[Any, int, int]]:
        """(geometry, address of a table of slabs, slabs): one where K and V are stored alike."""
        layers, table = self.spec.num_layers, self._tables.address
        if self.spec.k_format == self.spec.v_format:
            yield self._geometry["k"], table, 2 * layers
        else:
            yield self._geometry["k"], table, layers
            yield self._geometry["v"], table + 16 * layers, layers


def _block_ids(ids: Array) -> Array:
    """Distinct ids without the scratch block, int32."""
    ids = np.unique(ids[ids >= 0])
    return ids.astype(np.int32)
