"""Tables of pointers to blocks, in device memory, for kernels that take pointers instead of ids.

One table holds K and V of all layers of a device for one list of blocks (a sequence's):
uint64 ``[num_layers, 2, capacity]``, entry i the address of block i, 0 where there is none. The
entry of an open block is the address of its open slot, whose bytes are rows of the open format
(``spec.open_format``) and not of the cache's own: places from ``num_blocks`` on say which. It is
made when it is first asked for, with room to spare; afterwards only entries that changed are
written, by one kernel for all layers.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from pagedcache._cuda.arrays import DeviceArray
from pagedcache._cuda.scratch import Region
from pagedcache._cuda.streams import Stream
from pagedcache.storage.checks import check_ids
from pagedcache.storage.cuda_base import CudaBase
from pagedcache.storage.cuda_sides import OPEN, SEALED
from pagedcache.storage.slabs import KINDS, Array

_LEAST = 16  # entries of a new table
_DTYPE = np.dtype(np.uint64)


class PointerTable:
    """The pointers to one list of blocks, as ``storage`` has them. Thread-safe."""

    def __init__(self, storage: CudaBase) -> None:
        self._storage = storage
        self._lock = threading.Lock()
        self._region: Region | None = None
        self._capacity = 0
        self._shown = np.empty(0, np.int32)  # places whose addresses the table holds
        self._readers: dict[Stream, None] = {}  # where kernels of the caller's own may read it

    def arrays(
        self, layer: int, places: Array, queue: Stream
    ) -> tuple[DeviceArray, DeviceArray]:
        """K and V pointers of one layer, uint64 ``[len(places)]``, right on ``queue``.

        Raises ``StorageMemoryError`` or ``DeviceError``; the table is as it was then.
        """
        storage = self._storage
        check_ids(places, storage.num_places)
        with self._lock:
            region = self._bring_up_to_date(places, queue)
            self._readers[queue] = None
            region.used(queue)
            starts = [
                region.address + 8 * self._capacity * (2 * layer + part) for part in range(2)
            ]
        k, v = (
            DeviceArray(
                start, (len(places),), None, _DTYPE, storage.device,
                owner=region, stream=queue, readonly=True,
            )
            for start in starts
        )
        return k, v

    def _bring_up_to_date(self, places: Array, queue: Stream) -> Region:
        region, shown = self._region, self._shown
        if region is None or len(places) > self._capacity:
            return self._make(places, queue)
        common = min(len(places), len(shown))
        changed = np.flatnonzero(places[:common] != shown[:common])
        first = int(changed[0]) if len(changed) else common
        end = max(len(places), len(shown))
        for reader in self._readers:
            region.used(reader)  # what was queued there after the table was asked for
        region.acquire(queue)
        if first < end:
            fresh = np.full(end - first, -1, np.int32)  # behind the end: no pointer is left over
            fresh[: len(places) - first] = places[first:]
            self._write(region, self._capacity, first, fresh, queue)
            self._shown = np.array(places, np.int32)
        return region

    def _make(self, places: Array, queue: Stream) -> Region:
        capacity = _LEAST
        while capacity < len(places):
            capacity *= 2
        storage = self._storage
        nbytes = 16 * storage.spec.num_layers * capacity
        region = storage.take_region(nbytes, queue)
        try:
            entries = np.full(capacity, -1, np.int32)
            entries[: len(places)] = places
            self._write(region, capacity, 0, entries, queue)
        except BaseException:
            region.release()
            raise
        self._retire()
        self._region, self._capacity = region, capacity
        self._shown = np.array(places, np.int32)
        return region

    def _write(
        self, region: Region, capacity: int, first: int, places: Array, queue: Stream
    ) -> None:
        storage = self._storage
        storage.build_pointers(
            0, storage.spec.num_layers, region.address, capacity, first, places, queue
        )
        region.used(queue)

    def close(self, queue: Any = None) -> None:
        """Give the memory back; with ``queue``, after the caller's kernels there."""
        with self._lock:
            if queue is not None:
                self._readers[queue] = None
            self._retire()
            self._capacity, self._shown = 0, self._shown[:0]

    def _retire(self) -> None:
        """Let the region go; it is used anew once no array over it is left, after its readers."""
        region, self._region = self._region, None
        if region is not None:
            for reader in self._readers:
                region.used(reader)
        self._readers = {}


def batch_of_pointers(
    storage: CudaBase, layer: int, places: Array, queue: Stream
) -> tuple[DeviceArray, DeviceArray]:
    """K and V pointers of one layer for places of any shape, in device memory of their own."""
    check_ids(places.reshape(-1), storage.num_places, -1)
    count = places.size
    made = storage.new_array((2, *places.shape), _DTYPE, f"pointers to {count} blocks")
    if count:
        storage.build_pointers(
            layer, 1, made.address, count, 0, places.reshape(-1).astype(np.int32), queue
        )
    made.stream = queue
    return made[0], made[1]


def pointers_of(storage: CudaBase, layer: int, places: Array) -> tuple[Array, Array]:
    """K and V pointers of blocks as host arrays, uint64, shaped as ``places``.

    Places below 0 give 0. Nothing is taken or queued on the device.
    """
    check_ids(places.reshape(-1), storage.num_places, -1)
    is_open = places >= storage.num_blocks
    found = []
    for kind in KINDS:
        addresses = np.zeros(places.shape, np.uint64)
        for where, chosen in ((SEALED, (places >= 0) & ~is_open), (OPEN, is_open)):
            if chosen.any():
                _, base, stride = storage.located(kind, layer, where)
                steps = places.astype(np.int64) * stride
                with np.errstate(over="ignore"):
                    moved = np.uint64(base) + steps.view(np.uint64)
                addresses = np.where(chosen, moved, addresses)
        found.append(addresses)
    return found[0], found[1]
