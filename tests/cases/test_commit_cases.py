"""Case C37: what may be committed, and under which tokens it is cached."""

from __future__ import annotations

import pytest
from cachekit import (
    assert_holds,
    empty,
    fill,
    make_cache,
    refused,
    rows,
    whole,
    write,
)

from pagedcache.errors import (
    InvalidArgumentError,
    InvalidPositionError,
    PagedCacheError,
)

B = 4


def test_commits_past_the_table_or_past_what_was_written():
    # CASE C37
    # SPEC F25
    cache = make_cache(8, B=B, layers=2)
    seq = cache.open(range(6))
    refused(cache, lambda: seq.commit(9), InvalidPositionError, seq)  # table: 2 blocks
    for bad in (-1, 2**40, 2**63):
        refused(cache, lambda n=bad: seq.commit(n), PagedCacheError, seq)
    seq.append(0, *rows(cache.spec, 0, range(1, 5)))
    refused(cache, lambda: seq.commit(1), InvalidPositionError, seq)  # layer 1 has nothing
    seq.append(1, *rows(cache.spec, 1, range(1, 4)))
    refused(cache, lambda: seq.commit(4), InvalidPositionError, seq)
    seq.commit(3)
    assert seq.seq_len == 3
    refused(cache, lambda: seq.commit(1), InvalidPositionError, seq)
    seq.append(1, *rows(cache.spec, 1, [4]))
    seq.commit(1)
    assert_holds(cache, seq, range(1, 5))
    seq.free()
    empty(cache)


def test_tokens_of_unknown_value_are_never_cached():
    # CASE C37
    # SPEC F25
    cache = make_cache(16, B=B, layers=2, partial_block_reuse=0)
    tokens = list(range(10, 16))
    seq = cache.open(tokens)
    fill(cache, seq, range(1, 7))
    fill(cache, seq, range(7, 13))  # six more, values never named
    assert seq.seq_len == 12 and seq.tokens.tolist() == tokens
    assert_holds(cache, seq, range(1, 13))
    assert cache.num_cached_blocks == 1  # the block of four known tokens only
    seq.append_tokens(range(80, 88))
    fill(cache, seq, range(13, 21))
    assert cache.num_cached_blocks == 1
    assert cache.probe([*tokens, *range(80, 100)]) == 4
    assert_holds(cache, seq, range(1, 21))
    seq.free()
    assert cache.probe([*tokens, 1]) == 4
    empty(cache)


def test_an_engine_that_stores_vouches_by_committing():
    # CASE C37
    # SPEC F25 F33
    cache = make_cache(8, B=B, layers=2)
    tokens = list(range(10, 20))
    seq = cache.open(tokens)
    slots = seq.prepare(10)
    for layer in range(2):
        cache.store(layer, *rows(cache.spec, layer, range(1, 11)), slots)
    assert (seq.num_written, seq.seq_len) == (0, 0)
    seq.commit(10)
    assert (seq.num_written, seq.seq_len) == (10, 10)
    assert_holds(cache, seq, range(1, 11))
    for layer in range(2):
        assert seq.gather(layer)[0].shape[0] == 10
    assert cache.probe([*tokens, 1]) >= 8
    seq.free()
    empty(cache)


def written_then_forked(tokens: list[int]):
    """A sequence and its fork that share one block whose last rows are written, not committed."""
    cache = make_cache(16, B=B, partial_block_reuse=0)
    parent = cache.open(tokens)
    write(parent, cache.spec, range(1, 9))
    parent.commit(1)
    return cache, parent, parent.fork()


def test_rows_written_before_a_fork_and_committed_under_one_name():
    # CASE C37
    # SPEC F25 F28
    cache, parent, child = written_then_forked([10])
    for seq in (parent, child):
        seq.append_tokens([11, 12, 13])
        seq.commit(3)
        assert_holds(cache, seq, range(1, 9))
        whole(cache)
    child.commit(4)  # the second block: values never named, so it is not cached
    parent.append_tokens([14, 15, 16, 17])
    parent.commit(4)
    whole(cache)
    assert cache.probe([*range(10, 18), 1]) == 8
    for seq in (parent, child):
        assert_holds(cache, seq, range(1, 9))
        seq.free()
    empty(cache)


def test_rows_written_before_a_fork_and_committed_unnamed():
    # CASE C37
    # SPEC F25 F28
    cache, parent, child = written_then_forked([10])
    parent.append_tokens([11, 12, 13])
    parent.commit(3)
    child.commit(3)  # the same rows, their tokens unknown to the child
    child.append_tokens([14, 15, 16, 17])
    child.commit(4)
    whole(cache)
    assert_holds(cache, child, range(1, 9))
    assert cache.probe([*range(10, 18), 1]) == 4  # the child's second block is behind unknowns
    for seq in (parent, child):
        seq.free()
    empty(cache)


@pytest.mark.parametrize("named_first", [True, False])
def test_rows_written_before_a_fork_and_given_two_names(named_first):
    # CASE C37
    # SPEC F25 F35
    cache, parent, child = written_then_forked([10])
    child.append_tokens([77])
    if named_first:
        child.commit(1)
    parent.append_tokens([11, 12, 13])
    parent.commit(3)  # the block is cached as 10, 11, 12, 13
    child.append_tokens([12, 13, 14, 15, 16, 17])
    refused(cache, lambda: child.commit(3 - named_first), InvalidArgumentError, parent, child)
    fill(cache, child, [])
    whole(cache)
    # prepared and written again the child's tokens are its own
    child.truncate(1)
    child.append_tokens([77, 12, 13, 14, 15, 16, 17])
    fill(cache, child, range(22, 29))
    assert_holds(cache, child, [1, *range(22, 29)])
    assert_holds(cache, parent, range(1, 9))
    assert cache.probe([10, 11, 12, 13, 14, 15, 16, 17, 1]) == 4
    assert cache.probe([10, 77, 12, 13, 14, 15, 16, 17, 1]) == 8
    for seq in (parent, child):
        seq.free()
    empty(cache)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_names_for_the_same_rows_in_one_batch_step(order):
    # CASE C37
    # SPEC F25 F35
    for early in (0, 1):  # the child commits one of its tokens before the step
        cache, parent, child = written_then_forked([10])
        cache.append_tokens([parent, child], [*range(11, 18), 77, *range(12, 18)], [7, 7])
        child.commit(early)
        pair, counts = [parent, child], [7, 7 - early]
        step = [pair[i] for i in order], [counts[i] for i in order]
        refused(cache, lambda c=cache, s=step: c.commit(*s), InvalidArgumentError, *pair)
        parent.commit(7)
        whole(cache)
        assert cache.probe([*range(10, 18), 1]) == 8
        assert cache.probe([10, 77, *range(12, 18), 1]) == 0
        for seq in pair:
            seq.free()
        empty(cache)


def test_one_name_for_the_same_rows_in_one_batch_step():
    # CASE C37
    # SPEC F25
    cache, parent, child = written_then_forked([10])
    cache.append_tokens([parent, child], [*range(11, 18), 11, 12], [7, 2])
    cache.commit([parent, child], [7, 7])  # the child's last five have no name
    whole(cache)
    for seq in (parent, child):
        assert seq.seq_len == 8
        assert_holds(cache, seq, range(1, 9))
    child.append_tokens([1, 2, 3, 4])
    fill(cache, child, range(31, 35))
    assert cache.probe([*range(10, 18), 1, 2, 3, 4, 5]) == 8  # nothing behind the unnamed
    for seq in (parent, child):
        seq.free()
    empty(cache)
