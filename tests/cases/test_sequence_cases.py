"""Cases C30-C37, C59 and C66-C69: sequences, fork, truncate, stale tables and views."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from cachekit import (
    assert_holds,
    cached_prompt,
    empty,
    expected,
    fill,
    make_cache,
    refused,
    rows,
    snapshot,
    whole,
    write,
)

import pagedcache as pc
from pagedcache.errors import (
    FreedHandleError,
    InvalidArgumentError,
    InvalidPositionError,
    OutOfBlocksError,
    PagedCacheError,
    PendingCopyError,
    SequenceTooLongError,
    SlotError,
    StaleMappingError,
)

B = 4
FORMATS = ["float32", "float16", "bfloat16", "q8", "q4", ("q8", "q4_1"), "q8_0", "q4_0"]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("child_first", [True, False])
def test_fork_at_a_part_filled_block(fmt, layout, child_first):
    # CASE C30
    # SPEC F28
    cache = make_cache(8, B=B, layers=2, heads=2, dim=8, fmt=fmt, layout=layout)
    parent = cache.open(range(100, 106))
    fill(cache, parent, range(1, 7))
    raw_before = [bytes(v.k.tobytes() + v.v.tobytes()) for v in parent.views(1)]
    child = parent.fork()
    assert cache.stats().cow_copies == 0
    assert child.block_table.tolist() == parent.block_table.tolist()
    for seq, mark in ((child, 50), (parent, 60)) if child_first else ((parent, 60), (child, 50)):
        seq.append_token(mark)
        fill(cache, seq, [mark])
        whole(cache)
    assert cache.stats().cow_copies == 1  # the second writer was alone by then
    p, c = parent.block_table.tolist(), child.block_table.tolist()
    assert p[0] == c[0] and p[1] != c[1]
    assert parent.slot_mapping(6, 7)[0] != child.slot_mapping(6, 7)[0]
    assert_holds(cache, parent, [1, 2, 3, 4, 5, 6, 60])
    assert_holds(cache, child, [1, 2, 3, 4, 5, 6, 50])
    assert (parent.seq_len, child.seq_len) == (7, 7)
    with parent.views(1, 0, 6) as views:
        raw_after = [bytes(v.k.tobytes() + v.v.tobytes()) for v in views]
    if fmt in ("float32", "float16", "bfloat16"):
        assert raw_after == raw_before
    parent.free()
    assert_holds(cache, child, [1, 2, 3, 4, 5, 6, 50])
    child.free()
    gc.collect()
    empty(cache)


def test_four_children_grow_one_block_short():
    # CASE C31
    # SPEC F23 F28 F28a
    cache = make_cache(5, B=B, layers=2)
    parent = cache.open(range(6))
    fill(cache, parent, range(1, 7))
    children = [parent.fork() for _ in range(4)]
    family = [parent, *children]
    e = refused(cache, lambda: cache.prepare(children, [1] * 4), OutOfBlocksError, *family)
    assert (e.needed, e.available, e.total) == (4, 3, 5)
    for seq in family:
        assert_holds(cache, seq, range(1, 7))
    children[2].free()
    left = [children[i] for i in (0, 1, 3)]
    slots = cache.prepare(left, [1] * 3)
    for layer in range(2):
        k, v = rows(cache.spec, layer, [71, 72, 73])
        cache.store(layer, k, v, slots)
    for seq, mark in zip(left, (71, 72, 73), strict=True):
        seq.commit(1)
        assert_holds(cache, seq, [1, 2, 3, 4, 5, 6, mark])
    assert_holds(cache, parent, range(1, 7))
    for seq in family:
        seq.free()
    empty(cache)


def test_four_children_append_one_by_one():
    # CASE C31
    # SPEC F28
    cache = make_cache(5, B=B)
    parent = cache.open(range(6))
    fill(cache, parent, range(1, 7))
    children = [parent.fork() for _ in range(4)]
    for i in range(3):
        fill(cache, children[i], [71 + i])
    k, v = rows(cache.spec, 0, [74])
    refused(cache, lambda: children[3].append(0, k, v), OutOfBlocksError, parent, *children)
    assert_holds(cache, children[3], range(1, 7))
    children[1].free()
    fill(cache, children[3], [74])
    for i in (0, 2, 3):
        assert_holds(cache, children[i], [1, 2, 3, 4, 5, 6, 71 + i])
    assert_holds(cache, parent, range(1, 7))
    for seq in (parent, *children):
        seq.free()
    empty(cache)


def test_truncate_at_the_edges():
    # CASE C32
    # SPEC F27
    cache = make_cache(8, B=B, layers=2)
    seq = cache.open(range(10))
    fill(cache, seq, range(1, 11))
    for bad in (11, 12, 2**31, 2**63, -1, -(2**40)):
        e = refused(cache, lambda n=bad: seq.truncate(n), InvalidPositionError, seq)
        assert isinstance(e, IndexError)
        assert e.length == 10
    seq.truncate(10)
    assert_holds(cache, seq, range(1, 11))
    assert seq.num_blocks == 3
    seq.truncate(5)
    assert (seq.seq_len, seq.num_tokens, seq.num_written, seq.num_blocks) == (5, 5, 5, 2)
    assert seq.tokens.tolist() == [0, 1, 2, 3, 4]
    for layer in range(2):
        k, v = seq.gather(layer)
        assert k.shape == (5, 1, 4)
    assert_holds(cache, seq, range(1, 6))
    with pytest.raises(InvalidPositionError):
        seq.gather(0, 0, 9)  # past the table: no stale tail
    seq.truncate(0)
    assert (seq.seq_len, seq.num_tokens, seq.num_written, seq.num_blocks) == (0, 0, 0, 0)
    assert seq.gather(0)[0].shape == (0, 1, 4)
    assert seq.block_table.tolist() == []
    whole(cache)
    assert cache.num_used_blocks == 0
    seq.append_tokens([7, 8])
    fill(cache, seq, [91, 92])
    assert_holds(cache, seq, [91, 92])
    seq.free()
    empty(cache)


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 7])
@pytest.mark.parametrize("fmt", ["float32", "q4"])
def test_truncate_into_a_cached_block_then_append(cut, fmt):
    # CASE C33
    # SPEC F27
    cache = make_cache(8, B=B, fmt=fmt)
    tokens = list(range(50, 58))
    seq = cache.open(tokens)
    fill(cache, seq, range(1, 9))
    old = seq.block_table.tolist()
    seq.truncate(cut)
    seq.append_tokens([900 + i for i in range(6)])
    fill(cache, seq, range(31, 37))
    assert_holds(cache, seq, [*range(1, cut + 1), *range(31, 37)])
    whole(cache)
    new = seq.block_table.tolist()
    if cut % B:
        assert new[cut // B] != old[cut // B]  # a copy: the cached block keeps its bytes
    assert new[: cut // B] == old[: cut // B]
    with cache.open([*tokens, 1]) as other:
        assert other.num_cached_tokens == 8
        assert other.block_table.tolist()[:2] == old
        assert_holds(cache, other, range(1, 9))
    seq.free()
    with cache.open([*tokens, 1]) as other:
        assert other.num_cached_tokens == 8
        assert_holds(cache, other, range(1, 9))
    longer = [*tokens[:cut], *range(900, 906), 1]
    with cache.open(longer) as other:
        full = (cut + 6) // B * B
        assert other.num_cached_tokens >= full
        marks = [*range(1, cut + 1), *range(31, 37)]
        assert_holds(cache, other, marks[: other.num_cached_tokens])
    empty(cache)


@pytest.mark.parametrize("fmt", ["float32", "bfloat16", "q8", "q4"])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_appends_from_every_offset(fmt, layout):
    # CASE C34
    # SPEC F24
    for block_size in (1, 3, 4):
        cache = make_cache(
            16, B=block_size, layers=2, heads=2, dim=5, fmt=fmt, layout=layout
        )
        for offset in range(block_size):
            for n in (0, 1, 2 * block_size + 1):
                seq = cache.open(range(offset))
                fill(cache, seq, range(1, offset + 1))
                for layer in range(2):
                    views, start = seq.append(layer, *rows(cache.spec, layer, range(21, 21 + n)))
                    assert start == offset
                    assert len(views) == -(-(offset + n) // block_size)
                    assert sum(v.length for v in views) == offset + n
                    views.release()
                assert seq.num_written == offset + n
                assert seq.seq_len == offset
                seq.commit(n)
                assert seq.seq_len == offset + n
                table = seq.block_table.tolist()
                assert len(table) == -(-(offset + n) // block_size)
                assert len(set(table)) == len(table)
                assert_holds(cache, seq, [*range(1, offset + 1), *range(21, 21 + n)])
                assert seq.slot_mapping(0, offset + n).tolist() == [
                    table[p // block_size] * block_size + p % block_size
                    for p in range(offset + n)
                ]
                whole(cache)
                seq.free()
        gc.collect()
        empty(cache)


def test_max_seq_len_in_the_middle_of_an_append():
    # CASE C35
    # SPEC F24
    cache = make_cache(8, B=B, layers=2, max_seq_len=10)
    seq = cache.open(range(8))
    fill(cache, seq, range(1, 9))
    k, v = rows(cache.spec, 0, range(21, 24))
    e = refused(cache, lambda: seq.append(0, k, v), SequenceTooLongError, seq)
    assert (e.needed, e.max_seq_len) == (11, 10)
    refused(cache, lambda: seq.append_kv(0, k, v, 8), SequenceTooLongError, seq)
    refused(cache, lambda: seq.append_tokens([1, 2, 3]), SequenceTooLongError, seq)
    refused(cache, lambda: seq.prepare(3), SequenceTooLongError, seq)
    refused(cache, lambda: cache.prepare([seq], [3]), SequenceTooLongError, seq)
    refused(cache, lambda: cache.open(range(11)), SequenceTooLongError, seq)
    refused(cache, lambda: cache.allocate_sequence(11), SequenceTooLongError, seq)
    refused(cache, lambda: cache.extend(seq.seq_id, 3), SequenceTooLongError, seq)
    assert seq.tokens.tolist() == list(range(8))
    fill(cache, seq, [9, 10])
    assert_holds(cache, seq, range(1, 11))
    refused(cache, lambda: seq.append(1, k[:1], v[:1]), SequenceTooLongError, seq)
    seq.free()
    empty(cache)


def test_opening_the_id_of_a_live_request():
    # CASE C36
    # SPEC F21
    cache = make_cache(8, B=B)
    live = cache.open(range(6), request_id="r1")
    fill(cache, live, range(1, 7))
    refused(cache, lambda: cache.open(range(3), request_id="r1"), InvalidArgumentError, live)
    refused(cache, lambda: live.fork(request_id="r1"), InvalidArgumentError, live)
    assert live.request_id == "r1"
    assert_holds(cache, live, range(1, 7))
    with cache.open(range(3), request_id="r2") as other:
        assert other.request_id == "r2"
    live.free()
    with cache.open(range(3), request_id="r1") as again:
        assert again.request_id == "r1"
        assert again.seq_id != live.seq_id
    # a failed open does not keep the id
    with pytest.raises(OutOfBlocksError):
        cache.open(range(1000), request_id="r3")
    cache.open(range(2), request_id="r3").free()
    empty(cache)


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


@pytest.mark.parametrize("fmt", ["float32", "q8"])
def test_a_mapping_for_reading_writes_nothing(fmt):
    # CASE C66
    # SPEC F28a F33
    cache = make_cache(8, B=B, fmt=fmt, layers=2)
    parent = cache.open(range(7))
    write(parent, cache.spec, range(1, 7))
    parent.commit(6)
    child = parent.fork()
    reading = child.slot_mapping(6, 7)
    k, v = rows(cache.spec, 0, [50])
    refused(cache, lambda: cache.store(0, k, v, reading), SlotError, parent, child)
    # a cached block is refused too, even by its only holder
    with cache.open([*range(4), 9]) as holder:
        assert holder.num_cached_tokens == 4
        refused(
            cache, lambda: cache.store(0, k, v, holder.slot_mapping(3, 4)), SlotError, parent
        )
    slots = child.prepare(1)
    assert slots.slots[0] != reading[0]
    for layer in range(2):
        cache.store(layer, *rows(cache.spec, layer, [50]), slots)
    child.commit(1)
    assert_holds(cache, child, [1, 2, 3, 4, 5, 6, 50])
    assert_holds(cache, parent, range(1, 7))
    fill(cache, parent, [60])
    assert_holds(cache, child, [1, 2, 3, 4, 5, 6, 50])
    assert_holds(cache, parent, [1, 2, 3, 4, 5, 6, 60])
    child.free()
    parent.free()
    empty(cache)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("fmt", ["float32", "bfloat16", "q8", "q4"])
def test_views_and_tables_kept_across_growth_free_and_reuse(fmt, packed):
    # CASE C67
    # SPEC F30 F31
    cache = make_cache(6, B=B, fmt=fmt, heads=2)
    seq = cache.open(range(6))
    fill(cache, seq, range(1, 7))
    table = seq.block_table
    ids = table.tolist()
    with pytest.raises(ValueError):
        table[0] = 5
    views = seq.packed_views(0) if packed else seq.views(0)
    arrays = [(v.k, v.v, v.start, v.length) for v in views]
    shown = [(k.copy(), v.copy()) for k, v, _, _ in arrays]
    assert [(s, n) for _, _, s, n in arrays] == [(0, 4), (4, 2)]
    if fmt == "float32":
        want = expected(cache.spec, 0, range(1, 7))
        for k, v, start, length in arrays:
            np.testing.assert_array_equal(k.transpose(1, 0, 2), want[0][start : start + length])
            np.testing.assert_array_equal(v.transpose(1, 0, 2), want[1][start : start + length])
    for k, v, _, _ in arrays:
        with pytest.raises(ValueError):
            k[...] = 0
        with pytest.raises(ValueError):
            v[...] = 0
    assert cache.stats().pinned == 2
    fill(cache, seq, range(7, 15))  # growth
    seq.truncate(5)
    fill(cache, seq, range(31, 34))  # other values behind the cut
    dense = fmt in ("float32", "bfloat16")

    def same():
        for (k, v, _, _), (old_k, old_v) in zip(arrays, shown, strict=True):
            if dense:
                np.testing.assert_array_equal(k, old_k)
                np.testing.assert_array_equal(v, old_v)

    same()
    assert_holds(cache, seq, [1, 2, 3, 4, 5, 31, 32, 33])
    seq.free()
    whole(cache)
    same()
    assert cache.stats().pinned == 2
    with pytest.raises(OutOfBlocksError):
        cache.open(range(500, 524))  # six blocks: two are pinned
    other = cache.open(range(500, 516))
    assert not set(other.block_table.tolist()) & set(ids)
    fill(cache, other, range(101, 117))
    same()
    assert cache.defragment() >= 0
    same()
    assert table.tolist() == ids  # the snapshot is stale but valid
    cache.reset_prefix_cache()
    same()
    other.free()
    arrays.clear()
    del views, k, v
    gc.collect()
    empty(cache)


def test_an_array_outlives_view_sequence_and_cache():
    # CASE C67
    # SPEC F11 F30
    cache = make_cache(2, B=B)
    seq = cache.open(range(4))
    fill(cache, seq, range(1, 5))
    k = seq.views(0)[0].k[:, 1:3, :]
    want = k.copy()
    seq.free()
    gc.collect()
    assert cache.stats().pinned == 1
    with pytest.raises(OutOfBlocksError):
        cache.open(range(90, 98))
    with cache.open(range(90, 94)) as other:
        fill(cache, other, range(61, 65))
        np.testing.assert_array_equal(k, want)
    cache.close()
    gc.collect()
    np.testing.assert_array_equal(k, want)
    with pytest.raises(FreedHandleError):
        cache.open(range(2))


def test_a_released_view_frees_its_block():
    # CASE C67
    # SPEC F30
    cache = make_cache(2, B=B)
    seq = cache.open(range(8))
    fill(cache, seq, range(1, 9))
    views = seq.views(0)
    assert cache.stats().pinned == 2
    first = views[0]
    views.release()
    assert cache.stats().pinned == 0
    with pytest.raises(FreedHandleError):
        _ = first.k
    with seq.views(0, 5, 7) as part:
        assert [(v.start, v.length) for v in part] == [(5, 2)]
        assert cache.stats().pinned == 1
    assert cache.stats().pinned == 0
    seq.free()
    empty(cache)


@pytest.mark.parametrize("fmt", ["float32", "q4"])
def test_a_slot_mapping_is_stale_after_a_defragment(fmt):
    # CASE C68
    # SPEC F19 F33
    cache = make_cache(8, B=B, fmt=fmt, layers=2)
    low = cache.open(range(300, 308))
    seq = cache.open(range(6))
    fill(cache, seq, range(1, 7))
    slots = seq.prepare(3)
    made = np.array(slots.slots)
    low.free()
    epoch = cache.layout_epoch
    assert cache.defragment() == 3
    assert cache.layout_epoch > epoch
    k, v = rows(cache.spec, 0, [7, 8, 9])
    refused(cache, lambda: cache.store(0, k, v, slots), StaleMappingError, seq)
    refused(cache, lambda: cache.store(0, k, v, made), (SlotError, StaleMappingError), seq)
    fresh = seq.prepare(3)
    for layer in range(2):
        cache.store(layer, *rows(cache.spec, layer, [7, 8, 9]), fresh)
    seq.commit(3)
    assert_holds(cache, seq, range(1, 10))
    # moved by compact_sequence, freed, or shared since: stale as well
    slots = seq.prepare(1)
    twin = seq.fork()
    refused(cache, lambda: cache.store(0, k[:1], v[:1], slots), PagedCacheError, seq, twin)
    twin.free()
    slots = seq.prepare(1)
    seq.free()
    with pytest.raises(PagedCacheError):
        cache.store(0, k[:1], v[:1], slots)
    empty(cache)


def run_copies(cache: pc.PagedKVCache, memory: np.ndarray) -> int:
    """Play the engine: run the copies in parallel and in order, which must agree."""
    done = 0
    while True:
        pairs, ticket = cache.take_block_copies()
        if not len(pairs):
            return done
        assert pairs.dtype == np.int32 and pairs.shape[1] == 2
        src, dst = pairs[:, 0].tolist(), pairs[:, 1].tolist()
        assert len(set(dst)) == len(dst)
        assert not set(dst) & set(src)
        memory[dst] = memory[src]
        cache.copies_done(ticket)
        done += len(pairs)


@pytest.mark.parametrize("taken_before", [False, True])
def test_a_pending_copy_keeps_both_ends(taken_before):
    # CASE C69
    # SPEC F48
    cache = make_cache(6, B=B, storage=None)
    memory = np.zeros((6, B), np.int64)

    def put(slots, marks):
        memory.reshape(-1)[np.asarray(slots)] = marks

    def marks_of(seq, n):
        return memory.reshape(-1)[seq.slot_mapping(0, n)].tolist()

    parent = cache.open(range(6))
    put(parent.prepare(6), [1, 2, 3, 4, 5, 6])
    parent.commit(6)
    child = parent.fork()
    slots = child.prepare(1)
    assert cache.stats().cow_copies == 1
    source, target = parent.block_table[1], child.block_table[1]
    assert source != target
    taken = cache.take_block_copies() if taken_before else None
    if taken_before:
        assert taken[0].tolist() == [[source, target]]
    refused(cache, lambda: child.commit(1), PendingCopyError, parent, child)
    parent.free()
    whole(cache)
    # everything else is taken and written: neither end is among it
    rest = cache.open(range(700, 700 + 4 * cache.num_free_blocks))
    assert not {int(source), int(target)} & set(rest.block_table.tolist())
    put(rest.prepare(rest.num_tokens), range(100, 100 + rest.num_tokens))
    try:
        cache.defragment()
    except PendingCopyError:
        pass
    assert int(child.block_table[1]) == int(target)
    if taken_before:
        for src, dst in taken[0]:
            memory[dst] = memory[src]
        cache.copies_done(taken[1])
        with pytest.raises(InvalidArgumentError):
            cache.copies_done(taken[1])
    run_copies(cache, memory)
    put(slots, [50])
    child.commit(1)
    assert marks_of(child, 7) == [1, 2, 3, 4, 5, 6, 50]
    assert marks_of(rest, rest.num_tokens) == list(range(100, 100 + rest.num_tokens))
    whole(cache)
    rest.free()
    moved = cache.defragment()
    run_copies(cache, memory)
    assert marks_of(child, 7) == [1, 2, 3, 4, 5, 6, 50], moved
    child.free()
    empty(cache)


def test_a_cache_without_bytes_says_so():
    # SPEC F48
    cache = make_cache(4, B=B, storage=None)
    seq = cache.open(range(5))
    k = np.zeros((1, 1, 4), np.float32)
    for call in (
        lambda: seq.append(0, k, k),
        lambda: seq.append_kv(0, k, k, 0),
        lambda: cache.store(0, k, k, np.array([0])),
        lambda: seq.gather(0),
        lambda: seq.views(0),
        lambda: seq.packed_views(0),
    ):
        refused(cache, call, pc.FormatError, seq)
    seq.prepare(5)
    seq.commit(5)
    seq.free()
    assert cache.probe(range(5)) == 4
    empty(cache)


def test_an_operation_refused_half_way_changes_nothing():
    # CASE C59
    # SPEC F23
    cache = make_cache(8, B=B, layers=2)
    stranger_home = make_cache(8, B=B, layers=2)
    seq, gone = cache.open(range(6)), cache.open(range(20, 26))
    fill(cache, seq, range(1, 7))
    fill(cache, gone, range(11, 17))
    gone.free()
    stranger = stranger_home.open(range(6))
    fill(stranger_home, stranger, range(21, 27))
    k, v = rows(cache.spec, 0, [90])
    other_before = snapshot(stranger_home, stranger)
    prompts = [[*range(4), 1], [*range(20, 24), 1]]

    def no(call, kind=PagedCacheError):
        refused(cache, call, kind, seq, prompts=prompts)
        assert snapshot(stranger_home, stranger) == other_before

    no(lambda: gone.truncate(0), FreedHandleError)
    no(lambda: gone.commit(0), FreedHandleError)
    no(lambda: gone.append(0, k, v), FreedHandleError)
    no(lambda: gone.append_token(1), FreedHandleError)
    no(lambda: seq.truncate(7), InvalidPositionError)
    no(lambda: seq.commit(3), InvalidPositionError)
    no(lambda: seq.append_kv(0, k, v, 7), InvalidPositionError)
    no(lambda: cache.prepare([seq, gone], [1, 1]), FreedHandleError)
    no(lambda: cache.prepare([seq, stranger], [1, 1]))
    no(lambda: cache.prepare([seq, seq], [1, 1]))
    no(lambda: cache.prepare([seq], [1, 1]))
    no(lambda: cache.prepare([seq], [-1]))
    no(lambda: cache.block_tables([seq, stranger]))
    no(lambda: cache.page_table([stranger]))
    no(lambda: cache.block_tables([seq, gone]), FreedHandleError)
    no(lambda: cache.block_tables([seq], [9]), InvalidPositionError)
    no(lambda: cache.compact_sequence(stranger))
    no(lambda: cache.sequence_contiguity(gone), FreedHandleError)
    no(lambda: cache.store(0, k, v, stranger.prepare(1)))
    other_before = snapshot(stranger_home, stranger)
    no(lambda: cache.update_tokens(seq.seq_id, 9), InvalidPositionError)
    no(lambda: cache.update_tokens(seq.seq_id, -1), PagedCacheError)
    no(lambda: cache.update_tokens(gone.seq_id, 1), pc.SequenceNotFoundError)
    assert_holds(cache, seq, range(1, 7))
    for s in (seq, stranger):
        s.free()
    empty(cache)
    empty(stranger_home)


def test_the_id_based_style():
    # SPEC F21
    cache = make_cache(8, B=B, layers=2)
    a = cache.allocate_sequence(6)
    assert cache.sequence_tokens(a) == 0
    assert cache.num_used_blocks == 2
    seq = cache.sequence(a)
    assert seq.seq_id == a and cache.sequence(a) is seq
    write(seq, cache.spec, range(1, 7))
    cache.update_tokens(a, 6)
    assert cache.sequence_tokens(a) == 6
    blocks = [cache.block_at(a, p) for p in range(6)]
    assert blocks == [int(seq.block_table[p // B]) for p in range(6)]
    cache.extend(a, 5)
    assert cache.num_used_blocks == 3
    child = cache.fork_sequence(a)
    assert child != a and cache.sequence_tokens(child) == 6
    cache.update_tokens(child, 5)  # shrinks its own length, keeps blocks
    assert (cache.sequence_tokens(a), cache.sequence_tokens(child)) == (6, 5)
    assert cache.sequence(child).num_blocks == cache.sequence(a).num_blocks
    old = cache.block_at(child, 5)
    private = cache.writable_block_at(child, 5)
    assert private != old == cache.block_at(a, 5)
    assert cache.block_at(child, 5) == private == cache.writable_block_at(child, 5)
    fill(cache, cache.sequence(child), [70])
    assert_holds(cache, cache.sequence(child), [1, 2, 3, 4, 5, 70])
    assert_holds(cache, seq, range(1, 7))
    for bad in (12, -1, 2**40):
        with pytest.raises(InvalidPositionError):
            cache.block_at(a, bad)
    cache.free_sequence(a)
    cache.free_sequence(a)
    with pytest.raises(FreedHandleError):
        _ = seq.block_table
    assert_holds(cache, cache.sequence(child), [1, 2, 3, 4, 5, 70])
    cache.free_sequence(child)
    b = cache.allocate_sequence(1)
    assert b not in (a, child)  # ids are never reused
    cache.free_sequence(b)
    empty(cache)


def test_allocate_upto_takes_a_first_chunk():
    # SPEC F22
    cache = make_cache(8, B=B)
    prompt = list(range(10, 30))
    seq = cache.open(prompt, allocate_upto=6)
    assert (seq.num_blocks, seq.num_tokens, seq.seq_len) == (2, 20, 0)
    assert cache.num_used_blocks == 2
    for first, n in ((0, 6), (6, 6), (12, 8)):
        slots = seq.prepare(n)
        cache.store(0, *rows(cache.spec, 0, range(first + 1, first + 1 + n)), slots)
        seq.commit(n)
        assert seq.num_blocks == -(-(first + n) // B)
        whole(cache)
    assert_holds(cache, seq, range(1, 21))
    assert cache.probe([*prompt, 1]) == 20
    seq.free()
    empty(cache)
    cold = cache.open()
    assert cold.allocate_for_tokens([*prompt, 1]) == 20
    assert_holds(cache, cold, range(1, 21))
    refused(cache, lambda: cold.allocate_for_tokens([1]), InvalidArgumentError, cold)
    cold.free()
    empty(cache)
    cached_prompt(cache, prompt)
