"""Every allocation fails once, in turn: the error is typed and nothing has changed.

``alloc.fail_after(n)`` lets the n-th allocation of the bookkeeping fail. Each operation is run
on a fresh, identical cache with n = 0, 1, 2, … until it asks for no more memory.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cachekit import assert_holds, cached_prompt, empty, fill, make_cache, rows, snapshot, write

import pagedcache as pc
from pagedcache.bookkeeping import alloc
from pagedcache.errors import PagedCacheError, StorageMemoryError

B = 4
PROMPT = list(range(10, 22))


class World:
    """A cache in the middle of its work: shared, cached, part-filled and free blocks."""

    def __init__(self, storage: Any = "own") -> None:
        self.cache = make_cache(
            16, B=B, layers=2, storage=storage, partial_block_reuse=1, max_seq_len=1000
        )
        own = storage == "own"
        low = self.cache.open(range(900, 905))
        self.seq = self.cache.open(range(50, 57))
        self.parent = self.cache.open(range(70, 76))
        if own:
            cached_prompt(self.cache, PROMPT)
            fill(self.cache, self.seq, range(41, 48))
            fill(self.cache, self.parent, range(61, 67))
        else:
            with self.cache.open(PROMPT) as seq:
                seq.prepare(12)
                seq.commit(12)
            for s in (self.seq, self.parent):
                s.prepare(s.num_tokens)
                s.commit(s.num_tokens)
        self.child = self.parent.fork()
        self.mapping = self.seq.prepare(1)
        low.free()
        self.seqs = (self.seq, self.parent, self.child)
        self.keep: list[Any] = []

    def shot(self, *, flows: bool = True) -> dict[str, Any]:
        """All that must stay; without ``flows``, block totals (taken, given back) may grow."""
        shot = snapshot(self.cache, *self.seqs, prompts=[[*PROMPT, 1], PROMPT, PROMPT[:6]])
        if not flows:
            del shot["counts"][3:5]
        return shot

    def done(self) -> None:
        self.keep.clear()
        gc.collect()
        while True:  # what an engine with its own bytes owes
            pairs, ticket = self.cache.take_block_copies()
            if not len(pairs):
                break
            self.cache.copies_done(ticket)
        for seq in self.seqs:
            seq.free()
        for seq_id in self.cache.live_sequences():
            self.cache.free_sequence(seq_id)
        gc.collect()
        empty(self.cache)


Operation = Callable[[World], Any]
K, V = np.ones((3, 1, 4), np.float32), -np.ones((3, 1, 4), np.float32)

OPERATIONS: dict[str, Operation] = {
    "open cold": lambda w: w.keep.append(w.cache.open(range(300, 309))),
    "open empty": lambda w: w.keep.append(w.cache.open()),
    "open hit": lambda w: w.keep.append(w.cache.open([*PROMPT, 1, 2])),
    "open full hit": lambda w: w.keep.append(w.cache.open(PROMPT)),
    "open partial hit": lambda w: w.keep.append(w.cache.open([*PROMPT[:6], 1, 2])),
    "open with everything": lambda w: w.keep.append(
        w.cache.open(
            range(300, 330),
            salt=b"salt",
            adapter="adapter",
            extra_keys=[(1, 3, b"one"), (5, 20, b"two")],
            request_id="r",
            allocate_upto=9,
        )
    ),
    "allocate_for_tokens": lambda w: _opened_late(w),
    "allocate_sequence": lambda w: w.cache.allocate_sequence(9),
    "extend": lambda w: w.cache.extend(w.seq.seq_id, 9),
    "extend far": lambda w: w.cache.extend(w.seq.seq_id, 40),
    "fork": lambda w: w.keep.append(w.parent.fork()),
    "fork_sequence": lambda w: w.cache.fork_sequence(w.parent.seq_id),
    "append": lambda w: w.seq.append(0, K, V),
    "append copies": lambda w: w.child.append(1, K, V),
    "append_kv": lambda w: w.child.append_kv(0, K, V, 5),
    "append_token": lambda w: w.seq.append_token(5),
    "append_tokens": lambda w: w.seq.append_tokens(range(500)),
    "commit": lambda w: w.seq.commit(1),
    "prepare": lambda w: w.child.prepare(2),
    "prepare batch": lambda w: w.cache.prepare(w.seqs, [5, 6, 7]),
    "store": lambda w: w.cache.store(0, K[:1], V[:1], w.mapping),
    "store raw": lambda w: w.cache.store(0, K[:1], V[:1], w.mapping.slots),
    "truncate": lambda w: w.child.truncate(3),
    "update_tokens": lambda w: w.cache.update_tokens(w.child.seq_id, 3),
    "free": lambda w: w.child.free(),
    "writable_block_at": lambda w: w.cache.writable_block_at(w.child.seq_id, 5),
    "defragment": lambda w: w.cache.defragment(),
    "compact_sequence": lambda w: w.cache.compact_sequence(w.seq),
    "reset_prefix_cache": lambda w: w.cache.reset_prefix_cache(),
    "probe": lambda w: w.cache.probe([*PROMPT, 1], extra_keys=[(0, 3, b"x")]),
    "blocks_needed": lambda w: w.cache.blocks_needed([*PROMPT, 1]),
    "seq.blocks_needed": lambda w: w.child.blocks_needed(9),
    "gather": lambda w: w.seq.gather(0),
    "views": lambda w: w.keep.append([v.k for v in w.seq.views(0)]),
    "packed_views": lambda w: w.keep.append(w.seq.packed_views(1)),
    "block_table": lambda w: w.seq.block_table,
    "slot_mapping": lambda w: w.seq.slot_mapping(0, 7),
    "block_tables": lambda w: w.cache.block_tables(w.seqs),
    "page_table": lambda w: w.cache.page_table(w.seqs),
    "fragmentation": lambda w: w.cache.fragmentation(),
    "check": lambda w: w.cache.check(),
    "pool.allocate": lambda w: w.cache.pool.free(w.cache.pool.allocate(5)),
    "pool.touch": lambda w: w.cache.pool.free([w.cache.pool.touch(T := [0]) or T[0]]),
}
WITHOUT_BYTES = {"append", "append copies", "append_kv", "store", "store raw", "gather", "views"}
ID_OPERATIONS = [n for n in OPERATIONS if n not in WITHOUT_BYTES and n != "packed_views"]


def _opened_late(world: World) -> None:
    """allocate_for_tokens on a handle made before; the handle itself is not the operation."""
    world.keep[0].allocate_for_tokens([*PROMPT[:10], 7, 8, 9])


def prepared(name: str, storage: Any) -> World:
    world = World(storage)
    if name == "allocate_for_tokens":
        world.keep.append(world.cache.open())
    if name == "pool.touch":
        world.cache.pool.touch([int(world.seq.block_table[0])])
        world.cache.pool.free([int(world.seq.block_table[0])])
    return world


def fail_each(name: str, storage: Any) -> int:
    """Run one operation with each of its allocations failing; how many it has."""
    call = OPERATIONS[name]
    if name == "pool.touch":
        def call(w):  # noqa: E306
            held = [int(w.seq.block_table[0])]
            w.cache.pool.touch(held)
            w.cache.pool.free(held)
    for n in range(200):
        world = prepared(name, storage)
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


class Broken(RuntimeError):
    """What an injected mover raises."""


COPIERS: dict[str, Operation] = {
    name: OPERATIONS[name]
    for name in (
        "open full hit",
        "open partial hit",
        "append copies",
        "append_kv",
        "prepare",
        "prepare batch",
        "writable_block_at",
    )
}


@pytest.mark.parametrize("name", list(COPIERS))
def test_a_copy_that_fails_changes_nothing(name, monkeypatch):
    # TRAP 12
    # SPEC F23 F28
    from pagedcache.storage import CpuStorage

    world = World()
    before = world.shot(flows=False)

    def broken(*_: Any) -> None:
        raise Broken

    with monkeypatch.context() as patch:
        patch.setattr(CpuStorage, "copy_blocks", broken)
        with pytest.raises(Broken):
            COPIERS[name](world)
    world.keep.clear()
    gc.collect()
    assert world.shot(flows=False) == before
    world.cache.check()
    COPIERS[name](world)
    world.done()


def test_a_move_that_fails_changes_nothing(monkeypatch):
    # SPEC F19 F23
    from pagedcache.storage import CpuStorage

    world = World()
    before = world.shot()

    def broken(*_: Any) -> None:
        raise Broken

    for call in (
        lambda: world.cache.defragment(),
        lambda: world.cache.compact_sequence(world.child),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(CpuStorage, "move_blocks", broken)
            try:
                call()
                assert world.shot() == before  # nothing was to be moved
            except Broken:
                pass
        assert world.shot() == before
        world.cache.check()
    assert world.cache.defragment() > 0
    assert_holds(world.cache, world.seq, range(41, 48))
    assert_holds(world.cache, world.child, range(61, 67))
    world.done()


def test_a_store_that_fails_advances_nothing(monkeypatch):
    # SPEC F24
    from pagedcache.storage import CpuStorage

    world = World()
    k, v = rows(world.cache.spec, 0, [91])

    def broken(*_: Any) -> None:
        raise Broken

    with monkeypatch.context() as patch:
        patch.setattr(CpuStorage, "store", broken)
        with pytest.raises(Broken):
            world.child.append(0, k, v)
        with pytest.raises(Broken):
            world.cache.store(0, k, v, world.mapping)
    assert world.child.written(0) == world.child.seq_len == 6
    assert world.cache.stats().pinned == 0
    world.cache.check()
    assert_holds(world.cache, world.child, range(61, 67))
    assert_holds(world.cache, world.parent, range(61, 67))
    world.done()
