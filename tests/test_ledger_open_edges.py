"""Open blocks, one rule at a time: what seals, what keeps from sealing, and what that leaves."""

from __future__ import annotations

import numpy as np
import pytest
from ledgerkit import Kit

from pagedcache import (
    InvalidArgumentError,
    OutOfOpenBlocksError,
    PagedCacheError,
    SlotError,
    StaleMappingError,
)


def write_all(kit: Kit, seq, values, **options) -> None:
    for value in values:
        kit.write(seq, [value], **options)


def sealed(kit: Kit) -> int:
    return kit.ledger.stats()["blocks_sealed"]


def test_a_mapping_of_a_whole_block_that_was_opened_since_is_stale() -> None:
    # SPEC F33
    kit = Kit()
    seq = kit.open()
    mapping = kit.ledger.prepare([seq], [4])
    kit.ledger.prepare([seq], [2])
    assert kit.is_open(seq) == [True]
    with pytest.raises(StaleMappingError):
        kit.ledger.pin_mapping(mapping)


def test_a_mapping_of_a_block_that_was_sealed_for_nothing_is_stale() -> None:
    # SPEC F23 F33: its block was sealed for a step that failed afterwards
    kit = Kit(num_open=1)
    a, b = kit.open(), kit.open()
    kit.write(b, range(20, 28), name=False)
    kit.ledger.truncate(b, 3)  # its first block stays, sealed
    write_all(kit, a, range(3))
    mapping = kit.ledger.prepare([a], [1])
    kit.ledger.append_tokens(a, np.asarray([3], np.uint32))
    kit.ledger.commit(a, 1)
    kit.ledger.pin_mapping(mapping).release()

    class Second:
        """False when it is asked first, true from then on."""

        asked = 0

        def __bool__(self) -> bool:
            self.asked += 1
            return self.asked > 1

    kit.places.fail = Second()
    with pytest.raises(PagedCacheError, match="no bytes"):
        kit.ledger.prepare([b], [1])
    assert kit.is_open(a) == [False] and kit.ledger.open_in_use == 0
    with pytest.raises(StaleMappingError):
        kit.ledger.pin_mapping(mapping)
    kit.ledger.check()


def test_forks_that_commit_together_seal_what_they_share_once() -> None:
    # SPEC F25 F28
    kit = Kit()
    parent = kit.open()
    write_all(kit, parent, range(4))
    child = kit.ledger.fork(parent)
    for seqs, counts in (([parent, child], [1, 1]), ([parent, child], [3, 3])):
        kit.ledger.prepare(seqs, counts)
        for seq, n in zip(seqs, counts, strict=True):
            kit.ledger.append_tokens(seq, np.arange(seq.seq_len, seq.seq_len + n, dtype=np.uint32))
        kit.ledger.commit_many(seqs, counts)
    assert kit.is_open(parent) == kit.is_open(child) == [False, True]
    assert sealed(kit) == 1 and kit.ledger.open_in_use == 2
    kit.ledger.check()


def test_all_seals_of_a_commit_are_counted() -> None:
    # SPEC F16
    kit = Kit()
    seqs = [kit.open() for _ in range(3)]
    for seq in seqs:
        write_all(kit, seq, range(7))
    kit.ledger.prepare(seqs, [1, 1, 1])
    kit.ledger.commit_many(seqs, [1, 1, 1])
    assert sealed(kit) == 3 and kit.ledger.open_in_use == 3
    kit.ledger.check()


def test_nothing_is_sealed_at_the_end_that_could_not_be_cached() -> None:
    # SPEC F25: of unknown tokens, not computed, behind a block that is not cached, or forgotten
    kit = Kit()
    unknown = kit.open()
    write_all(kit, unknown, range(4), name=False)
    kit.ledger.free(unknown)
    short = kit.open(range(8))
    kit.ledger.prepare([short], [2])
    kit.ledger.commit(short, 2)
    kit.ledger.free(short)
    forgotten = kit.open()
    write_all(kit, forgotten, range(4))
    kit.ledger.reset_prefix_cache()
    kit.ledger.free(forgotten)
    assert sealed(kit) == 0
    behind = kit.open(range(12))
    kit.write(behind, range(8))
    kit.ledger.reset_prefix_cache()
    write_all(kit, behind, range(8, 12))  # its tokens are known, but what is before it is gone
    kit.ledger.free(behind)
    assert sealed(kit) == 0 and kit.ledger.open_in_use == 0
    assert kit.ledger.probe(np.arange(13, dtype=np.uint32)) == 0
    kit.ledger.check()


def test_a_viewed_block_keeps_its_slot_when_its_sequence_goes() -> None:
    # SPEC F30, CASE C67
    kit = Kit(num_open=2)
    a, b = kit.open(), kit.open()
    write_all(kit, a, range(4))
    view = kit.ledger.pin_range(a, 0, 4)
    kit.ledger.free(a)
    assert kit.ledger.open_in_use == 1 and sealed(kit) == 0
    kit.write(b, [50])
    with pytest.raises(OutOfOpenBlocksError):
        kit.write(kit.open(), [60])
    assert kit.places.rows[view.places[0]].tolist() == [0, 1, 2, 3]
    view.release()
    assert kit.ledger.open_in_use == 1
    kit.write(kit.open(), [60])
    kit.ledger.check()


def test_what_is_written_is_not_sealed_for_its_own_slots() -> None:
    # SPEC F23: nothing changes where the step does not fit
    kit = Kit(num_open=1)
    seq = kit.open()
    write_all(kit, seq, range(4))
    with pytest.raises(OutOfOpenBlocksError) as error:
        kit.ledger.begin_append(seq, 0, 3, 3)
    assert (error.value.needed, error.value.available) == (1, 0)
    assert kit.is_open(seq) == [True] and sealed(kit) == 0
    kit.ledger.check()
    kit.write(seq, [4])  # the block is not kept from it for good
    assert kit.is_open(seq) == [False, True]


def test_as_many_blocks_are_sealed_early_as_slots_are_needed() -> None:
    # SPEC F23: fewer would not do, and more are not sealed
    kit = Kit(num_open=3)
    held = [kit.open() for _ in range(3)]
    for seq in held[:2]:
        write_all(kit, seq, range(4))
    kit.write(held[2], [50])
    more = [kit.open() for _ in range(3)]
    with pytest.raises(OutOfOpenBlocksError) as error:
        kit.ledger.prepare(more, [1, 1, 1])
    assert (error.value.needed, error.value.available) == (3, 0)
    assert sealed(kit) == 0 and kit.ledger.open_in_use == 3
    kit.write(more[0], [60])
    assert sealed(kit) == 1
    assert [kit.is_open(seq) for seq in held] == [[False], [True], [True]]
    kit.ledger.free(more[0])
    kit.ledger.prepare(more[1:], [1, 1])  # one slot is free, one block is sealed for the other
    assert sealed(kit) == 2 and kit.ledger.open_in_use == 3
    kit.ledger.check()


def test_a_block_that_was_cut_is_not_sealed_early() -> None:
    # SPEC F23: it is not full any more
    kit = Kit(num_open=1)
    a, b = kit.open(), kit.open()
    write_all(kit, a, range(4))
    kit.ledger.truncate(a, 2)
    with pytest.raises(OutOfOpenBlocksError):
        kit.write(b, [50])
    assert kit.is_open(a) == [True] and sealed(kit) == 0
    kit.ledger.check()


def test_whole_blocks_are_rewritten_in_place_without_a_copy() -> None:
    # SPEC F24: of unknown tokens, so not cached, and nobody else's
    kit = Kit()
    seq = kit.open()
    kit.write(seq, range(8), name=False)
    table = seq.block_table().tolist()
    start, pin = kit.ledger.begin_append(seq, 0, 8, 0)
    kit.places.store(pin.slots, np.arange(50, 58))
    kit.ledger.end_append(seq, 0, start, 8, pin)
    assert kit.places.copies == [] and seq.block_table().tolist() == table
    assert kit.is_open(seq) == [False, False] and kit.read(seq) == list(range(50, 58))
    kit.ledger.check()


def test_an_open_block_without_bytes_is_replaced_by_a_sealed_one() -> None:
    # SPEC F28: a fork fills whole what its parent had only made room for
    kit = Kit()
    parent = kit.open()
    kit.write(parent, range(2), name=False)
    kit.ledger.set_computed(parent, 0)
    assert kit.is_open(parent) == [True]
    child = kit.ledger.fork(parent)
    kit.write(child, range(4), name=False)
    assert kit.is_open(child) == [False] and kit.is_open(parent) == [True]
    assert kit.places.copies == [] and kit.ledger.stats()["cow_copies"] == 0
    kit.ledger.check()


def test_copies_of_open_blocks_are_no_reopening() -> None:
    # SPEC F16 F28
    kit = Kit()
    parent = kit.open()
    kit.write(parent, range(2))
    child = kit.ledger.fork(parent)
    kit.write(child, [3])
    stats = kit.ledger.stats()
    assert (stats["cow_copies"], stats["blocks_reopened"]) == (1, 0)
    kit.ledger.check()


def test_a_rewrite_is_remembered_by_the_block_for_all_its_holders() -> None:
    # SPEC F25 F28, TRAP 4: a fork that starts anew makes nothing true for its parent
    kit = Kit()
    parent = kit.open()
    write_all(kit, parent, range(4))
    with kit.ledger.pin_slots(parent.slot_mapping(1, 2)) as pin:
        kit.places.store(pin.slots, np.asarray([91]))
    child = kit.ledger.fork(parent)
    kit.ledger.set_computed(child, 0)
    write_all(kit, parent, range(4, 9))
    assert kit.ledger.probe(np.arange(9, dtype=np.uint32)) == 0
    kit.ledger.check()


def test_a_rewrite_is_remembered_where_its_tokens_stay() -> None:
    # SPEC F25 F27, TRAP 4: only the tokens behind them were cut off
    kit = Kit()
    seq = kit.open()
    write_all(kit, seq, range(4))
    with kit.ledger.pin_slots(seq.slot_mapping(1, 2)) as pin:
        kit.places.store(pin.slots, np.asarray([91]))
    kit.ledger.truncate(seq, 2)
    write_all(kit, seq, range(2, 9))
    assert kit.ledger.probe(np.arange(9, dtype=np.uint32)) == 0
    assert kit.read(seq, 4) == [0, 91, 2, 3]
    kit.ledger.check()


def test_tokens_without_names_contradict_nobody() -> None:
    # SPEC F25 F28
    kit = Kit()
    parent = kit.open()
    kit.ledger.prepare([parent], [2])
    kit.ledger.prepare([parent], [4])
    kit.ledger.prepare([parent], [6])
    kit.ledger.prepare([parent], [8])
    named, unnamed, other = (kit.ledger.fork(parent) for _ in range(3))
    assert kit.is_open(parent) == [True, True]
    kit.ledger.commit(parent, 8)  # of unknown values: whoever names them may
    kit.ledger.append_tokens(named, np.arange(8, dtype=np.uint32))
    kit.ledger.commit(named, 8)
    kit.ledger.append_tokens(unnamed, np.asarray([0], np.uint32))
    kit.ledger.commit(unnamed, 8)  # nothing of its second block is named
    kit.ledger.append_tokens(other, np.asarray([1], np.uint32))
    with pytest.raises(InvalidArgumentError, match="not prepared by this sequence"):
        kit.ledger.commit(other, 8)
    kit.ledger.check()


def test_an_admission_that_failed_leaves_an_empty_sequence() -> None:
    # SPEC F22 F23
    kit = Kit(partial_block_reuse=1)
    first = kit.open(range(12))
    kit.write(first, range(12))
    seq = kit.open()
    kit.places.fail = True
    with pytest.raises(PagedCacheError, match="no bytes"):
        kit.ledger.allocate_tokens(seq, np.asarray([*range(10), 50, 51], np.uint32))
    kit.places.fail = False
    assert (seq.num_blocks, seq.num_tokens, seq.seq_len) == (0, 0, 0)
    assert kit.ledger.open_in_use == 0
    kit.write(seq, [50, 51])
    kit.ledger.check()
    assert kit.is_open(seq) == [True] and kit.read(seq) == [50, 51]


def test_raw_slots_across_two_sealed_blocks_are_not_a_whole_one() -> None:
    # SPEC F33
    kit = Kit()
    seq = kit.open()
    kit.ledger.prepare([seq], [8])
    assert seq.block_table().tolist() == [0, 1]
    with pytest.raises(SlotError, match=r"slot 1: .*all of it"):
        kit.ledger.pin_slots(np.arange(1, 5))
    with pytest.raises(SlotError, match=r"slot 4: .*all of it"):
        kit.ledger.pin_slots(np.arange(7))
    kit.ledger.pin_slots(np.asarray([-1, 0, 1, 2, 3, -1])).release()
    kit.ledger.check()


@pytest.mark.parametrize("num_open", [0, 8])
def test_what_was_stored_and_not_committed_yet_stays(num_open: int) -> None:
    # SPEC F25 F33: a step of which a part is committed, and a shorter one over its rest
    kit = Kit(num_open=num_open)
    seq = kit.open()
    with kit.ledger.pin_mapping(kit.ledger.prepare([seq], [8])) as pin:
        kit.places.store(pin.slots, np.arange(8))
    kit.ledger.commit(seq, 2)
    with kit.ledger.pin_mapping(kit.ledger.prepare([seq], [4])) as pin:
        kit.places.store(pin.slots, np.asarray([92, 93, 94, 95]))
    kit.ledger.commit(seq, 6)
    assert kit.read(seq) == [0, 1, 92, 93, 94, 95, 6, 7]
    kit.ledger.check()
