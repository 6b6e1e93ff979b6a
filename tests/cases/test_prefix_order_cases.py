"""Cases C22-C27: order of eviction, statistics, drafts and reset."""

from __future__ import annotations

import itertools

import numpy as np
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

from pagedcache.bookkeeping import Ledger

B = 4
P = list(range(10, 22))
"""A prompt of three full blocks."""


def test_the_tail_of_a_chain_goes_before_its_head():
    # CASE C22
    # SPEC F14
    cache = make_cache(3, B=B)
    ids, marks = cached_prompt(cache, P)
    short = cache.open([900])
    assert short.block_table.tolist() == [ids[2]]
    assert cache.probe([*P, 1]) == 8
    short.free()
    with cache.open([*P[:8], 1]) as seq:
        assert seq.num_cached_tokens == 8
        assert seq.block_table.tolist()[:2] == ids[:2]
        assert_holds(cache, seq, marks[:8])
    empty(cache)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("held", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])
def test_the_tail_goes_first_whatever_views_held_longest(held, order):
    # CASE C22
    # SPEC F14 F30
    cache = make_cache(4, B=B)
    seq = cache.open(P)
    fill(cache, seq, range(1, 13))
    views = {i: seq.views(0, B * i, B * i + B) for i in held}
    seq.free()
    for i in order:
        if i in views:
            views[i].release()
            whole(cache)
    takers = [cache.open([900])]  # the one block that holds nothing
    for left in (8, 4, 0):
        takers.append(cache.open([900 + left]))
        whole(cache)
        assert cache.probe([*P, 1]) == left
    for taker in takers:
        taker.free()
    empty(cache)


def test_blocks_that_can_never_hit_are_reused_first():
    # CASE C23
    # SPEC F14
    cache = make_cache(10, B=16)
    prompt = list(range(64))
    ids, marks = cached_prompt(cache, prompt)
    for i in range(20):
        with cache.open(range(1000 + 5 * i, 1005 + 5 * i)) as seq:
            fill(cache, seq, range(100, 105))
            assert seq.block_table[0] not in ids
        whole(cache)
    assert cache.stats().evicted_blocks == 0
    with cache.open([*prompt, 1]) as seq:
        assert seq.num_cached_tokens == 64
        assert seq.block_table.tolist()[:4] == ids
        assert_holds(cache, seq, marks)
    empty(cache)


def test_a_waiting_request_is_counted_once():
    # CASE C24
    # SPEC F16
    cache = make_cache(16, B=B)
    cached_prompt(cache, P)
    before = cache.stats()
    for _ in range(5):
        assert cache.probe([*P, 1]) == 12
        assert cache.blocks_needed([*P, 1]) == 1
    assert cache.stats().to_dict() == {**before.to_dict(), "steps": cache.stats().steps}
    with cache.open([*P, 1]) as seq:
        assert seq.num_cached_tokens == 12
    after = cache.stats()
    assert after.prefix_queries - before.prefix_queries == 1
    assert after.prefix_hits - before.prefix_hits == 1
    assert after.query_tokens - before.query_tokens == 13
    assert after.hit_tokens - before.hit_tokens == 12
    assert after.miss_tokens - before.miss_tokens == 1
    assert after.hit_blocks - before.hit_blocks == 3


def test_resumed_requests_do_not_lift_the_hit_rate():
    # CASE C25
    # SPEC F16
    import random

    rng = random.Random(25)
    cache = make_cache(256, B=B)
    for _ in range(20):
        tokens = [rng.randrange(2**32) for _ in range(rng.randint(9, 30))]
        with cache.open(tokens) as seq:
            assert seq.num_cached_tokens == 0
            fill(cache, seq, range(1, len(tokens) + 1))
        if rng.random() < 0.5:  # preempted: comes back for the same tokens and more
            with cache.open([*tokens, 1], resumed=True) as seq:
                assert seq.num_cached_tokens >= len(tokens) // B * B
    stats = cache.stats()
    assert stats.prefix_queries == 20
    assert stats.resumed_queries > 3
    assert stats.hit_tokens == 0 and stats.hit_rate == 0.0
    assert stats.resumed_hit_tokens >= 8 * stats.resumed_queries
    empty(cache)


def test_only_accepted_draft_tokens_are_cached():
    # CASE C26
    # SPEC F25 F26 F27
    cache = make_cache(16, B=16)
    accepted = list(range(100, 130))
    seq = cache.open(accepted)
    fill(cache, seq, range(1, 31))
    drafts = [500, 501, 502, 503]
    seq.append_tokens(drafts)
    write(seq, cache.spec, [31, 32, 33, 34])
    assert cache.probe([*accepted, *drafts, 9]) == 16
    seq.commit(2)
    assert cache.probe([*accepted, *drafts, 9]) == 32  # block edge: two accepted drafts are in
    seq.truncate(32)
    assert seq.num_tokens == seq.seq_len == 32
    whole(cache)
    # the refused drafts' places are written again, with other tokens
    seq.append_tokens(range(600, 616))
    fill(cache, seq, range(41, 57))
    assert cache.probe([*accepted, *drafts, *range(600, 620)]) == 32
    assert cache.probe([*accepted, 500, 501, *range(600, 616), 9]) == 48
    assert_holds(cache, seq, [*range(1, 33), *range(41, 57)])
    seq.free()
    with cache.open([*accepted, 500, 501, *range(600, 616), 9]) as again:
        assert again.num_cached_tokens == 48
        assert_holds(cache, again, [*range(1, 33), *range(41, 57)])
    empty(cache)


def test_drafts_refused_before_the_block_edge():
    # CASE C26
    # SPEC F25 F27
    cache = make_cache(16, B=16, partial_block_reuse=0)
    accepted = list(range(100, 130))
    seq = cache.open(accepted)
    fill(cache, seq, range(1, 31))
    seq.append_tokens([500, 501, 502, 503])
    write(seq, cache.spec, [31, 32, 33, 34])
    seq.commit(1)
    seq.truncate(31)
    seq.append_tokens([700, 701])
    fill(cache, seq, [61, 62])
    assert cache.probe([*accepted, 500, 501, 502, 503]) == 16
    assert cache.probe([*accepted, 500, 700, 701]) == 32
    assert_holds(cache, seq, [*range(1, 32), 61, 62])
    seq.free()
    empty(cache)


def test_reset_while_a_sequence_holds_cached_blocks():
    # CASE C27
    # SPEC F41
    cache = make_cache(8, B=B, layers=2)
    seq = cache.open(P)
    fill(cache, seq, range(1, 13))
    assert cache.probe([*P, 1]) == 12
    cache.reset_prefix_cache()
    whole(cache)
    assert cache.probe([*P, 1]) == 0
    assert cache.pool.num_cached_blocks == 0
    assert_holds(cache, seq, range(1, 13))
    # going on does not bring back what was committed before
    seq.append_tokens(range(30, 34))
    fill(cache, seq, range(13, 17))
    assert cache.probe([*P, *range(30, 34), 1]) == 0
    assert_holds(cache, seq, range(1, 17))
    seq.free()
    empty(cache)
    assert cache.probe([*P, 1]) == 0
    cached_prompt(cache, P, 50)
    with cache.open([*P, 1]) as again:
        assert again.num_cached_tokens == 12
        assert_holds(cache, again, range(50, 62))
    empty(cache)


@pytest.mark.parametrize("computed", range(1, 2 * B))
def test_what_was_committed_before_a_reset_is_never_cached_again(computed):
    # CASE C27
    # SPEC F41
    cache = make_cache(16, B=B, partial_block_reuse=1)
    seq = cache.open(P)
    write(seq, cache.spec, range(1, 13))
    seq.commit(computed)
    cache.reset_prefix_cache()
    twin = seq.fork()
    for s in (seq, twin):
        s.commit(12 - computed)
        assert cache.num_cached_blocks == 0
        assert cache.probe([*P, 1]) == 0
        assert_holds(cache, s, range(1, 13))
        whole(cache)
    twin.truncate(0)  # starting over, its tokens are new
    twin.append_tokens(P)
    fill(cache, twin, range(51, 63))
    with cache.open([*P, 1]) as other:
        assert other.num_cached_tokens == 12
        assert_holds(cache, other, range(51, 63))
    assert_holds(cache, seq, range(1, 13))
    for s in (seq, twin):
        s.free()
    empty(cache)


def test_what_nothing_can_reach_any_more_is_blank():
    # CASE C23
    # SPEC F14 F20: views let the head go first and the middle last: the tail is of no use then
    ledger = Ledger(3, 4)
    seq = ledger.open(np.arange(12, dtype=np.uint32))
    ledger.commit(seq, 12)
    middle, tail = ledger.pin_range(seq, 4, 8), ledger.pin_range(seq, 8, 12)
    ledger.free(seq)
    tail.release()
    ledger.check()
    assert ledger.pool.stats()["blocks_idle"] == 2      # head and tail; the middle is pinned
    taken = ledger.pool.allocate(1)
    assert taken.tolist() == [0]                        # the head, idle longest
    middle.release()
    ledger.check()
    assert ledger.pool.stats()["blocks_idle"] == 0
    assert ledger.pool.num_cached_blocks == 0
    assert ledger.pool.stats()["evicted_blocks"] == 1
