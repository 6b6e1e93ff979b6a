"""Cases C30-C36 and C59: fork, truncate, append, identity of requests."""

from __future__ import annotations

import gc

import pytest
from cachekit import (
    assert_holds,
    cached_prompt,
    empty,
    fill,
    make_cache,
    refused,
    rows,
    snapshot,
    whole,
    write,
)
from devicekit import host

import pagedcache as pc
from pagedcache.errors import (
    FreedHandleError,
    InvalidArgumentError,
    InvalidPositionError,
    OutOfBlocksError,
    PagedCacheError,
    SequenceTooLongError,
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
    raw_before = [host(v.k).tobytes() + host(v.v).tobytes() for v in parent.views(1)]
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
        raw_after = [host(v.k).tobytes() + host(v.v).tobytes() for v in views]
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
