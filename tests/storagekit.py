"""Tools of the storage tests: a storage beside its reference, rows of every shape in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import reference_formats as formats
from devicekit import ON_CPU, host, overwrite, placement
from numpy.typing import NDArray
from reference_storage import KINDS, ReferenceStorage

from pagedcache.spec import CacheSpec
from pagedcache.storage import CpuStorage

Array = NDArray[Any]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)
LAYOUTS = ("HND", "NHD")
FORMATS = formats.ALL
QUANTIZED = formats.QUANTIZED
#: Formats whose rows are stored one by one: each has scales of its own.
BY_ROW = formats.BY_ROW


def make_storage(spec: CacheSpec, num_blocks: int, slabs: Any = None, num_open: int = 0) -> Any:
    """A storage on the tests' device; adopted arrays are the CPU's."""
    if ON_CPU or slabs is not None:
        return CpuStorage(spec, num_blocks, num_open, slabs)
    from pagedcache.storage.placed import make_storage

    devices = placement(spec.num_layers)
    each = [devices] * spec.num_layers if isinstance(devices, str) else devices
    return make_storage(spec, num_blocks, each, None, num_open)


class Pair:
    """A storage and a ReferenceStorage that are told the same.

    Blocks of formats by channel (q4k) are written whole. There every block has an open slot here,
    and what is to be written or copied a row at a time goes the way of a cache: the block is
    reopened, rows are written to the slot, and it is sealed again.
    """

    def __init__(
        self,
        k_format: str,
        v_format: str | None = None,
        *,
        layout: str = "HND",
        num_blocks: int = 4,
        layers: int = 1,
        heads: int = 2,
        dim: int = 33,
        block_size: int = 4,
        slabs: Any = None,
        open_blocks: str | None = None,
    ) -> None:
        v_format = k_format if v_format is None else v_format
        self.spec = CacheSpec(
            layers, heads, dim, block_size, k_format=k_format, v_format=v_format, layout=layout,
            open_blocks=open_blocks,
        )  # fmt: skip
        self.whole = not {k_format, v_format}.isdisjoint(formats.BY_CHANNEL)
        num_open = num_blocks if self.spec.has_open_blocks else 0
        self.storage = make_storage(self.spec, num_blocks, slabs, num_open)
        self.reference = ReferenceStorage(
            layers, heads, dim, block_size, k_format, v_format, layout, num_blocks, num_open,
            str(self.spec.open_blocks or "float16"),
        )  # fmt: skip

    def fill(self, byte: int) -> None:
        """Set every byte of both."""
        for kind in KINDS:
            self.reference.blocks[kind][:] = byte
            self.reference.opened[kind][:] = byte
        places = np.arange(self.storage.num_blocks + self.reference.num_open, dtype=np.int32)
        self.storage.fill_blocks(places, byte)

    def store(self, layer: int, k: Array, v: Array, slots: Any, policy: str = "raise") -> None:
        """Store rows at slots of sealed blocks."""
        slots = np.asarray(slots, np.int64)
        if not self.whole:
            self.store_at(layer, k, v, slots, policy)
            return
        size, count = self.spec.block_size, self.storage.num_blocks
        blocks = np.unique(slots[slots >= 0] // size)
        every = np.full(len(blocks), size)
        self.copy_places(blocks, blocks + count, every)
        self.store_at(layer, k, v, np.where(slots < 0, slots, slots + count * size), policy)
        self.copy_places(blocks + count, blocks, every)

    def store_at(self, layer: int, k: Array, v: Array, slots: Any, policy: str = "raise") -> None:
        """Store rows at place-slots, as they are."""
        slots = np.asarray(slots, np.int64)
        ready = self.storage.check_rows(layer, k, v, len(slots), policy)
        self.storage.store(layer, *ready, slots, policy)
        shape = (len(slots), self.spec.num_kv_heads, self.spec.head_dim)
        self.reference.store(layer, k.reshape(shape), v.reshape(shape), slots)

    def copy_blocks(self, src: Any, dst: Any, rows: Any) -> None:
        """Copy between sealed blocks."""
        count, size = self.storage.num_blocks, self.spec.block_size
        steps: list[tuple[int, int, int]] = []
        for source, target, n in zip(src, dst, rows, strict=True):
            if self.whole and 0 < n < size:
                steps += [(target, target + count, size), (source, target + count, n),
                          (target + count, target, size)]  # fmt: skip
            else:
                steps.append((source, target, n))
        self.copy_places(*(np.array(steps).reshape(-1, 3).T))

    def copy_places(self, src: Any, dst: Any, rows: Any) -> None:
        """Copy from place to place."""
        lists = [np.asarray(x, np.int32) for x in (src, dst, rows)]
        self.storage.copy_blocks(*lists)
        self.reference.copy_blocks(*lists)

    def copy_tokens(self, src: Any, dst: Any) -> None:
        """Copy between slots of sealed blocks."""
        pairs = [(np.asarray(src), np.asarray(dst))]
        if self.whole:
            pairs = [(np.array([s]), np.array([d])) for s, d in zip(src, dst, strict=True)]
        size, count = self.spec.block_size, self.storage.num_blocks
        for source, target in pairs:
            blocks = target // size if self.whole else target[:0]
            every = np.full(len(blocks), size)
            moved = target + count * size if self.whole else target
            self.copy_places(blocks, blocks + count, every)
            self.storage.copy_tokens(source, moved)
            self.reference.copy_tokens(source, moved)
            self.copy_places(blocks + count, blocks, every)

    def fill_random(self, seed: int = 0) -> None:
        """Store random rows in every slot of every layer."""
        rng = np.random.default_rng(seed)
        slots = np.arange(self.storage.num_blocks * self.spec.block_size)
        shape = (len(slots), self.spec.num_kv_heads, self.spec.head_dim)
        for layer in range(self.spec.num_layers):
            k, v = (rng.standard_normal(shape).astype(np.float32) for _ in KINDS)
            self.store(layer, k, v, slots)

    def assert_equal(self) -> None:
        """Every byte of every slab, padding and open slots included."""
        for kind in KINDS:
            for layer in range(self.spec.num_layers):
                np.testing.assert_array_equal(
                    raw_slab(self.storage, layer, kind), self.reference.blocks[kind][layer]
                )
                if self.reference.num_open:
                    np.testing.assert_array_equal(
                        raw_open_slab(self.storage, layer, kind),
                        self.reference.opened[kind][layer],
                    )


def raw_slab(storage: Any, layer: int, kind: Any) -> NDArray[np.uint8]:
    """Return a slab's blocks as uint8 [num_blocks, block_nbytes]: on the CPU the memory itself,
    writable, else a copy."""
    return _raw(storage.slab_array(layer, kind, writable=True))


def raw_open_slab(storage: Any, layer: int, kind: Any) -> NDArray[np.uint8]:
    """The same of the open slots."""
    return _raw(storage.open_slab_array(layer, kind, writable=True))


def _raw(slab: Any) -> NDArray[np.uint8]:
    raw = host(slab).reshape(len(slab), -1).view(np.uint8)
    assert not isinstance(slab, np.ndarray) or np.shares_memory(raw, slab)
    return raw


def write_slab(storage: Any, layer: int, kind: Any, values: Any) -> None:
    """Set every byte of a slab's blocks, with NumPy's broadcasting to raw_slab's shape."""
    raw = raw_slab(storage, layer, kind)
    raw[...] = values
    slab = storage.slab_array(layer, kind, writable=True)
    if not isinstance(slab, np.ndarray):
        overwrite(slab, raw)


def snapshot(storage: Any) -> list[bytes]:
    """Return every stored byte, for "nothing has changed"."""
    slabs = [raw_slab, raw_open_slab] if storage.num_open else [raw_slab]
    return [
        raw(storage, layer, kind).tobytes()
        for layer in range(storage.spec.num_layers)
        for kind in KINDS
        for raw in slabs
    ]


def bits(x: Array) -> Array:
    """Return the bits of a float array, so that NaN equals itself."""
    x = np.ascontiguousarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def _flat(x: Array) -> Array:
    return x.reshape(len(x), x.shape[1] * x.shape[2])


def _read_only(x: Array) -> Array:
    x = x.copy()
    x.flags.writeable = False
    return x


def _transposed(x: Array) -> Array:
    return np.ascontiguousarray(x.transpose(2, 1, 0)).transpose(2, 1, 0)


def _head_major(x: Array) -> Array:
    return np.ascontiguousarray(x.transpose(1, 0, 2)).transpose(1, 0, 2)


def _every_other(x: Array) -> Array:
    wide = np.zeros((2 * len(x), x.shape[1] * 3, x.shape[2] * 2), x.dtype)
    wide[::2, ::3, ::2] = x
    return wide[::2, ::3, ::2]


def _backwards(x: Array) -> Array:
    return np.ascontiguousarray(x[::-1, ::-1, ::-1])[::-1, ::-1, ::-1]


def _misaligned(x: Array) -> Array:
    memory = np.zeros(x.nbytes + 1, np.uint8)
    shifted = memory[1:].view(x.dtype).reshape(x.shape)
    shifted[:] = x
    return shifted


#: The same rows [n, heads, dim] lying in memory in different ways (CASE C45).
ARRANGEMENTS: dict[str, Callable[[Array], Array]] = {
    "contiguous": np.ascontiguousarray,
    "flat": _flat,
    "read-only": _read_only,
    "transposed": _transposed,
    "head-major": _head_major,
    "strided": _every_other,
    "backwards": _backwards,
    "misaligned": _misaligned,
}
