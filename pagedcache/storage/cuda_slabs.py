"""Slabs in the memory of a CUDA device: taken, or adopted from the caller's device arrays."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import numpy as np

from pagedcache._cuda.arrays import DeviceArray
from pagedcache._cuda.driver import Device
from pagedcache._cuda.exchange import as_device_array, check_pointer
from pagedcache._cuda.memory import DeviceMemory
from pagedcache.errors import DeviceError, StorageMemoryError
from pagedcache.spec import CacheSpec
from pagedcache.storage import slabs as slab_memory
from pagedcache.storage.shadows import shadow, shadowed
from pagedcache.storage.slabs import KINDS, Array, Kind

Slabs = dict[Kind, list[DeviceArray]]


def allocate(device: Device, spec: CacheSpec, num_blocks: int) -> Slabs:
    """One zeroed allocation per layer and kind; all of it or nothing.

    Raises :class:`StorageMemoryError` when the device has not that much.
    """
    shapes = {kind: slab_memory.shape_of_block(spec, kind) for kind in KINDS}
    return _zeroed(device, spec, num_blocks, shapes, spec.storage_nbytes(num_blocks), "blocks")


def allocate_open(device: Device, spec: CacheSpec, num_open: int) -> Slabs:
    """The same for ``num_open`` open slots; no slabs for none."""
    if not num_open:
        return {"k": [], "v": []}
    shapes = {kind: slab_memory.shape_of_open_block(spec, kind) for kind in KINDS}
    total = spec.storage_nbytes(0, num_open)
    return _zeroed(device, spec, num_open, shapes, total, "open blocks")


def _zeroed(
    device: Device,
    spec: CacheSpec,
    count: int,
    shapes: dict[Kind, tuple[tuple[int, ...], np.dtype[Any]]],
    total: int,
    name: str,
) -> Slabs:
    slabs: Slabs = {"k": [], "v": []}
    with ExitStack() as undo:
        for kind, (shape, dtype) in shapes.items():
            nbytes = count * math.prod(shape) * dtype.itemsize
            for layer in range(spec.num_layers):
                what = f"{count:,} {name} of {kind} of layer {layer}"
                try:
                    memory = DeviceMemory(device, nbytes, what)
                except StorageMemoryError as error:
                    raise StorageMemoryError(total, f"{what} and the others") from error
                undo.callback(memory.free)
                device.call("pc_cuda_fill", memory.address, 0, nbytes, None)
                slabs[kind].append(
                    DeviceArray(
                        memory.address, (count, *shape), None, dtype, device, owner=memory
                    )
                )
        device.synchronize()  # zeros before any stream, also one that does not wait for others
        undo.pop_all()
    return slabs


def adopt(device: Device, spec: CacheSpec, num_blocks: int, slabs: Any) -> Slabs:
    """The caller's device arrays as slabs; the rules are those of :func:`slabs.adopt`."""

    def share(x: Any, what: str) -> Array:
        array = on_device(x, what, device)
        check_pointer(array, device)
        return shadow(array)

    arrays = slab_memory.adopt(spec, num_blocks, slabs, share)
    return {kind: [shadowed(slab) for slab in arrays[kind]] for kind in KINDS}


def on_device(x: Any, what: str, device: Device) -> DeviceArray:
    """``x`` as an array of this device; :class:`DeviceError` names both places otherwise."""
    array = as_device_array(x, what)
    if array is None:
        raise DeviceError(f"memory of {device.name}", f"{type(x).__name__} on the host", what)
    if array.device != device.name:
        raise DeviceError(f"memory of {device.name}", f"memory of {array.device}", what)
    return array


def give_back(slabs: Slabs) -> None:
    """Free what :func:`allocate` took now, not when the last reference goes."""
    for kind in KINDS:
        for slab in slabs[kind]:
            if isinstance(slab.owner, DeviceMemory):
                slab.owner.free()


def base_of(slab: DeviceArray, first_place: int) -> int:
    """Where place 0 would lie if the slab's first block is that of ``first_place``: an unsigned
    64-bit address from which places are counted; no memory may lie there."""
    return (slab.address - first_place * slab.strides[0]) % 2**64


def describe(slabs: list[DeviceArray], first_place: int = 0) -> Array:
    """The table that kernels read: int64 ``[num_layers, 2]`` of (base, block stride)."""
    table = np.empty((len(slabs), 2), np.int64)
    for row, slab in zip(table, slabs, strict=True):
        row[:1].view(np.uint64)[0] = base_of(slab, first_place)
        row[1] = slab.strides[0]
    return table
