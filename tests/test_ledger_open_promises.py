"""Open slots are promised with the blocks of a prompt: writing what a sequence was opened for finds
one, whatever other sequences do meanwhile."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import profiles
import pytest
from ledgerkit import Kit

from pagedcache import OutOfBlocksError, OutOfOpenBlocksError


def write_in_steps(kit: Kit, seq: Any, values: list[int], steps: list[int]) -> None:
    at = seq.seq_len
    for n in steps:
        kit.write(seq, values[at : at + n])
        kit.ledger.check()
        at += n


@pytest.mark.parametrize("steps", [[20], [1] * 20, [3] * 6 + [2], [5] * 4, [7, 7, 6], [4] * 5])
def test_what_was_opened_can_be_written_whatever_others_do(steps: list[int]) -> None:
    # SPEC F22
    kit = Kit(num_open=6)
    seq = kit.open(range(20))
    greedy = []
    with pytest.raises(OutOfOpenBlocksError):
        while True:
            greedy.append(kit.open())
            kit.write(greedy[-1], [1])
    assert len(greedy) == 5  # the last one could not write
    kit.ledger.free(greedy.pop())
    write_in_steps(kit, seq, list(range(20)), steps)
    assert kit.read(seq) == list(range(20))


def test_prompts_that_could_not_be_written_are_refused() -> None:
    # SPEC F22
    kit = Kit(num_open=5)
    first, second = kit.open(range(20)), kit.open(range(100, 120))
    before, free = kit.counts(), kit.ledger.pool.num_free_blocks
    with pytest.raises(OutOfOpenBlocksError) as error:
        kit.open(range(200, 220))
    assert (error.value.needed, error.value.available, error.value.total) == (2, 1, 5)
    assert kit.counts() == before and kit.ledger.pool.num_free_blocks == free
    third = kit.open(range(200, 203))  # within one block: one slot
    kit.ledger.free(first)
    kit.ledger.truncate(second, 4)
    assert second.num_tokens == 4
    assert kit.open(range(300, 320)) and kit.ledger.check() is None
    assert third.seq_len == 0


def test_blocks_are_sealed_at_once_where_slots_are_promised() -> None:
    # SPEC F22
    kit = Kit(num_open=2)
    seq = kit.open(range(11))
    kit.write(seq, [0, 1, 2])
    kit.write(seq, [3, 4, 5])
    assert kit.is_open(seq) == [False, True, False]  # not one block behind the end, and yet sealed
    kit.write(seq, [6, 7, 8, 9, 10])
    assert kit.read(seq) == list(range(11))
    kit.ledger.check()


def test_promises_are_kept_behind_a_shared_prompt() -> None:
    # SPEC F22
    kit = Kit(num_open=4, partial_block_reuse=1)
    first = kit.open(range(12))
    kit.write(first, range(12))
    second = kit.open([*range(10), 50, 51, 52, 53])  # 8 shared, 2 copied into a slot of its own
    assert second.num_cached_tokens == 10
    others = [kit.open() for _ in range(2)]
    for other in others:
        kit.write(other, [9])
    with pytest.raises(OutOfOpenBlocksError):
        kit.write(kit.open(), [9])
    kit.write(second, [50, 51, 52])  # fills the copy and begins another
    assert kit.read(second) == [*range(10), 50, 51, 52]
    kit.ledger.check()


def test_a_single_slot_is_too_few_for_a_prompt_of_several_blocks() -> None:
    # SPEC F22
    kit = Kit(num_open=1)
    with pytest.raises(OutOfOpenBlocksError) as error:
        kit.open(range(5))
    assert error.value.fits_never
    kit.write(kit.open(range(4)), range(4))
    kit.ledger.check()


def test_a_copy_that_fails_gives_its_promise_back() -> None:
    # SPEC F22 F40
    kit = Kit(num_open=2, partial_block_reuse=1)
    first = kit.open(range(8))
    kit.write(first, range(8))
    kit.places.fail = True
    for _ in range(5):
        with pytest.raises(Exception, match="no bytes"):
            kit.open([0, 1, 2, 3, 4, 5, 9, 9])
        kit.ledger.check()
    kit.places.fail = False
    assert kit.open(range(100, 120)).num_tokens == 20


class Crowd:
    """Sequences that were opened for tokens, which must always find slots, and others that take
    what they get."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.size = self.rng.choice([1, 2, 4])
        self.kit = Kit(40, self.size, self.rng.choice([2, 3, 5, 8]), partial_block_reuse=1)
        self.opened: list[tuple[Any, list[int]]] = []
        self.greedy: list[Any] = []
        self.refused = self.written = 0

    def open(self) -> None:
        tokens = [self.rng.randrange(2) for _ in range(self.rng.randrange(1, 6 * self.size + 2))]
        self.opened.append((self.kit.open(tokens), tokens))

    def write_opened(self) -> None:
        unfinished = [pair for pair in self.opened if pair[0].seq_len < len(pair[1])]
        chosen = self.rng.sample(unfinished, min(len(unfinished), self.rng.choice([1, 1, 3])))
        counts = [self.rng.randint(1, len(tokens) - seq.seq_len) for seq, tokens in chosen]
        try:
            mapping = self.kit.ledger.prepare([seq for seq, _ in chosen], counts)
        except OutOfBlocksError as error:
            raise AssertionError("it was opened for this") from error
        with self.kit.ledger.pin_mapping(mapping) as pin:
            values = [t for (seq, tokens), n in zip(chosen, counts, strict=True)
                      for t in tokens[seq.seq_len : seq.seq_len + n]]  # fmt: skip
            self.kit.places.store(pin.slots, np.asarray(values, np.int64))
        for (seq, _), n in zip(chosen, counts, strict=True):
            self.kit.ledger.commit(seq, n)
        self.written += sum(counts)

    def grow(self) -> None:
        if not self.greedy or self.rng.random() < 0.4:
            self.greedy.append(self.kit.open())
        seq = self.rng.choice(self.greedy)
        self.kit.write(seq, [self.rng.randrange(2) for _ in range(self.rng.randint(1, 5))])

    def fork(self) -> None:
        if self.greedy:
            self.greedy.append(self.kit.ledger.fork(self.rng.choice(self.greedy)))

    def cut(self) -> None:
        if self.greedy:
            seq = self.rng.choice(self.greedy)
            self.kit.ledger.truncate(seq, self.rng.randint(0, seq.seq_len))

    def free(self) -> None:
        if self.greedy and self.rng.random() < 0.5:
            self.kit.ledger.free(self.greedy.pop(self.rng.randrange(len(self.greedy))))
        elif self.opened:
            self.kit.ledger.free(self.opened.pop(self.rng.randrange(len(self.opened)))[0])

    def step(self) -> None:
        action = self.rng.choice([self.open, self.grow, self.grow, self.fork, self.cut, self.free])
        try:
            action()
        except OutOfBlocksError as error:
            self.refused += isinstance(error, OutOfOpenBlocksError)
        self.write_opened()
        self.kit.ledger.check()
        for seq, tokens in self.opened:
            assert self.kit.read(seq) == tokens[: seq.seq_len]


def test_a_crowd_never_takes_what_was_promised() -> None:
    # SPEC F22
    refused = written = 0
    seeds = profiles.scaled(60, 8)
    for seed in range(seeds):
        crowd = Crowd(seed)
        for _ in range(150):
            crowd.step()
        refused, written = refused + crowd.refused, written + crowd.written
    assert refused > 5 * seeds and written > 10 * seeds  # both have happened, and often
