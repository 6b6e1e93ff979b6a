"""64-bit addresses (TRAP 14, CASE C46) and memory that must not be touched (CASE C41).

The slabs are sparse: anonymous memory reserved without being backed, of which a test touches a
few pages. Sizes are those of the storage, not of the machine.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import numpy as np
import pytest
from storagekit import DTYPES, raw_slab

from pagedcache.errors import StorageMemoryError
from pagedcache.spec import CacheSpec
from pagedcache.storage import CpuStorage

LINUX = sys.platform.startswith("linux")
MAP_NORESERVE = 0x4000  # Linux; the mmap module names it from Python 3.13 on

needs_linux = pytest.mark.skipif(not LINUX, reason="sparse and protected memory as Linux has it")


def reserve(nbytes: int) -> Any:
    """Zeroed pages that count against no limit until they are touched, as uint8."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)


def sparse_storage(spec: CacheSpec, num_blocks: int) -> CpuStorage:
    """A storage over reserved memory, V in the second half of one tensor with K."""
    assert spec.k_format == spec.v_format
    shape, dtype = spec.k_block_shape, spec.k_format.dtype
    memory = reserve(num_blocks * 2 * spec.layer_block_nbytes("k"))
    both = memory.view(dtype).reshape(num_blocks, 2, *shape)
    return CpuStorage(spec, num_blocks, slabs=([both[:, 0]], [both[:, 1]]))


def marker(spec: CacheSpec, seed: int) -> Any:
    """One token's rows of small integers, which float formats and q4 store exactly."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-7, 8, (1, spec.num_kv_heads, spec.head_dim)).astype(np.float32)
    x[..., ::32] = 7  # every group's amax is 7: q4's scale is 1, q8's 7 / 127
    return x


def check_far_blocks(storage: CpuStorage, far: list[int]) -> None:
    """Store, gather, copy and move around far blocks; every marker is read back in its place."""
    spec = storage.spec
    size = spec.block_size
    # Half a step of q8's scale 7 / 127; q8_0 rounds that scale to float16 on top.
    limit = 7 / 254 + 7 / 2048 if spec.k_format.name in ("q8", "q8_0") else 0
    markers = {block: marker(spec, block) for block in far}
    for block, x in markers.items():
        ready = storage.check_rows(0, x, -x, 1)
        storage.store(0, *ready, np.array([block * size + size - 1]))

    def assert_marker(block: int, x: Any) -> None:
        ids = np.array([block], np.int32)
        k, v = storage.gather(0, ids, size - 1, size, np.float32)
        np.testing.assert_array_equal(k, -v)
        np.testing.assert_allclose(k, x, rtol=0, atol=limit)

    for block, x in markers.items():
        assert_marker(block, x)
    first, last = far[0], far[-1]
    whole, some = np.array([size], np.int32), np.array([1], np.int32)
    empty = far[-1] - 1
    assert empty not in markers
    stored = raw_slab(storage, 0, "k")[last].tobytes()
    storage.copy_blocks(np.array([last], np.int32), np.array([empty], np.int32), whole)
    assert_marker(empty, markers[last])
    storage.copy_blocks(np.array([empty], np.int32), np.array([first], np.int32), some)
    assert_marker(first, markers[first])  # its last token was not among the rows copied
    storage.copy_tokens(np.array([last * size + size - 1]), np.array([first * size + size - 1]))
    assert_marker(first, markers[last])
    storage.move_blocks(np.array([[last, -1], [far[1], last], [-1, far[1]]], np.int32))
    assert_marker(far[1], markers[last])
    assert_marker(last, markers[far[1]])
    assert raw_slab(storage, 0, "k")[far[1]].tobytes() == stored


# TRAP 14, CASE C46: block 5,000 of 1 MiB blocks lies 5 GiB into the slab.
@needs_linux
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_block_5000_of_one_mebibyte(layout: str) -> None:
    spec = CacheSpec(1, 32, 128, 128, "float16", layout=layout)
    assert spec.layer_block_nbytes("k") == 2**20
    storage = sparse_storage(spec, 5001)
    check_far_blocks(storage, [0, 2047, 2048, 4095, 4096, 5000])


# TRAP 14, CASE C46: more than 2^31 values, and more than 2^32 bytes, in one slab of every packing.
@needs_linux
@pytest.mark.parametrize("fmt", ["float32", "bfloat16", "q8", "q4", "q8_0"])
def test_more_than_two_to_the_31_values(fmt: str) -> None:
    spec = CacheSpec(1, 8, 128, 64, fmt)
    values = spec.num_kv_heads * spec.block_size * spec.head_dim  # 2^16 in a block
    nbytes = spec.layer_block_nbytes("k")
    edges = {0, 2**31 // values, 2**31 // nbytes, 2**32 // nbytes, 2**32 // values + 3}
    num_blocks = max(edges) + 4
    assert num_blocks * values > 2**31 and num_blocks * nbytes > 2**32
    check_far_blocks(sparse_storage(spec, num_blocks), sorted({*edges, num_blocks - 1}))


# TRAP 14: the last of 2^31 - 1 block ids.
@needs_linux
def test_the_last_block_id() -> None:
    spec = CacheSpec(1, 1, 16, 2, "float16")
    storage = sparse_storage(spec, 2**31 - 1)
    check_far_blocks(storage, [0, 2**30, 2**31 - 2])


# SPEC F11, CASE C46: our own slabs are taken lazily, 2^31 values in each.
def test_own_slabs_are_lazy() -> None:
    spec = CacheSpec(1, 8, 128, 64, "q4")
    num_blocks = 2**31 // 2**16 + 2
    try:
        storage = CpuStorage(spec, num_blocks)
    except StorageMemoryError as error:
        pytest.skip(f"this machine does not give {error.nbytes:,} bytes, even untouched")
    check_far_blocks(storage, [0, num_blocks // 2, num_blocks - 1])


# CASE C41: slots past the length are never read: they lie in pages that nobody may read.
@needs_linux
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", ["float32", "bfloat16", "q8_0"])
def test_slots_past_the_length_are_not_read(fmt: str, dtype: Any) -> None:
    # NHD: tokens lie one after the other; the first 8 of block 1 end exactly where a page does.
    spec = CacheSpec(1, mmap.PAGESIZE // 16, 32, 16, fmt, layout="NHD")
    token = spec.layer_block_nbytes("k") // 16
    memory = reserve(2 * 2 * 16 * token)
    both = memory.view(spec.k_format.dtype).reshape(2, 2, *spec.k_block_shape)
    storage = CpuStorage(spec, 2, slabs=([both[0]], [both[1]]))
    x = np.ones((8, spec.num_kv_heads, 32), np.float32)
    storage.store(0, *storage.check_rows(0, x, x, 8), np.arange(16, 24))
    libc = ctypes.CDLL(None, use_errno=True)
    for half in range(2):
        start = memory.ctypes.data + (half * 32 + 24) * token
        assert start % mmap.PAGESIZE == 0
        assert libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(8 * token), 0) == 0
    try:
        k, v = storage.gather(0, np.array([1], np.int32), 0, 8, dtype)
        assert (k.astype(np.float32) == v.astype(np.float32)).all() and (k != 0).all()
        assert (storage.dequantize_block(0, "v", 1, 8, dtype) == v).all()
        rows = np.array([8], np.int32)
        storage.copy_blocks(np.array([1], np.int32), np.array([0], np.int32), rows)
        assert (storage.gather(0, np.array([0], np.int32), 0, 8, dtype)[0] == k).all()
    finally:
        libc.mprotect(
            ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes),
            mmap.PROT_READ | mmap.PROT_WRITE,
        )  # fmt: skip
