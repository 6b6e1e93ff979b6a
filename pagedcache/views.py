"""Views: a sequence's K and V block by block, over the storage itself where the format allows.

Lifetime, the point of this module. A view pins its block: until the pin goes, the block is
neither moved nor handed out again, so the values stay what they were even after the sequence is
freed. The pin goes with ``release()``, at the end of a ``with`` block, or when the last of the
view and the arrays made from it (slices included) is collected::

    ViewList ── pin of all its blocks
       └ BlockView ── pin of its own block
            └ array ── base: _PinnedMemory ── the same pin, and the memory

After an explicit ``release()`` arrays still at hand are valid memory, but the cache may write
other tokens there.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import numpy as np

from pagedcache.dlpack import lent
from pagedcache.errors import FreedHandleError
from pagedcache.formats import KVFormat, get_format
from pagedcache.guards import NoCopy

if TYPE_CHECKING:
    from pagedcache.bookkeeping import Pin
    from pagedcache.spec import CacheSpec

Array = np.ndarray[Any, Any]

_TYPE_STRINGS = {1: "|u1", 2: "=u2", 4: "=u4"}


class _PinnedMemory:
    """Base object of a view's array: as long as an array made from it lives, the pin does."""

    __slots__ = ("__array_interface__", "_array", "_pin")

    def __init__(self, array: Array, pin: Any) -> None:
        self._array, self._pin = array, pin
        # NumPy has no type string for bfloat16: go through integers of the same width.
        self.__array_interface__ = {
            "version": 3,
            "shape": array.shape,
            "strides": array.strides,
            "typestr": np.dtype(_TYPE_STRINGS[array.itemsize]).str,
            "data": (array.__array_interface__["data"][0], True),
        }


def pinned_array(array: Any, pin: Any) -> Any:
    """Read-only array over the same memory that keeps ``pin`` (and the memory) alive."""
    if not isinstance(array, np.ndarray):  # of a device
        return array.with_owner((array.owner, pin), readonly=True)
    return lent(np.asarray(_PinnedMemory(array, pin)).view(array.dtype))


@dataclass(frozen=True, slots=True)
class ViewSource:
    """What all views of one call share: where the bytes are and how they are shown."""

    storage: Any
    spec: CacheSpec
    layer: int
    device: str
    dtype: np.dtype[Any] | None
    queue: Any

    def stored(self, place: int) -> tuple[KVFormat, KVFormat]:
        """Formats in which K and V of the block at a place are kept."""
        if place >= self.storage.num_blocks:
            return self.spec.open_format("k"), self.spec.open_format("v")
        return self.spec.k_format, self.spec.v_format

    def formats(self, place: int) -> tuple[KVFormat, KVFormat]:
        """Formats of the arrays shown: the stored ones, or the dense one of ``dtype``."""
        if self.dtype is None:
            return self.stored(place)
        shown = get_format(str(self.dtype))
        return shown, shown

    def arrays(self, place: int, offset: int, length: int, pin: Any) -> tuple[Array, Array]:
        """K and V of tokens ``offset … offset + length - 1`` of a block; see ``BlockView``."""
        k_format, v_format = self.stored(place)
        if self.dtype is not None and any(
            fmt.dtype != self.dtype for fmt in (k_format, v_format)
        ):
            return self._copies(place, offset, length)
        return (
            self._stored("k", k_format, place, offset, length, pin),
            self._stored("v", v_format, place, offset, length, pin),
        )

    def _stored(
        self,
        kind: Literal["k", "v"],
        fmt: KVFormat,
        place: int,
        offset: int,
        length: int,
        pin: Any,
    ) -> Array:
        block = self.storage.block_array(self.layer, kind, place, queue=self.queue)
        if not fmt.is_quantized:
            if self.spec.layout == "NHD":
                block = block.transpose(1, 0, 2)
            block = block[:, offset : offset + length, :]
        return pinned_array(block, pin)

    def _copies(self, place: int, offset: int, length: int) -> tuple[Array, Array]:
        ids = np.array([place], np.int32)
        pair = self.storage.gather(
            self.layer, ids, offset, offset + length, self.dtype, queue=self.queue
        )
        shown = []
        for rows in pair:
            owner = rows
            while isinstance(owner, np.ndarray):  # down to the memory: who owns it could thaw it
                owner.flags.writeable = False
                owner = owner.base
            shown.append(rows.transpose(1, 0, 2))
        return shown[0], shown[1]


class BlockView(NoCopy):
    """K and V of one block of a sequence, in one layer, read-only and cut to its tokens.

    Float formats: ``k`` and ``v`` are ``[num_kv_heads, length, head_dim]`` (head-major in both
    layouts, strided, no copy) of the stored dtype. Quantised formats: the whole block's bytes,
    uint8 ``[block_nbytes]``, to be read with ``k_format`` / ``v_format``; or, with ``dtype=``,
    dequantised copies of the float shape. A block that is open (``CacheSpec.open_blocks``) is
    shown in the float format it is open in. NumPy arrays on the CPU, ``DeviceArray`` objects on a
    GPU; both are taken by DLPack without a copy. ``k, v, start, length, device = view`` works.

    The view pins its block; see the module's text for how long.
    """

    __slots__ = ("__weakref__", "_arrays", "_offset", "_pin", "_place", "_source",
                 "block_id", "length", "start")

    block_id: int
    """Id of the block shown."""
    start: int
    """Position in the sequence of the first token shown."""
    length: int
    """Tokens shown, 1…block_size."""

    def __init__(
        self, source: ViewSource, pin: Pin, block_id: int, place: int, start: int, stop: int
    ) -> None:
        self._source, self._place = source, place
        self._pin: Pin | None = pin
        self._arrays: tuple[Array, Array] | None = None
        self._offset = start % source.spec.block_size
        self.block_id, self.start, self.length = block_id, start, stop - start

    @property
    def k(self) -> Array:
        """Keys; raises ``FreedHandleError`` after ``release()``."""
        return self._both()[0]

    @property
    def v(self) -> Array:
        """Values; raises ``FreedHandleError`` after ``release()``."""
        return self._both()[1]

    def _both(self) -> tuple[Array, Array]:
        pin = self._pin
        if pin is None:
            raise FreedHandleError("this view")
        if self._arrays is None:
            self._arrays = self._source.arrays(self._place, self._offset, self.length, pin)
        return self._arrays

    @property
    def device(self) -> str:
        """Device of the layer: ``"cpu"`` or ``"cuda:N"``."""
        return self._source.device

    @property
    def k_format(self) -> KVFormat:
        """Format of ``k`` as shown."""
        return self._source.formats(self._place)[0]

    @property
    def v_format(self) -> KVFormat:
        """Format of ``v`` as shown."""
        return self._source.formats(self._place)[1]

    @property
    def format(self) -> KVFormat | None:
        """Format of both arrays, or None where K and V differ (``k_format``, ``v_format``)."""
        k_format, v_format = self._source.formats(self._place)
        return k_format if k_format == v_format else None

    @property
    def released(self) -> bool:
        """Whether ``release()`` was called."""
        return self._pin is None

    def release(self) -> None:
        """Let go of the block now; idempotent. Arrays taken from the view must not be used on."""
        pin, self._pin, self._arrays = self._pin, None, None
        if pin is not None:
            pin.release()

    def __enter__(self: _View) -> _View:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def __iter__(self) -> Iterator[Any]:
        return iter((self.k, self.v, self.start, self.length, self.device))

    def __repr__(self) -> str:
        tokens = f"tokens {self.start}…{self.start + self.length - 1}"
        state = ", released" if self.released else ""
        return f"<{type(self).__name__} block {self.block_id}: {tokens}{state}>"


_View = TypeVar("_View", bound=BlockView)


class PackedView(BlockView):
    """A ``BlockView`` that carries the geometry too, for code that knows no ``CacheSpec``."""

    __slots__ = ()

    @property
    def block_size(self) -> int:
        """Token slots of the block."""
        return self._source.spec.block_size

    @property
    def head_dim(self) -> int:
        """Values per head."""
        return self._source.spec.head_dim

    @property
    def num_kv_heads(self) -> int:
        """Heads of K and V."""
        return self._source.spec.num_kv_heads


class ViewList(NoCopy, SequenceABC[_View]):
    """The views of one call, in token order: made when looked at, pinned from the start.

    Supports ``len``, indexing, slicing and iteration. The list pins all its blocks until
    ``release()``, the end of a ``with`` block, or collection; a view taken from it pins its own
    block beyond that.
    """

    __slots__ = ("__weakref__", "_ids", "_kind", "_pin", "_places", "_source", "_start", "_stop",
                 "_views")

    def __init__(
        self, source: ViewSource, kind: type[_View], pin: Pin, start: int, stop: int
    ) -> None:
        self._source, self._kind = source, kind
        self._pin: Pin | None = pin
        self._ids = pin.block_ids if stop > start else ()
        self._places = pin.places
        self._start, self._stop = start, stop
        self._views: dict[int, _View] = {}

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> _View: ...
    @overload
    def __getitem__(self, index: slice) -> list[_View]: ...
    def __getitem__(self, index: int | slice) -> _View | list[_View]:
        positions = range(len(self._ids))[index]  # IndexError and TypeError as for a list
        if isinstance(positions, range):
            return [self._view(i) for i in positions]
        return self._view(positions)

    def _view(self, index: int) -> _View:
        view = self._views.get(index)
        if view is None:
            if self._pin is None:
                raise FreedHandleError("this list of views")
            size = self._source.spec.block_size
            first = (self._start // size + index) * size
            view = self._views.setdefault(index, self._kind(
                self._source,
                self._pin.part(index, index + 1),
                int(self._ids[index]),
                int(self._places[index]),
                max(self._start, first),
                min(self._stop, first + size),
            ))
        return view

    def release(self) -> None:
        """Let go of all blocks now, those of the views taken from the list too; idempotent."""
        pin, self._pin = self._pin, None
        views, self._views = self._views, {}
        for view in list(views.values()):  # another thread may be taking one right now
            view.release()
        if pin is not None:
            pin.release()

    def __enter__(self) -> ViewList[_View]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<ViewList of {len(self)} blocks: tokens {self._start}…{self._stop - 1}>"
