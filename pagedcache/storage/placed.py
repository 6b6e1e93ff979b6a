"""Layers of one cache on several devices: each call goes to the storage of its layer, copies of
blocks go to all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pagedcache.arguments import as_layer
from pagedcache.errors import DeviceError, PagedCacheError, shown
from pagedcache.spec import CacheSpec
from pagedcache.storage.attention import AttentionArrays, AttentionBatch, AttentionOptions
from pagedcache.storage.base import Storage
from pagedcache.storage.cpu import CpuStorage
from pagedcache.storage.queues import by_device
from pagedcache.storage.slabs import Array, Kind

Queues = dict[str, Any]


def make_storage(
    spec: CacheSpec,
    num_blocks: int,
    devices: Sequence[str],
    slabs: Any = None,
    num_open: int = 0,
) -> CpuStorage | Any:
    """The storage of a cache whose layer ``i`` lives on ``devices[i]`` (``"cpu"``, ``"cuda:N"``).

    ``slabs``: ``(k_slabs, v_slabs)`` to adopt, one array per layer on the layer's device.
    ``num_open``: open slots, in memory taken here. Raises what the storages raise; nothing is kept
    then.
    """
    if len(set(devices)) == 1:
        return _one(spec, num_blocks, devices[0], slabs, num_open)
    return PlacedStorage(spec, num_blocks, devices, slabs, num_open)


def _one(spec: CacheSpec, num_blocks: int, device: str, slabs: Any, num_open: int) -> Storage:
    if device == "cpu":
        return CpuStorage(spec, num_blocks, num_open, slabs)
    from pagedcache.storage.cuda import CudaStorage  # no driver is touched before this

    return CudaStorage(spec, num_blocks, int(device.partition(":")[2]), slabs, num_open)


class PlacedStorage:
    """The same interface as one storage, over one storage per device."""

    ordered = True

    def __init__(
        self,
        spec: CacheSpec,
        num_blocks: int,
        devices: Sequence[str],
        slabs: Any = None,
        num_open: int = 0,
    ) -> None:
        self.spec = spec
        self._devices = tuple(devices)
        names = list(dict.fromkeys(devices))
        # The CPU's part comes last: what can fail goes first.
        names.sort(key=lambda name: name == "cpu")
        self._parts: dict[str, Storage] = {}
        self._local: list[int] = []
        counts: dict[str, int] = {}
        for name in devices:
            self._local.append(counts.get(name, 0))
            counts[name] = counts.get(name, 0) + 1
        try:
            for name in names:
                own = None if slabs is None else _part_of(slabs, devices, name, spec.num_layers)
                part = replace(spec, num_layers=counts[name])
                self._parts[name] = _one(part, num_blocks, name, own, num_open)
        except BaseException:
            self.close()  # the error may keep this object for long
            self._parts.clear()
            raise
        self.num_blocks, self.num_open = num_blocks, num_open

    @property
    def num_places(self) -> int:
        """See :class:`Storage`."""
        return self.num_blocks + self.num_open

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks and open slots in all layers, K and V, padding included."""
        return self.spec.storage_nbytes(self.num_blocks, self.num_open)

    def close(self) -> None:
        """Close every part."""
        for part in self._parts.values():
            part.close()

    def touch(self) -> None:
        """See :class:`Storage`."""
        for part in self._parts.values():
            part.touch()

    def __repr__(self) -> str:
        return f"<PlacedStorage: {', '.join(map(repr, self._parts.values()))}>"

    def queue(self, stream: Any) -> Queues:
        """One queue per GPU. ``stream``: None, a mapping from device names to streams, or, where
        all GPU layers live on one GPU, its stream."""
        gpus = [name for name in self._parts if name != "cpu"]
        if isinstance(stream, Mapping):
            named = by_device(stream, gpus)
            return {name: self._parts[name].queue(named.get(name)) for name in gpus}
        if stream is not None and len(gpus) > 1:
            expected = f"a mapping from {', '.join(gpus)} to their streams"
            raise DeviceError(expected, shown(stream), "stream")
        return {name: self._parts[name].queue(stream) for name in gpus}

    def _place(self, layer: Any, queue: Queues | None) -> tuple[Storage, int, Any]:
        layer = as_layer(layer, self.spec.num_layers)
        name = self._devices[layer]
        return self._parts[name], self._local[layer], (queue or {}).get(name)

    # ---- one layer -----------------------------------------------------------------------

    def check_rows(
        self,
        layer: int,
        k: Any,
        v: Any,
        num_tokens: int | None,
        on_nonfinite: str | None = None,
        queue: Queues | None = None,
    ) -> tuple[Any, Any]:
        """See :class:`Storage`."""
        part, local, own = self._place(layer, queue)
        return part.check_rows(local, k, v, num_tokens, on_nonfinite, own)

    def store(
        self,
        layer: int,
        k: Any,
        v: Any,
        slots: Any,
        on_nonfinite: str | None = None,
        queue: Queues | None = None,
        mapping: Any = None,
    ) -> None:
        """See :class:`Storage`."""
        part, local, own = self._place(layer, queue)
        part.store(local, k, v, slots, on_nonfinite, own, mapping)

    def device_slots(self, x: Any, what: str) -> Any:
        """See :class:`Storage`."""
        return next(iter(self._parts.values())).device_slots(x, what)

    def store_raw(
        self,
        layer: int,
        k: Any,
        v: Any,
        slots: Any,
        on_nonfinite: str | None = None,
        queue: Queues | None = None,
    ) -> None:
        """See :class:`CudaStorage`; :class:`DeviceError` for a layer on the CPU."""
        part, local, own = self._place(layer, queue)
        part.store_raw(local, k, v, slots, on_nonfinite, own)

    def gather(
        self,
        layer: int,
        places: Array,
        start: int,
        stop: int,
        dtype: Any = None,
        out_k: Any = None,
        out_v: Any = None,
        queue: Queues | None = None,
    ) -> tuple[Any, Any]:
        """See :class:`Storage`."""
        part, local, own = self._place(layer, queue)
        return part.gather(local, places, start, stop, dtype, out_k, out_v, own)

    def attention_arrays(
        self,
        layer: int,
        q: Any,
        out: Any = None,
        sinks: Any = None,
        return_lse: bool = False,
        queue: Queues | None = None,
    ) -> AttentionArrays:
        """See :class:`Storage`."""
        part, local, own = self._place(layer, queue)
        return part.attention_arrays(local, q, out, sinks, return_lse, own)

    def attend(
        self,
        layer: int,
        arrays: AttentionArrays,
        batch: AttentionBatch,
        options: AttentionOptions,
        queue: Queues | None = None,
    ) -> None:
        """See :class:`Storage`."""
        part, local, own = self._place(layer, queue)
        part.attend(local, arrays, batch, options, own)

    def out_array(self, layer: int, x: Any, what: str) -> Any:
        """See :class:`Storage`."""
        part, local, _ = self._place(layer, None)
        return part.out_array(local, x, what)

    def slab_array(self, layer: int, kind: Kind, *, writable: bool = False) -> Any:
        """See :class:`Storage`."""
        part, local, _ = self._place(layer, None)
        return part.slab_array(local, kind, writable=writable)

    def open_slab_array(self, layer: int, kind: Kind, *, writable: bool = False) -> Any:
        """See :class:`Storage`."""
        part, local, _ = self._place(layer, None)
        return part.open_slab_array(local, kind, writable=writable)

    def block_array(
        self, layer: int, kind: Kind, place: int, *, writable: bool = False, queue: Any = None
    ) -> Any:
        """See :class:`Storage`."""
        part, local, own = self._place(layer, queue)
        return part.block_array(local, kind, place, writable=writable, queue=own)

    def on_layer(self, layer: int) -> tuple[Storage, int]:
        """The storage that holds a layer, and the layer's number there."""
        part, local, _ = self._place(layer, None)
        return part, local

    # ---- every layer ---------------------------------------------------------------------

    def copy_blocks(
        self, src: Array, dst: Array, rows: Array, queue: Queues | None = None
    ) -> None:
        """See :class:`Storage`."""
        for name, part in self._parts.items():
            part.copy_blocks(src, dst, rows, (queue or {}).get(name))

    def copy_tokens(self, src: Array, dst: Array, queue: Queues | None = None) -> None:
        """See :class:`Storage`."""
        for name, part in self._parts.items():
            part.copy_tokens(src, dst, (queue or {}).get(name))

    def move_blocks(self, moves: Array, queue: Queues | None = None) -> None:
        """See :class:`Storage`; where one device refuses, the others move back."""
        done = []
        try:
            for name, part in self._parts.items():
                part.move_blocks(moves, (queue or {}).get(name))
                done.append((name, part))
        except PagedCacheError:
            for name, part in done:
                _move_back(part, moves, (queue or {}).get(name))
            raise

    def fill_blocks(self, places: Array, byte: int, queue: Queues | None = None) -> None:
        """See :class:`Storage`."""
        for name, part in self._parts.items():
            part.fill_blocks(places, byte, (queue or {}).get(name))

    def acquire(self, places: Array, queue: Queues | None, writing: bool) -> None:
        """See :class:`Storage`."""
        for name, part in self._parts.items():
            part.acquire(places, (queue or {}).get(name), writing)

    def turn(self, queue: Queues | None) -> Any:
        """See :class:`Storage`."""
        return [part.turn((queue or {}).get(name)) for name, part in self._parts.items()]

    def publish(
        self, places: Array, queue: Queues | None = None, writing: bool = False
    ) -> None:
        """See :class:`Storage`."""
        for name, part in self._parts.items():
            part.publish(places, (queue or {}).get(name), writing)

    def synchronize(self) -> None:
        """See :class:`Storage`."""
        for part in self._parts.values():
            part.synchronize()


def _move_back(part: Any, moves: Array, queue: Any) -> None:
    """Undo moves; a device that refuses even that holds blocks that nobody can name any more."""
    try:
        part.move_blocks(moves[::-1, ::-1], queue)
    except DeviceError as error:
        part.device.broken = error
    except PagedCacheError as error:
        part.device.broken = DeviceError("moves to be undone", str(error), "defragment")


def _part_of(slabs: Any, devices: Sequence[str], name: str, num_layers: int) -> Any:
    """The caller's arrays of the layers on one device; wrong numbers are left to ``adopt``."""
    parts = []
    for given in slabs:
        try:
            listed = list(given)
        except TypeError:
            return slabs
        if len(listed) != num_layers:
            return slabs
        parts.append([x for x, device in zip(listed, devices, strict=True) if device == name])
    return tuple(parts)
