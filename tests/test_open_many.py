"""``cache.open_many``: many prompts in one step, all or nothing, or as many as fit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from cachekit import assert_holds, by_profile, cached_prompt, make_cache, snapshot, write
from ledgerkit import Kit

import pagedcache as pc

B = 4


def commit_all(cache: pc.PagedKVCache, seq: pc.Sequence) -> None:
    n = seq.num_tokens - seq.seq_len
    cache.prepare([seq], [n])
    seq.commit(n)


def keep(cache: pc.PagedKVCache, tokens: Any, **options: Any) -> None:
    """Leave a prompt cached and free."""
    with cache.open(tokens, **options) as seq:
        commit_all(cache, seq)


class Shelf:
    """Which prefixes are cached, and the blocks that prompts would take: an oracle of its own.

    Prompts never end where a cached block ends, so that no block is copied.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.cache = make_cache(24, B=B, storage=None, partial_block_reuse=0)
        self.used: list[pc.Sequence] = []
        for _ in range(self.rng.randint(0, 5)):
            seq = self.cache.open(self.prompt())
            commit_all(self.cache, seq)
            if self.rng.random() < 0.5:
                seq.free()
            else:
                self.used.append(seq)

    def prompt(self) -> list[int]:
        """Few heads, so that many are shared; another last token, so that the end never hits."""
        head = self.rng.choice([100, 200, 300])
        blocks = self.rng.randint(0, 6)
        return [*range(head, head + blocks * B), *[9] * self.rng.randint(1, B - 1)]

    def costs(self, prompts: list[list[int]]) -> list[tuple[int, set[tuple[int, ...]]]]:
        """Per prompt: blocks to take, and the free blocks that it hits (named by their prefix)."""
        held = {
            tuple(seq.tokens[:end].tolist())
            for seq in self.used
            for end in range(B, seq.seq_len + 1, B)
        }
        costs = []
        for prompt in prompts:
            hits = self.cache.probe(prompt) // B
            prefixes = {tuple(prompt[: (i + 1) * B]) for i in range(hits)}
            costs.append((-(-len(prompt) // B) - hits, prefixes - held))
        return costs

    def fitting(self, prompts: list[list[int]]) -> int:
        """How many of the first prompts fit together."""
        free, fresh, idle = self.cache.pool.num_free_blocks, 0, set[tuple[int, ...]]()
        for i, (blocks, hit) in enumerate(self.costs(prompts)):
            fresh += blocks
            idle |= hit
            if fresh > free - len(idle):
                return i
        return len(prompts)


@pytest.mark.parametrize("seed", range(by_profile(40, 400)))
@pytest.mark.parametrize("as_many_as_fit", [False, True])
def test_what_fits_together_is_opened(seed, as_many_as_fit):
    # SPEC F23 F24
    shelf = Shelf(seed)
    cache = shelf.cache
    prompts = [shelf.prompt() for _ in range(shelf.rng.randint(1, 8))]
    fits = shelf.fitting(prompts)
    costs = shelf.costs(prompts)
    hits = [cache.probe(prompt) for prompt in prompts]
    free = cache.pool.num_free_blocks
    before = snapshot(cache, *shelf.used, prompts=prompts)
    if fits < len(prompts) and not (as_many_as_fit and fits):
        with pytest.raises(pc.OutOfBlocksError) as error:
            cache.open_many(prompts, as_many_as_fit=as_many_as_fit)
        assert snapshot(cache, *shelf.used, prompts=prompts) == before
        upto = costs[: fits + 1]
        assert error.value.needed == sum(fresh for fresh, _ in upto)
        assert error.value.available == free - len(set().union(*(idle for _, idle in upto)))
        cache.check()
        return
    seqs = cache.open_many(prompts, as_many_as_fit=as_many_as_fit)
    cache.check()
    assert len(seqs) == fits
    assert [seq.tokens.tolist() for seq in seqs] == prompts[:fits]
    assert [seq.num_cached_tokens for seq in seqs] == hits[:fits]
    assert [seq.num_blocks for seq in seqs] == [-(-len(p) // B) for p in prompts[:fits]]
    idle = set().union(*(idle for _, idle in costs[:fits]))
    assert cache.pool.num_free_blocks == (
        free - sum(fresh for fresh, _ in costs[:fits]) - len(idle)
    )
    own = [seq.block_table.tolist()[hit // B :] for seq, hit in zip(seqs, hits, strict=False)]
    flat = [block for table in own for block in table]
    assert len(flat) == len(set(flat))  # blocks that are not hit are nobody else's
    for seq in [*seqs, *shelf.used]:
        seq.free()
    cache.check()
    assert cache.pool.num_used_blocks == 0


def test_what_a_later_prompt_hits_is_not_evicted_for_an_earlier_one():
    # SPEC F14 F23: 4 blank blocks, the oldest 2 cached ones are the second prompt's
    cache = make_cache(8, B=B, storage=None)
    old, new = list(range(8)), list(range(100, 108))
    keep(cache, old)
    keep(cache, new)
    seqs = cache.open_many([range(200, 220), [*old, 1]])
    assert [seq.num_cached_tokens for seq in seqs] == [0, 8]
    assert cache.pool.num_free_blocks == 0
    assert cache.probe([*new, 1]) == 0
    assert cache.probe([*old, 1]) == 8
    cache.check()


def test_prompts_of_one_call_do_not_hit_each_other():
    # SPEC F23: nothing is cached before it is computed
    cache = make_cache(8, B=B, storage=None)
    seqs = cache.open_many([range(8), range(8)])
    assert [seq.num_cached_tokens for seq in seqs] == [0, 0]
    assert set(seqs[0].block_table).isdisjoint(seqs[1].block_table)
    stats = cache.stats()
    assert (stats.prefix_queries, stats.query_tokens, stats.sequences_active) == (2, 16, 2)
    assert cache.open_many([]) == []


def test_one_value_for_all_prompts_or_one_each():
    # SPEC F24: salt, adapter and extra keys isolate
    cache = make_cache(32, B=B, storage=None)
    prompt = [*range(8), 1]
    keep(cache, prompt, salt=b"s")
    keep(cache, prompt, salt="t", adapter="a")
    keep(cache, prompt, extra_keys=[(0, 4, b"image")])
    seqs = cache.open_many([prompt] * 3, b"s", request_ids=["x", None, "z"])
    assert [seq.num_cached_tokens for seq in seqs] == [8, 8, 8]
    assert [seq.request_id for seq in seqs] == ["x", None, "z"]
    seqs = cache.open_many([prompt] * 3, ["s", "t", "t"], adapter=(None, "a", "b"))
    assert [seq.num_cached_tokens for seq in seqs] == [8, 8, 0]
    seqs = cache.open_many(
        (prompt, prompt, prompt), extra_keys=[[(0, 4, b"image")], [(0, 4, b"other")], None]
    )
    assert [seq.num_cached_tokens for seq in seqs] == [8, 0, 0]
    before = cache.stats()
    seqs = cache.open_many([prompt, prompt], b"s", resumed=[True, False], allocate_upto=[9, None])
    after = cache.stats()
    assert after.resumed_queries - before.resumed_queries == 1
    assert after.prefix_queries - before.prefix_queries == 1
    seqs = cache.open_many([range(50, 59), range(60, 69)], allocate_upto=[1, 8])
    assert [seq.num_blocks for seq in seqs] == [1, 2]
    cache.check()


def test_request_ids_are_claimed_for_those_that_come_in():
    # SPEC F22
    cache = make_cache(4, B=B, storage=None)
    first = cache.open_many([range(8), range(20, 28), range(40, 48)], request_ids=["a", "b", "c"],
                            as_many_as_fit=True)
    assert [seq.request_id for seq in first] == ["a", "b"]
    first[1].free()
    with pytest.raises(pc.InvalidArgumentError, match="is live"):
        cache.open_many([[1], [2]], request_ids=["c", "a"])
    more = cache.open_many([[1], [2]], request_ids=["c", "b"])
    assert [seq.request_id for seq in more] == ["c", "b"]
    with pytest.raises(pc.OutOfBlocksError):
        cache.open_many([range(8)], request_ids=["d"])
    cache.close()
    with pytest.raises(pc.FreedHandleError):
        cache.open_many([[1]])
    cache = make_cache(4, B=B, storage=None)
    with pytest.raises(pc.OutOfBlocksError):
        cache.open_many([range(8), range(20, 32)], request_ids=["d", "e"])
    assert len(cache.open_many([[1], [2]], request_ids=["d", "e"])) == 2


def test_heads_of_partly_matching_blocks_are_copied():
    # SPEC F27: two prompts copy from one block, one from another; bytes come along
    cache = make_cache(16, B=B, layers=2, partial_block_reuse=1)
    cached_prompt(cache, range(10, 18), 1)
    cached_prompt(cache, range(30, 38), 21)
    prompts = [[10, 11, 12, 13, 14, 15, 7, 7], [*range(10, 18)], [30, 31, 9], [77]]
    seqs = cache.open_many(prompts)
    assert [seq.num_cached_tokens for seq in seqs] == [6, 7, 2, 0]
    assert cache.stats().partial_copies == 3
    for seq, marks in zip(seqs, [range(1, 7), range(1, 8), [21, 22], []], strict=True):
        assert_holds(cache, seq, list(marks))
        write(seq, cache.spec, range(50, 50 + seq.num_tokens - seq.seq_len))
        seq.commit(seq.num_tokens - seq.seq_len)
    assert_holds(cache, seqs[1], [*range(1, 8), 50])
    cache.check()


def test_a_source_is_kept_while_it_is_copied_from():
    # SPEC F27: 6 blank blocks and 2 cached ones, of which one is copied from
    cache = make_cache(8, B=B, partial_block_reuse=1)
    cached_prompt(cache, range(10, 18), 1)
    seqs = cache.open_many([[10, 11, 12, 7], range(100, 124)])
    assert [seq.num_cached_tokens for seq in seqs] == [3, 0]
    assert_holds(cache, seqs[0], [1, 2, 3])
    assert cache.pool.num_free_blocks == 1
    cache.check()


def test_copies_are_given_up_where_blocks_are_short():
    # SPEC F23: cold, 1 + 7 blocks fit into 8; opened one by one they would, too
    for as_many_as_fit in (False, True):
        cache = make_cache(8, B=B, partial_block_reuse=1)
        cached_prompt(cache, range(10, 18), 1)
        seqs = cache.open_many([[10, 11, 12, 7], range(100, 128)], as_many_as_fit=as_many_as_fit)
        assert [seq.num_cached_tokens for seq in seqs] == [0, 0]
        assert cache.pool.num_free_blocks == 0
        cache.check()
    cache = make_cache(8, B=B, partial_block_reuse=1)
    cached_prompt(cache, range(10, 18), 1)
    seqs = cache.open_many([[10, 11, 12, 7], range(100, 129)], as_many_as_fit=True)
    assert [seq.num_cached_tokens for seq in seqs] == [3]  # the second does not fit anyway
    with pytest.raises(pc.OutOfBlocksError) as error:
        cache.open_many([[10, 11, 12, 8], range(100, 128)])
    assert (error.value.needed, error.value.available) == (8, 7)
    cache.check()


def test_an_engine_is_told_of_all_copies():
    # SPEC F48
    cache = make_cache(16, B=B, storage=None, partial_block_reuse=1)
    keep(cache, range(10, 18))
    seqs = cache.open_many([[10, 11, 12, 13, 14, 15, 7, 7], [*range(10, 18)]])
    pairs, ticket = cache.take_block_copies()
    assert pairs[:, 1].tolist() == [int(seq.block_table[1]) for seq in seqs]
    assert len(set(pairs[:, 0].tolist())) == 1
    cache.copies_done(ticket)
    cache.check()


@pytest.mark.parametrize("num_open", [0, 8])
def test_copies_that_fail_leave_no_prompt_behind(num_open):
    # SPEC F23 F27
    kit = Kit(16, B, num_open, partial_block_reuse=1)
    seq = kit.open(range(12))
    kit.write(seq, range(12))
    kit.ledger.free(seq)
    prompts = [
        (np.array(p, np.uint32), b"", [], -1, False)
        for p in ([0, 1, 2, 3, 4, 5, 9], [0, 1, 2, 3, 4, 9], [70, 71])
    ]
    before = kit.counts()
    kit.places.fail = True
    with pytest.raises(pc.PagedCacheError, match="no bytes move today"):
        kit.ledger.open_many(prompts)
    kit.ledger.check()
    after = kit.counts()
    for name in ("blocks_allocated", "blocks_freed"):
        after[name] = before[name]
    assert after == before
    kit.places.fail = False
    seqs = kit.ledger.open_many(prompts)
    assert [s.seq_len for s in seqs] == [6, 5, 0]
    assert kit.read(seqs[0]) == [0, 1, 2, 3, 4, 5]
    assert kit.read(seqs[1]) == [0, 1, 2, 3, 4]
    kit.ledger.check()


def test_open_slots_count_for_all_prompts_together():
    # SPEC F30: each prompt of two blocks is promised two slots
    kit = Kit(32, B, 5)
    prompts = [(np.arange(i, i + 6, dtype=np.uint32), b"", [], -1, False) for i in (0, 10, 20)]
    before = kit.counts()
    with pytest.raises(pc.OutOfOpenBlocksError) as error:
        kit.ledger.open_many(prompts)
    assert (error.value.needed, error.value.available, error.value.total) == (6, 5, 5)
    assert kit.counts() == before
    kit.ledger.check()
    seqs = kit.ledger.open_many(prompts, True)
    assert len(seqs) == 2
    with pytest.raises(pc.OutOfOpenBlocksError):
        kit.ledger.open_many(prompts[2:], True)
    for i, seq in enumerate(seqs):
        kit.write(seq, range(10 * i, 10 * i + 6))
    kit.ledger.check()
