"""The id-based style (SPEC F21)."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from cachekit import assert_holds, empty, fill, make_cache, refused, rows, whole

import pagedcache as pc


def test_life_of_an_id():
    # SPEC F21
    with make_cache(16, B=4) as cache:
        seq_id = cache.allocate_sequence(10)
        assert type(seq_id) is int
        assert cache.num_used_blocks == 3
        assert cache.sequence_tokens(seq_id) == 0
        cache.extend(seq_id, 2)
        assert cache.num_used_blocks == 3
        cache.extend(seq_id, 1)
        assert cache.num_used_blocks == 4
        cache.update_tokens(seq_id, 9)
        assert cache.sequence_tokens(seq_id) == 9
        cache.update_tokens(seq_id, 2)
        assert cache.sequence_tokens(seq_id) == 2
        assert cache.num_used_blocks == 4  # blocks stay
        cache.update_tokens(seq_id, 13)
        assert cache.sequence_tokens(seq_id) == 13
        cache.free_sequence(seq_id)
        cache.free_sequence(seq_id)
        empty(cache)


def test_setting_the_length_it_has_changes_nothing():
    # SPEC F21: neither a commit nor a truncate
    with make_cache(16, B=4) as cache:
        seq_id = cache.allocate_sequence(8)
        seq = cache.sequence(seq_id)
        seq.append_tokens([1, 2, 3])
        seq.append(0, *rows(cache.spec, 0, [0, 1, 2]))
        for computed in (0, 2):
            seq.commit(computed)
            before = (seq.num_written, seq.num_tokens, seq.block_table.tolist())
            cache.update_tokens(seq_id, computed)
            assert seq.tokens.tolist() == [1, 2, 3]
            assert (seq.num_written, seq.num_tokens, seq.block_table.tolist()) == before
            assert cache.sequence_tokens(seq_id) == computed
        assert_holds(cache, seq, [0, 1])


def test_ids_live_without_a_handle():
    # SPEC F21
    with make_cache(16, B=4) as cache:
        first, second = cache.allocate_sequence(4), cache.allocate_sequence(0)
        seq = cache.sequence(first)
        fill(cache, seq, range(4))
        assert cache.sequence(first) is seq
        del seq
        gc.collect()
        assert cache.live_sequences() == [first, second]
        assert cache.sequence_tokens(first) == 4
        assert_holds(cache, cache.sequence(first), range(4))
        cache.sequence(first).free()
        assert cache.live_sequences() == [second]
        with pytest.raises(pc.SequenceNotFoundError):
            cache.sequence(first)


def test_ids_of_handles_serve_too():
    # SPEC F21: two styles over the same handles
    with make_cache(16, B=4) as cache:
        seq = cache.open(range(6))
        fill(cache, seq, range(6))
        assert cache.sequence(seq.seq_id) is seq
        assert cache.sequence_tokens(np.int64(seq.seq_id)) == 6
        child = cache.fork_sequence(seq.seq_id)
        assert child != seq.seq_id
        assert_holds(cache, cache.sequence(child), range(6))
        number = seq.seq_id
        cache.free_sequence(number)
        assert seq.freed
        assert_holds(cache, cache.sequence(child), range(6))
        cache.free_sequence(child)
        seq = cache.open([1])
        number = seq.seq_id
        del seq  # nobody owns it: gone, its id is not found
        with pytest.raises(pc.SequenceNotFoundError) as caught:
            cache.sequence_tokens(number)
        assert caught.value.seq_id == number
        empty(cache)


def test_blocks_for_reading_and_writing():
    # SPEC F21
    with make_cache(16, B=4) as cache:
        parent = cache.allocate_sequence(6)
        seq = cache.sequence(parent)
        fill(cache, seq, range(6))
        child = cache.fork_sequence(parent)
        for position in range(8):
            block = seq.block_for_position(position)
            assert cache.block_at(parent, position) == cache.block_at(child, position) == block
        mine = cache.writable_block_at(child, 5)
        assert mine != cache.block_at(parent, 5)
        assert cache.block_at(child, 5) == mine
        assert cache.writable_block_at(child, 5) == mine  # its own already
        assert cache.block_at(child, 0) == cache.block_at(parent, 0)
        assert_holds(cache, cache.sequence(child), range(6))
        assert cache.stats().cow_copies == 1
        for bad in (-1, 8, 2**40, 2**100):
            for call in (cache.block_at, cache.writable_block_at):
                refused(cache, lambda: call(parent, bad), pc.InvalidPositionError, seq)  # noqa: B023
        whole(cache)


def test_update_on_a_fork_leaves_the_parent_alone():
    # SPEC F21, TRAP 10
    with make_cache(16, B=4) as cache:
        parent = cache.allocate_sequence(8)
        fill(cache, cache.sequence(parent), range(6))
        child = cache.fork_sequence(parent)
        cache.update_tokens(child, 3)
        assert (cache.sequence_tokens(parent), cache.sequence_tokens(child)) == (6, 3)
        cache.sequence(child).append(0, *rows(cache.spec, 0, [50]))
        cache.update_tokens(child, 4)
        assert_holds(cache, cache.sequence(parent), range(6))
        assert_holds(cache, cache.sequence(child), [0, 1, 2, 50])
        whole(cache)


def test_refusals_change_nothing():
    # SPEC F23
    with make_cache(4, B=4, max_seq_len=40) as cache:
        seq_id = cache.allocate_sequence(4)
        seq = cache.sequence(seq_id)
        error = refused(cache, lambda: cache.allocate_sequence(13), pc.OutOfBlocksError, seq)
        assert (error.needed, error.available, error.total) == (4, 3, 4)
        refused(cache, lambda: cache.allocate_sequence(41), pc.SequenceTooLongError, seq)
        refused(cache, lambda: cache.extend(seq_id, 13), pc.OutOfBlocksError, seq)
        refused(cache, lambda: cache.extend(seq_id, 37), pc.SequenceTooLongError, seq)
        for bad in (5, -1, 2**40, 2**100):
            refused(cache, lambda: cache.update_tokens(seq_id, bad),  # noqa: B023
                    pc.InvalidPositionError, seq)
        for junk in (-1, 1.0, True, None, "3", 2**70):
            for call in (
                lambda: cache.allocate_sequence(junk),  # noqa: B023
                lambda: cache.extend(seq_id, junk),  # noqa: B023
            ):
                refused(cache, call, pc.InvalidArgumentError, seq)


def test_unknown_ids():
    # SPEC F21, SPEC 7, CASE C12
    with make_cache(4) as cache:
        known = cache.allocate_sequence(1)
        for unknown in (known + 1, 0, -1, 2**40, 2**100):
            if unknown == known:
                continue
            cache.free_sequence(unknown)
            for call in (
                lambda: cache.extend(unknown, 1),  # noqa: B023
                lambda: cache.fork_sequence(unknown),  # noqa: B023
                lambda: cache.sequence_tokens(unknown),  # noqa: B023
                lambda: cache.update_tokens(unknown, 1),  # noqa: B023
                lambda: cache.block_at(unknown, 0),  # noqa: B023
                lambda: cache.writable_block_at(unknown, 0),  # noqa: B023
                lambda: cache.sequence(unknown),  # noqa: B023
            ):
                error = refused(cache, call, pc.SequenceNotFoundError)
                assert isinstance(error, KeyError) and error.seq_id == unknown
        for junk in (1.0, "1", None, True, [1]):
            for call in (cache.sequence, cache.free_sequence, cache.fork_sequence):
                refused(cache, lambda: call(junk), pc.InvalidArgumentError)  # noqa: B023
