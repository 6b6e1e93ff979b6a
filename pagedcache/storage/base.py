"""What every storage does the same way: the checks before bytes move, and the order of the steps.

A storage keeps K and V of the layers of one device in slabs. Who may write where is decided above
(reference counts, pins, epochs); a storage validates arrays, keeps every address inside its slabs,
and moves bytes. Calls on different blocks may run in parallel; two calls that touch the same
block must be ordered by the caller; on a device, calls on different streams are ordered here.

Numbers: float32 rows are rounded straight to the stored format; float16 and bfloat16 rows are
widened to float32 first, which is exact. Reading goes through float32 in the same way. A row
whose dtype is the stored one is copied bit for bit in both directions, NaN payloads included.

Places: a block's bytes lie at a place, int32. ``0 … num_blocks - 1`` are the blocks in their own
format, by id (sealed); ``num_blocks + i`` is open slot ``i``, which keeps a block in a float
format until it can be quantised (``spec.open_format``). A slot is ``place * block_size + offset``.
Without open slots places are block ids. Sealed blocks whose groups run along the tokens (q4k) are
written whole. What an open slot holds for a quantised format is finite and within the range of
its float format: NaN and Inf are refused or saturated as by that format, by groups of 32 values
of the row.

``queue`` is what :meth:`Storage.queue` made of the caller's stream; None on the CPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from pagedcache.arguments import as_count, as_integer, as_layer
from pagedcache.arrays import as_ids, as_slots, row_format
from pagedcache.errors import (
    DeviceError,
    InvalidArgumentError,
    InvalidPositionError,
    ShapeError,
    shown,
)
from pagedcache.formats import NONFINITE_POLICIES, KVFormat, get_policy
from pagedcache.spec import CacheSpec
from pagedcache.storage.attention import AttentionArrays, AttentionBatch, AttentionOptions
from pagedcache.storage.slabs import KINDS, Array, Kind

RAISE = NONFINITE_POLICIES["raise"]


class Storage(ABC):
    """K and V of ``spec.num_layers`` layers for ``num_blocks`` blocks and ``num_open`` open slots,
    on one device.

    Raises :class:`InvalidArgumentError` for open slots where ``spec.open_blocks`` is None.
    """

    #: Whether work is queued on streams, so that it has to be ordered between them.
    ordered = False

    def __init__(self, spec: CacheSpec, num_blocks: int, num_open: int = 0) -> None:
        self.spec = spec
        self.num_blocks = as_count(num_blocks, "num_blocks", least=1, most=2**31 - 1)
        self.num_open = as_count(num_open, "num_open", most=2**31 - 1 - self.num_blocks)
        spec.storage_nbytes(num_blocks, num_open)  # raises where the spec has no open blocks
        self._formats = {"k": spec.k_format, "v": spec.v_format}

    @property
    def num_places(self) -> int:
        """Blocks and open slots: places are below this."""
        return self.num_blocks + self.num_open

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks and open slots in all layers, K and V, padding included."""
        return self.spec.storage_nbytes(self.num_blocks, self.num_open)

    # ---- rows in -------------------------------------------------------------------------

    def check_rows(
        self,
        layer: int,
        k: Any,
        v: Any,
        num_tokens: int | None,
        on_nonfinite: str | None = None,
        queue: Any = None,
    ) -> tuple[Any, Any]:
        """Validate ``k`` and ``v`` for :meth:`store` and return them ready for it; writes nothing.

        Each is ``[num_tokens, num_kv_heads, head_dim]`` or
        ``[num_tokens, num_kv_heads * head_dim]`` of float32, float16 or bfloat16 with any
        strides; ``num_tokens=None`` takes whatever both have. Rows are copied only where they are
        misaligned or may lie in the slabs themselves.

        Raises :class:`FormatError`, :class:`ShapeError` or :class:`DeviceError`, and
        :class:`NonFiniteError` when a quantised format is to hold NaN or Inf under
        ``on_nonfinite="raise"``, also where they go to open slots; float formats hold both.
        """
        self._open()
        layer = as_layer(layer, self.spec.num_layers)
        policy = self._policy(on_nonfinite)
        pair = self._rows(k, v, num_tokens, queue)
        if pair[0].shape != pair[1].shape:
            raise ShapeError(f"as many tokens as k ({len(pair[0])})", len(pair[1]), "v")
        if policy == RAISE:
            self._refuse_nonfinite(
                [
                    (kind, rows)
                    for kind, rows in zip(KINDS, pair, strict=True)
                    if self._formats[kind].is_quantized
                ],
                queue,
            )
        return self._apart(layer, pair[0], queue), self._apart(layer, pair[1], queue)

    def store(
        self,
        layer: int,
        k: Any,
        v: Any,
        slots: Any,
        on_nonfinite: str | None = None,
        queue: Any = None,
        mapping: Any = None,
    ) -> None:
        """Store token ``i`` of ``k`` and ``v`` (from :meth:`check_rows`) at ``slots[i]``.

        ``slots``: int64 ``[num_tokens]``, ``place * block_size + offset``; -1 skips a token.
        Slots out of range, and those of a sealed block that is to be written whole and is not
        (all its slots, in order), raise :class:`SlotError` before any byte is written; whether
        they may be written at all is the caller's to know. ``mapping``: an object that has the same
        slots in every call it is given to, so that a device keeps its copy of them.
        """
        self._open()
        layer = as_layer(layer, self.spec.num_layers)
        policy = self._policy(on_nonfinite)
        slots = as_slots(slots)
        if not len(slots) == len(k) == len(v):
            raise ShapeError(f"{len(k)} slots, one per token", len(slots), "slots")
        self._store(layer, k, v, slots, policy, queue, mapping)

    # ---- rows out ------------------------------------------------------------------------

    def gather(
        self,
        layer: int,
        places: Array,
        start: int,
        stop: int,
        dtype: Any = None,
        out_k: Any = None,
        out_v: Any = None,
        queue: Any = None,
    ) -> tuple[Any, Any]:
        """Read tokens ``start … stop-1`` and return K and V as ``[stop - start, heads, head_dim]``.

        ``places``: int32, where the blocks are that hold the tokens from position
        ``start // block_size * block_size`` on, in token order. ``dtype``: float32, float16 or
        bfloat16; by default that of ``out_k``, or float32. ``out_k`` and ``out_v`` may have any
        strides; they are made where they are None. No slot outside the range is read.

        Raises :class:`InvalidPositionError`, :class:`BlockError` (a place out of range), or
        :class:`ShapeError` / :class:`FormatError` for an unusable ``out``.
        """
        self._open()
        layer = as_layer(layer, self.spec.num_layers)
        first, num_tokens = self._range(start, stop)
        ids = as_ids(places, "places")
        available = len(ids) * self.spec.block_size
        if not num_tokens:
            first = 0  # an empty range needs no block
        if first + num_tokens > available:
            raise InvalidPositionError(first + num_tokens, available, "past the blocks given")
        if dtype is None:
            dtype = np.float32 if out_k is None else out_k.dtype
        shape = (num_tokens, self.spec.num_kv_heads, self.spec.head_dim)
        return self._load(layer, ids, first, row_format(dtype), shape, out_k, out_v, queue)

    # ---- attention -----------------------------------------------------------------------

    @abstractmethod
    def attention_arrays(
        self,
        layer: int,
        q: Any,
        out: Any = None,
        sinks: Any = None,
        return_lse: bool = False,
        queue: Any = None,
    ) -> AttentionArrays:
        """Validate the arrays of a call of :meth:`attend`, and make those that are not given.

        ``q``: ``[total_q, num_q_heads, head_dim]`` or ``[total_q, num_q_heads * head_dim]`` of
        float32, float16 or bfloat16 with any strides, where ``num_q_heads`` is a multiple of
        ``num_kv_heads``. ``out``: an array of q's shape and dtype to fill, apart from ``q``.
        ``sinks``: ``[num_q_heads]``, no NaN or +inf. Raises :class:`ShapeError`,
        :class:`FormatError`, :class:`DeviceError` or :class:`InvalidArgumentError`.
        """

    @abstractmethod
    def attend(
        self,
        layer: int,
        arrays: AttentionArrays,
        batch: AttentionBatch,
        options: AttentionOptions,
        queue: Any = None,
    ) -> None:
        """Fill ``arrays.out`` (and ``arrays.lse``) with attention over sequences' places.

        Bytes of positions that no sequence of the batch has are not read. Raises, before anything
        is written, :class:`BlockError` for a place out of range, and :class:`InvalidPositionError`
        or :class:`ShapeError` for lengths that do not fit.
        """

    # ---- copies --------------------------------------------------------------------------

    def copy_blocks(self, src: Array, dst: Array, rows: Array, queue: Any = None) -> None:
        """Copy blocks in every layer, K and V: pair i copies ``src[i]`` to ``dst[i]``, in order.

        ``src``, ``dst``: int32 places. ``rows[i]`` (int32, 0…block_size): how many of the first
        token rows; ``block_size`` copies every byte of the block, fewer rows only their quants
        and scales. From an open to a sealed place the rows are quantised (finite values, so
        nothing is refused), the other way round they are read back and rounded. Raises
        :class:`BlockError` or :class:`InvalidPositionError` before any byte moves; the latter
        also for a part of a sealed block that is to be written whole.
        """
        self._open()
        self._copy_blocks(as_ids(src, "src"), as_ids(dst, "dst"), as_ids(rows, "rows"), queue)

    def copy_tokens(self, src: Array, dst: Array, queue: Any = None) -> None:
        """Copy single tokens, slot to slot (int64), in every layer, K and V, in order.

        Moves the quants and scales of those tokens and no other byte; between open and sealed
        slots as :meth:`copy_blocks`. Raises :class:`SlotError`, and :class:`FormatError` for a
        target in a sealed block that is to be written whole, before any byte moves.
        """
        self._open()
        self._copy_tokens(as_slots(src, "src"), as_slots(dst, "dst"), queue)

    def move_blocks(self, moves: Array, queue: Any = None) -> None:
        """Move whole sealed blocks in every layer, K and V: int32 ``[n, 2]`` of (src, dst) ids,
        in order.

        Id -1 is a scratch block that lives for this call, so that cycles can be turned.
        Raises :class:`BlockError` before any byte moves.
        """
        self._open()
        moves = np.asarray(moves)
        if moves.ndim != 2 or moves.shape[1] != 2:
            raise ShapeError("[n, 2]", list(moves.shape), "moves")
        self._move_blocks(as_ids(moves[:, 0], "src"), as_ids(moves[:, 1], "dst"), queue)

    # ---- what a kind of memory does in its own way ---------------------------------------

    @abstractmethod
    def close(self) -> None:
        """Let go of the slabs; their memory returns once no view holds it. Idempotent."""

    def touch(self) -> None:  # noqa: B027 - elsewhere memory is there once it is given out
        """Have the system provide all memory of our own that it has only promised so far."""

    @abstractmethod
    def queue(self, stream: Any) -> Any:
        """What calls are queued on for the caller's ``stream`` (None: the default)."""

    @abstractmethod
    def out_array(self, layer: int, x: Any, what: str) -> Any:
        """The caller's array as one that :meth:`gather` can fill."""

    def device_slots(self, x: Any, what: str) -> Any:
        """A slot mapping that lies on a device, or None for any other."""
        return None

    def store_raw(
        self,
        layer: int,
        k: Any,
        v: Any,
        slots: Any,
        on_nonfinite: str | None = None,
        queue: Any = None,
    ) -> None:
        """Store by slots that lie on a device; only storages there can."""
        raise DeviceError("slots on the host, as the layer is", "a device array", "slot_mapping")

    @abstractmethod
    def slab_array(self, layer: int, kind: Kind, *, writable: bool = False) -> Any:
        """Return a whole slab without a copy: ``[num_blocks, *shape of block_array]``."""

    @abstractmethod
    def open_slab_array(self, layer: int, kind: Kind, *, writable: bool = False) -> Any:
        """Return all open slots without a copy: ``[num_open, *shape of block_array]``."""

    @abstractmethod
    def block_array(
        self, layer: int, kind: Kind, place: int, *, writable: bool = False, queue: Any = None
    ) -> Any:
        """Return one block's array over the storage itself, without a copy.

        Float formats, and those of open places: the layout's shape and the format's dtype;
        quantised formats: uint8 ``[block_nbytes]``. Read-only unless ``writable``. It keeps the
        memory alive, not the block: pin the block as long as the array is used. ``queue``:
        where its values are.
        """

    @abstractmethod
    def fill_blocks(self, places: Array, byte: int, queue: Any = None) -> None:
        """Set every byte of whole blocks in every layer, K and V (zero or poison)."""

    @abstractmethod
    def _open(self) -> Any:
        """Raise :class:`FreedHandleError` after :meth:`close`."""

    @abstractmethod
    def _rows(self, k: Any, v: Any, num_tokens: int | None, queue: Any) -> tuple[Any, Any]:
        """Both arrays as ``[num_tokens, heads, head_dim]`` that :meth:`_store` can read."""

    @abstractmethod
    def _refuse_nonfinite(self, pairs: list[tuple[Kind, Any]], queue: Any) -> None:
        """Raise :class:`NonFiniteError` for the first NaN or Inf of these rows."""

    @abstractmethod
    def _apart(self, layer: int, rows: Any, queue: Any) -> Any:
        """Return rows that no store can change under its own hands."""

    @abstractmethod
    def _store(
        self, layer: int, k: Any, v: Any, slots: Array, policy: int, queue: Any, mapping: Any
    ) -> None: ...

    @abstractmethod
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
    ) -> tuple[Any, Any]: ...

    @abstractmethod
    def _copy_blocks(self, src: Array, dst: Array, rows: Array, queue: Any) -> None: ...

    @abstractmethod
    def _copy_tokens(self, src: Array, dst: Array, queue: Any) -> None: ...

    @abstractmethod
    def _move_blocks(self, src: Array, dst: Array, queue: Any) -> None: ...

    # ---- order between streams: nothing to do where calls are done when they return ------

    def acquire(self, places: Array, queue: Any, writing: bool) -> None:
        """Order ``queue`` after the work of other streams on these places: their writes, and
        where it will write, their reads too."""
        return

    def turn(self, queue: Any) -> Any:
        """A value that stays the same as long as no other queue than this writes blocks; to be
        asked for before :meth:`acquire`."""
        return None

    def publish(self, places: Array, queue: Any = None, writing: bool = False) -> None:
        """Make the work on these places waitable: with ``queue``, also work of the caller's own
        that was queued on it."""
        return

    def synchronize(self) -> None:
        """Wait for all queued work and raise what it reported."""
        return

    # ---- argument checks -----------------------------------------------------------------

    def _kind(self, kind: str) -> Kind:
        for known in KINDS:
            if isinstance(kind, str) and kind == known:
                return known
        raise InvalidArgumentError(f'kind: expected "k" or "v", got {shown(kind)}')

    def _policy(self, on_nonfinite: str | None) -> int:
        return get_policy(self.spec.on_nonfinite if on_nonfinite is None else on_nonfinite)

    def _range(self, start: int, stop: int) -> tuple[int, int]:
        start, stop = as_integer(start, "start"), as_integer(stop, "stop")
        if not 0 <= start <= stop:
            raise InvalidPositionError(start, stop, "expected 0 <= start <= stop")
        return start % self.spec.block_size, stop - start
