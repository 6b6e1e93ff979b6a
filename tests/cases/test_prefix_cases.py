"""Cases C13-C15, C20, C21, C28, C29 and C64: what hits and what does not."""

from __future__ import annotations

import pytest
from cachekit import (
    assert_holds,
    cached_prompt,
    empty,
    fill,
    make_cache,
    whole,
    write,
)

import pagedcache as pc

B = 4
P = list(range(10, 22))
"""A prompt of three full blocks."""


def test_an_evicted_prompt_is_not_found():
    # CASE C13
    # SPEC F14 F35
    cache = make_cache(3, B=B)
    cached_prompt(cache, P)
    assert cache.probe([*P, 1]) == 12
    q = list(range(50, 62))
    with cache.open(q) as seq:
        assert seq.num_cached_tokens == 0
        assert cache.probe([*P, 1]) == 0
        fill(cache, seq, range(101, 113))
        assert cache.probe([*P, 1]) == 0
        whole(cache)
    assert cache.probe([*P, 1]) == 0
    with cache.open(P) as seq:
        assert seq.num_cached_tokens == 0
    empty(cache)


def test_a_prompt_aborted_before_its_bytes_is_not_found():
    # CASE C14
    # SPEC F25
    cache = make_cache(8, B=B)
    with cache.open(P):
        assert cache.probe([*P, 1]) == 0
    assert cache.probe([*P, 1]) == 0
    with cache.open(P) as seq:
        assert seq.num_cached_tokens == 0
        write(seq, cache.spec, range(1, 13))  # written, never committed
        assert cache.probe([*P, 1]) == 0
    with cache.open(P) as seq:
        assert seq.num_cached_tokens == 0
    empty(cache)


@pytest.mark.parametrize("first_out", [0, 1])
@pytest.mark.parametrize("second_commits_first", [False, True])
def test_two_identical_prompts_in_flight(first_out, second_commits_first):
    # CASE C15
    # SPEC F35
    cache = make_cache(16, B=B, layers=2)
    pair = [cache.open(P), cache.open(P)]
    assert [s.num_cached_tokens for s in pair] == [0, 0]
    marks = [list(range(1, 13)), list(range(101, 113))]
    for i in (1, 0) if second_commits_first else (0, 1):
        fill(cache, pair[i], marks[i])
        whole(cache)
    for seq, m in zip(pair, marks, strict=True):
        assert_holds(cache, seq, m)
    tables = [s.block_table.tolist() for s in pair]
    assert not set(tables[0]) & set(tables[1])
    third = cache.open([*P, 1])
    assert third.num_cached_tokens == 12
    shared = third.block_table.tolist()[:3]
    assert shared in tables  # one canonical copy, whole
    assert_holds(cache, third, marks[tables.index(shared)])
    third.free()
    pair[first_out].free()
    whole(cache)
    left = pair[1 - first_out]
    assert_holds(cache, left, marks[1 - first_out])
    with cache.open([*P, 1]) as again:
        assert again.num_cached_tokens == 12
        ids = again.block_table.tolist()[:3]
        assert ids in tables
        assert_holds(cache, again, marks[tables.index(ids)])
    left.free()
    empty(cache)
    with cache.open([*P, 1]) as again:
        assert again.num_cached_tokens == 12
        ids = again.block_table.tolist()[:3]
        assert_holds(cache, again, marks[tables.index(ids)])
    empty(cache)


def test_a_prompt_cached_in_full_leaves_one_token_to_compute():
    # CASE C20
    # SPEC F22
    cache = make_cache(16, B=B, layers=2)
    ids, marks = cached_prompt(cache, P)
    before = cache.pool.num_free_blocks
    assert cache.blocks_needed(P) == 1
    seq = cache.open(P)
    assert seq.num_cached_tokens == 11 and seq.seq_len == 11
    table = seq.block_table.tolist()
    assert table[:2] == ids[:2] and table[2] != ids[2] and len(table) == 3
    assert [cache.pool.ref_count(b) for b in table] == [1, 1, 1]
    assert cache.pool.is_cached(ids[2]) and cache.pool.ref_count(ids[2]) == 0
    assert not cache.pool.is_cached(table[2])
    assert before - cache.pool.num_free_blocks == 3  # two revived hits, one fresh
    assert_holds(cache, seq, marks[:11])
    whole(cache)
    # the recomputed token: no allocation, and the cached block keeps its own
    free = cache.pool.num_free_blocks
    fill(cache, seq, [777])
    assert cache.pool.num_free_blocks == free
    assert_holds(cache, seq, [*marks[:11], 777])
    with cache.open([*P, 99]) as longer:
        assert longer.num_cached_tokens == 12
        assert longer.block_table.tolist()[:2] == ids[:2]
        third = longer.block_table.tolist()[2]
        assert third in (ids[2], table[2])
        assert_holds(cache, longer, marks if third == ids[2] else [*marks[:11], 777])
    whole(cache)
    seq.free()
    with cache.open([*P, 99]) as longer:
        assert longer.num_cached_tokens == 12
    empty(cache)
    assert cache.probe([*P, 99]) == 12


@pytest.mark.parametrize("partial", [0, 1, None])
def test_a_hit_is_never_the_whole_prompt(partial):
    # CASE C21
    # SPEC F22
    for length in (1, B, B + 1, 2 * B, 2 * B + 1, 3 * B - 1, 3 * B):
        cache = make_cache(16, B=B, partial_block_reuse=partial)
        _, marks = cached_prompt(cache, P)
        want = length - 1
        if partial == 0 and length % B:
            want = (length - 1) // B * B
        for _ in range(2):
            assert cache.probe(P[:length]) == want, length
            with cache.open(P[:length]) as seq:
                assert seq.num_cached_tokens == want
                assert seq.num_tokens == length
                assert_holds(cache, seq, marks[:want])
                whole(cache)
        empty(cache)


@pytest.mark.parametrize("fmt", ["float32", "q8", "q4", "q4_0"])
def test_prompts_that_part_at_a_block_edge(fmt):
    # CASE C28
    # SPEC F40
    for partial, want in ((0, (0, B, B)), (1, (B - 1, B, B + 1))):
        cache = make_cache(32, B=B, fmt=fmt, layers=2, partial_block_reuse=partial)
        _, marks = cached_prompt(cache, P)
        for differs_at, hit in zip((B - 1, B, B + 1), want, strict=True):
            other = list(P)
            other[differs_at] = 999
            assert cache.probe(other) == hit
            copies = cache.stats().partial_copies
            with cache.open(other) as seq:
                assert seq.num_cached_tokens == hit
                assert_holds(cache, seq, marks[:hit])
                assert cache.stats().partial_copies - copies == bool(hit % B)
                fill(cache, seq, range(100, 112 - hit))
                assert_holds(cache, seq, [*marks[:hit], *range(100, 112 - hit)])
                whole(cache)
            cache.reset_prefix_cache()
            _, marks = cached_prompt(cache, P)
        # the first prompt's own bytes were never touched
        with cache.open([*P, 1]) as seq:
            assert_holds(cache, seq, marks)
        empty(cache)


def test_probe_changes_neither_counts_nor_recency():
    # CASE C29
    # SPEC F21
    older, newer = list(range(10, 18)), list(range(30, 38))
    cache = make_cache(4, B=B)
    cached_prompt(cache, older)
    cached_prompt(cache, newer)
    before = cache.stats()
    refs = [cache.pool.ref_count(b) for b in range(4)]
    for _ in range(10):
        assert cache.probe([*older, 1]) == 8
    after = cache.stats()
    assert {**after.to_dict(), "steps": 0} == {**before.to_dict(), "steps": 0}
    assert [cache.pool.ref_count(b) for b in range(4)] == refs
    with cache.open(range(50, 58)):  # needs two blocks: the older prompt's
        assert cache.probe([*older, 1]) == 0
        assert cache.probe([*newer, 1]) == 8
    empty(cache)


@pytest.mark.parametrize("partial", [0, 1, None])
def test_a_hit_never_needs_more_blocks_than_a_miss(partial):
    # CASE C64
    # SPEC F22
    cache = make_cache(3, B=B, partial_block_reuse=partial)
    _, marks = cached_prompt(cache, P)
    for round_number in range(5):
        assert cache.blocks_needed(P) <= 3
        with cache.open(P) as seq:
            hit = seq.num_cached_tokens
            assert hit <= 11 and seq.num_blocks == 3
            assert_holds(cache, seq, marks[:hit])
            whole(cache)
            new = list(range(1000 * round_number + 1, 1000 * round_number + 13 - hit))
            fill(cache, seq, new)
            marks = [*marks[:hit], *new]
            assert_holds(cache, seq, marks)
        empty(cache)
    # and behind a longer prompt that only just fits
    cache = make_cache(4, B=B, partial_block_reuse=partial)
    _, marks = cached_prompt(cache, [*P, 1, 2, 3, 4])
    with cache.open([*P, 1, 2, 3, 4]) as seq:
        assert_holds(cache, seq, marks[: seq.num_cached_tokens])
        with pytest.raises(pc.OutOfBlocksError):
            cache.open([5])
    empty(cache)
