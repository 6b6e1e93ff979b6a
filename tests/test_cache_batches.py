"""Batch paths: prepare, store, block tables, page tables (SPEC F28a, F33)."""

from __future__ import annotations

import numpy as np
import pytest
from cachekit import assert_holds, expected, fill, make_cache, read, refused, rows, whole

import pagedcache as pc


@pytest.mark.parametrize("fmt", ["float32", "bfloat16", "q8", "q4_0"])
def test_one_step_for_many_sequences(fmt):
    # SPEC F28a, F33
    with make_cache(16, B=4, layers=3, heads=2, dim=8, fmt=fmt) as cache:
        seqs = [cache.open() for _ in range(4)]
        for i, seq in enumerate(seqs):
            fill(cache, seq, range(10 * i, 10 * i + i))
        counts = [5, 0, 1, 3]
        slots = cache.prepare(seqs, counts)
        assert isinstance(slots, pc.SlotMapping)
        assert len(slots) == 9
        assert np.asarray(slots).dtype == np.int64
        want = [seq.slot_mapping(seq.seq_len, seq.seq_len + n) for seq, n in zip(seqs, counts,
                                                                                 strict=True)]
        assert slots.slots.tolist() == np.concatenate(want).tolist()
        marks = list(range(100, 109))
        for layer in range(3):
            cache.store(layer, *rows(cache.spec, layer, marks), slots)
        at = 0
        for i, (seq, n) in enumerate(zip(seqs, counts, strict=True)):
            seq.commit(n)
            assert_holds(cache, seq, [*range(10 * i, 10 * i + i), *marks[at:at + n]])
            at += n
        whole(cache)


def test_prepare_copies_what_is_shared_once_for_all_layers():
    # SPEC F28a, CASE C66
    with make_cache(8, B=4, layers=2) as cache, cache.open(range(6)) as seq:
        fill(cache, seq, range(6))
        with seq.fork() as twin:
            wrong = twin.slot_mapping(5, 6)
            for layer in range(2):
                refused(cache, lambda: cache.store(layer, *rows(cache.spec, layer, [9]), wrong),  # noqa: B023
                        pc.SlotError, seq, twin)
            assert twin.blocks_needed(1) == 1
            slots = cache.prepare((s for s in [seq, twin]), np.array([1, 1]))
            assert cache.stats().cow_copies == 1
            for layer in range(2):
                cache.store(layer, *rows(cache.spec, layer, [70, 80]), slots)
            seq.commit(1)
            twin.commit(1)
            assert_holds(cache, seq, [*range(6), 70])
            assert_holds(cache, twin, [*range(6), 80])
            whole(cache)


def test_prepare_is_all_or_nothing():
    # SPEC F23, F28a
    with make_cache(4, B=4, max_seq_len=12) as cache:
        a, b = cache.open(), cache.open()
        fill(cache, a, range(4))
        error = refused(cache, lambda: cache.prepare([a, b], [4, 12]), pc.OutOfBlocksError, a, b)
        assert (error.needed, error.available, error.total) == (4, 3, 4)
        refused(cache, lambda: cache.prepare([b, a], [1, 9]), pc.SequenceTooLongError, a, b)
        cases = [
            ([a, a], [1, 1]),
            ([a], [1, 1]),
            ([a, b], [1]),
            ([a], [-1]),
            ([a], [1.0]),
            ([a], [True]),
            ([a], [2**63]),
            ([a], 1),
            ([a], None),
            ([a], "1"),
            (a, [1]),
            ([a, None], [1, 1]),
            (["x"], [1]),
            (3, [1]),
        ]
        for seqs, counts in cases:
            refused(cache, lambda: cache.prepare(seqs, counts),  # noqa: B023
                    pc.InvalidArgumentError, a, b)
        assert len(cache.prepare([], [])) == 0
        assert len(cache.prepare([a, b], [0, 0])) == 0


def test_sequences_of_another_cache_are_refused():
    # SPEC 7
    with make_cache(8, B=4) as cache, make_cache(8, B=4) as other:
        mine, alien = cache.open(range(4)), other.open(range(4))
        for call in (
            lambda: cache.prepare([mine, alien], [1, 1]),
            lambda: cache.block_tables([alien]),
            lambda: cache.page_table([alien]),
            lambda: cache.compact_sequence(alien),
            lambda: cache.sequence_contiguity(alien),
            lambda: cache.compact_sequence("x"),
            lambda: cache.store(0, *rows(cache.spec, 0, [1]), alien.prepare(1)),
        ):
            refused(cache, call, pc.InvalidArgumentError, mine)
        whole(other)


def test_store_with_raw_slots():
    # SPEC F33
    with make_cache(8, B=4, layers=2, heads=2) as cache, cache.open() as seq:
        seq.prepare(6)
        table = seq.block_table
        positions = [5, 0, 3]
        slots = [int(table[p // 4]) * 4 + p % 4 for p in positions]
        k, v = rows(cache.spec, 1, [15, 99, 10, 13])
        for given in ([slots[0], -1, *slots[1:]],
                      np.array([slots[0], -1, *slots[1:]], np.int32),
                      (slots[0], -1, slots[1], slots[2])):
            cache.store(1, k, v, given)
        want = expected(cache.spec, 1, [10, 13, 15])
        for got, rows_ in zip(read(seq, 1, 0, 6), want, strict=True):
            np.testing.assert_array_equal(got[[0, 3, 5]], rows_)
            assert not got[[1, 2, 4]].any()


def test_store_refuses_what_must_not_be_written():
    # SPEC F33
    with make_cache(8, B=4) as cache, cache.open(range(4)) as cached, cache.open() as seq:
        fill(cache, cached, range(4))
        fill(cache, seq, range(2))
        twin = seq.fork()
        own = cache.open(range(4))
        good = int(own.block_table[0]) * 4
        one, two = rows(cache.spec, 0, [1]), rows(cache.spec, 0, [1, 2])
        free = next(b for b in range(8) if cache.pool.ref_count(b) == 0)
        cases = [
            (one, [32], pc.SlotError),
            (one, [2**40], pc.SlotError),
            (one, [-2], pc.SlotError),
            (two, [good, good], pc.SlotError),
            (one, [int(cached.block_table[0]) * 4 + 1], pc.SlotError),
            (one, [int(seq.block_table[0]) * 4 + 3], pc.SlotError),
            (one, [free * 4], pc.SlotError),
            (two, [good], pc.ShapeError),
            (one, [good, good + 1], pc.ShapeError),
            (one, [2**63], pc.InvalidArgumentError),
            (one, [float(good)], pc.InvalidArgumentError),
            (one, [[good]], pc.InvalidArgumentError),
            (one, None, pc.InvalidArgumentError),
        ]
        for (k, v), slots, kind in cases:
            refused(cache, lambda: cache.store(0, k, v, slots), kind, seq, twin)  # noqa: B023
        for layer in (1, -1, 0.0):
            refused(cache, lambda: cache.store(layer, *one, [good]),  # noqa: B023
                    pc.InvalidArgumentError, seq)
        cache.store(0, *two, [-1, -1])
        assert cache.stats().pinned == 0


def test_a_mapping_from_before_a_defragment_is_refused():
    # SPEC F19, CASE C68
    with make_cache(8, B=4) as cache:
        first, seq = cache.open(range(8)), cache.open()
        slots = seq.prepare(2)
        epoch = cache.layout_epoch
        first.free()
        assert cache.defragment() == 1
        assert cache.layout_epoch != epoch
        refused(cache, lambda: cache.store(0, *rows(cache.spec, 0, [1, 2]), slots),
                pc.StaleMappingError, seq)
        cache.store(0, *rows(cache.spec, 0, [1, 2]), seq.prepare(2))
        seq.commit(2)
        assert_holds(cache, seq, [1, 2])


def test_a_mapping_of_a_freed_sequence_is_refused():
    with make_cache(8, B=4) as cache:
        seq = cache.open()
        slots = seq.prepare(2)
        seq.free()
        refused(cache, lambda: cache.store(0, *rows(cache.spec, 0, [1, 2]), slots),
                pc.StaleMappingError)


def test_a_mapping_whose_block_another_sequence_took_is_refused():
    # SPEC F28a, CASE C67: the block is held once and not cached again, but by somebody else
    with make_cache(1, B=4) as cache:
        seq = cache.open()
        slots = seq.prepare(2)
        seq.free()
        other = cache.open(range(3))
        fill(cache, other, [5, 6])
        refused(cache, lambda: cache.store(0, *rows(cache.spec, 0, [1, 2]), slots),
                pc.StaleMappingError, other)
        assert_holds(cache, other, [5, 6])


def test_a_mapping_of_a_block_that_became_cached_is_refused():
    # SPEC F28a, TRAP 3: others may hit it now
    with make_cache(8, B=4) as cache:
        seq = cache.open(range(4))
        slots = seq.prepare(4)
        cache.store(0, *rows(cache.spec, 0, range(4)), slots)
        seq.commit(4)
        refused(cache, lambda: cache.store(0, *rows(cache.spec, 0, range(9, 13)), slots),
                pc.StaleMappingError, seq)
        assert_holds(cache, seq, range(4))


def test_block_tables():
    # SPEC F33, CASE C54
    with make_cache(16, B=4) as cache:
        seqs = [cache.open(range(100 * i, 100 * i + 12)) for i in range(3)]
        for seq, n in zip(seqs, (9, 0, 4), strict=True):
            fill(cache, seq, range(n))
        table = cache.block_tables(seqs)
        assert table.dtype == np.int32 and table.shape == (3, 3)
        assert table[0].tolist() == seqs[0].block_table.tolist()
        assert table[1].tolist() == [0, 0, 0]
        assert table[2].tolist() == [seqs[2].block_table[0], 0, 0]
        given = cache.block_tables(seqs, [1, 12, 5])
        assert given.shape == (3, 3)
        assert given[0].tolist() == [seqs[0].block_table[0], 0, 0]
        assert given[1].tolist() == seqs[1].block_table.tolist()
        assert given[2].tolist() == [*seqs[2].block_table[:2], 0]
        np.testing.assert_array_equal(given, cache.block_tables(seqs, np.array([1, 12, 5])))
        assert cache.block_tables([]).shape == (0, 0)
        assert cache.block_tables([seqs[1]]).shape == (1, 0)
        refused(cache, lambda: cache.block_tables(seqs, [1, 13, 1]), pc.InvalidPositionError)
        for lengths in ([1], [1, 2, -1], [1, 2, 1.5], 3, "123", [1, 2, 2**70]):
            refused(cache, lambda: cache.block_tables(seqs, lengths),  # noqa: B023
                    pc.InvalidArgumentError)
        refused(cache, lambda: cache.block_tables(seqs, group=1), pc.InvalidArgumentError)


def test_page_table():
    # SPEC F33, CASE C53
    with make_cache(16, B=4) as cache:
        seqs = [cache.open(range(100 * i, 100 * i + 12)) for i in range(3)]
        for seq, n in zip(seqs, (9, 8, 1), strict=True):
            fill(cache, seq, range(n))
        table = cache.page_table(seqs)
        assert isinstance(table, pc.PageTable)
        indptr, indices, last = table
        assert [a.dtype for a in table] == [np.int32] * 3
        assert indptr.tolist() == [0, 3, 5, 6]
        assert indices.tolist() == [*seqs[0].block_table, *seqs[1].block_table[:2],
                                    seqs[2].block_table[0]]
        assert last.tolist() == [1, 4, 1]
        assert cache.page_table(seqs, [4, 5, 12]).kv_last_page_len.tolist() == [4, 1, 4]
        with cache.open() as empty_one:
            error = refused(cache, lambda: cache.page_table([seqs[0], empty_one]),
                            pc.PagedCacheError)
            assert str(empty_one.seq_id) in str(error)
            table = cache.page_table([seqs[0], empty_one, seqs[2]], allow_empty=True)
            assert table.kv_indptr.tolist() == [0, 3, 3, 4]
            assert table.kv_last_page_len.tolist() == [1, 0, 1]
        indptr, indices, last = cache.page_table([])
        assert (indptr.tolist(), indices.tolist(), last.tolist()) == ([0], [], [])
        refused(cache, lambda: cache.page_table(seqs, [1, 13, 1]), pc.InvalidPositionError)


# ---- a whole step in one call ----------------------------------------------------------------


def test_a_batch_step_equals_single_calls() -> None:
    # SPEC F25, F26, F28a: same lengths, tokens and cached blocks as one call per sequence
    spec = pc.CacheSpec(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4)
    with (
        pc.PagedKVCache(spec, 64, storage=None) as one,
        pc.PagedKVCache(spec, 64, storage=None) as many,
    ):
        prompts = [list(range(100 * i, 100 * i + 5 + i)) for i in range(4)]
        singles = [one.open(prompt) for prompt in prompts]
        batch = [many.open(prompt) for prompt in prompts]
        for seq in singles:
            seq.commit(seq.num_tokens)
        many.commit(batch, [seq.num_tokens for seq in batch])
        for step in range(9):
            tokens = [1000 * step + i for i in range(4)]
            for seq, token in zip(singles, tokens, strict=True):
                seq.append_token(token)
                seq.prepare(1)
                seq.commit(1)
            many.append_tokens(batch, tokens)
            many.prepare(batch, [1] * 4)
            many.commit(batch, [1] * 4)
            for a, b in zip(singles, batch, strict=True):
                assert a.tokens.tolist() == b.tokens.tolist()
                assert (a.seq_len, a.num_tokens) == (b.seq_len, b.num_tokens)
            assert one.num_cached_blocks == many.num_cached_blocks
            one.check()
            many.check()
        several = [[1], [2, 3], [], [4]]
        many.append_tokens(batch, [t for some in several for t in some], [1, 2, 0, 1])
        for seq, some in zip(batch, several, strict=True):
            assert seq.tokens.tolist()[seq.seq_len:] == some


def test_a_batch_step_is_all_or_nothing() -> None:
    # SPEC F23, CASE C59
    spec = pc.CacheSpec(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, max_seq_len=12)
    with pc.PagedKVCache(spec, 16, storage=None) as cache:
        a, b = cache.open(range(6)), cache.open(range(50, 62))
        cache.commit([a, b], [6, 12])
        a.prepare(2)
        for call in (
            lambda: cache.commit([a, b], [1, 1]),               # b has no room
            lambda: cache.append_tokens([a, b], [7, 8]),        # b is at max_seq_len
            lambda: cache.commit([a, a], [1, 1]),
            lambda: cache.append_tokens([a, a], [7, 8]),
            lambda: cache.commit([a], [1, 1]),
            lambda: cache.append_tokens([a], [1, 2]),
            lambda: cache.append_tokens([a], [2**32]),
            lambda: cache.commit([a], [-1]),
        ):
            with pytest.raises(pc.PagedCacheError):
                call()
            assert (a.seq_len, a.num_tokens, b.seq_len) == (6, 6, 12)
            cache.check()


def test_forks_that_commit_shared_work_must_agree() -> None:
    # SPEC F25: one block cannot promise two different tokens
    spec = pc.CacheSpec(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4)
    with pc.PagedKVCache(spec, 16, storage=None) as cache:
        parent = cache.open(range(4))
        parent.prepare(4)
        child = parent.fork()
        cache.commit([parent, child], [4, 4])                   # the same four tokens
        assert cache.num_cached_blocks == 1
        cache.check()
        other = cache.open((), salt="b")
        other.prepare(4)
        twin = other.fork()
        cache.append_tokens([other, twin], [1, 2, 3, 4, 1, 2, 3, 5], [4, 4])
        with pytest.raises(pc.InvalidArgumentError):
            cache.commit([other, twin], [4, 4])
        assert (other.seq_len, twin.seq_len) == (0, 0)
        cache.check()
