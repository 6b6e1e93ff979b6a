"""What every call on a CUDA device's storage needs: its slabs, streams, uploads, and the order."""

from __future__ import annotations

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
from pagedcache.spec import CacheSpec
from pagedcache.storage import cuda_slabs
from pagedcache.storage.base import Storage
from pagedcache.storage.checks import check_ids
from pagedcache.storage.cuda_sides import OPEN, SEALED, Side, make_sides
from pagedcache.storage.queues import by_device
from pagedcache.storage.shadows import shadow
from pagedcache.storage.slabs import KINDS, Array, Kind, shape_of_open_block

_E_NONFINITE = 1  # include/pagedcache/status.h


class CudaBase(Storage):
    """See ``CudaStorage``, which is this with copies and rows."""

    ordered = True

    def __init__(
        self,
        spec: CacheSpec,
        num_blocks: int,
        ordinal: int = 0,
        slabs: Any = None,
        num_open: int = 0,
    ) -> None:
        super().__init__(spec, num_blocks, num_open)
        self.adopted = slabs is not None
        device = self.device = get_device(ordinal)
        self.streams = Streams(device)
        self.streams.default.refuse_capture("making a cache")
        # Sealed blocks, and open slots if there are any.
        self._slabs: list[cuda_slabs.Slabs] = [
            cuda_slabs.adopt(device, spec, self.num_blocks, slabs)
            if self.adopted
            else cuda_slabs.allocate(device, spec, self.num_blocks)
        ]
        try:
            if self.num_open:
                self._slabs.append(cuda_slabs.allocate_open(device, spec, self.num_open))
            self.order = Order(device, self.num_places)
            self._scratch = Scratch(device, self.order)
            self._staging = Staging(device, self._scratch)
            # The slabs of K and of V, sealed and open, then the fault word of raw device slots.
            tables = [
                cuda_slabs.describe(side[kind], where * self.num_blocks)
                for where, side in enumerate(self._slabs)
                for kind in KINDS
            ]
            table = np.concatenate([*tables, np.zeros((1, 2), np.int64)])
            self._tables = DeviceMemory(device, table.nbytes, "the table of slabs")
            self._fault = self._tables.address + table.nbytes - 16
            self.sides = make_sides(
                device, spec, self.num_blocks, self.num_open, self._tables.address
            )
            self._staging.write(self._tables.address, table, self.queue(None))
            device.synchronize()
        except BaseException:
            for side in self._slabs:
                cuda_slabs.give_back(side)  # the error may keep this object for long
            self._slabs = []
            raise

    def close(self) -> None:
        """Let go of the slabs; their memory returns once no view holds it. Idempotent."""
        self._slabs = []

    def queue(self, stream: Any) -> Stream:
        """The stream of the caller's object: None, an int handle, one of PyCUDA, torch, CuPy
        or cuda.core, or a mapping with one for this device. Raises :class:`DeviceError` or
        :class:`InvalidArgumentError`."""
        if isinstance(stream, Mapping):
            stream = by_device(stream, [self.device.name]).get(self.device.name)
        return self.streams.resolve(stream)

    def __repr__(self) -> str:
        state = f"{self.nbytes:,} bytes" if self._slabs else "closed"
        opened = f" and {self.num_open} open slots" if self.num_open else ""
        return f"<CudaStorage on {self.device.name}: {self.num_blocks} blocks{opened}, {state}>"

    def _open(self) -> list[cuda_slabs.Slabs]:
        slabs = self._slabs
        if not slabs:
            raise FreedHandleError("this storage")
        if self.device.broken is not None:
            self.device.refuse("a call on its storage")
        return slabs

    def slab_array(self, layer: int, kind: Kind, *, writable: bool = False) -> DeviceArray:
        """Return a whole slab without a copy: ``[num_blocks, *shape of block_array]``."""
        layer = as_layer(layer, self.spec.num_layers)
        slab = self._open()[SEALED][self._kind(kind)][layer]
        return slab.with_owner(slab, readonly=not writable)

    def open_slab_array(self, layer: int, kind: Kind, *, writable: bool = False) -> DeviceArray:
        """Return all open slots without a copy: ``[num_open, *open_block_shape]``."""
        layer = as_layer(layer, self.spec.num_layers)
        slabs, kind = self._open(), self._kind(kind)
        shape, dtype = shape_of_open_block(self.spec, kind)
        if not self.num_open:
            return DeviceArray(0, (0, *shape), None, dtype, self.device, readonly=not writable)
        slab = slabs[OPEN][kind][layer]
        return slab.with_owner(slab, readonly=not writable)

    def block_array(
        self, layer: int, kind: Kind, place: int, *, writable: bool = False, queue: Any = None
    ) -> DeviceArray:
        """One block's device array over the slab; see :class:`Storage`."""
        slab = self.slab_array(layer, kind, writable=writable)
        check_ids(np.array([place], np.int64), self.num_places)
        if place >= self.num_blocks:
            slab = self.open_slab_array(layer, kind, writable=writable)
            place -= self.num_blocks
        block: DeviceArray = slab[place]
        block.stream = queue
        return block

    def located(self, kind: Kind, layer: int, where: int) -> tuple[Side, int, int]:
        """A side of K or V, and its slab in one layer: the base that places are counted from
        and the bytes from block to block."""
        slab = self._open()[where][kind][layer]
        base = cuda_slabs.base_of(slab, where * self.num_blocks)
        return self.sides[kind][where], base, slab.strides[0]

    def on_layer(self, layer: int) -> tuple[CudaBase, int]:
        """This storage and the layer's number in it; see ``PlacedStorage``."""
        return self, as_layer(layer, self.spec.num_layers)

    # ---- order ---------------------------------------------------------------------------

    def acquire(self, places: Array, queue: Any, writing: bool) -> None:
        """See :class:`Storage`."""
        self._open()
        self.order.acquire(queue or self.queue(None), places, writing)

    def turn(self, queue: Any) -> int:
        """See :class:`Storage`."""
        return self.order.turn(queue or self.queue(None))

    def publish(self, places: Array, queue: Any = None, writing: bool = False) -> None:
        """See :class:`Storage`."""
        self._open()
        self.order.publish(places, queue, writing)

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
        """A block of calls that read and write places, ordered with other streams."""
        read, written = (_distinct(places) for places in (read, written))
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
        sides = self._open()
        return {kind: [shadow(slab) for side in sides for slab in side[kind]] for kind in KINDS}

    def take_region(self, nbytes: int, queue: Stream) -> Region:
        """Device memory from the pool of regions, to be used on ``queue`` first."""
        return self._scratch.take(nbytes, queue)

    def upload(self, array: Array, queue: Stream) -> Region:
        """A region that holds the bytes of a dense host array, once ``queue`` gets there."""
        return self._staging.upload(array, queue)

    def build_pointers(
        self,
        layer: int,
        num_layers: int,
        table: int,
        capacity: int,
        first: int,
        places: Array,
        queue: Stream,
    ) -> None:
        """Write entries ``first …`` of K and V of ``num_layers`` layers from ``layer`` on."""
        tables = [
            self.sides[kind][where if self.num_open else SEALED].tables + 16 * layer
            for where in (SEALED, OPEN)
            for kind in KINDS
        ]
        with self._uploaded(places, queue) as region:
            self.device.call(
                "pc_cuda_build_pointers",
                *tables,
                self.num_blocks,
                num_layers,
                region.address,
                first,
                len(places),
                table,
                capacity,
                queue.handle,
            )


def _distinct(places: Array) -> Array:
    """Distinct places without the scratch block, int32."""
    places = np.unique(places[places >= 0])
    return places.astype(np.int32)
