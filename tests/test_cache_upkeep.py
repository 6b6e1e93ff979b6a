"""Figures, statistics, housekeeping and checks of a cache (SPEC F9, F16-F20, F41)."""

from __future__ import annotations

import numpy as np
import pytest
from cachekit import ROW_FORMATS, assert_holds, fill, make_cache, refused, whole, write
from formatkit import raw_blocks

import pagedcache as pc


@pytest.mark.parametrize("fmt", [*ROW_FORMATS, ("q8", "q4")])
def test_memory_figures(fmt):
    # SPEC F9, F17, CASE C42
    with make_cache(10, B=4, layers=2, heads=3, dim=40, fmt=fmt) as cache:
        spec = cache.spec
        assert cache.memory_usage == 0
        assert cache.fp32_equivalent_memory == 0
        assert cache.memory_savings == 1.0
        assert cache.utilization == 0.0
        assert cache.total_capacity == 10 * spec.block_nbytes == cache._storage.nbytes
        with cache.open(range(10)):
            assert cache.num_used_blocks == 3
            assert cache.num_free_blocks == 7
            assert cache.utilization == 0.3
            assert cache.memory_usage == 3 * spec.block_nbytes
            assert cache.fp32_equivalent_memory == 3 * 2 * 2 * 3 * 4 * 40 * 4
            assert cache.memory_savings == cache.memory_usage / cache.fp32_equivalent_memory
            assert 0 < cache.memory_savings <= 1


def test_free_and_cached_blocks():
    # SPEC F17
    with make_cache(10, B=4) as cache:
        with cache.open(range(10)) as seq:
            fill(cache, seq, range(10))
            assert cache.num_cached_blocks == 2
            assert cache.num_free_blocks == 7
        assert cache.num_cached_blocks == 2
        assert cache.num_free_blocks == 10
        assert cache.pool.num_free_blocks == 10


def test_statistics_count_when_it_happens():
    # SPEC F16
    with make_cache(16, B=4, partial_block_reuse=0) as cache:
        assert cache.stats().hit_rate == 0.0
        with cache.open(range(8)) as seq:
            fill(cache, seq, range(8))
            assert cache.stats().tokens_saved == 0  # counted at the hit, not at the insert
            before = cache.stats().to_dict()
            assert cache.probe(range(9)) == 8
            after = cache.stats().to_dict()
            assert after.pop("steps") > before.pop("steps")  # work was done, nothing counted
            assert after == before
            with cache.open(range(9)) as hit, hit.fork() as twin:
                stats = cache.stats()
                assert isinstance(stats, pc.Stats)
                assert (stats.prefix_queries, stats.prefix_hits) == (2, 1)
                assert (stats.query_tokens, stats.hit_tokens, stats.tokens_saved) == (17, 8, 8)
                assert stats.hit_rate == 8 / 17
                assert (stats.sequences_allocated, stats.sequences_active) == (3, 3)
                write(twin, cache.spec, [9])
                assert cache.stats().cow_copies == 0  # nothing written in the shared block yet
            with cache.open(range(9), resumed=True):
                stats = cache.stats()
                assert (stats.resumed_queries, stats.resumed_hit_tokens) == (1, 8)
                assert stats.hit_rate == 8 / 17
                assert stats.tokens_saved == 16
        stats = cache.stats()
        assert (stats.sequences_freed, stats.sequences_active) == (4, 0)
        assert stats.blocks_used == 0
        assert stats.blocks_allocated == stats.blocks_freed


def scattered(cache):
    """Three sequences of one cache, blocks taken in turns; the middle one is freed."""
    seqs = [cache.open() for _ in range(3)]
    for step in range(3):
        for i, seq in enumerate(seqs):
            fill(cache, seq, range(100 * i + 4 * step, 100 * i + 4 * step + 4))
    seqs[1].free()
    return seqs[0], seqs[2]


def test_fragmentation():
    # SPEC F18
    with make_cache(12, B=4) as cache:
        assert cache.fragmentation().to_dict() == {
            "holes": 0, "wasted_slots": 0, "ratio": 0.0, "largest_free_run": 12,
            "mean_tokens_per_block": 0.0, "used_blocks": 0, "free_blocks": 12, "block_size": 4,
        }  # fmt: skip
        assert not cache.should_defragment()
        first, second = scattered(cache)
        shape = cache.fragmentation()
        assert isinstance(shape, pc.Fragmentation)
        assert (shape.holes, shape.used_blocks, shape.free_blocks) == (3, 6, 6)
        assert shape.ratio == 0.5
        assert shape.largest_free_run == 3
        assert shape.mean_tokens_per_block == 4.0
        assert cache.should_defragment() and not cache.should_defragment(0.5)
        for junk in ("0.3", None, True, 1j):
            refused(cache, lambda: cache.should_defragment(junk),  # noqa: B023
                    pc.InvalidArgumentError)


@pytest.mark.parametrize("fmt", ["float32", "bfloat16", "q8", "q4", ("q8", "q4")])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_defragment_keeps_every_value(fmt, layout):
    # SPEC F19, CASE C56
    with make_cache(12, B=4, layers=2, heads=2, dim=40, fmt=fmt, layout=layout) as cache:
        first, second = scattered(cache)
        twin = second.fork()
        fill(cache, twin, [500])
        assert cache.sequence_contiguity(first) == 0.0
        bytes_before = [raw_blocks(cache, seq) for seq in (first, second, twin)]
        epoch = cache.layout_epoch
        moved = cache.defragment()
        assert moved > 0
        assert cache.layout_epoch != epoch
        assert cache.stats().blocks_moved == moved
        assert cache.stats().defragmentations == 1
        assert cache.sequence_contiguity(first) == 1.0
        held = {int(b) for seq in (first, second, twin) for b in seq.block_table}
        assert held == set(range(7))
        assert [raw_blocks(cache, seq) for seq in (first, second, twin)] == bytes_before
        assert_holds(cache, first, range(12))
        assert_holds(cache, second, range(200, 212))
        assert_holds(cache, twin, [*range(200, 212), 500])
        assert cache.defragment() == 0
        whole(cache)


def test_defragment_keeps_cached_prefixes():
    # SPEC F19
    with make_cache(12, B=4) as cache:
        with cache.open(range(8)) as filler, cache.open(range(100, 108)) as seq:
            fill(cache, filler, range(8))
            fill(cache, seq, range(100, 108))
        cache.reset_prefix_cache()
        with cache.open(range(8)) as filler, cache.open(range(100, 108)) as seq:
            fill(cache, seq, range(100, 108))
        cache.defragment()
        with cache.open([*range(100, 108), 1]) as seq:
            assert seq.num_cached_tokens == 8
            assert_holds(cache, seq, range(100, 108))
        whole(cache)


def test_compact_one_sequence():
    # SPEC F19
    with make_cache(12, B=4) as cache:
        first, second = scattered(cache)
        assert cache.compact_sequence(second) > 0
        assert cache.sequence_contiguity(second) == 1.0
        assert_holds(cache, first, range(12))
        assert_holds(cache, second, range(200, 212))
        with cache.open() as empty_one, cache.open([1]) as short:
            assert cache.sequence_contiguity(empty_one) == 1.0
            assert cache.sequence_contiguity(short) == 1.0
            assert cache.compact_sequence(empty_one) == 0
        whole(cache)


def test_nothing_defragments_by_itself():
    # SPEC F19
    with make_cache(12, B=4) as cache:
        first, second = scattered(cache)
        epoch = cache.layout_epoch
        for i in range(20):
            with cache.open(range(1000 + i, 1000 + i + 9)) as seq:
                fill(cache, seq, range(9))
        assert cache.layout_epoch == epoch
        assert cache.stats().defragmentations == 0


def test_check_names_the_block():
    # SPEC F20
    with make_cache(8, B=4) as cache, cache.open(range(6)) as seq:
        cache.check()
        cache.pool.touch([int(seq.block_table[1])])  # a reference that no sequence accounts for
        block = int(seq.block_table[1])
        cache.pool.free([block])
        cache.check()
        cache._storage.num_blocks = 7
        with pytest.raises(pc.CorruptionError, match="storage has 7 blocks"):
            cache.check()
        cache._storage.num_blocks = 8


def test_reset_prefix_cache():
    # SPEC F41, CASE C27
    with make_cache(8, B=4) as cache, cache.open(range(12)) as seq:
        fill(cache, seq, range(8))
        cache.reset_prefix_cache()
        assert cache.num_cached_blocks == 0
        assert cache.probe(range(9)) == 0
        assert_holds(cache, seq, range(8))
        fill(cache, seq, range(8, 12))
        assert cache.probe([*range(12), 1]) == 0  # what was committed before stays forgotten
        seq.free()
        assert cache.num_free_blocks == 8
        whole(cache)


def test_figures_are_plain_numbers():
    with make_cache(8, B=4) as cache, cache.open(np.arange(5)) as seq:
        for name in ("num_free_blocks", "num_used_blocks", "num_cached_blocks", "memory_usage",
                     "total_capacity", "fp32_equivalent_memory", "layout_epoch"):
            assert type(getattr(cache, name)) is int, name
        for name in ("seq_len", "num_tokens", "num_written", "num_cached_tokens", "num_blocks",
                     "seq_id"):
            assert type(getattr(seq, name)) is int, name
        assert type(cache.utilization) is float


def test_fewest_tokens_of_a_partial_hit():
    # SPEC F40: at least partial_block_reuse tokens, the last of the prompt never among them
    with make_cache(16, B=8, partial_block_reuse=3) as cache:
        with cache.open(range(8)) as seq:
            fill(cache, seq, range(8))
        for same, length, hit in ((2, 8, 0), (3, 8, 3), (3, 4, 3), (3, 3, 0), (4, 4, 3)):
            prompt = [*range(same), *range(50, 50 + length - same)]
            assert cache.probe(prompt) == hit, (same, length)


def test_eight_candidates_of_a_partial_hit_are_looked_at():
    # SPEC F40
    with make_cache(16, B=4, partial_block_reuse=1) as cache:
        for i in range(8):  # the same first token
            with cache.open([1, i, i, i]) as seq:
                fill(cache, seq, range(seq.num_cached_tokens, 4))
        assert [cache.probe([1, i, i, 50]) for i in range(8)] == [3] * 8


def test_compact_uses_the_gaps_between_others():
    # SPEC F19
    with make_cache(5, B=4) as cache:
        seq, gap = cache.open(range(4)), cache.open(range(10, 14))
        seq.prepare(8)
        others = [cache.open(range(20 + i, 24 + i)) for i in range(2)]
        assert seq.block_table.tolist() == [0, 2]
        assert cache.compact_sequence(seq) == 0  # no two neighbouring ids to be had
        gap.free()
        assert cache.compact_sequence(seq) == 1
        assert seq.block_table.tolist() == [0, 1]
        assert [other.block_table.tolist() for other in others] == [[3], [4]]
        whole(cache)


def test_evictions_are_counted_in_blocks_and_tokens():
    # SPEC F16
    with make_cache(3, B=4) as cache:
        with cache.open(range(12)) as seq:
            fill(cache, seq, range(12))
        cache.open(range(50, 58))
        stats = cache.stats()
        assert (stats.evicted_blocks, stats.evicted_tokens) == (2, 8)


def test_a_block_taken_from_the_pool_keeps_its_id():
    # SPEC F13, F19: nobody could tell its holder where it went
    with make_cache(8, B=4) as cache:
        gap, block = cache.open(range(4)), cache.pool.allocate_one()
        seq = cache.open(range(10, 18))
        gap.free()
        assert cache.defragment() > 0
        assert cache.pool.ref_count(block) == 1
        assert block not in seq.block_table
        cache.pool.free_one(block)
        whole(cache)


def test_empty_blocks_are_not_wasted():
    # SPEC F18: only part-filled blocks waste slots
    with make_cache(8, B=4) as cache:
        cache.allocate_sequence(8)
        shape = cache.fragmentation()
        assert (shape.used_blocks, shape.wasted_slots, shape.mean_tokens_per_block) == (2, 0, 0.0)


def test_truncate_gives_the_tail_back_first():
    # SPEC F14, F27: as free() does, so the tail of a prefix goes before its head
    with make_cache(3, B=4) as cache:
        seq = cache.open(range(12))
        fill(cache, seq, range(12))
        seq.truncate(0)
        cache.open([99])
        assert cache.probe(range(13)) == 8


def test_queries_are_counted_in_tokens_and_in_blocks():
    # SPEC F16: a part-filled last block is looked up too, one whose head is copied is not shared
    with make_cache(16, B=4, partial_block_reuse=1) as cache:
        with cache.open(range(9)) as seq:  # cold: 9 tokens in 3 blocks
            fill(cache, seq, range(9))
        with cache.open([*range(7), 50, 51, 52]) as seq:  # 1 block shared, 3 tokens copied
            assert seq.num_cached_tokens == 7
        cache.open(range(4), resumed=True).free()  # apart
        stats = cache.stats()
        assert (stats.prefix_queries, stats.prefix_hits, stats.prefix_misses) == (2, 1, 1)
        assert (stats.query_tokens, stats.hit_tokens, stats.miss_tokens) == (19, 7, 12)
        assert (stats.query_blocks, stats.hit_blocks, stats.miss_blocks) == (6, 1, 5)
        assert (stats.resumed_queries, stats.resumed_hit_tokens) == (1, 3)
        assert (stats.partial_copies, stats.tokens_saved) == (2, 10)
