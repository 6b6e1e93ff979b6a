"""Engines that own their tensors: ids, tables and prefixes without bytes (SPEC F48)."""

from __future__ import annotations

import numpy as np
import pytest
from cachekit import empty, make_cache, refused, rows, whole

import pagedcache as pc


class Engine:
    """An engine's own K tensor, one number per slot, written and copied by its own hands."""

    def __init__(self, cache):
        self.cache = cache
        self.values = np.full((cache.num_blocks, cache.block_size), -1)

    def write(self, seq, marks):
        slots = seq.prepare(len(marks))
        self.copy()
        self.values.reshape(-1)[np.asarray(slots)] = marks
        seq.commit(len(marks))

    def copy(self):
        copied = 0
        while True:
            pairs, ticket = self.cache.take_block_copies()
            if not len(pairs):
                return copied
            assert pairs.dtype == np.int32 and pairs.shape[1] == 2
            dst = pairs[:, 1].tolist()
            assert len(set(dst)) == len(dst)
            assert not set(dst) & set(pairs[:, 0].tolist())  # right in parallel
            self.values[pairs[:, 1]] = self.values[pairs[:, 0]]
            self.cache.copies_done(ticket)
            copied += len(pairs)

    def read(self, seq):
        return self.values.reshape(-1)[seq.slot_mapping(0, seq.seq_len)].tolist()


def test_bytes_are_refused():
    # SPEC F48
    with make_cache(8, B=4, storage=None) as cache, cache.open(range(6)) as seq:
        k, v = rows(cache.spec, 0, [1])
        slots = seq.prepare(1)
        for call in (
            lambda: seq.append(0, k, v),
            lambda: seq.append_kv(0, k, v, 0),
            lambda: seq.gather(0),
            lambda: seq.views(0),
            lambda: seq.packed_views(0),
            lambda: cache.store(0, k, v, slots),
        ):
            with pytest.raises(pc.FormatError, match="storage=None"):
                call()
        assert cache.memory_usage == 2 * cache.spec.block_nbytes
        whole(cache)


def test_prefixes_and_tables_work():
    # SPEC F48
    with make_cache(16, B=4, storage=None) as cache:
        engine = Engine(cache)
        with cache.open(range(8)) as seq:
            engine.write(seq, list(range(8)))
            assert engine.read(seq) == list(range(8))
        with cache.open([*range(8), 9]) as seq:
            assert seq.num_cached_tokens == 8
            assert engine.read(seq) == list(range(8))
            assert cache.block_tables([seq]).tolist() == [seq.block_table[:2].tolist()]
        empty(cache)


def test_copy_on_write_by_the_engine():
    # SPEC F48
    with make_cache(16, B=4, storage=None) as cache, cache.open() as seq:
        engine = Engine(cache)
        engine.write(seq, list(range(6)))
        twin = seq.fork()
        slots = twin.prepare(1)
        refused(cache, lambda: twin.commit(1), pc.PendingCopyError)
        ends = (int(seq.block_table[1]), int(twin.block_table[1]))
        cache.defragment()
        assert (int(seq.block_table[1]), int(twin.block_table[1])) == ends  # pinned till then
        pairs, ticket = cache.take_block_copies()
        assert pairs.tolist() == [[seq.block_table[1], twin.block_table[1]]]
        refused(cache, lambda: twin.commit(1), pc.PendingCopyError)
        engine.values[pairs[:, 1]] = engine.values[pairs[:, 0]]
        cache.copies_done(ticket)
        refused(cache, lambda: cache.copies_done(ticket), pc.InvalidArgumentError)
        for junk in (-1, 1.0, None, True, 2**70, ticket + 1):
            refused(cache, lambda: cache.copies_done(junk), pc.InvalidArgumentError)  # noqa: B023
        engine.values.reshape(-1)[np.asarray(slots)] = 70
        twin.commit(1)
        assert engine.read(twin) == [*range(6), 70]
        assert engine.read(seq) == list(range(6))
        twin.free()
        whole(cache)


def test_partial_reuse_by_the_engine():
    # SPEC F40, F48
    with make_cache(16, B=4, storage=None, partial_block_reuse=1) as cache:
        engine = Engine(cache)
        with cache.open(range(8)) as seq:
            engine.write(seq, list(range(8)))
        with cache.open([0, 1, 2, 3, 4, 5, 90]) as seq:
            assert seq.num_cached_tokens == 6
            assert engine.copy() == 1
            assert engine.read(seq) == list(range(6))


def test_both_ends_stay_until_the_copy_is_done():
    # SPEC F48, CASE C69
    with make_cache(4, B=4, storage=None) as cache:
        engine = Engine(cache)
        parent = cache.open()
        engine.write(parent, [0, 1, 2])
        twin = parent.fork()
        twin.prepare(1)
        source = int(parent.block_table[0])
        parent.free()
        with cache.open(range(100, 108)) as other:  # takes every block that can be taken
            assert source not in other.block_table
            with pytest.raises(pc.OutOfBlocksError):
                other.prepare(9)
            engine.copy()
            assert engine.read(twin) == [0, 1, 2]
        twin.free()
        empty(cache)


def test_a_cache_with_bytes_leaves_no_copies():
    with make_cache(8, B=4) as cache, cache.open(range(6)) as seq:
        with seq.fork() as twin:
            twin.prepare(1)
        pairs, ticket = cache.take_block_copies()
        assert pairs.shape == (0, 2)
        cache.copies_done(ticket)


def test_defragment_by_the_engine():
    # SPEC F19, F48
    with make_cache(12, B=4, storage=None) as cache:
        engine = Engine(cache)
        seqs = [cache.open() for _ in range(3)]
        for step in range(3):
            for i, seq in enumerate(seqs):
                engine.write(seq, list(range(100 * i + 4 * step, 100 * i + 4 * step + 4)))
        seqs[1].free()
        moved = cache.defragment()
        assert moved > 0
        assert engine.copy() >= moved
        assert engine.read(seqs[0]) == list(range(12))
        assert engine.read(seqs[2]) == list(range(200, 212))
        whole(cache)


def test_a_longer_chain_comes_in_the_next_call():
    # SPEC F48: the second copy reads what the first one writes
    with make_cache(8, B=4, storage=None) as cache:
        parent = cache.open()
        parent.prepare(2)
        parent.commit(2)
        child = parent.fork()
        child.prepare(1)
        grandchild = child.fork()
        grandchild.prepare(1)
        a, b, c = (int(seq.block_table[0]) for seq in (parent, child, grandchild))
        assert len({a, b, c}) == 3
        pairs, first = cache.take_block_copies()
        assert pairs.tolist() == [[a, b]]
        assert cache.take_block_copies()[0].tolist() == []  # not before the first is made
        cache.copies_done(first)
        pairs, second = cache.take_block_copies()
        assert pairs.tolist() == [[b, c]]
        with pytest.raises(pc.PendingCopyError):
            child.commit(1)  # its block is still read by the second copy
        cache.copies_done(second)
        child.commit(1)
        grandchild.commit(1)
        whole(cache)
