"""Storage over the caller's own arrays (F48)."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from devicekit import cpu_memory
from reference_storage import KINDS
from storagekit import FORMATS, LAYOUTS, QUANTIZED, Pair, raw_slab

from pagedcache.errors import DeviceError, FormatError, InvalidArgumentError, ShapeError
from pagedcache.spec import CacheSpec
from pagedcache.storage import CpuStorage

pytestmark = cpu_memory("NumPy arrays adopted as slabs")


def block_shape(spec: CacheSpec, kind: str) -> tuple[tuple[int, ...], Any]:
    fmt = spec.k_format if kind == "k" else spec.v_format
    shape = spec.k_block_shape if kind == "k" else spec.v_block_shape
    return shape, fmt.dtype


def halves(spec: CacheSpec, num_blocks: int) -> Any:
    """One [num_blocks, 2, …] tensor per layer, as vLLM has them; K and V of one format."""
    shape, dtype = block_shape(spec, "k")
    both = [np.zeros((num_blocks, 2, *shape), dtype) for _ in range(spec.num_layers)]
    return [x[:, 0] for x in both], [x[:, 1] for x in both]


def planes(spec: CacheSpec, num_blocks: int) -> Any:
    """One [2, num_layers, num_blocks, …] tensor for everything."""
    shape, dtype = block_shape(spec, "k")
    whole = np.zeros((2, spec.num_layers, num_blocks, *shape), dtype)
    return whole[0], whole[1]


def blocks_first(spec: CacheSpec, num_blocks: int) -> Any:
    """One [num_blocks, num_layers, 2, …] tensor for everything, blocks in descending order."""
    shape, dtype = block_shape(spec, "k")
    whole = np.zeros((num_blocks, spec.num_layers, 2, *shape), dtype)[::-1]
    layers = range(spec.num_layers)
    return [whole[:, i, 0] for i in layers], [whole[:, i, 1] for i in layers]


def apart(spec: CacheSpec, num_blocks: int) -> Any:
    """One array per layer and kind."""
    return tuple(
        [
            np.zeros((num_blocks, *block_shape(spec, kind)[0]), block_shape(spec, kind)[1])
            for _ in range(spec.num_layers)
        ]
        for kind in KINDS
    )


# SPEC F48: every operation on adopted arrays does what it does on our own, in the same bytes.
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("arrange", [halves, planes, blocks_first, apart])
def test_adopted_arrays(fmt: str, layout: str, arrange: Any) -> None:
    spec = CacheSpec(2, 3, 40, 4, k_format=fmt, v_format=fmt, layout=layout)
    slabs = arrange(spec, 5)
    pair = Pair(fmt, layout=layout, layers=2, heads=3, dim=40, num_blocks=5, slabs=slabs)
    pair.fill_random()
    pair.assert_equal()
    ids = (np.array([0, 4], np.int32), np.array([3, 1], np.int32), np.array([4, 3], np.int32))
    pair.copy_blocks(*ids)
    moves = [(2, -1), (0, 2), (-1, 0)]
    pair.storage.move_blocks(np.array(moves, np.int32))
    pair.reference.move_blocks(moves)
    pair.assert_equal()
    for (index, kind), layer in itertools.product(enumerate(KINDS), range(2)):
        given = slabs[index][layer]
        assert np.shares_memory(given, pair.storage.slab_array(layer, kind))
        for block in range(5):
            stored = pair.reference.blocks[kind][layer, block]
            assert given[block].tobytes() == stored.tobytes()
    values = pair.storage.gather(1, np.array([4, 0, 1], np.int32), 2, 11, np.float32)
    slots = [18, 19, 0, 1, 2, 3, 4, 5, 6]
    for kind, got in zip(KINDS, values, strict=True):
        want = pair.reference.gather(1, kind, slots, np.float32)
        np.testing.assert_array_equal(got, want)


# SPEC F48: bytes between the blocks belong to the caller.
def test_bytes_between_blocks_are_left_alone() -> None:
    wide = np.full((4, 3, 2 * 4 * 33), 7, np.float16)
    views = [wide[:, i, : 2 * 4 * 33].reshape(4, 2, 4, 33) for i in range(2)]
    pair = Pair("float16", slabs=([views[0]], [views[1]]))
    pair.fill_random()
    pair.storage.move_blocks(np.array([[1, 2]], np.int32))
    assert (wide[:, 2] == 7).all()


def test_one_block_and_the_smallest_sizes() -> None:
    slabs = ([np.zeros((1, 1, 1, 1), np.float32)], [np.zeros((1, 1, 1, 1), np.float32)])
    pair = Pair("float32", heads=1, dim=1, block_size=1, num_blocks=1, slabs=slabs)
    pair.store(0, np.full((1, 1, 1), 3, np.float32), np.full((1, 1), 4, np.float32), [0])
    assert slabs[0][0].item() == 3 and slabs[1][0].item() == 4


# SPEC F34, 7: rows that lie in the slabs themselves are read before anything is written.
def test_rows_from_the_same_slab() -> None:
    slab = np.arange(4 * 2 * 2 * 4, dtype=np.float32).reshape(4, 2, 2, 4)
    other = -slab
    storage = CpuStorage(CacheSpec(1, 2, 4, 2, "float32", layout="NHD"), 4, slabs=([slab], [other]))
    tokens = slab.reshape(8, 2, 4)
    before = tokens.copy()
    slots = np.arange(1, 8)
    storage.store(0, *storage.check_rows(0, tokens[:7], -tokens[:7], 7), slots)
    np.testing.assert_array_equal(tokens[1:], before[:7])
    np.testing.assert_array_equal(other.reshape(8, 2, 4)[1:], -before[:7])


class OnADevice:
    __cuda_array_interface__: dict[str, Any] = {}


def good() -> Any:
    return np.zeros((4, 2, 4, 32), np.float16)


def read_only() -> Any:
    x = good()
    x.flags.writeable = False
    return x


def misaligned() -> Any:
    return np.zeros(1 + 2 * 1024, np.uint8)[1:].view(np.float16).reshape(4, 2, 4, 32)


# SPEC 7, F48: shape, dtype and layout are checked; nothing is adopted by accident.
@pytest.mark.parametrize(
    ("make", "error", "named"),
    [
        (lambda: np.zeros((4, 2, 4, 32), np.float32), FormatError, "expected float16, got float32"),
        (lambda: np.zeros((4, 2, 4, 32), np.uint16), FormatError, "got uint16"),
        (lambda: np.zeros((4, 2, 4, 32), ">f2"), FormatError, "got >f2"),
        (lambda: np.zeros((5, 2, 4, 32), np.float16), ShapeError, "[4, 2, 4, 32], got [5, 2, 4"),
        (lambda: np.zeros((4, 4, 2, 32), np.float16), ShapeError, "got [4, 4, 2, 32]"),
        (lambda: np.zeros((4, 256), np.float16), ShapeError, "got [4, 256]"),
        (lambda: np.zeros((4, 2, 4, 64), np.float16)[..., ::2], ShapeError, "dense inside a block"),
        (lambda: np.zeros((4, 4, 2, 32), np.float16).transpose(0, 2, 1, 3), ShapeError, "dense"),
        (lambda: good()[:, :, ::-1], ShapeError, "dense inside a block"),
        (lambda: np.lib.stride_tricks.as_strided(good(), strides=(0, 256, 64, 2)), ShapeError,
         "at least 512 bytes from block to block, got 0"),
        (lambda: np.lib.stride_tricks.as_strided(good(), strides=(510, 256, 64, 2)), ShapeError,
         "got 510"),
        (read_only, FormatError, "read-only"),
        (misaligned, FormatError, "aligned to 2 bytes"),
        (lambda: good().tolist(), FormatError, "memory can be shared, got list"),
        (lambda: None, FormatError, "got NoneType"),
        (lambda: 1.5, FormatError, "got float"),
        (OnADevice, DeviceError, "CUDA"),
    ],
)  # fmt: skip
def test_unusable_arrays_are_refused(make: Any, error: Any, named: str) -> None:
    spec = CacheSpec(2, 2, 32, 4, "float16")
    with pytest.raises(error) as caught:
        CpuStorage(spec, 4, slabs=([good(), good()], [good(), make()]))
    assert named in str(caught.value) and "v_slabs[1]" in str(caught.value)


@pytest.mark.parametrize("fmt", QUANTIZED)
def test_quantised_arrays_are_raw_bytes(fmt: str) -> None:
    spec = CacheSpec(1, 2, 32, 4, k_format=fmt, v_format=fmt)
    nbytes = spec.layer_block_nbytes("k")
    right = [np.zeros((4, nbytes), np.uint8)]
    for wrong in (np.zeros((4, nbytes), np.int8), np.zeros((4, nbytes // 4), np.float32)):
        with pytest.raises(FormatError, match="expected uint8"):
            CpuStorage(spec, 4, slabs=(right, [wrong]))
    with pytest.raises(ShapeError):
        CpuStorage(spec, 4, slabs=(right, [np.zeros((4, nbytes + 16), np.uint8)]))
    CpuStorage(spec, 4, slabs=(right, [np.zeros((4, nbytes + 16), np.uint8)[:, :nbytes]]))


@pytest.mark.parametrize(
    ("slabs", "error"),
    [
        (3, InvalidArgumentError),
        (([good()],), InvalidArgumentError),
        ((good(), good(), good()), InvalidArgumentError),
        ("kv", InvalidArgumentError),
        (([good()], [good(), good()]), ShapeError),
        (([good(), good()], []), ShapeError),
        (({0: good(), 1: good()}, [good(), good()]), InvalidArgumentError),
        ((7, [good(), good()]), InvalidArgumentError),
    ],
)
def test_wrong_numbers_of_arrays(slabs: Any, error: Any) -> None:
    with pytest.raises(error):
        CpuStorage(CacheSpec(2, 2, 32, 4, "float16"), 4, slabs=slabs)


def test_slabs_that_share_memory_are_refused() -> None:
    spec = CacheSpec(2, 2, 32, 4, "float16")
    x = good()
    with pytest.raises(ShapeError, match="share no memory"):
        CpuStorage(spec, 4, slabs=([x, good()], [good(), x]))
    whole = np.zeros((7, 2, 4, 32), np.float16)
    with pytest.raises(ShapeError, match=r"v_slabs\[0\] over k_slabs\[0\]"):
        CpuStorage(spec, 4, slabs=([whole[:4], good()], [whole[3:], good()]))


# SPEC F11: closing lets go of the caller's arrays and of our own.
def test_close_lets_go() -> None:
    import sys

    slab, other = good(), good()
    before = sys.getrefcount(slab)
    storage = CpuStorage(CacheSpec(1, 2, 32, 4, "float16"), 4, slabs=([slab], [other]))
    block = storage.block_array(0, "k", 1)
    storage.close()
    storage.close()
    raw = block.tobytes()
    assert raw == bytes(512)
    del block, storage
    assert sys.getrefcount(slab) == before


def test_padding_of_adopted_blocks_is_not_touched() -> None:
    spec = CacheSpec(1, 1, 32, 1, "q8")  # 32 quants, 4 bytes of scale, 12 bytes of padding
    slabs = [np.full((2, 48), 0xAA, np.uint8) for _ in KINDS]
    storage = CpuStorage(spec, 2, slabs=([slabs[0]], [slabs[1]]))
    x = np.ones((2, 1, 32), np.float32)
    storage.store(0, *storage.check_rows(0, x, x, 2), np.array([0, 1]))
    for kind in KINDS:
        assert (raw_slab(storage, 0, kind)[:, 36:] == 0xAA).all()
        assert (raw_slab(storage, 0, kind)[:, :32] == 127).all()


# SPEC F33: reading must not write over what is stored.
@pytest.mark.parametrize("layout", LAYOUTS)
def test_out_over_the_slabs_is_refused(layout: str) -> None:
    spec = CacheSpec(2, 1, 8, 4, kv_format="float32", layout=layout)
    arena = np.zeros((4, 5, *spec.k_block_shape), np.float32)  # the fifth part is nobody's
    slabs = [arena[:, i] for i in range(4)]
    storage = CpuStorage(spec, 4, slabs=(slabs[:2], slabs[2:]))
    rows = np.random.default_rng(1).standard_normal((16, 1, 8)).astype(np.float32)
    for layer in range(2):
        ready = storage.check_rows(layer, rows, -rows, 16)
        storage.store(layer, *ready, np.arange(16))
    before = arena.copy()
    apart = np.empty((4, 1, 8), np.float32)
    for part in range(4):  # of either layer, K or V: none may be written
        over = arena[1, part].reshape(4, 1, 8)
        for pair in ((over, apart), (apart, over)):
            with pytest.raises(ShapeError, match="apart from the slabs"):
                storage.gather(0, np.array([0], np.int32), 0, 4, None, *pair)
    assert np.array_equal(arena, before)
    # Memory between the blocks of the same tensor is the caller's.
    free = arena[1, 4].reshape(4, 1, 8)
    storage.gather(0, np.array([2], np.int32), 8, 12, None, free, apart)
    assert np.array_equal(free, rows[8:12]) and np.array_equal(apart, -rows[8:12])
    assert np.array_equal(arena[:, :4], before[:, :4])
