"""Cases C1-C7 and C10-C12: the pool and its reference counts."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from cachekit import (
    assert_holds,
    by_profile,
    cached_prompt,
    empty,
    fill,
    make_cache,
    refused,
    whole,
    write,
)

import pagedcache as pc
from pagedcache.errors import (
    BlockError,
    FreedHandleError,
    InvalidArgumentError,
    OutOfBlocksError,
    PagedCacheError,
    SequenceNotFoundError,
)


def pool_state(pool: pc.BlockPool) -> tuple:
    return (
        pool.num_free_blocks,
        pool.num_used_blocks,
        pool.num_cached_blocks,
        [pool.ref_count(b) for b in range(pool.num_blocks)],
    )


def test_an_id_given_twice_to_one_free_is_refused():
    # CASE C1
    # SPEC F13
    pool = pc.BlockPool(8, 4)
    b = int(pool.allocate(1)[0])
    before = pool_state(pool)
    with pytest.raises(BlockError) as caught:
        pool.free([b, b])
    assert caught.value.block_id == b
    assert pool_state(pool) == before
    pool.check()
    assert pool.ref_count(b) == 1
    pool.free([b])
    pool.check()
    ids = [int(pool.allocate(1)[0]) for _ in range(8)]
    assert sorted(ids) == list(range(8))
    pool.check()


def test_two_references_may_go_in_one_free():
    # SPEC F13
    pool = pc.BlockPool(8, 4)
    b = int(pool.allocate(1)[0])
    pool.touch([b])
    pool.free([b, b])
    assert pool.ref_count(b) == 0 and pool.num_free_blocks == 8
    pool.check()


@pytest.mark.parametrize("bad", [[-1], [8], [5], [0, 5], [0, 8], [2**31 - 1], [2**31], [2**63]])
def test_freeing_what_nobody_holds_is_refused(bad):
    # CASE C2
    # SPEC F13
    pool = pc.BlockPool(8, 4)
    held = [int(b) for b in pool.allocate(2)]
    free_id = next(b for b in range(8) if b not in held)
    ids = [held[0] if b == 0 else free_id if b == 5 else b for b in bad]
    before = pool_state(pool)
    with pytest.raises(PagedCacheError):
        pool.free(ids)
    assert pool_state(pool) == before
    pool.check()


def test_freeing_twice_in_two_calls_is_refused():
    # CASE C2
    # SPEC F13
    pool = pc.BlockPool(8, 4)
    ids = pool.allocate(3)
    pool.free(ids)
    before = pool_state(pool)
    for again in (ids, ids[:1], ids[::-1]):
        with pytest.raises(BlockError):
            pool.free(again)
        assert pool_state(pool) == before
        pool.check()


def test_counts_to_allocate_at_the_edges():
    # CASE C3
    # SPEC F12
    pool = pc.BlockPool(8, 4)
    held = pool.allocate(2)
    before = pool_state(pool)
    with pytest.raises(InvalidArgumentError):
        pool.allocate(-1)
    none = pool.allocate(0)
    assert none.shape == (0,) and none.dtype == np.int32
    for n in (7, 9, 2**40):
        with pytest.raises(OutOfBlocksError) as caught:
            pool.allocate(n)
        e = caught.value
        assert (e.needed, e.available, e.total) == (n, 6, 8)
    for n in (2**63, 2**64, -(2**63)):
        with pytest.raises(PagedCacheError):
            pool.allocate(n)
    assert pool_state(pool) == before
    pool.check()
    rest = pool.allocate(6)
    assert sorted([*held.tolist(), *rest.tolist()]) == list(range(8))
    pool.check()


@pytest.mark.parametrize("parent_first", [True, False])
def test_four_forks_freed_in_every_order(parent_first):
    # CASE C4
    # SPEC F28 F29
    for order in itertools.permutations(range(4)):
        cache = make_cache(16, B=4)
        parent = cache.open(range(100, 106))
        fill(cache, parent, range(1, 7))
        children = [parent.fork() for _ in range(4)]
        for i, child in enumerate(children):
            child.append_tokens([200 + i, 300 + i, 400 + i])
            fill(cache, child, [10 * i + 20, 10 * i + 21, 10 * i + 22])
            whole(cache)
        for i, child in enumerate(children):
            base = 10 * i + 20
            assert_holds(cache, child, [1, 2, 3, 4, 5, 6, base, base + 1, base + 2])
        assert_holds(cache, parent, [1, 2, 3, 4, 5, 6])
        if parent_first:
            parent.free()
            whole(cache)
        for i in order:
            children[i].free()
            whole(cache)
        parent.free()
        empty(cache)
        stats = cache.stats()
        assert stats.blocks_allocated == stats.blocks_freed
        # every block can be had again, each once
        ids = cache.pool.allocate(16)
        assert sorted(ids.tolist()) == list(range(16))


def test_hits_are_reused_before_older_free_blocks_are_taken():
    # CASE C5
    # SPEC F14 F22
    prompt = list(range(10, 18))
    cache = make_cache(4, B=4)
    other = cache.open(range(900, 908))  # takes two blocks, commits nothing
    ids, marks = cached_prompt(cache, prompt)
    older = other.block_table.tolist()
    other.free()
    whole(cache)
    # the prompt's blocks went first: make them the older ones too
    cache2 = make_cache(4, B=4)
    ids2, marks2 = cached_prompt(cache2, prompt)
    for c, hit_ids, m in ((cache, ids, marks), (cache2, ids2, marks2)):
        seq = c.open([*prompt, *range(50, 58)])
        assert seq.num_cached_tokens == 8
        table = seq.block_table.tolist()
        assert table[:2] == hit_ids
        assert sorted(table) == [0, 1, 2, 3]
        assert_holds(c, seq, m)
        whole(c)
    assert sorted(older) == sorted(set(range(4)) - set(ids))


def test_a_refused_open_leaves_its_hits_matchable():
    # CASE C5
    # SPEC F12 F23
    prompt = list(range(10, 18))
    cache = make_cache(3, B=4)
    ids, marks = cached_prompt(cache, prompt)
    longer = [*prompt, *range(50, 58)]
    e = refused(
        cache,
        lambda: cache.open(longer),
        OutOfBlocksError,
        prompts=[[*prompt, 1], longer],
    )
    # it can never fit, so it is counted without its hits (CASE C10)
    assert (e.needed, e.available, e.total, e.fits_never) == (4, 3, 3, True)
    assert cache.probe([*prompt, 1]) == 8
    with cache.open([*prompt, 1]) as seq:
        assert seq.num_cached_tokens == 8
        assert seq.block_table.tolist()[:2] == ids
        assert_holds(cache, seq, marks)
    empty(cache)


def test_a_refused_open_leaves_counts_and_eviction_order():
    # CASE C6
    # SPEC F23 F14
    first, second = list(range(10, 18)), list(range(30, 38))
    for probe_older in (True, False):
        cache = make_cache(6, B=4)
        cached_prompt(cache, first)
        cached_prompt(cache, second, 20)
        holder = cache.open(range(70, 78))
        touched = first if probe_older else second
        refused(
            cache,
            lambda c=cache, t=touched: c.open([*t, *range(80, 97)]),
            OutOfBlocksError,
            holder,
            prompts=[[*first, 1], [*second, 1]],
        )
        # two blocks more are needed: the prompt freed first loses its tail and its head
        filler = cache.open(range(500, 508))
        assert cache.probe([*first, 1]) == 0
        assert cache.probe([*second, 1]) == 8
        filler.free()
        holder.free()
        empty(cache)


def test_eviction_does_the_same_work_whatever_is_cached():
    # CASE C7
    # SPEC F12 F14
    n, take = by_profile(20_000, 100_000, 1_000_000), 1_000

    def steps_per_block(cache: pc.PagedKVCache) -> float:
        before = cache.pool.steps
        ids = cache.pool.allocate(take)
        assert len(ids) == take
        return (cache.pool.steps - before) / take

    plain = make_cache(n, B=1, storage=None)
    ordinary = steps_per_block(plain)
    full = make_cache(n, B=1, storage=None)
    seq = full.open(np.arange(n, dtype=np.uint32))
    seq.commit(n)
    seq.free()
    assert full.pool.num_cached_blocks == n
    evicting = steps_per_block(full)
    assert full.stats().evicted_blocks == take
    assert ordinary > 0
    assert evicting <= 2 * ordinary
    full.check()


def test_a_request_larger_than_the_pool_is_told_never():
    # CASE C10
    # SPEC F12
    cache = make_cache(8, B=4)
    with cache.open(range(8)):
        e = refused(cache, lambda: cache.open(range(100, 136)), OutOfBlocksError)
        assert (e.needed, e.available, e.total) == (9, 6, 8)
        assert e.fits_never and "never" in str(e)
        e = refused(cache, lambda: cache.open(range(100, 132)), OutOfBlocksError)
        assert (e.needed, e.available, e.total) == (8, 6, 8)
        assert not e.fits_never and "never" not in str(e)
        with pytest.raises(MemoryError):
            cache.open(range(100, 136))
    pool = pc.BlockPool(8, 4)
    with pytest.raises(OutOfBlocksError) as caught:
        pool.allocate(9)
    assert caught.value.fits_never


def test_blocks_needed_is_what_is_then_taken():
    # CASE C11
    # SPEC F21 F22 F28a
    rng = random.Random(11)
    kinds: set[str] = set()
    for round_number in range(by_profile(150, 600)):
        B = rng.randint(1, 4)
        cache = make_cache(64, B=B, partial_block_reuse=min(B, rng.choice([0, 1, 2])))
        live: list[pc.Sequence] = []
        for step in range(8):
            n = rng.randint(0, 4 * B)
            tokens = [rng.randint(0, 1) for _ in range(n)]
            need = cache.blocks_needed(tokens)
            seq = cache.open(tokens)
            shared = seq.num_cached_tokens // B
            assert need == seq.num_blocks - shared, (round_number, step)
            kinds.add("hit" if shared else "cold")
            live.append(seq)
            if seq.num_cached_tokens < n:
                fill(cache, seq, range(1, 1 + n - seq.num_cached_tokens))
            if rng.random() < 0.4:
                live.append(rng.choice(live).fork())
            if rng.random() < 0.3:
                cut = rng.choice(live)
                cut.truncate(rng.randint(0, cut.num_tokens))
            grown = rng.choice(live)
            more = rng.randint(0, 2 * B + 1)
            before = set(grown.block_table.tolist())
            length = grown.num_blocks
            need = grown.blocks_needed(more)
            slots = grown.prepare(more)
            table = grown.block_table.tolist()
            assert len(set(table) - before) == need
            assert len(slots) == more
            if need > len(table) - length:
                kinds.add("copy")
            whole(cache)
            # tokens were opened for but may not be written: give the sequence back
            if rng.random() < 0.3:
                gone = live.pop(rng.randrange(len(live)))
                gone.free()
        for seq in live:
            seq.free()
        empty(cache)
    assert kinds == {"hit", "cold", "copy"}


def test_a_sequence_with_no_blocks():
    # CASE C12
    # SPEC F29 F31
    cache = make_cache(4, B=4, layers=2)
    seq = cache.open()
    assert seq.block_table.shape == (0,) and seq.block_table.dtype == np.int32
    assert (seq.seq_len, seq.num_tokens, seq.num_written, seq.num_blocks) == (0, 0, 0, 0)
    k, v = seq.gather(1)
    assert k.shape == v.shape == (0, 1, 4)
    assert list(seq.views(0)) == []
    assert seq.slot_mapping(0, 0).shape == (0,)
    twin = seq.fork()
    seq.truncate(0)
    seq.commit(0)
    whole(cache)
    for s in (seq, twin):
        s.free()
    empty(cache)


def test_an_unknown_id_and_a_freed_handle():
    # CASE C12
    # SPEC F21 F29
    cache = make_cache(4, B=4)
    for unknown in (0, 7, 2**40, -1):
        if unknown > 0:
            cache.free_sequence(unknown)  # nothing happens
        with pytest.raises((SequenceNotFoundError, InvalidArgumentError)):
            cache.sequence_tokens(unknown)
    whole(cache)
    seq = cache.open(range(6))
    write(seq, cache.spec, range(1, 7))
    seq_id = seq.seq_id
    seq.free()
    seq.free()
    empty(cache)
    uses = [
        lambda: seq.block_table,
        lambda: seq.seq_len,
        lambda: seq.num_tokens,
        lambda: seq.append(0, np.zeros((1, 1, 4), np.float32), np.zeros((1, 1, 4), np.float32)),
        lambda: seq.commit(1),
        lambda: seq.truncate(0),
        lambda: seq.fork(),
        lambda: seq.gather(0),
        lambda: seq.views(0),
        lambda: seq.prepare(1),
        lambda: seq.append_token(1),
        lambda: seq.slot_mapping(0, 1),
        lambda: cache.block_tables([seq]),
        lambda: cache.page_table([seq]),
        lambda: cache.prepare([seq], [1]),
    ]
    for use in uses:
        with pytest.raises(FreedHandleError):
            use()
        empty(cache)
    for call in (
        lambda: cache.sequence(seq_id),
        lambda: cache.extend(seq_id, 1),
        lambda: cache.fork_sequence(seq_id),
        lambda: cache.update_tokens(seq_id, 1),
        lambda: cache.block_at(seq_id, 0),
        lambda: cache.writable_block_at(seq_id, 0),
    ):
        with pytest.raises(SequenceNotFoundError) as caught:
            call()
        assert caught.value.seq_id == seq_id
        empty(cache)
    cache.free_sequence(seq_id)  # an unknown id: nothing happens
    empty(cache)
    # the freed ids are all there once
    assert sorted(cache.pool.allocate(4).tolist()) == [0, 1, 2, 3]
