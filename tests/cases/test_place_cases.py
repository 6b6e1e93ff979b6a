"""Cases C46 and C47: where bytes go, beyond 2^31 and no further than told."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from cachekit import (
    assert_holds,
    cached_prompt,
    empty,
    expected,
    make_cache,
    rows,
)
from formatkit import QUANTISED, row_bytes


class SparseMemory:
    """Anonymous memory that takes no page before it is touched."""

    def __init__(self, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        self.map = mmap.mmap(-1, nbytes, flags=flags)
        self.bytes = np.frombuffer(self.map, np.uint8)


@pytest.mark.parametrize("fmt", ["float16", "q8"])
def test_a_marker_beyond_two_to_the_31_elements(fmt):
    # CASE C46
    # TRAP 14
    # SPEC F9a
    n, heads, B, dim = 5_002, 8, 1_024, 64  # float16: one block of K is exactly 1 MiB
    spec = make_cache(1, B=B, heads=heads, dim=dim, fmt=fmt).spec
    each = spec.layer_block_nbytes("k")
    if fmt == "float16":
        assert each == 2**20 and n * each // 2 > 2**31
    assert n * each > 2**31
    try:
        memory = [SparseMemory(n * each) for _ in range(2)]
    except (OSError, MemoryError):
        pytest.skip("no 10 GiB of address space")
    shape = (n, heads, B, dim) if fmt == "float16" else (n, each)
    slabs = [m.bytes.view(spec.k_format.dtype).reshape(shape) for m in memory]
    cache = make_cache(
        n, B=B, heads=heads, dim=dim, fmt=fmt, storage=([slabs[0]], [slabs[1]])
    )
    low = cache.pool.allocate(4_999)
    seq = cache.open(range(2 * B))
    ids = seq.block_table.tolist()
    assert sorted(ids) == [4_999, 5_000]
    at = [0, 1, B - 1, B, B + 5, 2 * B - 1]
    table = np.array(ids, np.int64)
    slots = np.array([table[p // B] * B + p % B for p in at], np.int64)
    seq.prepare(2 * B)
    marks = np.arange(1, 7)
    cache.store(0, *rows(cache.spec, 0, marks), slots)
    want_k, want_v = expected(cache.spec, 0, marks)
    for i, p in enumerate(at):
        k, v = seq.gather(0, p, p + 1, dtype=np.float32)
        np.testing.assert_array_equal(k[0], want_k[i])
        np.testing.assert_array_equal(v[0], want_v[i])
    # nothing was written where a cut address would land
    units = (each, each // 2)  # addresses counted in bytes, or in elements
    wrong = {b * u % cut // u for b in ids for u in units for cut in (2**31, 2**32)} - set(ids)
    assert wrong
    for slab in slabs:
        assert not any(slab[b].view(np.uint8).any() for b in wrong)
    if fmt == "float16":
        for slab, want in zip(slabs, (want_k, want_v), strict=True):
            np.testing.assert_array_equal(slab[ids[1], :, 5, :].astype(np.float32), want[4])
    # copy-on-write and defragment move whole megabytes there
    seq.commit(2 * B)
    child = seq.fork()
    child.truncate(2 * B - 1)
    cache.store(0, *rows(cache.spec, 0, [77]), child.prepare(1))
    child.commit(1)
    assert child.block_table[1] == 5_001
    k, _ = child.gather(0, B + 5, B + 6, dtype=np.float32)
    np.testing.assert_array_equal(k[0], want_k[4])
    k, _ = child.gather(0, 2 * B - 1, 2 * B, dtype=np.float32)
    np.testing.assert_array_equal(k, expected(cache.spec, 0, [77])[0])
    seq.free()
    child.free()
    cache.pool.free(low)
    empty(cache)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("fmt", QUANTISED)
def test_one_token_of_a_quantised_block_is_copied_alone(fmt, layout):
    # CASE C47
    # SPEC F40
    heads, dim, B, n = 2, 32, 4, 4
    spec = make_cache(1, B=B, heads=heads, dim=dim, fmt=fmt, layout=layout).spec
    each = spec.layer_block_nbytes("k")
    slabs = [np.full((n, each), 0xA5, np.uint8) for _ in range(2)]
    cache = make_cache(
        n,
        B=B,
        heads=heads,
        dim=dim,
        fmt=fmt,
        layout=layout,
        storage=([slabs[0]], [slabs[1]]),
        partial_block_reuse=1,
    )
    (source,), marks = cached_prompt(cache, [5, 6, 7, 8])
    before = [s.copy() for s in slabs]
    seq = cache.open([5, 99, 100])  # one token in common
    assert seq.num_cached_tokens == 1
    (target,) = seq.block_table.tolist()
    assert target != source
    assert_holds(cache, seq, marks[:1])
    group = {"q8": 36, "q4": 20, "q8_0": 34, "q4_0": 18, "q4_1": 20}[fmt]
    for slab, old in zip(slabs, before, strict=True):
        np.testing.assert_array_equal(np.delete(slab, target, 0), np.delete(old, target, 0))
        # bytes that are the source's now, and every other byte of the block as it was
        changed = slab[target] != old[target]
        assert (slab[target][changed] == slab[source][changed]).all()
        assert changed.sum() <= heads * group
        # a changed value may happen to equal 0xA5: count the ones that cannot
        possible = (slab[source] != 0xA5).sum()
        assert changed.sum() > 0 and possible >= changed.sum()
        wanted = np.zeros(each, bool)
        for start, length in row_bytes(fmt, layout, heads, B, head=None, token=0):
            wanted[start : start + length] = True
        assert not changed[~wanted].any()
        np.testing.assert_array_equal(slab[target][wanted], slab[source][wanted])
    seq.free()
    empty(cache)
