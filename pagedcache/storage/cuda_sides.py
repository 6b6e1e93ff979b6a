"""The two sides of a cache on a CUDA device, sealed blocks and open slots, as kernels take them.

A kernel works on one kind of place. Which, is decided here on the host, which knows all places:
lists are sorted by side and each side gets its launch. Blocks of both sides are named by their
places, because the open slabs' bases are moved down (``cuda_slabs.base_of``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from pagedcache._cuda.driver import Device
from pagedcache.spec import LAYOUTS, CacheSpec
from pagedcache.storage.slabs import KINDS, Array, Kind

SEALED, OPEN = 0, 1  # as pc_where of include/pagedcache/space.h


class Side(NamedTuple):
    """K or V of all layers, in blocks of one kind."""

    geometry: Any
    """A ``pc_geometry`` on the host."""
    code: int
    """Of the format."""
    tables: int
    """Address of the slabs' table on the device: (base, block stride) of every layer."""
    num_places: int
    """Places from here on are none of this side."""


Sides = dict[Kind, tuple[Side, ...]]


def native_geometry(device: Device, spec: CacheSpec, code: int, clamped: bool) -> Any:
    """The geometry of a format's blocks, ``clamped`` if they are open ones of another format."""
    geometry = ctypes.create_string_buffer(device.library.pc_cuda_geometry_nbytes())
    device.call(
        "pc_cuda_geometry",
        geometry,
        code,
        LAYOUTS[spec.layout],
        spec.num_kv_heads,
        spec.block_size,
        spec.head_dim,
    )
    if clamped:
        device.call("pc_cuda_clamp", geometry)
    return geometry


def make_sides(
    device: Device, spec: CacheSpec, num_blocks: int, num_open: int, tables: int
) -> Sides:
    """Both sides of K and V; without open slots one side each.

    ``tables``: of K, then V, on the sealed side, then on the open one, one behind the other.
    """
    step = 16 * spec.num_layers
    formats = {"k": spec.k_format, "v": spec.v_format}
    sides: Sides = {}
    for index, kind in enumerate(KINDS):
        own = formats[kind]
        native = native_geometry(device, spec, own.code, False)
        made = [Side(native, own.code, tables + index * step, num_blocks)]
        if num_open:
            code = spec.open_format(kind).code
            native = native_geometry(device, spec, code, own.is_quantized)
            made.append(
                Side(native, code, tables + (2 + index) * step, num_blocks + num_open)
            )
        sides[kind] = tuple(made)
    return sides


def alike(sides: Sides, num_layers: int, where: int) -> Iterator[tuple[Any, int, int]]:
    """(geometry, table of slabs, their number) of one side: once where K and V are stored alike,
    so that one launch does both."""
    k, v = (sides[kind][where] for kind in KINDS)
    if k.code == v.code:
        yield k.geometry, k.tables, 2 * num_layers
    else:
        yield k.geometry, k.tables, num_layers
        yield v.geometry, v.tables, num_layers


def between(
    sides: Sides, num_layers: int, origin: int, target: int
) -> Iterator[tuple[Any, int, Any, int, int]]:
    """(geometry, table, geometry, table, slabs) from one side to the other: once where K and V are
    stored alike on both."""
    k, v = sides["k"], sides["v"]
    pairs = [(side[origin], side[target]) for side in (k, v)]
    count = num_layers
    if all(a.code == b.code for a, b in zip(*pairs, strict=True)):
        pairs, count = pairs[:1], 2 * num_layers
    for source, goal in pairs:
        yield source.geometry, source.tables, goal.geometry, goal.tables, count


def runs(keys: Array) -> Iterator[tuple[int, int]]:
    """(start, end) of each stretch of equal keys, int ``[n]``."""
    if len(keys):
        ends = [*(np.flatnonzero(np.diff(keys)) + 1).tolist(), len(keys)]
        yield from zip([0, *ends[:-1]], ends, strict=True)
