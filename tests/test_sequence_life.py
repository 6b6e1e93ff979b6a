"""Opening, naming and freeing sequences (SPEC F21, F22, F26, F29 at the façade)."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from cachekit import assert_holds, empty, fill, make_cache, refused, rows, whole

import pagedcache as pc
from pagedcache.errors import PagedCacheError


def test_open_leaves_one_token_and_append_takes_no_block():
    # SPEC F22, CASE C20, TRAP 3
    with make_cache(8, B=4) as cache:
        prompt = list(range(12))
        with cache.open(prompt) as first:
            fill(cache, first, range(12))
        assert cache.blocks_needed(prompt) == 1
        with cache.open(prompt) as seq:
            assert seq.num_cached_tokens == 11
            assert seq.seq_len == 11
            assert seq.num_blocks == 3
            free = cache.num_free_blocks
            seq.append(0, *rows(cache.spec, 0, [11]))
            assert cache.num_free_blocks == free
            seq.commit(1)
            assert_holds(cache, seq, range(12))
        with cache.open(prompt + [77]) as again:
            assert again.num_cached_tokens == 12
            assert_holds(cache, again, range(12))
        whole(cache)


def test_allocate_for_tokens_is_open_in_two_steps():
    # SPEC F22
    with make_cache(8, B=4) as cache:
        with cache.open(range(8), salt="a") as first:
            fill(cache, first, range(8))
        with cache.open(salt=b"a") as seq:
            assert seq.num_blocks == 0
            assert seq.allocate_for_tokens(list(range(9))) == 8
            assert (seq.num_cached_tokens, seq.seq_len, seq.num_tokens) == (8, 8, 9)
            refused(cache, lambda: seq.allocate_for_tokens([1]), pc.InvalidArgumentError, seq)
        with cache.open(salt="b") as other:
            assert other.allocate_for_tokens(np.arange(9)) == 0
        with cache.open() as seq:
            refused(cache, lambda: seq.allocate_for_tokens(range(40)), pc.OutOfBlocksError, seq)
            for junk in ([-1], [2**32], [1.5], "abc", [[1]], None):
                refused(cache, lambda: seq.allocate_for_tokens(junk),  # noqa: B023
                        pc.InvalidArgumentError, seq)
            assert seq.allocate_for_tokens(range(20), allocate_upto=8) == 0
            assert seq.num_blocks == 2


def test_generated_tokens_are_cached():
    # SPEC F26
    with make_cache(8, B=4) as cache:
        with cache.open([1, 2, 3]) as seq:
            fill(cache, seq, range(3))
            seq.append_token(4)
            seq.append_tokens(np.array([5, 6], np.uint16))
            fill(cache, seq, range(3, 6))
            assert seq.tokens.tolist() == [1, 2, 3, 4, 5, 6]
            assert seq.tokens.dtype == np.uint32
        assert cache.probe([1, 2, 3, 4, 9]) == 4
        with cache.open() as seq:
            for junk in (-1, 2**32, 1.0, True, None, "a"):
                refused(cache, lambda: seq.append_token(junk),  # noqa: B023
                        pc.InvalidArgumentError, seq)
            seq.append_token(2**32 - 1)
            assert seq.tokens.tolist() == [2**32 - 1]


def test_free_is_idempotent_and_final():
    # SPEC F29
    cache = make_cache(8)
    seq = cache.open(range(5))
    seq.free()
    seq.free()
    assert seq.freed
    for call in (
        lambda: seq.seq_len, lambda: seq.num_tokens, lambda: seq.num_written,
        lambda: seq.num_cached_tokens, lambda: seq.num_blocks, lambda: seq.block_table,
        lambda: seq.tokens, lambda: seq.written(0), lambda: seq.layer_block_ids(0),
        lambda: seq.slot_mapping(0, 1), lambda: seq.block_for_position(0),
        lambda: seq.block_offset(0), lambda: seq.gather(0), lambda: seq.views(0),
        lambda: seq.packed_views(0), lambda: seq.append(0, *rows(cache.spec, 0, [1])),
        lambda: seq.append_kv(0, *rows(cache.spec, 0, [1]), 0), lambda: seq.commit(0),
        lambda: seq.append_token(1), lambda: seq.append_tokens([1]), lambda: seq.truncate(0),
        lambda: seq.fork(), lambda: seq.prepare(1), lambda: seq.blocks_needed(1),
        lambda: seq.allocate_for_tokens([1]), lambda: cache.prepare([seq], [1]),
        lambda: cache.block_tables([seq]), lambda: cache.page_table([seq]),
        lambda: cache.compact_sequence(seq), lambda: cache.sequence_contiguity(seq),
        lambda: seq.__enter__(),
    ):
        with pytest.raises(pc.FreedHandleError, match=f"sequence {seq.seq_id}"):
            call()
    assert repr(seq) == f"<Sequence {seq.seq_id}: freed>"
    empty(cache)
    cache.close()


def test_a_dropped_handle_gives_its_blocks_back():
    with make_cache(8) as cache:
        seq = cache.open(range(9))
        assert cache.num_used_blocks == 3
        del seq
        empty(cache)


def test_request_ids():
    # SPEC F21, CASE C36
    with make_cache(8) as cache, cache.open([1, 2], request_id=("job", 7)) as seq:
        assert seq.request_id == ("job", 7)
        error = refused(cache, lambda: cache.open([3], request_id=("job", 7)),
                        pc.InvalidArgumentError, seq)
        assert "live" in str(error)
        refused(cache, lambda: seq.fork(request_id=("job", 7)), pc.InvalidArgumentError, seq)
        refused(cache, lambda: cache.open([3], request_id=[]), pc.InvalidArgumentError, seq)
        seq.free()
        with cache.open([3], request_id=("job", 7)):
            pass
        # A refused open does not keep the name.
        refused(cache, lambda: cache.open(range(99), request_id="x"), pc.OutOfBlocksError)
        cache.open([3], request_id="x")  # dropped at once
        with cache.open([3], request_id="x"):
            pass


def test_seq_ids_are_never_reused():
    # SPEC F21
    with make_cache(8) as cache:
        seen = set()
        for _ in range(20):
            with cache.open([1]) as seq:
                seen.add(seq.seq_id)
        assert len(seen) == 20


def test_open_arguments():
    with make_cache(8) as cache:
        for junk in ([-1], [2**32], [0.5], "text", [[1, 2]], 3, None, np.zeros(2)):
            refused(cache, lambda: cache.open(junk), pc.InvalidArgumentError)  # noqa: B023
            refused(cache, lambda: cache.probe(junk), pc.InvalidArgumentError)  # noqa: B023
            refused(cache, lambda: cache.blocks_needed(junk), pc.InvalidArgumentError)  # noqa: B023
        for options in ({"salt": 3}, {"adapter": 1.5}, {"extra_keys": [(0, 0, b"")]},
                        {"extra_keys": 7}, {"allocate_upto": -1}, {"allocate_upto": 1.0}):
            refused(cache, lambda: cache.open([1], **options), pc.InvalidArgumentError)  # noqa: B023
        tokens = [1, 2, 3, 4, 5]
        for same in (tokens, tuple(tokens), range(1, 6), np.array(tokens, np.int8),
                     np.array(tokens, np.uint64)):
            with cache.open(same) as seq:
                assert seq.tokens.tolist() == tokens
                assert seq.num_tokens == 5


def test_allocate_upto_takes_a_first_chunk():
    # SPEC F22
    with make_cache(8, B=4) as cache, cache.open(range(20), allocate_upto=6) as seq:
        assert seq.num_blocks == 2
        assert seq.num_tokens == 20
        assert cache.blocks_needed(range(20), allocate_upto=6) == 2
        fill(cache, seq, range(6))
        fill(cache, seq, range(6, 20))
        assert seq.num_blocks == 5
        assert_holds(cache, seq, range(20))


def test_repr():
    with make_cache(8, B=4) as cache, cache.open(range(6), request_id="r1") as seq:
        fill(cache, seq, range(5))
        assert repr(seq) == (
            f"<Sequence {seq.seq_id} 'r1': 5 of 6 tokens computed, 2 blocks>"
        )


# ---- what finalizers and other threads may do meanwhile ----------------------------------------


class Request:
    """An ordinary object of an engine, in a cycle, that ends or starts work when collected."""

    def __init__(self, cache: pc.PagedKVCache, finalize: object) -> None:
        self.cache, self.finalize, self.me = cache, finalize, self
        self.seq = cache.open([1])

    def __del__(self) -> None:
        try:
            self.finalize(self)
        except pc.FreedHandleError:  # the cache is closed already
            pass


def _free(request: Request) -> None:
    request.seq.free()


def _open(request: Request) -> None:
    request.kept = request.cache.open([2])


@pytest.mark.parametrize("finalize", [_free, _open])
@pytest.mark.parametrize("call", ["live_sequences", "close"])
def test_collection_inside_a_walk_over_the_handles(finalize, call):
    # SPEC F34
    threshold = gc.get_threshold()
    try:
        for i in range(400):
            cache = make_cache(64, B=4, storage=None)
            gc.disable()
            kept = [cache.open([3]) for _ in range(12)]
            for _ in range(3):
                Request(cache, finalize)
            gc.set_threshold(1 + i % 60)
            gc.enable()
            found = getattr(cache, call)()
            gc.set_threshold(*threshold)
            if call == "close":
                assert all(seq.freed for seq in kept)
            else:
                assert set(found) >= {seq.seq_id for seq in kept}
                cache.check()
            cache.close()
    finally:
        gc.set_threshold(*threshold)
        gc.enable()


class _ClosedMeanwhile:
    """A ledger that another thread closes between a handle's look at itself and its free()."""

    def __init__(self, cache: pc.PagedKVCache) -> None:
        self.cache, self.ledger = cache, cache._ledger

    @property
    def free(self) -> object:
        self.cache._ledger = self.ledger
        self.cache.close()
        return self.cache._ledger.free  # as the handle would find it now


def test_free_is_a_no_op_when_close_comes_in_between():
    # SPEC F25
    for use in (pc.Sequence.free, lambda seq: seq.__exit__(None, None, None)):
        cache = make_cache(8, B=4, storage=None)
        seq = cache.open(range(6))
        pool = cache.pool
        cache._ledger = _ClosedMeanwhile(cache)
        use(seq)
        assert seq.freed and cache.closed and pool.num_used_blocks == 0
        seq.free()


def test_views_let_go_after_close():
    # SPEC F31
    cache = make_cache(8, B=4)
    seq = cache.open()
    fill(cache, seq, range(6))
    pool, views, result = cache.pool, seq.views(0), seq.append(0, *rows(cache.spec, 0, [6]))
    block = views[1]
    assert len(list(result.views)) == 2
    cache.close()
    assert pool.num_used_blocks == 2
    for thing in (views, block, result.views, views):
        thing.release()
    assert pool.num_used_blocks == 0


# ---- errors that name what was given ------------------------------------------------------------


HUGE = [10**30, -(10**30), 10**5000]


def test_positions_are_reported_as_they_were_given():
    # SPEC 7
    with make_cache(8, B=4) as cache, cache.open() as seq:
        fill(cache, seq, range(6))
        k, v = rows(cache.spec, 0, [1])
        number = seq.seq_id
        calls = {
            "append_kv": (lambda x: seq.append_kv(0, k, v, x), 6),
            "truncate": (seq.truncate, 6),
            "gather stop": (lambda x: seq.gather(0, 0, x), 6),
            "gather start": (lambda x: seq.gather(0, x), 6),
            "views stop": (lambda x: seq.views(0, 0, x), 6),
            "packed_views start": (lambda x: seq.packed_views(0, x), 6),
            "slot_mapping start": (lambda x: seq.slot_mapping(x, 2), 8),
            "slot_mapping stop": (lambda x: seq.slot_mapping(0, x), 8),
            "block_for_position": (seq.block_for_position, 8),
            "block_offset": (seq.block_offset, 8),
            "update_tokens": (lambda x: cache.update_tokens(number, x), 8),
            "block_at": (lambda x: cache.block_at(number, x), 8),
            "writable_block_at": (lambda x: cache.writable_block_at(number, x), 8),
        }
        for name, (call, length) in calls.items():
            for value in [-1, *HUGE]:
                error = refused(cache, lambda call=call, x=value: call(x),
                                pc.InvalidPositionError, seq)
                assert error.position == value, name
                if abs(value) > 1:
                    assert error.length == length, name
            assert "position -1 is outside" in str(pytest.raises(
                pc.InvalidPositionError, call, -1).value), name


def test_sequences_that_were_never_opened():
    # SPEC 7
    bare = pc.Sequence.__new__(pc.Sequence)
    with make_cache(8, B=4) as cache, cache.open() as seq:
        for call in (
            lambda: cache.prepare([bare], [1]),
            lambda: cache.prepare([seq, bare], [1, 1]),
            lambda: cache.prepare((s for s in [seq, bare]), [1, 1]),
            lambda: cache.compact_sequence(bare),
        ):
            error = refused(cache, call, pc.InvalidArgumentError, seq)
            assert "cache.open()" in str(error)
        assert len(cache.prepare((s for s in [seq]), [2])) == 2


class NoRepr:
    def __repr__(self) -> str:
        raise ValueError("no words for this")


def test_request_ids_without_a_repr():
    # SPEC 7
    with make_cache(8, B=4) as cache:
        name = NoRepr()
        seq = cache.open([1], request_id=name)
        assert "NoRepr" in repr(seq) and "1 tokens" in repr(seq)
        error = refused(cache, lambda: cache.open([2], request_id=name), pc.InvalidArgumentError)
        assert "NoRepr" in str(error)
        seq.free()
        assert "freed" in repr(seq)


@pytest.mark.parametrize("bad", [NoRepr(), [NoRepr()], np.zeros((2, 3)), np.zeros(2)])
def test_values_without_a_repr_or_a_truth_are_refused_with_a_typed_error(bad):
    # SPEC 7
    spec = dict(num_layers=1, num_kv_heads=1, head_dim=32)
    good = pc.CacheSpec(**spec)
    with make_cache(8, B=4) as cache, cache.open([1, 2]) as seq:
        for call in (
            lambda: cache.open(bad),
            lambda: cache.open([1], bad),
            lambda: cache.open([1], extra_keys=bad),
            lambda: cache.probe([1], extra_keys=bad),
            lambda: cache.blocks_needed([1], extra_keys=bad),
            lambda: pc.compute_block_hashes([1, 2], 1, extra_keys=bad),
            lambda: pc.compute_block_hash([1], bad),
            lambda: pc.get_format(bad),
            lambda: pc.CacheSpec(**spec, layout=bad),
            lambda: pc.CacheSpec(**spec, on_nonfinite=bad),
            lambda: good.layer_block_nbytes(bad),
            lambda: good.blocks_for(bad),
            lambda: pc.PagedKVCache(good, bad),
            lambda: pc.PagedKVCache(good, 4, eviction=bad),
            lambda: pc.PagedKVCache(good, 4, device=bad),
            lambda: pc.PagedKVCache(good, 4, storage=bad),
            lambda: cache.should_defragment(bad),
            lambda: seq.append(0, bad, bad),
            lambda: seq.gather(0, dtype=bad),
            lambda: seq.truncate(bad),
        ):
            refused(cache, call, PagedCacheError, seq)
        if isinstance(bad, np.ndarray):
            refused(cache, lambda: cache.open([1], resumed=bad), pc.InvalidArgumentError)
