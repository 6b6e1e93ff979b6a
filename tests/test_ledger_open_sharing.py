"""Open blocks that several hold, write or look at: what is sealed and cached, when, and as what."""

from __future__ import annotations

import numpy as np
import pytest
from ledgerkit import Kit

from pagedcache import (
    InvalidArgumentError,
    InvalidPositionError,
    OutOfOpenBlocksError,
    PagedCacheError,
    SlotError,
    StaleMappingError,
)
from pagedcache.bookkeeping import Ledger


def numbers(*values: int) -> np.ndarray:
    return np.asarray(values, np.uint32)


def write_all(kit: Kit, seq, values) -> None:
    for value in values:
        kit.write(seq, [value])


def heir(kit: Kit, length: int):
    """A sequence that alone holds an open block which another one had filled and committed, itself
    computed up to ``length`` tokens."""
    parent = kit.open()
    write_all(kit, parent, range(7))
    child = kit.ledger.fork(parent)
    kit.ledger.truncate(child, length)
    mapping = kit.ledger.prepare([parent], [1])  # a copy: two hold the block
    with kit.ledger.pin_mapping(mapping) as pin:
        kit.places.store(pin.slots, np.asarray([7]))
    kit.ledger.free(child)
    child = kit.ledger.fork(parent)
    kit.ledger.truncate(child, length)
    kit.ledger.append_tokens(parent, numbers(7))
    kit.ledger.commit(parent, 1)  # vouched for before the fork
    kit.ledger.free(parent)
    assert kit.is_open(child) == [False, True]
    return child


def test_a_mapping_is_not_made_stale_by_seals_before_their_time() -> None:
    # SPEC F23 F28: another one had filled the block; its heir is writing the end of it anew
    kit = Kit(num_open=3)
    child = heir(kit, 5)
    mapping = kit.ledger.prepare([child], [2])
    others = [kit.open() for _ in range(3)]
    kit.write(others[0], [50])
    kit.write(others[1], [60])
    with pytest.raises(OutOfOpenBlocksError):
        kit.ledger.prepare([others[2]], [1])
    with kit.ledger.pin_mapping(mapping) as pin:
        kit.places.store(pin.slots, np.asarray([51, 61]))
    kit.ledger.commit(child, 2)
    assert kit.read(child) == [0, 1, 2, 3, 4, 51, 61]
    kit.ledger.check()


def test_a_block_made_writable_is_not_sealed_before_its_time() -> None:
    # SPEC F21: raw slots of it can be written until the next commit
    kit = Kit(num_open=2)
    a, b, c = kit.open(), kit.open(), kit.open()
    write_all(kit, a, range(4))
    block = kit.ledger.make_writable(a, 1)
    kit.write(b, [50])
    with pytest.raises(OutOfOpenBlocksError):
        kit.write(c, [60])
    with kit.ledger.pin_slots(np.asarray([4 * block + 1])) as pin:
        kit.places.store(pin.slots, np.asarray([90]))
    assert kit.read(a) == [0, 90, 2, 3]
    kit.ledger.commit(a, 0)
    kit.write(c, [60])
    assert kit.is_open(a) == [False] and kit.read(a) == [0, 90, 2, 3]
    kit.ledger.check()


def test_whole_blocks_are_rewritten_without_slots() -> None:
    # SPEC F24 F28: what other layers hold is copied as it is, so nothing is reopened
    kit = Kit(num_open=2, num_layers=2)
    seq = kit.open(range(24))
    kit.write(seq, range(24))
    start, pin = kit.ledger.begin_append(seq, 0, 24, 0)
    assert kit.places.copies == [
        (a, b, 4) for a, b in zip(range(6), (pin.slots[::4] // 4).tolist(), strict=True)
    ]
    kit.places.store(pin.slots, np.arange(100, 124))
    kit.ledger.end_append(seq, 0, start, 24, pin)
    assert kit.is_open(seq) == [False] * 6
    assert kit.read(seq) == list(range(100, 124))
    stats = kit.ledger.stats()
    assert (stats["cow_copies"], stats["blocks_reopened"]) == (6, 0)
    again = kit.open(range(25))
    assert kit.read(again, 24) == list(range(24))
    kit.ledger.check()


def test_a_copy_of_an_open_block_is_open_even_where_it_is_filled_whole() -> None:
    # SPEC F24 F28: other layers have filled it in part
    kit = Kit(num_layers=2)
    parent = kit.open()
    start, pin = kit.ledger.begin_append(parent, 1, 2)
    kit.places.store(pin.slots, np.asarray([1, 2]))
    kit.ledger.end_append(parent, 1, start, 2, pin)
    child = kit.ledger.fork(parent)
    start, pin = kit.ledger.begin_append(child, 0, 4)
    assert kit.is_open(child) == [True] and kit.is_open(parent) == [True]
    assert child.block_table()[0] != parent.block_table()[0]
    kit.ledger.end_append(child, 0, start, 4, pin)
    assert kit.read(child, 2) == [1, 2]
    kit.ledger.check()


def test_what_was_sealed_before_its_time_is_cached_when_its_sequence_goes() -> None:
    # SPEC F26
    kit = Kit(num_open=1)
    a, b = kit.open(), kit.open()
    write_all(kit, a, range(4))
    kit.write(b, [50])
    kit.ledger.free(b)
    assert kit.is_open(a) == [False] and kit.ledger.open_in_use == 0
    kit.ledger.free(a)
    assert kit.ledger.probe(np.arange(5, dtype=np.uint32)) == 4
    kit.ledger.check()


def test_a_seal_that_fails_at_the_end_costs_nothing_that_was_sealed_before() -> None:
    # SPEC F23 F26
    kit = Kit(num_open=2)
    a, b, c = kit.open(), kit.open(), kit.open()
    write_all(kit, a, range(4))
    kit.write(b, [50])
    kit.write(c, [60])  # seals a's block
    kit.ledger.free(b)
    write_all(kit, a, range(4, 7))
    mapping = kit.ledger.prepare([a], [1])
    kit.ledger.append_tokens(a, numbers(7))
    with kit.ledger.pin_mapping(mapping) as pin:
        kit.places.store(pin.slots, np.asarray([7]))
    kit.ledger.commit(a, 1)
    kit.places.fail = True
    kit.ledger.free(a)
    assert kit.ledger.probe(np.arange(9, dtype=np.uint32)) == 4
    kit.ledger.check()


@pytest.mark.parametrize("num_open", [0, 8])
def test_a_shared_block_is_not_committed_under_two_names(num_open: int) -> None:
    # SPEC F25 F28, TRAP 4: as where the first commit caches it
    kit = Kit(num_open=num_open)
    parent = kit.open()
    kit.ledger.prepare([parent], [2])
    mapping = kit.ledger.prepare([parent], [4])
    with kit.ledger.pin_mapping(mapping) as pin:
        kit.places.store(pin.slots, np.asarray([1, 2, 3, 4]))
    child = kit.ledger.fork(parent)
    same, unnamed = kit.ledger.fork(parent), kit.ledger.fork(parent)
    kit.ledger.append_tokens(parent, numbers(1, 2, 3, 4))
    kit.ledger.commit(parent, 4)
    kit.ledger.append_tokens(child, numbers(1, 9, 9, 9))
    kit.ledger.commit(child, 1)
    with pytest.raises(InvalidArgumentError, match="not prepared by this sequence"):
        kit.ledger.commit(child, 3)
    assert child.seq_len == 1
    kit.ledger.append_tokens(same, numbers(1, 2, 3, 4))
    kit.ledger.commit(same, 4)
    kit.ledger.commit(unnamed, 4)
    for seq in (same, unnamed):
        kit.write(seq, [5, 6, 7, 8], name=seq is same)
    assert kit.ledger.probe(numbers(1, 2, 3, 4, 0)) == 4
    assert kit.ledger.probe(numbers(1, 9, 9, 9, 0)) == 0
    kit.ledger.check()


def test_nor_under_two_names_once_the_first_is_forgotten() -> None:
    # SPEC F25 F28, TRAP 4
    kit = Kit(num_open=0)
    parent = kit.open()
    kit.ledger.prepare([parent], [4])
    child = kit.ledger.fork(parent)
    kit.ledger.append_tokens(parent, numbers(1, 2, 3, 4))
    kit.ledger.commit(parent, 4)
    kit.ledger.reset_prefix_cache()
    kit.ledger.append_tokens(child, numbers(9, 9, 9, 9))
    with pytest.raises(InvalidArgumentError, match="not prepared by this sequence"):
        kit.ledger.commit(child, 4)
    kit.ledger.check()


def rewrite_by_append(kit: Kit, seq) -> None:
    start, pin = kit.ledger.begin_append(seq, 0, 1, 1)
    kit.places.store(pin.slots, np.asarray([91]))
    kit.ledger.end_append(seq, 0, start, 1, pin)


def rewrite_by_block(kit: Kit, seq) -> None:
    block = kit.ledger.make_writable(seq, 1)
    kit.places.rows[seq.places()[0], 1] = 91  # a kernel of the caller's own
    assert block == seq.block_table()[0]


def rewrite_by_slots(kit: Kit, seq) -> None:
    with kit.ledger.pin_slots(seq.slot_mapping(1, 2)) as pin:
        kit.places.store(pin.slots, np.asarray([91]))


@pytest.mark.parametrize("rewrite", [rewrite_by_append, rewrite_by_block, rewrite_by_slots])
def test_what_is_rewritten_after_its_commit_is_never_cached(rewrite) -> None:
    # SPEC F25 F27, TRAP 4: only its first bytes could have been promised
    kit = Kit()
    seq = kit.open()
    write_all(kit, seq, range(6))
    assert kit.is_open(seq) == [True, True]
    rewrite(kit, seq)
    write_all(kit, seq, range(6, 14))
    assert kit.read(seq) == [0, 91, *range(2, 14)]
    assert kit.is_open(seq) == [False, False, True, True]
    assert kit.ledger.probe(np.arange(15, dtype=np.uint32)) == 0
    kit.ledger.free(seq)
    assert kit.ledger.probe(np.arange(15, dtype=np.uint32)) == 0
    kit.ledger.check()


def test_a_late_store_keeps_a_block_out_of_the_cache() -> None:
    # SPEC F25 F33, TRAP 4: the engine stored a layer after it had committed
    kit = Kit(num_layers=2)
    seq = kit.open()
    write_all(kit, seq, range(3))
    mapping = kit.ledger.prepare([seq], [1])
    kit.ledger.append_tokens(seq, numbers(3))
    kit.ledger.commit(seq, 1)
    kit.ledger.pin_mapping(mapping).release()
    write_all(kit, seq, range(4, 8))
    assert kit.ledger.probe(np.arange(9, dtype=np.uint32)) == 0
    with pytest.raises(StaleMappingError, match="opened or sealed"):  # it is sealed by now
        kit.ledger.pin_mapping(mapping)
    kit.ledger.check()


def test_whole_blocks_behind_an_open_one_are_not_cached_either_once_rewritten() -> None:
    # SPEC F25 F33, TRAP 4: sealed at once, but not yet offered
    kit = Kit()
    seq = kit.open()
    write_all(kit, seq, range(4))
    with kit.ledger.pin_range(seq, 0, 4):  # keeps the first block open
        kit.write(seq, range(4, 12))
        assert kit.is_open(seq) == [True, False, False]
        with kit.ledger.pin_slots(seq.slot_mapping(4, 8)) as pin:
            kit.places.store(pin.slots, np.arange(94, 98))
    write_all(kit, seq, range(12, 17))
    assert kit.ledger.probe(np.arange(17, dtype=np.uint32)) == 4
    kit.ledger.check()


def test_tokens_that_were_cut_off_are_no_rewrite() -> None:
    # SPEC F27: the block is filled anew from its start, so it is cached again
    kit = Kit()
    seq = kit.open()
    write_all(kit, seq, range(6))
    rewrite_by_append(kit, seq)
    kit.ledger.set_computed(seq, 0)
    for token in range(20, 28):
        kit.ledger.append_tokens(seq, numbers(token))
        with kit.ledger.pin_mapping(kit.ledger.prepare([seq], [1])) as pin:
            kit.places.store(pin.slots, np.asarray([token]))
        kit.ledger.commit(seq, 1)
    assert kit.ledger.probe(np.arange(20, 29, dtype=np.uint32)) == 4
    assert kit.read(kit.open(range(20, 29)), 4) == [20, 21, 22, 23]
    kit.ledger.check()


@pytest.mark.parametrize("num_open", [0, 8])
def test_a_view_keeps_its_values_while_a_batch_leaves_its_block(num_open: int) -> None:
    # SPEC F28 F30, CASE C67: the child is the last holder, but not of what the view shows
    kit = Kit(num_open=num_open)
    parent = kit.open()
    kit.write(parent, range(3))
    child = kit.ledger.fork(parent)
    kit.ledger.truncate(child, 1)
    with kit.ledger.pin_range(parent, 0, 3) as view:
        mapping = kit.ledger.prepare([parent, child], [1, 1])
        with kit.ledger.pin_mapping(mapping) as pin:
            kit.places.store(pin.slots, np.asarray([50, 60]))
        assert kit.places.rows[view.places[0], :3].tolist() == [0, 1, 2]
        kit.ledger.commit_many([parent, child], [1, 1])
        assert kit.read(parent) == [0, 1, 2, 50] and kit.read(child) == [0, 60]
        kit.ledger.check()
    assert kit.ledger.stats()["blocks_used"] == 2
    kit.ledger.check()


def test_the_last_of_a_batch_keeps_a_block_that_nobody_looks_at() -> None:
    # SPEC F28
    kit = Kit()
    parent = kit.open()
    kit.write(parent, range(3))
    child = kit.ledger.fork(parent)
    block = parent.block_table()[0]
    kit.ledger.prepare([parent, child], [1, 1])
    assert child.block_table()[0] == block != parent.block_table()[0]
    assert kit.ledger.stats()["cow_copies"] == 1
    kit.ledger.check()


def test_a_view_that_is_gone_makes_no_mapping_stale() -> None:
    # SPEC F30 F33
    kit = Kit(num_open=0)
    seq = kit.open()
    kit.write(seq, range(2))
    with kit.ledger.pin_range(seq, 0, 2):
        kit.ledger.free(kit.ledger.fork(seq))
    mapping = kit.ledger.prepare([seq], [1])
    with kit.ledger.pin_range(seq, 0, 2):
        kit.open([1])
        kit.ledger.pin_mapping(mapping).release()
    kit.ledger.check()


def test_a_partial_hit_takes_the_slot_of_a_block_that_can_be_sealed() -> None:
    # SPEC F22 F40, CASE C28
    kit = Kit(num_open=1)
    kit.write(kit.open(), range(8))
    other = kit.open()
    write_all(kit, other, range(50, 54))
    assert kit.is_open(other) == [True]
    prompt = numbers(*range(8))
    assert kit.ledger.probe(prompt) == 7
    with kit.ledger.pin_range(other, 0, 4):  # who looks at it keeps it open
        with pytest.raises(OutOfOpenBlocksError):
            kit.open(prompt)
    kit.places.fail = True
    before = kit.ledger.stats()
    with pytest.raises(PagedCacheError, match="no bytes"):
        kit.open(prompt)
    after = kit.ledger.stats()
    assert {k: v for k, v in after.items() if k != "steps"} == {
        k: v for k, v in before.items() if k != "steps"
    }
    assert kit.is_open(other) == [True]
    kit.places.fail = False
    again = kit.open(prompt)
    assert again.num_cached_tokens == 7 and kit.read(again, 7) == list(range(7))
    assert kit.is_open(other) == [False] and kit.read(other) == list(range(50, 54))
    kit.ledger.check()


def test_one_slot_serves_a_sequence_that_grows_token_by_token() -> None:
    # SPEC F12
    kit = Kit(num_open=1, num_layers=2)
    seq = kit.open()
    for token in range(23):
        for layer in range(2):
            start, pin = kit.ledger.begin_append(seq, layer, 1)
            kit.places.store(pin.slots, np.asarray([token]))
            kit.ledger.end_append(seq, layer, start, 1, pin)
        kit.ledger.append_tokens(seq, numbers(token))
        kit.ledger.commit(seq, 1)
        kit.ledger.check()
    assert kit.read(seq) == list(range(23))
    assert kit.ledger.probe(np.arange(24, dtype=np.uint32)) == 20


def test_slots_of_a_sealed_block_name_it() -> None:
    # SPEC F33: the error names the slot and says what to do
    kit = Kit(num_open=1)
    a, b = kit.open(), kit.open()
    write_all(kit, a, range(4))
    slots = a.slot_mapping(2, 3)
    kit.write(b, [50])
    with pytest.raises(SlotError, match=rf"slot {slots[0]}: its block is sealed.*prepare"):
        kit.ledger.pin_slots(slots)


def test_an_engine_that_copies_blocks_itself_has_no_open_ones() -> None:
    # SPEC 7
    with pytest.raises(InvalidArgumentError, match="deferred_copies or num_open"):
        Ledger(4, 4, deferred_copies=True, num_open=1)


def test_what_was_cut_meanwhile_is_not_pinned() -> None:
    # SPEC F34: the writer may cut what a reader has just been told it may read
    kit = Kit(num_layers=2)
    seq = kit.open()
    kit.write(seq, range(8))
    kit.ledger.set_computed(seq, 2)  # the blocks stay
    for pin in (
        lambda stop, layer: kit.ledger.pin_range(seq, 0, stop, layer),
        lambda stop, layer: kit.ledger.pin_reads([seq], [stop], layer)[0],
    ):
        with pytest.raises(InvalidPositionError, match="only what was written") as error:
            pin(8, 1)
        assert (error.value.position, error.value.length) == (8, 2)
        with pin(2, 1) as held:
            assert kit.places.rows[held.places].reshape(-1)[:2].tolist() == [0, 1]
        pin(8, -1).release()  # for writers: the whole table
        for layer in (2, -2, True, 1.5):
            with pytest.raises(InvalidArgumentError):
                pin(2, layer)
    kit.ledger.prepare([seq], [3])  # for store: what was prepared can be read
    kit.ledger.pin_range(seq, 0, 5, 1).release()
    start, pin = kit.ledger.begin_append(seq, 0, 2)
    kit.ledger.end_append(seq, 0, start, 2, pin)  # by its own appends: layer by layer
    kit.ledger.pin_range(seq, 0, 4, 0).release()
    with pytest.raises(InvalidPositionError):
        kit.ledger.pin_range(seq, 0, 4, 1)
    assert kit.ledger.stats()["pinned"] == 0
    kit.ledger.check()
