"""Storage in the CPU's memory: bytes move with the GIL released and are there on return."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np

from pagedcache._native.memory import bytes_to_alignment, touch
from pagedcache._native.rows import Slabs, find_nonfinite
from pagedcache.arguments import as_layer
from pagedcache.arrays import as_ids, as_rows, copied, overlap, row_format
from pagedcache.dlpack import Bfloat16Array, lent
from pagedcache.errors import (
    DeviceError,
    FormatError,
    FreedHandleError,
    InvalidArgumentError,
    InvalidPositionError,
    NonFiniteError,
    PagedCacheError,
    ShapeError,
    StorageMemoryError,
    shown,
)
from pagedcache.foreign import as_ndarray, is_tensor
from pagedcache.formats import KVFormat
from pagedcache.spec import LAYOUTS, CacheSpec
from pagedcache.storage import slabs as slab_memory
from pagedcache.storage.attention import AttentionArrays, AttentionBatch, AttentionOptions
from pagedcache.storage.base import Storage
from pagedcache.storage.checks import overlaps_itself
from pagedcache.storage.cpu_attention import attend, check_arrays
from pagedcache.storage.slabs import KINDS, Array, Kind

_ALIGNMENT = slab_memory.ALIGNMENT
_SPARE = _ALIGNMENT - 1


class CpuStorage(Storage):
    """K and V of every layer for ``num_blocks`` blocks and ``num_open`` open slots.

    ``slabs=None`` takes zeroed, 64-byte aligned memory, one slab per layer and kind;
    ``slabs=(k_slabs, v_slabs)`` adopts the caller's arrays (see :func:`slabs.adopt`). Open slots
    have memory of their own in both cases.
    Raises :class:`StorageMemoryError` when the memory cannot be had; nothing is kept then.
    """

    def __init__(
        self, spec: CacheSpec, num_blocks: int, num_open: int = 0, slabs: Any = None
    ) -> None:
        super().__init__(spec, num_blocks, num_open)
        self.adopted = slabs is not None
        self._shown = self.adopted  # whether others may have a writable array over the slabs
        arrays = (
            slab_memory.adopt(spec, self.num_blocks, slabs)
            if self.adopted
            else slab_memory.allocate(spec, self.num_blocks)
        )
        self._arrays: dict[Kind, list[Array]] | None = arrays
        self._open_arrays = slab_memory.allocate_open(spec, self.num_open)
        # The kind with the stricter checks comes first: what it lets pass, the other does too.
        strict_first = sorted(KINDS, key=lambda kind: self._formats[kind].group_axis != "tokens")
        self._slabs: dict[Kind, Slabs] = {k: self._native(k, arrays[k]) for k in strict_first}
        nbytes = max(spec.layer_block_nbytes(kind) for kind in KINDS)
        try:
            self._scratch = np.zeros(nbytes, np.uint8)
        except MemoryError:
            raise StorageMemoryError(nbytes, "the scratch block") from None
        self._scratch_lock = threading.Lock()

    def _native(self, kind: Kind, arrays: list[Array]) -> Slabs:
        spec = self.spec
        return Slabs(
            [slab_memory.raw(slab) for slab in arrays],
            self._formats[kind].code,
            LAYOUTS[spec.layout],
            spec.num_kv_heads,
            spec.block_size,
            spec.head_dim,
            [slab_memory.raw(slab) for slab in self._open_arrays[kind]],
            spec.open_format(kind).code if spec.has_open_blocks else 0,
        )

    def close(self) -> None:
        """Let go of the slabs; their memory returns once no view holds it. Idempotent."""
        self._arrays = None
        self._open_arrays = {"k": [], "v": []}
        self._slabs = {}

    def touch(self) -> None:
        """See :class:`Storage`; adopted slabs are left alone, as others may be at work on them."""
        own = [self._open_arrays, {} if self.adopted else self._arrays or {}]
        for slab in [slab for arrays in own for kind in arrays.values() for slab in kind]:
            touch(slab_memory.raw(slab).reshape(-1))

    def queue(self, stream: Any) -> None:
        """None: there are no streams on the CPU; :class:`DeviceError` for any other."""
        if stream is not None:
            raise DeviceError("no stream, as every layer is on the CPU", shown(stream), "stream")

    def __repr__(self) -> str:
        state = "closed" if self._arrays is None else f"{self.nbytes:,} bytes"
        opened = f" and {self.num_open} open slots" if self.num_open else ""
        return f"<CpuStorage: {self.num_blocks} blocks{opened}, {state}>"

    # ---- rows in -------------------------------------------------------------------------

    def _open(self) -> dict[Kind, Slabs]:
        slabs = self._slabs
        if not slabs:
            raise FreedHandleError("this storage")
        return slabs

    def native_slabs(self) -> dict[Kind, Slabs]:
        """K's and V's slabs, in the order in which :meth:`store` writes them."""
        return self._open()

    def arrays_of(self, layer: int) -> list[Array]:
        """All memory of a layer: its slabs and open slots, K and V."""
        both = [*(self._arrays or {}).values(), *self._open_arrays.values()]
        return [slabs[layer] for slabs in both if slabs]

    def _rows(self, k: Any, v: Any, num_tokens: int | None, queue: Any) -> tuple[Array, Array]:
        heads, head_dim = self.spec.num_kv_heads, self.spec.head_dim
        return (
            as_rows(k, "k", heads, head_dim, num_tokens),
            as_rows(v, "v", heads, head_dim, num_tokens),
        )

    def _refuse_nonfinite(self, pairs: list[tuple[Kind, Array]], queue: Any) -> None:
        for kind, rows in pairs:
            refuse_nonfinite(kind, rows)

    def _apart(self, layer: int, rows: Array, queue: Any) -> Array:
        if rows.base is None and not self.adopted:
            return rows  # owns its memory, and the slabs are ours
        inside = any(np.may_share_memory(rows, slab) for slab in self.arrays_of(layer))
        return copied(rows, "rows that lie in the slabs") if inside else rows

    def _store(
        self, layer: int, k: Array, v: Array, slots: Array, policy: int, queue: Any, mapping: Any
    ) -> None:
        pair = {"k": k, "v": v}
        for kind, native in self._open().items():
            rows = pair[kind]
            bad = native.store(layer, rows, _code(rows), slots, policy)
            if bad:  # a value changed after check_rows, or nobody called it
                refuse_nonfinite(kind, rows)

    # ---- rows out ------------------------------------------------------------------------

    def _load(
        self,
        layer: int,
        ids: Array,
        first: int,
        fmt: KVFormat,
        shape: tuple[int, int, int],
        out_k: Any,
        out_v: Any,
        queue: Any,
    ) -> tuple[Array, Array]:
        slabs = self._open()
        k, v = host_out(out_k, "out_k", shape, fmt), host_out(out_v, "out_v", shape, fmt)
        if out_k is not None and out_v is not None and overlap(k, v):
            raise ShapeError("out_k and out_v that share no memory", "overlapping arrays", "out")
        for given, name in ((out_k, "out_k"), (out_v, "out_v")):
            if given is not None and self._covered(given):
                raise ShapeError("memory apart from the slabs", "an array over them", name)
        slabs["k"].load(layer, ids, first, k, fmt.code)
        slabs["v"].load(layer, ids, first, v, fmt.code)
        return k, v

    # ---- attention -----------------------------------------------------------------------

    def attention_arrays(
        self,
        layer: int,
        q: Any,
        out: Any = None,
        sinks: Any = None,
        return_lse: bool = False,
        queue: Any = None,
    ) -> AttentionArrays:
        """See :class:`Storage`; a torch tensor as ``q`` makes tensors of the results."""
        self._open()
        as_layer(layer, self.spec.num_layers)
        made = check_arrays(self.spec, q, out, sinks, return_lse, filled, empty_rows)
        if out is not None and self._covered(made.out):
            raise ShapeError("memory apart from the slabs", "an array over them", "out")
        return made

    def attend(
        self,
        layer: int,
        arrays: AttentionArrays,
        batch: AttentionBatch,
        options: AttentionOptions,
        queue: Any = None,
    ) -> None:
        """See :class:`Storage`. On up to ``pagedcache.get_num_threads()`` threads."""
        slabs = self._open()
        layer = as_layer(layer, self.spec.num_layers)
        attend(slabs, layer, arrays, batch, options)

    def _covered(self, out: Array) -> bool:
        """Whether an array of the caller's lies over slabs that others may have arrays of."""
        both = [arrays for arrays in (self._arrays, self._open_arrays) if arrays]
        return self._shown and any(slab_memory.covers(own, out) for own in both)

    def out_array(self, layer: int, x: Any, what: str) -> Array:
        """A NumPy array over the caller's; see :class:`Storage`."""
        return filled(x, what)

    def dequantize_block(
        self, layer: int, kind: Kind, place: int, length: int, dtype: Any = np.float32
    ) -> Array:
        """Return a copy of a block's first ``length`` tokens as ``dtype``, in the block's layout.

        HND: ``[heads, length, head_dim]``; NHD: ``[length, heads, head_dim]``.
        """
        slabs = self._open()
        layer = as_layer(layer, self.spec.num_layers)
        _, num_tokens = self._range(0, length)
        if num_tokens > self.spec.block_size:
            raise InvalidPositionError(num_tokens, self.spec.block_size, "tokens of one block")
        ids = as_ids([place])
        native = slabs[self._kind(kind)]
        fmt = row_format(dtype)
        heads, head_dim = self.spec.num_kv_heads, self.spec.head_dim
        by_head = self.spec.layout == "HND"
        shape = (heads, num_tokens, head_dim) if by_head else (num_tokens, heads, head_dim)
        block = empty_rows(shape, fmt)
        rows = block.transpose(1, 0, 2) if by_head else block
        native.load(layer, ids, 0, rows, fmt.code)
        return block

    def block_array(
        self, layer: int, kind: Kind, place: int, *, writable: bool = False, queue: Any = None
    ) -> Array:
        """One block's NumPy array over the slab; see :class:`Storage`."""
        native = self._open()[self._kind(kind)]
        slab = self.slab_array(layer, kind, writable=writable)
        native.check_places(as_ids([place], "places"))
        if place >= self.num_blocks:
            slab = self.open_slab_array(layer, kind, writable=writable)
            place -= self.num_blocks
        block: Array = slab[place]
        return block

    def slab_array(self, layer: int, kind: Kind, *, writable: bool = False) -> Array:
        """Return a whole slab without a copy: ``[num_blocks, *shape of block_array]``."""
        layer = as_layer(layer, self.spec.num_layers)
        arrays = self._arrays
        if arrays is None:
            raise FreedHandleError("this storage")
        slab = lent(arrays[self._kind(kind)][layer].view())
        slab.flags.writeable = writable
        self._shown |= writable
        return slab

    def open_slab_array(self, layer: int, kind: Kind, *, writable: bool = False) -> Array:
        """Return all open slots without a copy: ``[num_open, *open_block_shape]``."""
        layer = as_layer(layer, self.spec.num_layers)
        kind = self._kind(kind)
        self._open()
        if not self.num_open:
            shape, dtype = slab_memory.shape_of_open_block(self.spec, kind)
            return np.empty((0, *shape), dtype)
        slab = lent(self._open_arrays[kind][layer].view())
        slab.flags.writeable = writable
        self._shown |= writable
        return slab

    # ---- copies --------------------------------------------------------------------------

    def _copy_blocks(self, src: Array, dst: Array, rows: Array, queue: Any) -> None:
        for native in self._open().values():
            native.copy(src, dst, rows)

    def fill_blocks(self, places: Array, byte: int, queue: Any = None) -> None:
        """See :class:`Storage`."""
        slabs = self._open()
        places = as_ids(places, "places")
        slabs["k"].check_places(places)
        sealed = places[places < self.num_blocks]
        opened = places[places >= self.num_blocks] - self.num_blocks
        for kind in KINDS:
            for slab in (self._arrays or {})[kind]:
                slab_memory.raw(slab)[sealed] = byte
            for slab in self._open_arrays[kind]:
                slab_memory.raw(slab)[opened] = byte

    def _copy_tokens(self, src: Array, dst: Array, queue: Any) -> None:
        for native in self._open().values():
            native.copy_tokens(src, dst)

    def _move_blocks(self, src: Array, dst: Array, queue: Any) -> None:
        slabs = self._open()
        with self._scratch_lock:
            for native in slabs.values():
                native.move(src, dst, self._scratch)


def filled(array: Any, what: str) -> Array:
    """A NumPy array over the memory of the caller's array that is to be filled."""
    if isinstance(array, np.ndarray):
        return array
    if is_tensor(array) or any(
        hasattr(array, name) for name in ("__cuda_array_interface__", "__dlpack__")
    ):
        try:
            return as_ndarray(array, what, written=True)
        except PagedCacheError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            reason = f"cannot be shared with NumPy ({shown(str(error))})"
            raise InvalidArgumentError(f"{what} {reason}") from None
    got = type(array).__name__
    raise InvalidArgumentError(f"{what} is {got}, not an array whose memory can be filled")


def host_out(out: Any, what: str, shape: tuple[int, ...], fmt: KVFormat) -> Array:
    """A NumPy array to fill: the caller's, checked, or a new one where it is None."""
    if out is None:
        return empty_rows(shape, fmt)
    if not isinstance(out, np.ndarray):
        raise FormatError("a numpy array", type(out).__name__, what)
    if out.dtype != fmt.dtype or not out.dtype.isnative:
        raise FormatError(fmt.dtype, out.dtype, what)
    if out.shape != shape:
        raise ShapeError(list(shape), list(out.shape), what)
    if overlaps_itself(out.shape, out.strides, out.itemsize):
        raise ShapeError("elements of their own", f"strides {out.strides}", what)
    if not out.flags.writeable or not out.flags.aligned:
        raise FormatError("a writable, aligned array", "a read-only or misaligned one", what)
    return out


def empty_rows(shape: tuple[int, ...], fmt: KVFormat) -> Array:
    """A new array for results, aligned like a slab."""
    dtype = fmt.dtype
    nbytes = math.prod(shape) * dtype.itemsize
    try:
        memory = np.empty(nbytes + _SPARE, np.uint8)
        skip = bytes_to_alignment(memory, _ALIGNMENT)
        kind = Bfloat16Array if fmt.name == "bfloat16" else np.ndarray
        return kind(shape, dtype, memory, skip)
    except (MemoryError, ValueError, OverflowError):  # the latter for sizes past the address space
        raise StorageMemoryError(nbytes, f"the {fmt.name} copy of {shape}") from None


def _code(rows: Array) -> int:
    return row_format(rows.dtype).code


def refuse_nonfinite(kind: Kind, rows: Array) -> None:
    """Raise :class:`NonFiniteError` for the first NaN or Inf of rows on the host."""
    index = find_nonfinite(rows, _code(rows))
    if index >= 0:
        raise NonFiniteError(kind, index, float(rows[np.unravel_index(index, rows.shape)]))
