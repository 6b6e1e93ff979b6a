"""Every allocation fails once, in turn: the error is typed and nothing has changed.

``alloc.fail_after(n)`` lets the n-th allocation of the bookkeeping fail. Each operation is run
on a fresh, identical cache with n = 0, 1, 2, … until it asks for no more memory.
"""

from __future__ import annotations

from typing import Any

import pytest
from cachekit import assert_holds, empty, make_cache, write
from faultkit import OPERATIONS, PROMPT, SEALING, B, World

from pagedcache.bookkeeping import alloc
from pagedcache.errors import PagedCacheError, StorageMemoryError

WITHOUT_BYTES = {"append", "append copies", "append_kv", "store", "store raw", "gather", "views"}
ID_OPERATIONS = [n for n in OPERATIONS if n not in WITHOUT_BYTES and n != "packed_views"]


def prepared(name: str, storage: Any, fmt: str) -> World:
    world = World(storage, fmt)
    if name in SEALING:
        world.write_more()
    if name == "allocate_for_tokens":
        world.keep.append(world.cache.open())
    if name == "pool.touch":
        world.cache.pool.touch([int(world.seq.block_table[0])])
        world.cache.pool.free([int(world.seq.block_table[0])])
    return world


def fail_each(name: str, storage: Any, fmt: str = "float32") -> int:
    """Run one operation with each of its allocations failing; how many it has."""
    call = (OPERATIONS | SEALING)[name]
    if name == "pool.touch":
        def call(w):  # noqa: E306
            held = [int(w.seq.block_table[0])]
            w.cache.pool.touch(held)
            w.cache.pool.free(held)
    for n in range(200):
        world = prepared(name, storage, fmt)
        before = world.shot()
        asked = alloc.count()
        alloc.fail_after(n)
        error: BaseException | None = None
        try:
            call(world)
        except BaseException as e:
            error = e.with_traceback(None)  # its frames hold views and handles
        finally:
            alloc.fail_after(-1)
        asked = alloc.count() - asked
        if error is not None:
            assert isinstance(error, MemoryError) and isinstance(error, PagedCacheError), repr(
                error
            )
            assert isinstance(error, StorageMemoryError)
            assert error.nbytes > 0
            assert world.shot() == before, (name, n)
            world.cache.check()
            error = None
            call(world)  # with memory the same call works
        world.cache.check()
        world.done()
        if asked <= n:
            return n
    raise AssertionError(f"{name} still asks for memory after 200 failures")


@pytest.mark.parametrize("name", list(OPERATIONS))
def test_a_failed_allocation_changes_nothing(name):
    # TRAP 1
    # TRAP 5
    # SPEC F23 F11
    fail_each(name, "own")


@pytest.mark.parametrize("name", ID_OPERATIONS)
def test_a_failed_allocation_changes_nothing_without_bytes(name):
    # SPEC F23 F48
    fail_each(name, None)


@pytest.mark.parametrize("name", [*OPERATIONS, *SEALING])
def test_a_failed_allocation_changes_nothing_with_open_blocks(name):
    # SPEC F23 F11
    fail_each(name, "own", "q4k")


def test_the_operations_do_allocate():
    """The injection reaches what it is meant for."""
    # SPEC F23
    counts = {name: fail_each(name, "own") for name in ("open cold", "fork", "defragment", "check")}
    assert all(counts.values()), counts


def test_a_commit_without_memory_for_the_index_caches_nothing_and_works():
    # SPEC F25
    for n in range(12):
        cache = make_cache(8, B=B)
        seq = cache.open(PROMPT, extra_keys=[(0, 12, b"image")])
        write(seq, cache.spec, range(1, 13))
        alloc.fail_after(n)
        try:
            seq.commit(12)
        finally:
            alloc.fail_after(-1)
        cache.check()
        assert seq.seq_len == 12
        assert_holds(cache, seq, range(1, 13))
        hit = cache.probe([*PROMPT, 1], extra_keys=[(0, 12, b"image")])
        assert hit in (0, 4, 8, 12)
        assert n < 8 or hit == 12
        seq.free()
        empty(cache)
