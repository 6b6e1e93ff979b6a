"""What is checked is what is used: arrays and lists that change under the library's hands."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import pagedcache as pc

SPEC = pc.CacheSpec(num_layers=1, num_kv_heads=1, head_dim=32, block_size=16, kv_format="float32")


def constant(n: int, value: float) -> np.ndarray:
    return np.full((n, 1, 32), value, np.float32)


def test_slots_that_change_while_they_are_stored() -> None:
    # SPEC F33: refused slots never receive a byte, even when the caller's buffer alternates
    n = 16 * 300
    with pc.PagedKVCache(SPEC, 700) as cache:
        mine, theirs = cache.open(range(n)), cache.open(range(1, n + 1))
        mine.prepare(n)
        theirs.append(0, constant(n, 7), constant(n, 7))
        theirs.commit(n)
        own, cached = mine.slot_mapping(0, n).copy(), theirs.slot_mapping(0, n).copy()
        wild = np.full(n, 10**12)
        slots, rows, stop = own.copy(), constant(n, 1), threading.Event()

        def change() -> None:
            while not stop.is_set():
                for state in (cached, own, wild):
                    slots[:] = state

        thread = threading.Thread(target=change)
        thread.start()
        try:
            stored = 0
            for _ in range(300):
                try:
                    cache.store(0, rows, rows, slots)
                    stored += 1
                except pc.SlotError:
                    pass
        finally:
            stop.set()
            thread.join()
        assert (theirs.gather(0)[0] == 7).all()
        cache.check()


@pytest.mark.parametrize("call", ["prepare", "commit", "append_tokens"])
def test_a_list_that_empties_itself(call: str) -> None:
    # SPEC section 7: no argument crashes the interpreter
    with pc.PagedKVCache(SPEC, 64) as cache:
        seqs = [cache.open([i]) for i in range(2)]

        class Emptying:
            def __index__(self) -> int:
                counts.clear()
                return 1

        counts: list = [Emptying(), 1]
        if call == "append_tokens":
            cache.append_tokens(seqs, [5, 6], counts)
            assert [seq.tokens.tolist() for seq in seqs] == [[0, 5], [1, 6]]
        elif call == "commit":
            cache.commit(seqs, counts)
            assert [seq.seq_len for seq in seqs] == [1, 1]
        else:
            assert len(cache.prepare(seqs, counts)) == 2
        assert counts == []
        cache.check()


def test_prepared_slots_cannot_be_changed() -> None:
    # SPEC F28a: a mapping is checked once, so it must stay as it was made
    with pc.PagedKVCache(SPEC, 8) as cache:
        mapping = cache.open(range(3)).prepare(3)
        with pytest.raises(ValueError):
            mapping.slots.flags.writeable = True
        with pytest.raises(ValueError):
            mapping.slots[0] = 99
        array = np.array(mapping)
        array[0] = 99
        assert mapping.slots.tolist() == [0, 1, 2]


def test_the_pool_frees_only_what_it_handed_out() -> None:
    # SPEC F13: a sequence's references are not the pool user's to give back
    with pc.PagedKVCache(SPEC, 8) as cache:
        seq = cache.open(range(32))
        lent = cache.pool.allocate(2)
        cache.pool.touch(seq.block_table[:1])
        cache.check()
        for ids in (seq.block_table, [int(seq.block_table[1])], [int(lent[0])] * 2):
            before = [cache.pool.ref_count(b) for b in range(8)]
            with pytest.raises(pc.BlockError):
                cache.pool.free(ids)
            assert [cache.pool.ref_count(b) for b in range(8)] == before
        with pytest.raises(pc.BlockError, match="only sequences hold it"):
            cache.pool.free_one(int(seq.block_table[1]))
        cache.pool.free(seq.block_table[:1])                # the reference that touch() took
        seq.free()
        cache.pool.free(lent)
        one = cache.pool.allocate_one()
        cache.pool.free_one(one)
        cache.check()
        assert cache.pool.num_used_blocks == 0


def test_copies_nobody_needs_are_not_owed() -> None:
    # SPEC F48: a fork that is dropped before the engine copied leaves nothing behind
    with pc.PagedKVCache(SPEC, 4, storage=None) as cache:
        parent = cache.open(range(20))
        parent.commit(20)
        for _ in range(10):
            child = parent.fork()
            child.prepare(1)
            assert cache.stats().pinned == 2
            child.free()
            assert cache.stats().pinned == 0
            cache.check()
        child = parent.fork()
        child.prepare(1)
        grandchild = child.fork()
        grandchild.prepare(1)                   # a chain: its source is the child's own copy
        child.free()                            # still needed as the chain's middle
        cache.check()
        rounds = []
        while True:
            pairs, ticket = cache.take_block_copies()
            if not len(pairs):
                break
            rounds.append(pairs.tolist())
            cache.copies_done(ticket)
        assert len(rounds) == 2
        assert rounds[0][0][1] == rounds[1][0][0]
        assert rounds[1][0][1] == grandchild.block_table[1]
        grandchild.commit(1)
        cache.check()
        assert cache.stats().pinned == 0
