"""Storage in the memory of one CUDA device: work is queued on the caller's stream.

Nothing waits on the host but what says so: arrays of the host coming out, NaN and Inf looked for
in device arrays (``on_nonfinite="raise"`` with quantised formats), the pinned ring when it is
full, and :meth:`CudaStorage.synchronize`. Blocks used on several streams are ordered on the
device; see ``_cuda/order.py``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pagedcache._cuda.arrays import DeviceArray
from pagedcache._cuda.exchange import as_device_array
from pagedcache._cuda.streams import Stream
from pagedcache.arrays import overlap
from pagedcache.errors import ShapeError
from pagedcache.formats import KVFormat
from pagedcache.storage.checks import check_ids
from pagedcache.storage.cpu import filled, host_out
from pagedcache.storage.cuda_attention import CudaAttention
from pagedcache.storage.cuda_pointers import PointerTable, batch_of_pointers, pointers_of
from pagedcache.storage.cuda_rows import Layout, Shape, dense_layout, device_out, layout_of
from pagedcache.storage.cuda_sides import OPEN, SEALED, runs
from pagedcache.storage.cuda_store import integers
from pagedcache.storage.shadows import shadow
from pagedcache.storage.slabs import KINDS, Array, Kind, covers


class Stretch(NamedTuple):
    """Tokens that follow one another on one side."""

    where: int
    row: int
    """Number of the first one among the rows read."""
    first: int
    """The same among all tokens of the places listed."""
    num_tokens: int


class CudaStorage(CudaAttention):
    """K and V of every layer for ``num_blocks`` blocks and ``num_open`` open slots on
    ``cuda:<ordinal>``.

    ``slabs=None`` takes zeroed device memory, one allocation per layer and kind;
    ``slabs=(k_slabs, v_slabs)`` adopts the caller's device arrays. Open slots have memory of
    their own in both cases.
    Raises :class:`CudaUnavailableError`, :class:`StorageMemoryError` or :class:`DeviceError`;
    nothing is kept then.
    """

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
        check_ids(ids, self.num_places)
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
                stretches = self._stretches(ids, first, shape[0])
                for kind, out in zip(KINDS, outs, strict=True):
                    self._load_one(kind, layer, table.address, stretches, out, shape, queue)
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

    def _stretches(self, places: Array, first: int, num_tokens: int) -> list[Stretch]:
        """Tokens that lie on one side each."""
        size = self.spec.block_size
        if not self.num_open:
            return [Stretch(SEALED, 0, first, num_tokens)]
        places = places[: -(-(first + num_tokens) // size)]
        found = []
        for start, end in runs(places >= self.num_blocks):
            at, stop = max(start * size, first), min(end * size, first + num_tokens)
            where = OPEN if places[start] >= self.num_blocks else SEALED
            found.append(Stretch(where, at - first, at, stop - at))
        return found

    def _load_one(
        self,
        kind: Kind,
        layer: int,
        table: int,
        stretches: list[Stretch],
        out: Any,
        shape: Shape,
        queue: Stream,
    ) -> None:
        if isinstance(out, DeviceArray):
            for stretch in stretches:
                self._launch_load(kind, layer, table, stretch, layout_of(out), queue)
            return
        dense = out if out.flags.c_contiguous else np.empty(shape, out.dtype)
        with self._temporary(dense.nbytes, queue) as region:
            layout = dense_layout(region.address, shape, out.dtype)
            for stretch in stretches:
                self._launch_load(kind, layer, table, stretch, layout, queue)
            self._staging.read(region.address, integers(dense), queue)
        if dense is not out:
            out[...] = dense

    def _launch_load(
        self,
        kind: Kind,
        layer: int,
        table: int,
        stretch: Stretch,
        rows: Layout,
        queue: Stream,
    ) -> None:
        side, base, stride = self.located(kind, layer, stretch.where)
        at = rows.address + stretch.row * rows.token_stride
        self.device.call(
            "pc_cuda_load",
            side.geometry,
            base,
            stride,
            table,
            None,
            stretch.first,
            *rows._replace(address=at),
            stretch.num_tokens,
            queue.handle,
        )

    # ---- pointers ------------------------------------------------------------------------

    def pointer_table(self) -> PointerTable:
        """A table of pointers for one sequence, empty so far."""
        return PointerTable(self)

    def block_pointers(self, layer: int, places: Array) -> tuple[Array, Array]:
        """See ``cuda_pointers.pointers_of``."""
        return pointers_of(self, layer, places)

    def pointer_batch(
        self, layer: int, places: Array, queue: Any
    ) -> tuple[DeviceArray, DeviceArray]:
        """Pointers to K and V of one layer for a table of places (-1: 0), in new device memory."""
        return batch_of_pointers(self, layer, places, queue or self.queue(None))
