"""``cache.step``: the bookkeeping between two forward passes of a batch in one call."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from cachekit import assert_holds, by_profile, make_cache, rows, snapshot
from ledgerkit import Kit

import pagedcache as pc

B = 4


def tokens(values: Any) -> np.ndarray:
    return np.asarray(values, np.uint32)


class Held:
    """A sequence in two ledgers, and what a list says of it."""

    def __init__(self, states: list[Any], named: list[int]) -> None:
        self.states, self.named = states, named
        self.computed = states[0].seq_len
        self.prepared = self.computed


def pending(s: Held) -> int:
    return max(0, min(len(s.named), s.prepared) - s.computed)


class Pair:
    """The same history twice: batch steps in one call, and in the three that it stands for."""

    def __init__(self, seed: int, num_open: int) -> None:
        self.rng = random.Random(seed)
        self.kits = [Kit(24, B, num_open) for _ in range(2)]
        self.held: list[Held] = []
        self.refused = 0

    def open(self) -> None:
        head = self.rng.choice([0, 500])
        prompt = [head + i for i in range(self.rng.randint(1, 14))]
        try:
            states = [self.kits[0].open(prompt)]
        except pc.OutOfBlocksError:
            with pytest.raises(pc.OutOfBlocksError):
                self.kits[1].open(prompt)
            return
        states.append(self.kits[1].open(prompt))
        assert states[0].seq_len == states[1].seq_len
        self.held.append(Held(states, prompt))

    def fork(self) -> None:
        if self.held:
            s = self.rng.choice(self.held)
            twins = [
                kit.ledger.fork(state) for kit, state in zip(self.kits, s.states, strict=True)
            ]
            child = Held(twins, list(s.named))
            child.computed, child.prepared = s.computed, s.prepared
            self.held.append(child)

    def free(self) -> None:
        if self.held:
            s = self.held.pop(self.rng.randrange(len(self.held)))
            for kit, state in zip(self.kits, s.states, strict=True):
                kit.ledger.free(state)

    def reject(self) -> None:
        """Drop the last drafts."""
        for s in self.held:
            if pending(s) > 1 and self.rng.random() < 0.5:
                keep = s.computed + self.rng.randint(1, pending(s) - 1)
                for kit, state in zip(self.kits, s.states, strict=True):
                    kit.ledger.truncate(state, keep)
                del s.named[keep:]
                s.prepared = min(s.prepared, keep)

    def step(self) -> None:
        batch = self.rng.sample(self.held, self.rng.randint(0, len(self.held)))
        counts = [self.rng.choice([1, 1, 1, 2, 5]) for _ in batch]
        done = [pending(s) for s in batch]
        ends = [s.computed + n + c for s, n, c in zip(batch, done, counts, strict=True)]
        new = [[self.rng.randrange(9) for _ in range(max(0, end - len(s.named)))]
               for s, end in zip(batch, ends, strict=True)]
        flat = tokens([t for each in new for t in each])
        one, three = ([s.states[i] for s in batch] for i in range(2))
        ledger, other = self.kits[0].ledger, self.kits[1].ledger
        before = self.shot(0)
        try:
            other.commit_many(three, done)
        except pc.PagedCacheError as error:  # forks that disagree
            with pytest.raises(type(error)):
                ledger.step(one, flat, counts)
            assert self.shot(0) == before
            self.refused += 1
            return
        try:
            expected = other.prepare(three, counts)
        except pc.OutOfBlocksError as error:
            with pytest.raises(type(error)):
                ledger.step(one, flat, counts)
            self.refused += 1
            if not isinstance(error, pc.OutOfOpenBlocksError):
                assert self.shot(0) == before
                ledger.commit_many(one, done)  # as the other did
            for s, n in zip(batch, done, strict=True):
                s.computed += n
            return
        other.append_many(three, flat, [len(each) for each in new])
        mapping = ledger.step(one, flat, counts)
        assert len(mapping) == len(expected) == sum(counts)
        for s, n, end, more in zip(batch, done, ends, new, strict=True):
            s.computed += n
            s.prepared = end
            s.named += more
        self.store(batch, counts, mapping, expected)

    def store(self, batch: list[Held], counts: list[int], *mappings: Any) -> None:
        """What stands for a forward pass."""
        values = [
            v for s, n in zip(batch, counts, strict=True) for v in s.named[s.computed :][:n]
        ]
        for kit, mapping in zip(self.kits, mappings, strict=True):
            with kit.ledger.pin_mapping(mapping) as pin:
                kit.places.store(pin.slots, np.array(values, np.int64))

    def shot(self, i: int) -> Any:
        kit = self.kits[i]
        return kit.counts(), [
            (s.states[i].seq_len, s.states[i].num_tokens, s.states[i].block_table().tolist(),
             s.states[i].tokens().tolist(), s.states[i].num_prepared)
            for s in self.held
        ]

    def look(self) -> None:
        for i, kit in enumerate(self.kits):
            kit.ledger.check()
            for s in self.held:
                state = s.states[i]
                assert state.seq_len == s.computed
                assert state.tokens().tolist() == s.named
                assert kit.read(state) == s.named[: s.computed]
        assert all(s.states[0].num_prepared == s.computed + pending(s) for s in self.held)


@pytest.mark.parametrize("num_open", [0, 3, 8])
def test_a_step_is_commit_names_and_slots(num_open):
    # SPEC F25 F27: every token reads as it was written, by both ways alike
    refused = 0
    for seed in range(by_profile(6, 60)):
        pair = Pair(100 * num_open + seed, num_open)
        for _ in range(60):
            action = pair.rng.choice(
                [pair.open, pair.fork, pair.free, pair.reject, *[pair.step] * 6]
            )
            action()
            pair.look()
        refused += pair.refused
    assert refused


def test_the_slots_and_tokens_of_a_decode_loop():
    # SPEC F27: three sequences decode three tokens; nothing is committed before its step is over
    cache = make_cache(16, B=B, storage=None)
    seqs = [cache.open(range(10 * i, 10 * i + 3 + i)) for i in range(3)]
    cache.prepare(seqs, [3, 4, 5])
    for step in range(3):
        mapping = cache.step(seqs, [70 + step, 80 + step, 90 + step])
        assert [seq.seq_len for seq in seqs] == [3 + step, 4 + step, 5 + step]
        assert mapping.slots.tolist() == [
            int(seq.block_table[(3 + i + step) // B]) * B + (3 + i + step) % B
            for i, seq in enumerate(seqs)
        ]
        assert not mapping.slots.flags.writeable
    assert seqs[2].tokens.tolist() == [20, 21, 22, 23, 24, 90, 91, 92]
    assert cache.probe([20, 21, 22, 23, 24, 90, 91, 92, 0]) == 4
    cache.commit(seqs, [1, 1, 1])  # the last step's tokens, by hand
    assert cache.probe([20, 21, 22, 23, 24, 90, 91, 92, 0]) == 8
    cache.step(seqs, [1, 2, 3])
    assert [seq.seq_len for seq in seqs] == [6, 7, 8]  # nothing was left to commit
    cache.check()


def test_a_long_decode_keeps_every_token():
    # SPEC F25: tables and histories grow on the way
    cache = make_cache(400, B=B, storage=None)
    seqs = [cache.open([i]) for i in range(3)]
    cache.prepare(seqs, [1, 1, 1])
    for step in range(500):
        cache.step(seqs, [3 * step, 3 * step + 1, 3 * step + 2])
    for i, seq in enumerate(seqs):
        assert seq.tokens.tolist() == [i, *range(i, 1500, 3)]
        assert seq.seq_len == 500
        assert cache.probe([*seq.tokens.tolist()[:500], 0]) == 500
    cache.check()


def test_prompts_in_pieces_beside_decoding_sequences():
    # SPEC F27: known tokens take no name, so one call serves both
    cache = make_cache(16, B=B, storage=None)
    reader = cache.open(range(10))
    decoder = cache.open(range(100, 103))
    cache.prepare([decoder], [3])
    first = cache.step([reader, decoder], [7], [4, 1])
    assert len(first) == 5
    assert (reader.seq_len, decoder.seq_len) == (0, 3)
    cache.step([decoder, reader], [8], [1, 6])
    assert (reader.seq_len, decoder.seq_len) == (4, 4)
    cache.step([reader, decoder], [50, 51, 9], [2, 1])
    assert (reader.seq_len, decoder.seq_len) == (10, 5)
    assert reader.tokens.tolist() == [*range(10), 50, 51]
    assert decoder.tokens.tolist() == [100, 101, 102, 7, 8, 9]
    with pytest.raises(pc.InvalidArgumentError, match="tokens: 2 of the next positions"):
        cache.step([reader, decoder], [1])
    assert (reader.seq_len, decoder.seq_len) == (10, 5)
    assert len(cache.step([], [])) == 0


def test_rejected_drafts_are_cut_before_the_step():
    # SPEC F27
    cache = make_cache(16, B=B, storage=None)
    seq = cache.open(range(3))
    cache.prepare([seq], [3])
    cache.step([seq], [3, 4, 5, 6], [4])  # one token and three drafts
    seq.truncate(5)  # the second and third draft were wrong
    cache.step([seq], [60])
    assert seq.seq_len == 5
    assert seq.tokens.tolist() == [0, 1, 2, 3, 4, 60]


def test_a_step_that_does_not_fit_changes_nothing():
    # SPEC F27 F11: then somebody is preempted, and the same call works
    cache = make_cache(4, B=B, storage=None)
    seqs = [cache.open(range(8)), cache.open(range(20, 28))]
    cache.prepare(seqs, [8, 8])
    before = snapshot(cache, *seqs, prompts=[list(range(8)) + [0]])
    with pytest.raises(pc.OutOfBlocksError) as error:
        cache.step(seqs, [1, 2])
    assert (error.value.needed, error.value.available, error.value.total) == (2, 0, 4)
    assert snapshot(cache, *seqs, prompts=[list(range(8)) + [0]]) == before
    seqs[1].free()
    assert len(cache.step(seqs[:1], [1])) == 1
    assert seqs[0].seq_len == 8
    short = make_cache(4, B=B, storage=None, max_seq_len=8)
    seq = short.open(range(8))
    short.prepare([seq], [8])
    with pytest.raises(pc.SequenceTooLongError):
        short.step([seq], [1])
    assert seq.seq_len == 0


@pytest.mark.parametrize(("fmt", "open_blocks"), [("float32", None), ("q4k", "float16")])
def test_a_decode_loop_with_bytes(fmt, open_blocks):
    # SPEC F27 F18: what is stored between two steps is what is read
    cache = make_cache(16, B=B, layers=2, dim=32, fmt=fmt, open_blocks=open_blocks)
    prompts = [[1, 2, 3], [21, 22, 23, 24, 25]]
    seqs = [cache.open(prompt) for prompt in prompts]
    mapping = cache.step(seqs, [], [3, 5])
    marks = [[*prompts[0]], [*prompts[1]]]
    new = [*prompts[0], *prompts[1]]
    for step in range(9):
        for layer in range(2):
            cache.store(layer, *rows(cache.spec, layer, new), mapping)
        new = [40 + step, 60 + step]
        mapping = cache.step(seqs, new)
        for seq, mine, mark in zip(seqs, marks, new, strict=True):
            assert seq.seq_len == len(mine)
            mine.append(mark)
    if fmt == "float32":
        for seq, mine in zip(seqs, marks, strict=True):
            assert_holds(cache, seq, mine[:-1])
    cache.check()
    assert cache.probe([*marks[1], 0]) == (12 if fmt == "float32" else 8)


def test_an_own_append_that_is_not_over_is_refused():
    # SPEC F25: bytes of every layer come first, as for commit
    cache = make_cache(8, B=B, layers=2)
    seq = cache.open(range(3))
    k, v = rows(cache.spec, 0, range(1, 4))
    seq.append(0, k, v)
    with pytest.raises(pc.InvalidPositionError):
        cache.step([seq], [9])
    seq.append(1, *rows(cache.spec, 1, range(1, 4)))
    cache.step([seq], [9])
    assert seq.seq_len == 3


def test_a_copy_that_fails_leaves_the_step_undone():
    # SPEC F27 F23: two forks write to one block, so one of them needs a copy of it
    kit = Kit(8, B, 0)
    seq = kit.open(range(6))
    kit.write(seq, range(6))
    child = kit.ledger.fork(seq)
    kit.ledger.step([seq], tokens([6]))  # copies for the first of the two
    state = kit.counts(), seq.block_table().tolist(), child.block_table().tolist()
    grand = kit.ledger.fork(child)
    kit.places.fail = True
    with pytest.raises(pc.PagedCacheError, match="no bytes move today"):
        kit.ledger.step([seq, child, grand], tokens([7, 8, 9]))
    kit.ledger.check()
    kit.ledger.free(grand)
    counts = dict(kit.counts())
    for name in ("sequences_allocated", "sequences_freed", "blocks_allocated", "blocks_freed"):
        counts[name] = state[0][name]
    assert (counts, seq.block_table().tolist(), child.block_table().tolist()) == state
    assert (seq.seq_len, child.seq_len, seq.num_known, child.num_known) == (6, 6, 7, 6)


def test_where_open_slots_are_missing_the_commit_stands():
    # SPEC F30: a block becomes full by the commit, which frees no slot; the next one needs a slot
    kit = Kit(16, B, 2)
    seqs = [kit.open(), kit.open()]
    kit.write(seqs[0], range(7))
    kit.write(seqs[1], range(100, 107))
    kit.ledger.step(seqs, tokens([7, 107]))
    pins = [kit.ledger.pin_range(seq, B, 2 * B) for seq in seqs]  # not sealed meanwhile
    with pytest.raises(pc.OutOfOpenBlocksError):
        kit.ledger.step(seqs, tokens([8, 108]))
    assert [seq.seq_len for seq in seqs] == [8, 8]
    assert [seq.num_known for seq in seqs] == [8, 8]
    for pin in pins:
        pin.release()
    kit.ledger.step(seqs, tokens([8, 108]))
    assert [seq.seq_len for seq in seqs] == [8, 8]
    assert [seq.num_known for seq in seqs] == [9, 9]
    kit.ledger.check()
