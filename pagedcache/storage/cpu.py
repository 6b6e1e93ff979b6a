"""Storage in the CPU's memory: rows in by slot, rows out by block table, block copies.

Who may write where is decided above (reference counts, pins, epochs); this module validates
arrays, keeps every address inside its slabs, and moves bytes with the GIL released. Calls on
different blocks may run in parallel; two calls that touch the same block must be ordered by
the caller.

Numbers: float32 rows are rounded straight to the stored format; float16 and bfloat16 rows are
widened to float32 first, which is exact. Reading goes through float32 in the same way. A row
whose dtype is the stored one is copied bit for bit in both directions, NaN payloads included.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from pagedcache._native.rows import Slabs, find_nonfinite
from pagedcache.arguments import as_count, as_integer, as_layer
from pagedcache.arrays import as_ids, as_rows, as_slots, copied, overlap, row_format
from pagedcache.errors import (
    FormatError,
    FreedHandleError,
    InvalidArgumentError,
    InvalidPositionError,
    NonFiniteError,
    ShapeError,
    StorageMemoryError,
    shown,
)
from pagedcache.formats import NONFINITE_POLICIES, KVFormat, get_policy
from pagedcache.spec import LAYOUTS, CacheSpec
from pagedcache.storage import slabs as slab_memory
from pagedcache.storage.slabs import KINDS, Array, Kind

_RAISE = NONFINITE_POLICIES["raise"]


class CpuStorage:
    """K and V of every layer for ``num_blocks`` blocks.

    ``slabs=None`` takes zeroed, 64-byte aligned memory, one slab per layer and kind;
    ``slabs=(k_slabs, v_slabs)`` adopts the caller's arrays (see :func:`slabs.adopt`).
    Raises :class:`StorageMemoryError` when the memory cannot be had; nothing is kept then.
    """

    def __init__(self, spec: CacheSpec, num_blocks: int, slabs: Any = None) -> None:
        self.spec = spec
        self.num_blocks = as_count(num_blocks, "num_blocks", least=1, most=2**31 - 1)
        self.adopted = slabs is not None
        arrays = (
            slab_memory.adopt(spec, self.num_blocks, slabs)
            if self.adopted
            else slab_memory.allocate(spec, self.num_blocks)
        )
        self._arrays: dict[Kind, list[Array]] | None = arrays
        self._formats = {"k": spec.k_format, "v": spec.v_format}
        self._slabs: dict[Kind, Slabs] = {k: self._native(k, arrays[k]) for k in KINDS}
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
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks in all layers, K and V, padding included."""
        return self.spec.storage_nbytes(self.num_blocks)

    def close(self) -> None:
        """Let go of the slabs; their memory returns once no view holds it. Idempotent."""
        self._arrays = None
        self._slabs = {}

    def __repr__(self) -> str:
        state = "closed" if self._arrays is None else f"{self.nbytes:,} bytes"
        return f"<CpuStorage: {self.num_blocks} blocks, {state}>"

    # ---- rows in -------------------------------------------------------------------------

    def check_rows(
        self, layer: int, k: Any, v: Any, num_tokens: int | None, on_nonfinite: str | None = None
    ) -> tuple[Array, Array]:
        """Validate ``k`` and ``v`` for :meth:`store` and return them ready for it; writes nothing.

        Each is ``[num_tokens, num_kv_heads, head_dim]`` or
        ``[num_tokens, num_kv_heads * head_dim]`` of float32, float16 or bfloat16 with any
        strides; ``num_tokens=None`` takes whatever both have. Rows are copied only where they are
        misaligned or may lie in the slabs themselves.

        Raises :class:`FormatError`, :class:`ShapeError` or :class:`DeviceError`, and
        :class:`NonFiniteError` when a quantised format is to hold NaN or Inf under
        ``on_nonfinite="raise"``; float formats hold both.
        """
        self._open()
        layer = as_layer(layer, self.spec.num_layers)
        policy = self._policy(on_nonfinite)
        spec = self.spec
        k_rows = as_rows(k, "k", spec.num_kv_heads, spec.head_dim, num_tokens)
        v_rows = as_rows(v, "v", spec.num_kv_heads, spec.head_dim, num_tokens)
        if k_rows.shape != v_rows.shape:
            raise ShapeError(f"as many tokens as k ({len(k_rows)})", len(v_rows), "v")
        if policy == _RAISE:
            for kind, rows in zip(KINDS, (k_rows, v_rows), strict=True):
                if self._formats[kind].is_quantized:
                    _refuse_nonfinite(kind, rows)
        return self._apart(layer, k_rows), self._apart(layer, v_rows)

    def store(
        self, layer: int, k: Array, v: Array, slots: Array, on_nonfinite: str | None = None
    ) -> None:
        """Store token ``i`` of ``k`` and ``v`` (from :meth:`check_rows`) at ``slots[i]``.

        ``slots``: int64 ``[num_tokens]``, ``block_id * block_size + offset``; -1 skips a token.
        Slots out of range raise :class:`SlotError` before any byte is written; whether they
        may be written at all is the caller's to know.
        """
        slabs = self._open()
        layer = as_layer(layer, self.spec.num_layers)
        policy = self._policy(on_nonfinite)
        slots = as_slots(slots)
        if not len(slots) == len(k) == len(v):
            raise ShapeError(f"{len(k)} slots, one per token", len(slots), "slots")
        for kind, rows in zip(KINDS, (k, v), strict=True):
            bad = slabs[kind].store(layer, _bits(rows), _code(rows), slots, policy)
            if bad:  # a value changed after check_rows, or nobody called it
                _refuse_nonfinite(kind, rows)

    # ---- rows out ------------------------------------------------------------------------

    def gather(
        self,
        layer: int,
        block_ids: Array,
        start: int,
        stop: int,
        dtype: Any = None,
        out_k: Array | None = None,
        out_v: Array | None = None,
    ) -> tuple[Array, Array]:
        """Read tokens ``start … stop-1`` and return K and V as ``[stop - start, heads, head_dim]``.

        ``block_ids``: int32, the blocks that hold the tokens from position
        ``start // block_size * block_size`` on, in token order. ``dtype``: float32, float16 or
        bfloat16; by default that of ``out_k``, or float32. ``out_k`` and ``out_v`` may have any
        strides; they are made where they are None. No slot outside the range is read.

        Raises :class:`InvalidPositionError`, :class:`BlockError` (an id out of range), or
        :class:`ShapeError` / :class:`FormatError` for an unusable ``out``.
        """
        slabs = self._open()
        layer = as_layer(layer, self.spec.num_layers)
        first, num_tokens = self._range(start, stop)
        ids = as_ids(block_ids)
        available = len(ids) * self.spec.block_size
        if not num_tokens:
            first = 0  # an empty range needs no block
        if first + num_tokens > available:
            raise InvalidPositionError(first + num_tokens, available, "past the blocks given")
        if dtype is None:
            dtype = np.float32 if out_k is None else out_k.dtype
        fmt = row_format(dtype)
        outs = [
            self._out(out_k, "out_k", num_tokens, fmt),
            self._out(out_v, "out_v", num_tokens, fmt),
        ]
        if overlap(*outs):
            raise ShapeError("out_k and out_v that share no memory", "overlapping arrays", "out")
        if self.adopted:  # nobody has a writable array over slabs made here
            for given, name in ((out_k, "out_k"), (out_v, "out_v")):
                if given is not None and slab_memory.covers(self._arrays or {}, given):
                    raise ShapeError("memory apart from the slabs", "an array over them", name)
        for kind, out in zip(KINDS, outs, strict=True):
            slabs[kind].load(layer, ids, first, _bits(out), fmt.code)
        return outs[0], outs[1]

    def dequantize_block(
        self, layer: int, kind: Kind, block_id: int, length: int, dtype: Any = np.float32
    ) -> Array:
        """Return a copy of a block's first ``length`` tokens as ``dtype``, in the block's layout.

        HND: ``[heads, length, head_dim]``; NHD: ``[length, heads, head_dim]``.
        """
        slabs = self._open()
        layer = as_layer(layer, self.spec.num_layers)
        _, num_tokens = self._range(0, length)
        if num_tokens > self.spec.block_size:
            raise InvalidPositionError(num_tokens, self.spec.block_size, "tokens of one block")
        ids = as_ids([block_id])
        native = slabs[self._kind(kind)]
        fmt = row_format(dtype)
        heads, head_dim = self.spec.num_kv_heads, self.spec.head_dim
        by_head = self.spec.layout == "HND"
        shape = (heads, num_tokens, head_dim) if by_head else (num_tokens, heads, head_dim)
        block = _empty(shape, fmt)
        rows = block.transpose(1, 0, 2) if by_head else block
        native.load(layer, ids, 0, _bits(rows), fmt.code)
        return block

    def block_array(
        self, layer: int, kind: Kind, block_id: int, *, writable: bool = False
    ) -> Array:
        """Return one block's array over the storage itself, without a copy.

        Float formats: the layout's shape and the format's dtype; quantised formats: uint8
        ``[block_nbytes]``. Read-only unless ``writable``. It keeps the memory alive, not the
        block: pin the block as long as the array is used.
        """
        native = self._open()[self._kind(kind)]
        slab = self.slab_array(layer, kind, writable=writable)
        native.check_ids(as_ids([block_id]))
        block: Array = slab[block_id]
        return block

    def slab_array(self, layer: int, kind: Kind, *, writable: bool = False) -> Array:
        """Return a whole slab without a copy: ``[num_blocks, *shape of block_array]``."""
        layer = as_layer(layer, self.spec.num_layers)
        arrays = self._arrays
        if arrays is None:
            raise FreedHandleError("this storage")
        slab = arrays[self._kind(kind)][layer].view()
        slab.flags.writeable = writable
        return slab

    # ---- copies --------------------------------------------------------------------------

    def copy_blocks(self, src: Array, dst: Array, rows: Array) -> None:
        """Copy blocks in every layer, K and V: pair i copies ``src[i]`` to ``dst[i]``, in order.

        ``rows[i]`` (int32, 0…block_size): how many of the first token rows; ``block_size``
        copies every byte of the block, fewer rows only their quants and scales. Raises
        :class:`BlockError` or :class:`InvalidPositionError` before any byte moves.
        """
        slabs = self._open()
        ids = [as_ids(src, "src"), as_ids(dst, "dst"), as_ids(rows, "rows")]
        for kind in KINDS:
            slabs[kind].copy(*ids)

    def copy_tokens(self, src: Array, dst: Array) -> None:
        """Copy single tokens, slot to slot (int64), in every layer, K and V, in order.

        Moves the quants and scales of those tokens and no other byte. Raises
        :class:`SlotError` before any byte moves.
        """
        slabs = self._open()
        pairs = [as_slots(src, "src"), as_slots(dst, "dst")]
        for kind in KINDS:
            slabs[kind].copy_tokens(*pairs)

    def move_blocks(self, moves: Array) -> None:
        """Move whole blocks in every layer, K and V: int32 ``[n, 2]`` of (src, dst), in order.

        Id -1 is a scratch block that lives for this call, so that cycles can be turned.
        Raises :class:`BlockError` before any byte moves.
        """
        slabs = self._open()
        moves = np.asarray(moves)
        if moves.ndim != 2 or moves.shape[1] != 2:
            raise ShapeError("[n, 2]", list(moves.shape), "moves")
        src, dst = as_ids(moves[:, 0], "src"), as_ids(moves[:, 1], "dst")
        with self._scratch_lock:
            for kind in KINDS:
                slabs[kind].move(src, dst, self._scratch)

    # ---- argument checks -----------------------------------------------------------------

    def _open(self) -> dict[Kind, Slabs]:
        slabs = self._slabs
        if not slabs:
            raise FreedHandleError("this storage")
        return slabs

    def _kind(self, kind: str) -> Kind:
        for known in KINDS:
            if isinstance(kind, str) and kind == known:
                return known
        raise InvalidArgumentError(f'kind: expected "k" or "v", got {shown(kind)}')

    def _policy(self, on_nonfinite: str | None) -> int:
        return get_policy(self.spec.on_nonfinite if on_nonfinite is None else on_nonfinite)

    def _apart(self, layer: int, rows: Array) -> Array:
        """Return rows that no store can change under its own hands."""
        if rows.base is None and not self.adopted:
            return rows  # owns its memory, and the slabs are ours
        arrays = self._arrays or {}
        inside = any(np.may_share_memory(rows, slabs[layer]) for slabs in arrays.values())
        return copied(rows, "rows that lie in the slabs") if inside else rows

    def _range(self, start: int, stop: int) -> tuple[int, int]:
        start, stop = as_integer(start, "start"), as_integer(stop, "stop")
        if not 0 <= start <= stop:
            raise InvalidPositionError(start, stop, "expected 0 <= start <= stop")
        return start % self.spec.block_size, stop - start

    def _out(self, out: Array | None, what: str, num_tokens: int, fmt: KVFormat) -> Array:
        shape = (num_tokens, self.spec.num_kv_heads, self.spec.head_dim)
        if out is None:
            return _empty(shape, fmt)
        if not isinstance(out, np.ndarray):
            raise FormatError("a numpy array", type(out).__name__, what)
        if out.dtype != fmt.dtype or not out.dtype.isnative:
            raise FormatError(fmt.dtype, out.dtype, what)
        if out.shape != shape:
            raise ShapeError(list(shape), list(out.shape), what)
        if not out.flags.writeable or not out.flags.aligned:
            raise FormatError("a writable, aligned array", "a read-only or misaligned one", what)
        return out


def _empty(shape: tuple[int, ...], fmt: KVFormat) -> Array:
    try:
        return np.empty(shape, fmt.dtype)
    except MemoryError:
        nbytes = int(np.prod(shape, dtype=object)) * fmt.dtype.itemsize
        raise StorageMemoryError(nbytes, f"the {fmt.name} copy of {shape}") from None


def _code(rows: Array) -> int:
    return row_format(rows.dtype).code


def _bits(rows: Array) -> Array:
    """Return rows as unsigned integers of their width: bfloat16 has no buffer format."""
    return rows.view(np.uint32 if rows.dtype.itemsize == 4 else np.uint16)


def _refuse_nonfinite(kind: Kind, rows: Array) -> None:
    index = find_nonfinite(_bits(rows), _code(rows))
    if index >= 0:
        raise NonFiniteError(kind, index, float(rows[np.unravel_index(index, rows.shape)]))
