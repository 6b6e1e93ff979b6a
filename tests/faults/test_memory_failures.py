"""No memory for a pool, for slabs, for anything; and nothing leaks."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from cachekit import make_cache
from devicekit import cpu_memory
from faultkit import PROMPT, B, World

import pagedcache as pc
from pagedcache.bookkeeping import alloc
from pagedcache.errors import PagedCacheError, StorageMemoryError


def test_no_memory_for_a_pool():
    # SPEC F11
    gc.collect()
    live = alloc.live()
    for make in (
        lambda: pc.BlockPool(1000, 4),
        lambda: make_cache(100, B=B, storage=None),
        lambda: make_cache(100, B=B),
    ):
        for n in range(50):
            asked = alloc.count()
            alloc.fail_after(n)
            try:
                made = make()
            except MemoryError as e:
                assert isinstance(e, StorageMemoryError)
                made = None
            finally:
                alloc.fail_after(-1)
            failed = made is None
            del made
            gc.collect()
            assert alloc.live() == live  # nothing is kept, whether it failed or not
            if not failed:
                assert alloc.count() - asked <= n
                break
        else:
            raise AssertionError("still failing")


def test_nothing_leaks_when_everything_goes():
    # SPEC F11 F29
    gc.collect()
    live = alloc.live()
    for storage in ("own", None):
        world = World(storage)
        world.keep.append(world.cache.open([*PROMPT, 5], extra_keys=[(0, 2, b"k")]))
        if storage:
            world.keep.append(world.seq.views(0)[0].k)
        world.cache.prepare(world.seqs, [5, 6, 7])
        world.cache.close()
        del world
        gc.collect()
        assert alloc.live() == live


@cpu_memory("NumPy's own allocations")
def test_no_memory_for_the_slabs(monkeypatch):
    # SPEC F11
    from pagedcache.storage import slabs

    gc.collect()
    live = alloc.live()
    real = np.zeros
    for fail_at in range(4):
        made = 0

        def zeros(*args: Any, fail_at: int = fail_at, **kwargs: Any) -> Any:
            nonlocal made
            if made == fail_at:
                made += 1
                raise MemoryError("injected")
            made += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(slabs.np, "zeros", zeros)
        try:
            with pytest.raises(StorageMemoryError) as caught:
                make_cache(100, B=B, layers=2)
        finally:
            monkeypatch.setattr(slabs.np, "zeros", real)
        assert isinstance(caught.value, MemoryError)
        assert caught.value.nbytes == 100 * 2 * 2 * B * 4 * 4
        gc.collect()
        assert alloc.live() == live
    make_cache(100, B=B, layers=2)


@pytest.mark.parametrize("blocks", [2**31 - 1, 2**31, 2**40, 2**63, 2**64])
def test_more_storage_than_any_machine_has(blocks):
    # SPEC F11
    spec = pc.CacheSpec(
        num_layers=80, num_kv_heads=8, head_dim=128, block_size=256, kv_format="float32"
    )
    with pytest.raises(PagedCacheError):
        pc.PagedKVCache(spec, blocks)
    with pytest.raises(PagedCacheError):
        pc.PagedKVCache(spec, memory=blocks * 10**6)
