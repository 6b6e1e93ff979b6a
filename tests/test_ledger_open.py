"""Open blocks in the bookkeeping: which blocks get a slot, when they are sealed and cached, and
that every token is found where it was written. Here the bytes are the numbers of the tokens."""

from __future__ import annotations

import random

import numpy as np
import profiles
import pytest
from ledgerkit import Kit

from pagedcache import (
    InvalidArgumentError,
    OutOfBlocksError,
    OutOfOpenBlocksError,
    PagedCacheError,
    SlotError,
    StaleMappingError,
)
from pagedcache.bookkeeping import Ledger


def test_what_one_write_fills_is_sealed_at_once_and_a_tail_is_open() -> None:
    kit = Kit()
    seq = kit.open()
    kit.write(seq, range(10))
    assert kit.is_open(seq) == [False, False, True]
    assert kit.places.copies == []  # nothing was ever opened and sealed
    assert kit.read(seq) == list(range(10))
    assert kit.ledger.stats()["open_blocks"] == kit.ledger.open_in_use == 1
    kit.ledger.check()


def test_a_block_is_sealed_once_when_it_is_a_block_behind_the_end() -> None:
    kit = Kit()
    seq = kit.open()
    history = []
    for token in range(17):
        kit.write(seq, [token])
        history.append(kit.is_open(seq))
        kit.ledger.check()
    assert history[3] == [True]
    assert history[4] == [True, True]
    assert history[6] == [True, True]
    assert history[7] == [False, True]  # 8 tokens: the first block is 4 tokens behind the end
    assert history[11] == [False, False, True]
    assert history[16] == [False, False, False, True, True]
    assert kit.ledger.stats()["blocks_sealed"] == 3
    assert kit.ledger.stats()["blocks_reopened"] == 0
    assert [rows for _, _, rows in kit.places.copies] == [4, 4, 4]
    assert kit.read(seq) == list(range(17))


def test_rejected_drafts_do_not_seal_and_reopen() -> None:
    kit = Kit()
    seq = kit.open()
    kit.write(seq, range(7))
    for _ in range(5):  # drafts across the block's end, all but one rejected
        kit.write(seq, [100, 101, 102], commit=True, name=False)
        kit.ledger.truncate(seq, 7)
    assert kit.ledger.stats()["blocks_sealed"] == 0
    assert kit.ledger.stats()["blocks_reopened"] == 0
    assert kit.read(seq) == list(range(7))
    kit.ledger.check()


def test_only_sealed_blocks_can_be_hit() -> None:
    kit = Kit()
    seq = kit.open()
    tokens = list(range(8))
    for token in tokens:
        kit.write(seq, [token])
    assert kit.ledger.probe(np.arange(9, dtype=np.uint32)) == 4
    kit.write(seq, [8, 9, 10, 11])  # sealed at once, yet behind an open block
    assert kit.ledger.probe(np.arange(13, dtype=np.uint32)) == 12
    kit.ledger.check()


def test_what_is_full_when_a_sequence_goes_is_sealed_and_cached() -> None:
    kit = Kit()
    seq = kit.open()
    for token in range(9):
        kit.write(seq, [token])
    assert kit.is_open(seq) == [False, True, True]
    kit.ledger.free(seq)
    assert kit.ledger.open_in_use == 0
    again = kit.open(range(9))
    assert again.num_cached_tokens == 8
    assert kit.read(again, 8) == list(range(8))
    kit.ledger.check()


def test_a_seal_that_fails_at_the_end_only_costs_the_cached_block() -> None:
    kit = Kit()
    seq = kit.open()
    for token in range(8):
        kit.write(seq, [token])
    kit.places.fail = True
    kit.ledger.free(seq)
    assert kit.ledger.open_in_use == 0
    assert kit.ledger.probe(np.arange(9, dtype=np.uint32)) == 4
    kit.ledger.check()


def test_a_commit_whose_seal_fails_changes_nothing() -> None:
    kit = Kit()
    seq = kit.open()
    for token in range(7):
        kit.write(seq, [token])
    kit.places.fail = True
    kit.write(seq, [7], commit=False)
    with pytest.raises(PagedCacheError, match="no bytes"):
        kit.ledger.commit(seq, 1)
    assert seq.seq_len == 7 and kit.is_open(seq) == [True, True]
    kit.ledger.check()
    kit.places.fail = False
    kit.ledger.commit(seq, 1)
    assert kit.is_open(seq) == [False, True]
    assert kit.read(seq) == list(range(8))


def test_a_rewritten_sealed_block_is_reopened_and_counted() -> None:
    kit = Kit()
    seq = kit.open()
    kit.write(seq, range(12), name=False)  # of unknown value: never cached, so its own
    kit.ledger.truncate(seq, 6)
    assert kit.is_open(seq) == [False, False]
    kit.write(seq, [60, 70, 80], name=False)
    assert kit.is_open(seq) == [False, True, True]
    assert kit.ledger.stats()["blocks_reopened"] == 1
    assert kit.read(seq) == [0, 1, 2, 3, 4, 5, 60, 70, 80]
    kit.ledger.check()


def test_a_cached_block_that_is_rewritten_is_copied_into_an_open_one() -> None:
    kit = Kit()
    seq = kit.open(range(12))
    kit.write(seq, range(12))
    kit.ledger.truncate(seq, 6)
    kit.write(seq, [60, 70, 80])
    assert kit.read(seq) == [0, 1, 2, 3, 4, 5, 60, 70, 80]
    assert kit.ledger.stats()["cow_copies"] == 1
    assert kit.ledger.stats()["blocks_reopened"] == 1
    assert kit.ledger.probe(np.arange(9, dtype=np.uint32)) == 8
    kit.ledger.check()


def test_a_partial_hit_lands_in_an_open_block() -> None:
    kit = Kit(num_open=1, partial_block_reuse=1)
    kit.write(kit.open(), range(8))
    again = kit.open([0, 1, 2, 3, 4, 5, 9, 9])
    assert again.num_cached_tokens == 6 and kit.is_open(again) == [False, True]
    assert kit.read(again) == [0, 1, 2, 3, 4, 5]
    before = kit.counts()
    with pytest.raises(OutOfOpenBlocksError):  # neither a copy nor a block filled in part
        kit.open([0, 1, 2, 3, 4, 5, 9, 9])
    assert kit.counts() == before
    kit.ledger.free(again)
    assert kit.open([0, 1, 2, 3, 4, 5, 9, 9]).num_cached_tokens == 6
    kit.ledger.check()


def test_no_slot_left_is_refused_with_nothing_changed() -> None:
    kit = Kit(num_open=2)
    held = [kit.open() for _ in range(3)]
    kit.write(held[0], [1])
    kit.write(held[1], [2])
    before = kit.ledger.stats()
    with pytest.raises(OutOfOpenBlocksError) as error:
        kit.ledger.prepare([held[2]], [1])
    assert (error.value.needed, error.value.available, error.value.total) == (1, 0, 2)
    assert isinstance(error.value, OutOfBlocksError) and not error.value.fits_never
    assert kit.ledger.stats() == before
    kit.write(held[2], [1, 2, 3, 4])  # a whole block needs none
    with pytest.raises(OutOfOpenBlocksError) as error:
        kit.ledger.prepare(held, [4, 4, 1])
    assert error.value.needed == 3 and error.value.fits_never
    kit.ledger.free(held[0])
    kit.write(held[2], [5])
    kit.ledger.check()


def test_full_blocks_are_sealed_early_where_slots_are_short() -> None:
    kit = Kit(num_open=3)
    a, b, c = kit.open(), kit.open(), kit.open()
    for token in range(6):
        kit.write(a, [token])  # two slots: one block waits to be a block behind the end
    kit.write(b, [50])
    assert kit.is_open(a) == [True, True] and kit.ledger.open_in_use == 3
    kit.write(c, [60])  # takes the slot of the block that waits
    assert kit.is_open(a) == [False, True]
    assert kit.ledger.stats()["blocks_sealed"] == 1
    assert [kit.read(s) for s in (a, b, c)] == [list(range(6)), [50], [60]]
    kit.ledger.check()
    kit.write(a, [6])
    assert kit.ledger.probe(np.arange(7, dtype=np.uint32)) == 4  # offered at the next commit
    with pytest.raises(OutOfOpenBlocksError):  # no block is full now
        kit.write(kit.open(), [70])
    kit.ledger.check()


def test_early_seals_spare_what_is_written_pinned_or_cut() -> None:
    kit = Kit(num_open=2)
    a, b = kit.open(), kit.open()
    for token in range(5):
        kit.write(a, [token], name=False)
    with kit.ledger.pin_range(a, 0, 4), pytest.raises(OutOfOpenBlocksError):
        kit.write(b, [50])
    kit.ledger.truncate(a, 2)  # its block is not full any more
    kit.write(a, [20, 30, 40], name=False)
    kit.ledger.truncate(a, 3)
    kit.write(b, [50])
    assert kit.is_open(a) == [True] and kit.is_open(b) == [True]
    assert kit.read(a) == [0, 1, 20]
    kit.places.fail = True
    kit.write(a, [41])
    with pytest.raises(PagedCacheError, match="no bytes"):  # the seal fails: nothing has changed
        kit.write(a, [42])
    assert a.seq_len == 4 and kit.is_open(a) == [True]
    kit.ledger.check()


def test_a_pinned_block_is_not_sealed_and_is_sealed_later() -> None:
    kit = Kit()
    seq = kit.open()
    for token in range(7):
        kit.write(seq, [token])
    with kit.ledger.pin_range(seq, 0, 4) as pin:
        place = pin.places.tolist()
        for token in (7, 8, 9):
            kit.write(seq, [token])
        assert kit.is_open(seq) == [True, True, True]
        assert pin.places.tolist() == place
        assert kit.places.rows[place[0]].tolist() == [0, 1, 2, 3]
        kit.ledger.check()
    kit.write(seq, [10])
    assert kit.is_open(seq) == [False, True, True]
    kit.write(seq, [11])
    assert kit.is_open(seq) == [False, False, True]
    assert kit.ledger.probe(np.arange(13, dtype=np.uint32)) == 8


def test_layers_that_fill_a_block_in_pieces_find_what_others_wrote_whole() -> None:
    kit = Kit(num_layers=2)
    seq = kit.open()
    start, pin = kit.ledger.begin_append(seq, 0, 4)
    kit.places.store(pin.slots, np.arange(4))
    kit.ledger.end_append(seq, 0, start, 4, pin)
    assert kit.is_open(seq) == [False]
    start, pin = kit.ledger.begin_append(seq, 1, 2)  # the other layer comes in two pieces
    assert kit.is_open(seq) == [True]
    assert (pin.slots // 4 == seq.places()[0]).all()
    kit.ledger.end_append(seq, 1, start, 2, pin)
    assert kit.read(seq, 4) == [0, 1, 2, 3]
    assert kit.ledger.stats()["blocks_reopened"] == 1
    kit.ledger.check()


def test_raw_slots_go_where_their_block_is() -> None:
    kit = Kit()
    seq = kit.open()
    kit.ledger.prepare([seq], [6])
    slots = seq.slot_mapping(0, 6)
    with kit.ledger.pin_slots(slots) as pin:
        assert pin.slots[:4].tolist() == slots[:4].tolist()
        assert (pin.slots[4:] // 4).tolist() == [int(seq.places()[1])] * 2
        assert seq.places()[1] >= 32
    with pytest.raises(SlotError, match="whole|all of it"):
        kit.ledger.pin_slots(slots[:3])
    with pytest.raises(SlotError):
        kit.ledger.pin_slots(slots[[1, 0, 2, 3]])


def test_a_mapping_made_before_a_block_was_sealed_is_stale() -> None:
    kit = Kit()
    seq = kit.open()
    mapping = kit.ledger.prepare([seq], [3])
    kit.ledger.commit(seq, 3)
    kit.ledger.prepare([seq], [5])
    kit.ledger.commit(seq, 5)
    assert kit.is_open(seq) == [False, False] or kit.is_open(seq) == [False, True]
    with pytest.raises(StaleMappingError):
        kit.ledger.pin_mapping(mapping)


def test_no_open_slots_and_too_many() -> None:
    with pytest.raises(InvalidArgumentError):
        Ledger(4, 4, num_open=-1)
    with pytest.raises(InvalidArgumentError):
        Ledger(4, 4, num_open=2**31)
    plain = Ledger(4, 4)
    assert (plain.num_open, plain.open_in_use) == (0, 0)


def test_pinning_what_many_sequences_read() -> None:
    kit = Kit()
    a, b = kit.open(), kit.open()
    kit.write(a, range(6))
    kit.write(b, range(50, 53))
    pin, indptr = kit.ledger.pin_reads([a, b, a], [6, 3, 4])
    with pin:
        assert indptr.tolist() == [0, 2, 3, 4]
        assert pin.block_ids.tolist() == [*a.block_table(), *b.block_table(), a.block_table()[0]]
        assert kit.places.rows[pin.places].reshape(-1).tolist()[:6] == list(range(6))
        assert kit.ledger.stats()["pinned"] == 3
    assert kit.ledger.stats()["pinned"] == 0
    with pytest.raises(IndexError):
        kit.ledger.pin_reads([a, b], [6, 5])
    kit.ledger.free(a)
    with pytest.raises(PagedCacheError):
        kit.ledger.pin_reads([b, a], [1, 1])
    assert kit.ledger.stats()["pinned"] == 0


@pytest.mark.parametrize("seed", range(profiles.scaled(30, 6)))
def test_random_histories(seed: int) -> None:
    """Every sequence reads what a list says, after each step; counts and slots agree."""
    rng = random.Random(seed)
    size = rng.choice([1, 2, 3, 4, 8])
    kit = Kit(num_blocks=24, block_size=size, num_open=rng.choice([2, 4, 24]),
              partial_block_reuse=rng.choice([0, 1]))
    live: list[tuple[object, list[int]]] = []
    pins: list[tuple[object, list[int], int]] = []
    for _ in range(300):
        action = rng.choice("oowwwwwwwtffFcdprR")
        try:
            if action == "o" and len(live) < 6:
                prompt = [rng.randrange(2) for _ in range(rng.randrange(3 * size + 2))]
                seq = kit.open(prompt)
                live.append((seq, prompt[: seq.num_cached_tokens]))
                if rng.random() < 0.8 and len(prompt) > seq.num_cached_tokens:
                    kit.write(seq, prompt[seq.num_cached_tokens :])
                    live[-1] = (seq, prompt)
            elif action == "w" and live:
                index = rng.randrange(len(live))
                seq, known = live[index]
                if seq.num_known != len(known):
                    continue
                values = [rng.randrange(2) for _ in range(rng.randrange(1, 2 * size + 2))]
                kit.write(seq, values)
                live[index] = (seq, known + values)
            elif action == "t" and live:
                index = rng.randrange(len(live))
                seq, known = live[index]
                keep = rng.randrange(len(known) + 1)
                kit.ledger.truncate(seq, keep)
                live[index] = (seq, known[:keep])
            elif action == "f" and live and len(live) < 6:
                seq, known = rng.choice(live)
                live.append((kit.ledger.fork(seq), list(known)))
            elif action == "F" and live:
                kit.ledger.free(live.pop(rng.randrange(len(live)))[0])
            elif action == "d":
                kit.ledger.defragment()
            elif action == "p" and live and len(pins) < 3:
                seq, known = rng.choice(live)
                pins.append((kit.ledger.pin_range(seq, 0, len(known)), list(known), size))
            elif action in "rR" and pins:
                pins.pop(rng.randrange(len(pins)))[0].release()
        except OutOfBlocksError:
            pass
        kit.ledger.check()
        for seq, known in live:
            assert seq.seq_len == len(known)
            assert kit.read(seq) == known
        for pin, known, _ in pins:
            assert kit.places.rows[pin.places].reshape(-1)[: len(known)].tolist() == known
    for pin, _, _ in pins:
        pin.release()
    for seq, _ in live:
        kit.ledger.free(seq)
    assert kit.ledger.open_in_use == 0
    assert kit.ledger.pool.num_free_blocks == 24
    kit.ledger.check()
