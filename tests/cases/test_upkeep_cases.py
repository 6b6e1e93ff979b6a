"""Cases C56-C58 and C62: long histories, defragmentation, crowds."""

from __future__ import annotations

import random

import pytest
from cachekit import (
    assert_holds,
    by_profile,
    cached_prompt,
    empty,
    fill,
    make_cache,
    read,
    whole,
)
from formatkit import raw_blocks

import pagedcache as pc


@pytest.mark.parametrize("fmt", ["q8", "q4", "q8_0", ("q8", "q4"), "bfloat16"], ids=str)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_a_fragmented_pool_keeps_every_stored_byte(fmt, layout):
    # CASE C56
    # SPEC F19
    rng = random.Random(56)
    cache = make_cache(40, B=4, heads=2, dim=40, layers=2, fmt=fmt, layout=layout)
    seqs: dict[pc.Sequence, list[int]] = {}
    mark = 1
    for i in range(12):
        n = rng.randint(1, 11)
        seq = cache.open(range(1000 * i, 1000 * i + n))
        marks = list(range(mark, mark + n))
        mark += n
        fill(cache, seq, marks)
        seqs[seq] = marks
    for seq in rng.sample(list(seqs), 5):
        seq.free()
        del seqs[seq]
    parent = next(iter(seqs))
    child = parent.fork()
    fill(cache, child, [mark])
    seqs[child] = [*seqs[parent], mark]
    cached_prompt(cache, range(70_000, 70_009), 500)
    hits = cache.probe(range(70_000, 70_010))
    before = {seq: raw_blocks(cache, seq) for seq in seqs}
    pinned = list(seqs)[3]
    with pinned.views(0) as held:
        ids = [v.block_id for v in held]
        moved = cache.defragment()
        assert [int(b) for b in pinned.block_table] == ids
        whole(cache)
        for seq, marks in seqs.items():
            assert raw_blocks(cache, seq) == before[seq]
            assert_holds(cache, seq, marks)
    moved += cache.defragment()
    assert moved > 0
    for seq, marks in seqs.items():
        assert raw_blocks(cache, seq) == before[seq]
        assert_holds(cache, seq, marks)
        if seq not in (parent, child):
            assert cache.sequence_contiguity(seq) == 1.0
    used = {int(b) for seq in seqs for b in seq.block_table}
    assert max(used) < len(used) + cache.num_cached_blocks
    assert cache.probe(range(70_000, 70_010)) == hits == 8
    with cache.open(range(70_000, 70_010)) as again:
        assert_holds(cache, again, range(500, 508))
    assert cache.defragment() == 0 or cache.fragmentation().holes == 0
    for seq in seqs:
        seq.free()
    empty(cache)


def test_ten_thousand_cycles_leak_nothing():
    # CASE C57
    # SPEC F19 F20
    rng = random.Random(57)
    cache = make_cache(24, B=3, dim=2, partial_block_reuse=1)
    live: list[pc.Sequence] = []
    marks: dict[int, list[int]] = {}
    mark = 0
    for cycle in range(by_profile(1_000, 10_000)):
        tokens = [rng.randint(0, 2) for _ in range(rng.randint(0, 14))]
        try:
            seq = cache.open(tokens)
        except pc.OutOfBlocksError:
            live.pop(rng.randrange(len(live))).free()
            continue
        hit = seq.num_cached_tokens
        own = [int(round(x / 64)) for x in read(seq, 0, 0, hit)[0][:, 0, 0]] if hit else []
        new = [(mark := mark % 100_000 + 1) for _ in range(len(tokens) - hit)]
        if new:
            fill(cache, seq, new)
        marks[seq.seq_id] = own + new
        live.append(seq)
        action = rng.random()
        chosen = rng.choice(live)
        try:
            if action < 0.3:
                more = [(mark := mark % 100_000 + 1) for _ in range(rng.randint(1, 7))]
                fill(cache, chosen, more)
                marks[chosen.seq_id] += more
            elif action < 0.5:
                n = rng.randint(0, chosen.seq_len)
                chosen.truncate(n)
                del marks[chosen.seq_id][n:]
            elif action < 0.65:
                twin = chosen.fork()
                marks[twin.seq_id] = list(marks[chosen.seq_id])
                live.append(twin)
        except pc.OutOfBlocksError:
            pass
        while len(live) > 5 or (live and rng.random() < 0.3):
            live.pop(rng.randrange(len(live))).free()
        if cycle % 97 == 0:
            cache.defragment()
        cache.check()
        if live:
            seq = rng.choice(live)
            assert_holds(cache, seq, marks[seq.seq_id])
    for seq in live:
        seq.free()
    empty(cache)
    # every free block is usable, contiguous or not
    with cache.open(range(10_000, 10_072)) as seq:
        assert sorted(seq.block_table.tolist()) == list(range(24))
        fill(cache, seq, range(1, 73))
        assert_holds(cache, seq, range(1, 73))
    empty(cache)


def test_defragmenting_full_pools_and_padding():
    # CASE C58
    # SPEC F18 F19
    cache = make_cache(6, B=4)
    seqs = [cache.open(range(100 * i, 100 * i + n)) for i, n in enumerate([8, 8, 8])]
    for i, seq in enumerate(seqs):
        fill(cache, seq, range(10 * i + 1, 10 * i + 9))
    assert cache.num_free_blocks == 0
    f = cache.fragmentation()
    assert (f.holes, f.wasted_slots, f.ratio, f.largest_free_run) == (0, 0, 0.0, 0)
    assert f.mean_tokens_per_block == 4.0
    # exactly full and interleaved: cycles without one free block
    for seq in seqs[:2]:
        seq.free()
    cache.reset_prefix_cache()
    a, b = cache.open(range(500, 504)), cache.open(range(600, 604))
    for seq, base in ((a, 41), (b, 51)):
        fill(cache, seq, range(base, base + 4))
    for seq, base in ((a, 45), (b, 55)):
        fill(cache, seq, range(base, base + 4))
    assert cache.num_free_blocks == 0
    assert cache.sequence_contiguity(a) < 1.0
    cache.defragment()
    whole(cache)
    for seq, base in ((a, 41), (b, 51), (seqs[2], 21)):
        assert_holds(cache, seq, range(base, base + 8))
        assert cache.sequence_contiguity(seq) == 1.0
    for seq in (a, b, seqs[2]):
        seq.free()
    empty(cache)
    # the only gaps are part-filled last blocks
    cache = make_cache(8, B=4)
    seqs = [cache.open(range(100 * i, 100 * i + n)) for i, n in enumerate([5, 1, 7])]
    for i, seq in enumerate(seqs):
        fill(cache, seq, range(10 * i + 1, 10 * i + 1 + seq.num_tokens))
    f = cache.fragmentation()
    assert (f.holes, f.ratio) == (0, 0.0)
    assert f.wasted_slots == 3 + 3 + 1
    assert f.mean_tokens_per_block == pytest.approx(13 / 5)
    assert (f.used_blocks, f.free_blocks, f.largest_free_run) == (5, 3, 3)
    tables = [seq.block_table.tolist() for seq in seqs]
    assert cache.defragment() == 0
    assert [seq.block_table.tolist() for seq in seqs] == tables
    for i, seq in enumerate(seqs):
        assert_holds(cache, seq, range(10 * i + 1, 10 * i + 1 + seq.num_tokens))
    assert make_cache(4, B=4).defragment() == 0  # nothing at all


def test_one_sequence_among_ten_thousand():
    # CASE C62
    # SPEC F12
    others = by_profile(1_000, 10_000)

    def work(cache: pc.PagedKVCache) -> list[int]:
        prompt = list(range(10, 30))
        out = []

        def step(call):
            before = cache.pool.steps
            result = call()
            out.append(cache.pool.steps - before)
            return result

        seq = step(lambda: cache.open(prompt))
        step(lambda: seq.prepare(20))
        step(lambda: seq.commit(20))
        step(lambda: seq.append_token(5))
        step(lambda: seq.prepare(1))
        step(lambda: seq.commit(1))
        child = step(lambda: seq.fork())
        step(lambda: child.truncate(18))
        step(lambda: child.prepare(3))
        for pairs, ticket in iter(lambda: cache.take_block_copies(), None):
            if not len(pairs):
                break
            cache.copies_done(ticket)
        step(lambda: child.commit(3))
        step(lambda: cache.probe([*prompt, 1]))
        step(lambda: cache.block_tables([seq, child]))
        step(lambda: child.free())
        step(lambda: seq.free())
        return out

    alone = make_cache(others + 64, B=4, storage=None)
    crowd = make_cache(others + 64, B=4, storage=None)
    held = []
    for i in range(others):
        seq = crowd.open([1000 + i, 1, 2, 3])
        seq.commit(4)
        held.append(seq)
    for busy, quiet in zip(work(crowd), work(alone), strict=True):
        # Bucket chains are longer by chance, up to a few nodes for each of the six look-ups of a
        # step; walking the others would show as a thousand steps.
        assert busy <= quiet + 32
    crowd.check()
