"""The reading half of a sequence's handle: lengths, tables, slots, gathered arrays and views."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from pagedcache.arguments import as_count, as_layer, as_position
from pagedcache.arrays import row_format
from pagedcache.errors import InvalidArgumentError, InvalidPositionError, PagedCacheError, shown
from pagedcache.guards import NoCopy, taking
from pagedcache.views import BlockView, PackedView, ViewList, ViewSource

if TYPE_CHECKING:
    from pagedcache.bookkeeping import SeqState
    from pagedcache.cache import PagedKVCache
    from pagedcache.spec import CacheSpec

Array = np.ndarray[Any, Any]
_View = TypeVar("_View", bound=BlockView)


class SequenceReading(NoCopy):
    """What a ``Sequence`` shows. Arrays returned are snapshots: valid memory, perhaps stale."""

    __slots__ = ("__weakref__", "_cache", "_pointers", "_safe_on", "_state", "request_id", "seq_id")

    seq_id: int
    """Unique id, never reused; serves the id-based style (``cache.sequence(seq_id)``)."""
    request_id: Any
    """The caller's own name for the request, or None."""

    def __init__(self, cache: PagedKVCache, state: SeqState, request_id: Any = None) -> None:
        self._cache, self._state = cache, state
        self._safe_on: Any = None  # queue on which all blocks may be used, with its turn
        self._pointers: dict[Any, Any] = {}  # see pointers.py
        self.seq_id = int(state.serial)
        self.request_id = request_id

    def _pointer_tables(self) -> dict[Any, Any]:
        return self._pointers

    # ---- lengths -------------------------------------------------------------------------

    @property
    def seq_len(self) -> int:
        """Tokens computed (committed)."""
        return int(self._state.seq_len)

    @property
    def num_tokens(self) -> int:
        """Tokens known or opened for; bounds ``truncate``."""
        return int(self._state.num_tokens)

    @property
    def num_written(self) -> int:
        """Least of the layers' own written ends (``append``); ``store`` leaves it alone."""
        return int(self._state.num_written)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens found in the prefix cache at open: they need no compute."""
        return int(self._state.num_cached_tokens)

    @property
    def num_blocks(self) -> int:
        """Blocks in the table."""
        return int(self._state.num_blocks)

    @property
    def tokens(self) -> Array:
        """Known tokens, uint32 ``[n]``, a copy: from the start up to the first of unknown value."""
        state = self._state
        with taking(4 * state.num_tokens, "a copy of the tokens"):
            return state.tokens()

    def written(self, layer: int) -> int:
        """Written end of one layer, in tokens."""
        return int(self._state.written(as_layer(layer, self._cache.spec.num_layers)))

    @property
    def freed(self) -> bool:
        """Whether ``free()`` was called or the cache is closed."""
        return bool(self._state.freed)

    # ---- geometry ------------------------------------------------------------------------

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._cache.spec.block_size

    @property
    def max_seq_len(self) -> int | None:
        """Longest length allowed, or None."""
        return self._cache.spec.max_seq_len

    def layer_device(self, layer: int) -> str:
        """Device of a layer: ``"cpu"`` or ``"cuda:N"``."""
        return self._cache.layer_device(layer)

    @property
    def is_on_gpu(self) -> bool:
        """Whether any layer lives on a GPU."""
        return self._cache.is_on_gpu

    # ---- tables and slots ----------------------------------------------------------------

    @property
    def block_table(self) -> Array:
        """Block ids in token order, int32 ``[num_blocks]``, read-only snapshot."""
        return self._state.block_table()

    def layer_block_ids(self, layer: int, num_blocks: int | None = None) -> Array:
        """The first ``num_blocks`` block ids of a layer (all for None), int32, read-only.

        Today every layer has the same table. Raises ``InvalidPositionError`` past its end.
        """
        as_layer(layer, self._cache.spec.num_layers)
        table = self.block_table
        if num_blocks is None:
            return table
        count = as_count(num_blocks, "num_blocks")
        if count > len(table):
            raise InvalidPositionError(count, len(table), "blocks in the table")
        return table[:count]

    def slot_mapping(self, start: int, stop: int) -> Array:
        """Slots of positions ``start … stop - 1``, int64, for READING.

        ``store`` refuses those that lie in shared or cached blocks; ``prepare`` gives slots for
        writing. Raises ``InvalidPositionError`` unless 0 <= start <= stop <= the table's end.
        """
        first, last = (as_position(x, "position", self._room) for x in (start, stop))
        for place in (first, last):
            if place < 0:
                raise InvalidPositionError(place, self._room(), "positions count from 0")
        with taking(8 * max(last - first, 0), "a slot mapping"):
            return self._state.slot_mapping(first, last)

    def block_for_position(self, position: int) -> int:
        """Id of the block that holds a position; ``InvalidPositionError`` past the table."""
        place = as_position(position, "position", self._room)
        return int(self._state.block_for_position(place))

    def block_offset(self, position: int) -> int:
        """Offset of a position inside its block; ``InvalidPositionError`` past the table."""
        place = as_position(position, "position", self._room)
        self._state.block_for_position(place)
        return place % self._cache.spec.block_size

    def _room(self) -> int:
        return self.num_blocks * self._cache.spec.block_size

    # ---- bytes ---------------------------------------------------------------------------

    def gather(
        self,
        layer: int,
        start: int = 0,
        stop: int | None = None,
        dtype: Any = None,
        out: tuple[Any, Any] | None = None,
        *,
        stream: Any = None,
    ) -> tuple[Any, Any]:
        """K and V of positions ``start … stop - 1``, contiguous and in token order.

        Each ``[stop - start, num_kv_heads, head_dim]`` of ``dtype`` (float32, float16 or
        bfloat16): by default the stored dtype where K and V share a float format, else float32.
        ``stop`` defaults to the layer's written end, or the computed length where ``store`` wrote;
        past that, only positions that ``prepare`` made writable can be read; what was not stored
        there yet reads as whatever the block held before. ``out``: a pair of arrays of that shape
        (or CPU tensors of torch) to fill, which are returned; their dtype is the default then.

        On the CPU the result is NumPy arrays in memory that starts at a multiple of 64 bytes; those
        of bfloat16 are ``Bfloat16Array``, so that ``torch.from_dlpack(k)`` takes either without a
        copy. A layer on a GPU gives ``DeviceArray`` objects (``np.asarray`` copies them to the
        host) in memory of their own, and fills arrays on that GPU, without waiting; arrays of the
        host are filled too, and waited for. The work is queued on ``stream``.

        Raises ``InvalidPositionError``, ``ShapeError`` (also for an ``out`` that lies over the
        cache's own memory), ``FormatError`` (also with ``storage=None``), ``DeviceError`` or
        ``StorageMemoryError``.
        """
        door = self._cache._door
        if door is not None and dtype is None and stream is None:
            rows = door.gather(self._state, layer, start, stop, out)
            if rows is not None:
                return rows
        queue = self._cache._queue(stream)
        storage, layer, start, stop, pin = self._pin(layer, start, stop)
        with pin:
            spec = self._cache.spec
            k_out, v_out = _check_out(out, storage, layer)
            if dtype is None:
                dtype = k_out.dtype if k_out is not None else stored_dtype(spec)
            rows = storage.gather(
                layer, pin.places, start, stop, dtype, k_out, v_out, queue
            )
            return rows if out is None else (out[0], out[1])

    def views(
        self,
        layer: int,
        start: int = 0,
        stop: int | None = None,
        dtype: Any = None,
        *,
        stream: Any = None,
    ) -> ViewList[BlockView]:
        """Per block a ``BlockView`` (K, V, start, length, device) of positions start … stop - 1.

        Read-only and cut to the length. Float formats: no copy. Quantised formats: the blocks'
        bytes with their format, or dequantised copies when ``dtype`` is given. ``stop`` and errors
        as for ``gather``. The blocks are pinned until the views are released or collected. On a
        GPU the arrays are safe to use on ``stream``; call ``cache.record_use`` before the views
        go while kernels of your own still read them.
        """
        return self._views(BlockView, layer, start, stop, dtype, stream)

    def packed_views(
        self,
        layer: int,
        start: int = 0,
        stop: int | None = None,
        dtype: Any = None,
        *,
        stream: Any = None,
    ) -> ViewList[PackedView]:
        """As ``views``, each a ``PackedView`` with block_size, head_dim and num_kv_heads too."""
        return self._views(PackedView, layer, start, stop, dtype, stream)

    def _views(
        self,
        kind: type[_View],
        layer: int,
        start: int,
        stop: int | None,
        dtype: Any,
        stream: Any,
    ) -> ViewList[_View]:
        shown = None if dtype is None else row_format(dtype).dtype
        queue = self._cache._queue(stream)
        storage, layer, start, stop, pin = self._pin(layer, start, stop)
        cache = self._cache
        if queue is not None:
            storage.acquire(pin.places, queue, False)
        source = ViewSource(storage, cache.spec, layer, cache.layer_device(layer), shown, queue)
        return ViewList(source, kind, pin, start, stop)

    def _acquire(self, queue: Any, num_shared: int | None = None) -> None:
        """Order ``queue`` behind other streams' work on all blocks; from the ``num_shared``-th
        on they are going to be written."""
        storage = self._cache._storage
        safe_on = (queue, storage.turn(queue))
        if num_shared is None and self._safe_on == safe_on:
            return
        table = self._state.places()
        storage.acquire(table[:num_shared], queue, False)
        if num_shared is not None:
            storage.acquire(table[num_shared:], queue, True)
        self._safe_on = safe_on

    def _pin(self, layer: Any, start: Any, stop: Any) -> tuple[Any, int, int, int, Any]:
        """Pin the blocks of a checked range; ``(storage, layer, start, stop, pin)``."""
        cache, state = self._cache, self._state
        ledger, storage = cache._ledger, cache._storage
        storage.nbytes  # noqa: B018 - a cache without bytes refuses here, before anything else
        layer = as_layer(layer, cache.spec.num_layers)
        if stop is None:
            last = int(state.written(layer))
        else:
            # Slots behind this hold whatever the block's last owner left there.
            readable = int(state.readable(layer))
            last = as_position(stop, "stop", lambda: readable)
            if last > readable:
                raise InvalidPositionError(last, readable, "only what was written can be read")
            if last < 0:
                raise InvalidPositionError(last, readable, "stop")
        first = as_position(start, "start", lambda: last)
        if not 0 <= first <= last:
            raise InvalidPositionError(first, last, "start")
        # The writer may cut the sequence at any moment: what is pinned is checked once more.
        return storage, layer, first, last, ledger.pin_range(state, first, last, layer)

    def __repr__(self) -> str:
        name = f" {shown(self.request_id)}" if self.request_id is not None else ""
        if self.freed:
            return f"<Sequence {self.seq_id}{name}: freed>"
        try:
            lengths = f"{self.seq_len} of {self.num_tokens} tokens computed"
            return f"<Sequence {self.seq_id}{name}: {lengths}, {self.num_blocks} blocks>"
        except PagedCacheError:  # freed in between, or this is a forked child
            return f"<Sequence {self.seq_id}{name}: not usable>"


class AppendedViews(NoCopy, SequenceABC[BlockView]):
    """The views that ``append`` returns: taken, and their blocks pinned, when first looked at."""

    __slots__ = ("_layer", "_seq", "_stop", "_stream", "_taken")

    def __init__(self, seq: SequenceReading, layer: int, stop: int, stream: Any) -> None:
        self._seq, self._layer, self._stop, self._stream = seq, layer, stop, stream
        self._taken: ViewList[BlockView] | None = None

    def _views(self) -> ViewList[BlockView]:
        if self._taken is None:
            self._taken = self._seq.views(self._layer, 0, self._stop, stream=self._stream)
        return self._taken

    def __len__(self) -> int:
        return -(-self._stop // self._seq.block_size)

    @overload
    def __getitem__(self, index: int) -> BlockView: ...
    @overload
    def __getitem__(self, index: slice) -> list[BlockView]: ...
    def __getitem__(self, index: int | slice) -> BlockView | list[BlockView]:
        return self._views()[index]

    def __iter__(self) -> Iterator[BlockView]:
        return iter(self._views())

    def release(self) -> None:
        """Let go of the blocks; nothing happens when they were never looked at."""
        if self._taken is not None:
            self._taken.release()

    def __repr__(self) -> str:
        return f"<AppendedViews of {len(self)} blocks: tokens 0…{self._stop - 1}>"


def stored_dtype(spec: CacheSpec) -> np.dtype[Any]:
    """What ``gather`` returns by default."""
    same = spec.k_format == spec.v_format and not spec.k_format.is_quantized
    return spec.k_format.dtype if same else np.dtype(np.float32)


def _check_out(out: Any, storage: Any, layer: int) -> tuple[Any, Any]:
    if out is None:
        return None, None
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise InvalidArgumentError("out must be a pair of arrays (k, v)")
    return (
        storage.out_array(layer, out[0], "out: k"),
        storage.out_array(layer, out[1], "out: v"),
    )
