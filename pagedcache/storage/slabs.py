"""Slabs: the memory of all blocks of one layer's K or V, taken from the system or adopted.

A slab has two faces over the same bytes: ``typed``, the array a user would make
(``[num_blocks, *block shape]`` of a float dtype, ``[num_blocks, block_nbytes]`` of uint8 for
quantised formats), and ``raw``, always ``[num_blocks, block_nbytes]`` of uint8, which native
code addresses. Open blocks have slabs of their own, ``[num_open, *block shape]`` of a float dtype,
which are always made here. Bytes between the end of a plane's quants or scales and the next 16-byte
boundary are padding: zero in slabs made here, and never written by a store.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from pagedcache._native.memory import advise_huge, bytes_to_alignment
from pagedcache.arrays import overlap
from pagedcache.errors import (
    FormatError,
    InvalidArgumentError,
    PagedCacheError,
    ShapeError,
    StorageMemoryError,
)
from pagedcache.foreign import as_ndarray
from pagedcache.spec import CacheSpec

Array = np.ndarray[Any, Any]

ALIGNMENT = 64  # bytes: a cache line, and the widest vector register
Kind = Literal["k", "v"]
KINDS: tuple[Kind, Kind] = ("k", "v")


def shape_of_block(spec: CacheSpec, kind: Kind) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of one block's array."""
    if kind == "k":
        return spec.k_block_shape, spec.k_format.dtype
    return spec.v_block_shape, spec.v_format.dtype


def shape_of_open_block(spec: CacheSpec, kind: Kind) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of one open block's array (of one that cannot be, without open blocks)."""
    if not spec.has_open_blocks:
        return spec.open_block_shape, shape_of_block(spec, kind)[1]
    return spec.open_block_shape, spec.open_format(kind).dtype


def allocate(spec: CacheSpec, num_blocks: int) -> dict[Kind, list[Array]]:
    """Return ``{"k": slabs, "v": slabs}``: one zeroed, 64-byte aligned slab per layer and kind.

    The memory is taken lazily: a page costs something once it is touched. All of it is asked
    for at once first, so that too large a cache is refused here, with
    :class:`StorageMemoryError`, and not by the system when its blocks fill up.
    """
    shapes = {kind: shape_of_block(spec, kind) for kind in KINDS}
    what = f"{num_blocks:,} blocks of K and V in {spec.num_layers} layers"
    return _zeroed(spec, num_blocks, shapes, spec.storage_nbytes(num_blocks), what)


def allocate_open(spec: CacheSpec, num_open: int) -> dict[Kind, list[Array]]:
    """The same for ``num_open`` open blocks; no slabs for none.

    Raises :class:`InvalidArgumentError` for open blocks where the spec has none.
    """
    total = spec.storage_nbytes(0, num_open)
    if not num_open:
        return {"k": [], "v": []}
    shapes = {kind: shape_of_open_block(spec, kind) for kind in KINDS}
    what = f"{num_open:,} open blocks of K and V in {spec.num_layers} layers"
    return _zeroed(spec, num_open, shapes, total, what)


def _zeroed(
    spec: CacheSpec,
    count: int,
    shapes: dict[Kind, tuple[tuple[int, ...], np.dtype[Any]]],
    total: int,
    what: str,
) -> dict[Kind, list[Array]]:
    try:
        np.empty(total, np.uint8)  # given back at once; never touched
        return {
            kind: [_slab(count, *shapes[kind]) for _ in range(spec.num_layers)] for kind in KINDS
        }
    except (MemoryError, ValueError, OverflowError):
        # numpy raises the latter two for sizes beyond the address space
        raise StorageMemoryError(total, what) from None


def _slab(count: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    nbytes = count * math.prod(shape) * dtype.itemsize
    memory = np.zeros(nbytes + ALIGNMENT - 1, np.uint8)
    skip = bytes_to_alignment(memory, ALIGNMENT)
    advise_huge(memory)  # fewer page faults, and fewer misses of the table of pages
    return memory[skip : skip + nbytes].view(dtype).reshape(count, *shape)


def share_host_memory(x: Any, what: str) -> Array:
    """The caller's array as a NumPy array over the same memory, to be written to."""
    return as_ndarray(x, what, written=True)


def adopt(
    spec: CacheSpec,
    num_blocks: int,
    slabs: Any,
    share: Callable[[Any, str], Array] = share_host_memory,
) -> dict[Kind, list[Array]]:
    """Return the caller's arrays as slabs, without a copy.

    ``slabs``: ``(k_slabs, v_slabs)``, each one array per layer with the shape and dtype of
    ``typed`` above: writable, aligned, dense inside a block, at any distance from block to
    block (so the halves of one ``[num_blocks, 2, …]`` tensor work), no two sharing a byte.
    ``share`` gives the NumPy array (or the shadow of a device array) over an array's memory.
    Raises :class:`ShapeError`, :class:`FormatError` or :class:`DeviceError` otherwise.
    """
    if not isinstance(slabs, Sequence) or len(slabs) != 2:
        raise InvalidArgumentError("storage: expected a pair (k_slabs, v_slabs)")
    adopted = {}
    for kind, given in zip(KINDS, slabs, strict=True):
        unsized = getattr(given, "ndim", 1) == 0  # an array without dimensions
        if isinstance(given, (str, bytes, dict)) or not hasattr(given, "__len__") or unsized:
            raise InvalidArgumentError(
                f"{kind}_slabs: expected one array per layer, got {type(given).__name__}"
            )
        if len(given) != spec.num_layers:
            raise ShapeError(
                f"{spec.num_layers} arrays, one per layer", len(given), f"{kind}_slabs"
            )
        adopted[kind] = [
            _checked(spec, kind, num_blocks, x, f"{kind}_slabs[{layer}]", share)
            for layer, x in enumerate(given)
        ]
    _refuse_overlap(adopted)
    return adopted


def _checked(
    spec: CacheSpec,
    kind: Kind,
    num_blocks: int,
    x: Any,
    what: str,
    share: Callable[[Any, str], Array],
) -> Array:
    if isinstance(x, (list, tuple, str, bytes)) or np.isscalar(x) or x is None:
        raise FormatError("an array whose memory can be shared", type(x).__name__, what)
    try:
        slab = share(x, what)
    except PagedCacheError:
        raise
    except (TypeError, ValueError, RuntimeError):
        raise FormatError("an array whose memory can be shared", type(x).__name__, what) from None
    block_shape, dtype = shape_of_block(spec, kind)
    shape = (num_blocks, *block_shape)
    if slab.dtype != dtype or not slab.dtype.isnative:
        raise FormatError(dtype, slab.dtype, what)
    if slab.shape != shape:
        raise ShapeError(list(shape), list(slab.shape), what)
    if not slab.flags.writeable:
        raise FormatError("a writable array", "a read-only one", what)
    if not slab.flags.aligned:
        raise FormatError(f"an array aligned to {dtype.alignment} bytes", "a misaligned one", what)
    if not slab[0].flags.c_contiguous:
        raise ShapeError("rows dense inside a block", f"strides {slab.strides}", what)
    if num_blocks > 1 and abs(slab.strides[0]) < spec.layer_block_nbytes(kind):
        raise ShapeError(
            f"at least {spec.layer_block_nbytes(kind)} bytes from block to block",
            slab.strides[0],
            what,
        )
    return slab


def _refuse_overlap(slabs: dict[Kind, list[Array]]) -> None:
    """Raise when two slabs share a byte; only spans that meet are compared byte by byte."""
    spans = [
        (*np.lib.array_utils.byte_bounds(slab), f"{kind}_slabs[{layer}]", slab)
        for kind in KINDS
        for layer, slab in enumerate(slabs[kind])
    ]
    spans.sort(key=lambda span: span[:2])
    for index, (_, end, name, slab) in enumerate(spans):
        for start, _, other_name, other in spans[index + 1 :]:
            if start >= end:
                break
            if overlap(slab, other):
                got = f"{other_name} over {name}"
                raise ShapeError("slabs that share no memory", got, "storage")


def covers(slabs: dict[Kind, list[Array]], out: Array) -> bool:
    """Whether ``out`` shares a byte with any of the slabs."""
    return any(overlap(out, slab) for kind in KINDS for slab in slabs[kind])


def raw(slab: Array) -> Array:
    """Return the ``[num_blocks, block_nbytes]`` uint8 view of a slab, sharing its memory."""
    bytes_of_blocks: Array = slab.reshape(slab.shape[0], -1).view(np.uint8)
    return bytes_of_blocks
