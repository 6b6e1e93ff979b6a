"""Blocks given back many at a time end as if each had been given back by itself."""

from __future__ import annotations

import numpy as np
import pytest
from cachekit import by_profile

import pagedcache as pc
from pagedcache.bookkeeping import Ledger

B = 4


def order(pool: pc.BlockPool) -> list[int]:
    """The ids that are free, in the order in which they are handed out."""
    taken = pool.allocate(pool.num_free_blocks)
    pool.free(taken)
    return taken.tolist()


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("seed", range(by_profile(4, 40)))
def test_free_of_many_is_free_of_each(queued, seed):
    # SPEC F10: blocks freed in one call, in the order of the ids
    rng = np.random.default_rng(seed)
    together, single = (Ledger(64, B, queued=queued).pool for _ in range(2))
    held: list[int] = []
    for _ in range(200):
        choice = rng.integers(3)
        if choice == 0:
            ids = together.allocate(int(rng.integers(together.num_free_blocks + 1)))
            assert ids.tolist() == [single.allocate_one() for _ in ids]
            held += ids.tolist()
        elif choice == 1 and held:
            ids = rng.choice(held, size=rng.integers(1, 4)).astype(np.int32)
            together.touch(ids)
            single.touch(ids)
            held += ids.tolist()
        else:
            rng.shuffle(held)
            ids = np.array(held[: rng.integers(len(held) + 1)], np.int32)
            del held[: len(ids)]
            together.free(ids)
            for block in ids:
                single.free_one(block)
        assert together.stats() == single.stats()
        assert together.steps == single.steps
    together.check()
    assert order(together) == order(single)


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize(
    ("before", "bad"),
    [
        *((n, bad) for n in (0, 3) for bad in ("twice", "never", "far", "negative", "lent")),
        (3, "free"),
    ],
)
def test_a_bad_id_behind_good_ones_changes_nothing(queued, before, bad):
    # CASE C4: the ids before it are held again, and the lists are as they were
    ledger = Ledger(32, B, queued=queued)
    pool = ledger.pool
    seq = ledger.open(np.arange(2 * B, dtype=np.uint32))
    ids = pool.allocate(12)
    pool.free(ids[8 : 8 + before])  # blank blocks that the list must go on with
    held = ids[:8]
    pool.touch(held[4:5])
    wrong = {
        "twice": held[0], "never": 31, "far": 32, "negative": -1, "free": ids[8],
        "lent": seq.block_table()[0],
    }[bad]
    counts, stats = [pool.ref_count(b) for b in range(32)], pool.stats()
    with pytest.raises(pc.BlockError):
        pool.free([*held, wrong])
    assert [pool.ref_count(b) for b in range(32)] == counts
    assert pool.stats() == stats
    pool.check()
    pool.free(held)  # each once, and the loans were put back
    with pytest.raises(pc.BlockError):
        pool.free(held[:1])
    assert pool.ref_count(held[4]) == 1
    expected = ids[8 : 8 + before].tolist() + [b for b in held.tolist() if b != held[4]]
    free = order(pool)
    never = [b for b in range(32) if b >= 14]
    assert free == (never + expected if queued else expected[::-1] + never)


def lru(ledger: Ledger) -> list[int]:
    """Cached-free ids, the least recently used first; takes all blocks."""
    pool = ledger.pool
    blank = pool.num_free_blocks - pool.num_idle_blocks
    return pool.allocate(pool.num_free_blocks)[blank:].tolist()


def filled(ledger: Ledger, *tokens):
    seq = ledger.open(np.array(tokens, np.uint32))
    ledger.commit(seq, len(tokens) - seq.seq_len)
    return seq


def probe(ledger: Ledger, *tokens) -> int:
    return ledger.probe(np.array(tokens, np.uint32))


def test_cached_blocks_are_evicted_from_the_tail():
    # SPEC F14
    ledger = Ledger(16, B)
    first, second = filled(ledger, *range(3 * B)), filled(ledger, *range(100, 100 + 4 * B))
    a, b = first.block_table().tolist(), second.block_table().tolist()
    ledger.free(second)
    ledger.free(first)
    ledger.check()
    assert lru(ledger) == b[::-1] + a[::-1]


def test_a_shared_head_stays_and_goes_last():
    # SPEC F14: the tail is idle first; the head, which another sequence holds, only after that
    ledger = Ledger(16, B)
    first = filled(ledger, *range(4 * B))
    second = filled(ledger, *range(2 * B), *range(50, 50 + 2 * B))
    a, b = first.block_table().tolist(), second.block_table().tolist()
    assert a[:2] == b[:2]
    ledger.free(first)
    assert [ledger.pool.ref_count(x) for x in a] == [1, 1, 0, 0]
    ledger.check()
    ledger.free(second)
    ledger.check()
    assert lru(ledger) == [a[3], a[2], b[3], b[2], b[1], b[0]]


@pytest.mark.parametrize("first", [0, 1])
def test_a_copy_of_a_cached_block_is_blank_at_once(first):
    # SPEC F14: of two copies of one prefix the first freed holds nothing, and stays reachable
    ledger = Ledger(16, B)
    tokens = np.arange(3 * B, dtype=np.uint32)
    seqs = [ledger.open(tokens), ledger.open(tokens)]
    for seq in seqs:
        ledger.commit(seq, 3 * B)
    tables = [seq.block_table().tolist() for seq in seqs]
    assert set(tables[0]).isdisjoint(tables[1])
    ledger.free(seqs[first])
    ledger.check()
    assert ledger.pool.num_idle_blocks == 0
    assert probe(ledger, *tokens, 0) == 3 * B
    ledger.free(seqs[1 - first])
    ledger.check()
    assert lru(ledger) == tables[1 - first][::-1]


def test_the_tail_of_one_copy_behind_the_head_of_another():
    # SPEC F14: the parent of the tail's node is canonically another sequence's block
    ledger = Ledger(16, B)
    head = np.arange(2 * B, dtype=np.uint32)
    longer = np.arange(4 * B, dtype=np.uint32)
    a, b = ledger.open(head), ledger.open(longer)
    ledger.commit(a, 2 * B)
    ledger.commit(b, 4 * B)
    table, other = b.block_table().tolist(), a.block_table().tolist()
    ledger.free(b)  # its tail becomes idle while the head of ``a`` is in use
    ledger.check()
    assert ledger.pool.num_idle_blocks == 2
    ledger.free(a)
    ledger.check()
    assert lru(ledger) == table[:1:-1] + other[::-1]


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_a_block_that_is_pinned_longer_goes_before_its_parent(kept):
    # SPEC F14, SPEC F32: no ancestor is evicted before its descendant
    ledger = Ledger(16, B)
    seq = filled(ledger, *range(4 * B))
    table = seq.block_table().tolist()
    pin = ledger.pin_range(seq, kept * B, (kept + 1) * B)
    ledger.free(seq)
    ledger.check()
    assert ledger.pool.num_idle_blocks == 3
    pin.release()
    ledger.check()
    assert lru(ledger) == table[::-1]


def test_a_cached_block_behind_another_parent():
    # SPEC F14: the table's third block is cached behind a block that the table no longer holds
    ledger = Ledger(16, B)
    seq = filled(ledger, *range(3 * B))
    old = seq.block_table().tolist()
    ledger.set_computed(seq, B)  # the blocks stay, the tokens past the first are forgotten
    ledger.append_tokens(seq, np.arange(200, 200 + B, dtype=np.uint32))
    ledger.prepare([seq], [B])
    ledger.commit(seq, B)
    new = seq.block_table().tolist()
    assert new[::2] == old[::2] and new[1] != old[1]
    assert ledger.pool.is_cached(new[1]) and ledger.pool.is_cached(new[2])
    ledger.free(seq)
    ledger.check()
    assert probe(ledger, *range(B), *range(200, 200 + B), 0) == 2 * B
    assert probe(ledger, *range(3 * B), 0) == 3 * B
    blocks = lru(ledger)
    assert sorted(blocks) == sorted({*old, *new})
    assert blocks.index(old[2]) < blocks.index(old[1]) < blocks.index(old[0])


def test_a_block_that_outlives_its_child_and_its_parent():
    # SPEC F14: the parent was idle before the child, and the pinned block between them comes last
    ledger = Ledger(16, B)
    seq = filled(ledger, *range(3 * B))
    parent, middle, child = seq.block_table().tolist()
    ledger.make_writable(seq, 0)  # the sequence has a copy of its first block now
    assert ledger.pool.num_idle_blocks == 1
    pin = ledger.pin_range(seq, B, 2 * B)
    ledger.free(seq)
    pin.release()
    ledger.check()
    assert lru(ledger) == [child, middle, parent]


def test_a_shared_block_between_blocks_that_are_given_back():
    # SPEC F14: as before, and the sequence's head is cached behind nothing that the others know
    ledger = Ledger(16, B)
    seq = filled(ledger, *range(3 * B))
    parent, middle, child = seq.block_table().tolist()
    ledger.set_computed(seq, 0)  # the blocks stay, under another head
    ledger.append_tokens(seq, np.arange(200, 200 + B, dtype=np.uint32))
    ledger.prepare([seq], [B])
    ledger.commit(seq, B)
    head = seq.block_table().tolist()[0]
    twin = ledger.fork(seq)
    ledger.truncate(twin, 2 * B)
    ledger.make_writable(twin, 0)  # a head of its own
    assert [ledger.pool.ref_count(b) for b in (parent, head, middle, child)] == [0, 1, 2, 1]
    ledger.free(seq)
    assert [ledger.pool.ref_count(b) for b in (head, middle, child)] == [0, 1, 0]
    ledger.free(twin)
    ledger.check()
    blocks = lru(ledger)
    assert sorted(blocks) == sorted([parent, middle, child, head])
    assert blocks.index(child) < blocks.index(middle) < blocks.index(parent)


def test_truncate_releases_as_free_does():
    # SPEC F14
    ledger = Ledger(16, B)
    seq = filled(ledger, *range(5 * B))
    table = seq.block_table().tolist()
    ledger.truncate(seq, 2 * B)
    ledger.check()
    assert ledger.pool.num_idle_blocks == 3
    assert probe(ledger, *range(5 * B), 0) == 5 * B
    ledger.free(seq)
    ledger.check()
    assert lru(ledger) == table[::-1]
