"""Writing through a handle: append, commit, truncate, fork (SPEC F24-F28 at the façade)."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from cachekit import (
    ROW_FORMATS,
    assert_holds,
    empty,
    expected,
    fill,
    make_cache,
    read,
    refused,
    rows,
    stored,
    whole,
    write,
)

import pagedcache as pc


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("fmt", ROW_FORMATS)
def test_every_format_and_layout(fmt, layout):
    # SPEC F24, F32
    with make_cache(8, fmt=fmt, layout=layout, layers=2, heads=3, dim=40) as cache:
        with cache.open(range(10)) as seq:
            write(seq, cache.spec, range(1, 8))
            write(seq, cache.spec, range(8, 11))
            seq.commit(10)
            assert_holds(cache, seq, range(1, 11))
        empty(cache)


def test_append_returns_views_and_start():
    # SPEC F24
    with make_cache(8, B=4, layers=2) as cache, cache.open() as seq:
        k, v = expected(cache.spec, 0, range(6))
        result = seq.append(0, k[:5], v[:5])
        assert isinstance(result, pc.AppendResult)
        views, start = result
        assert start == 0
        assert cache.stats().pinned == 0  # nothing pinned until somebody looks
        assert len(views) == 2
        assert [(view.start, view.length) for view in views] == [(0, 4), (4, 1)]
        np.testing.assert_array_equal(views[1].k[:, 0], k[4])
        assert cache.stats().pinned == 2
        views.release()
        assert cache.stats().pinned == 0
        assert seq.append(0, k[5:], v[5:]).start == 5
        assert seq.append(1, k[:2], v[:2]).start == 0


@pytest.mark.parametrize("offset", range(4))
@pytest.mark.parametrize("count", [0, 1, 4, 9])
def test_append_from_each_offset(offset, count):
    # SPEC F24, CASE C34
    with make_cache(8, B=4, layers=2) as cache, cache.open() as seq:
        fill(cache, seq, range(offset))
        write(seq, cache.spec, range(offset, offset + count))
        assert seq.num_written == offset + count
        assert seq.num_blocks == -(-(offset + count) // 4)
        seq.commit(count)
        assert seq.seq_len == offset + count
        assert_holds(cache, seq, range(offset + count))
        whole(cache)


def test_layers_advance_on_their_own():
    # SPEC F24, F31: num_written is the least of the layers
    with make_cache(8, layers=2) as cache, cache.open() as seq:
        seq.append(0, *rows(cache.spec, 0, range(5)))
        assert (seq.written(0), seq.written(1), seq.num_written) == (5, 0, 0)
        seq.append(1, *rows(cache.spec, 1, range(3)))
        assert (seq.written(0), seq.written(1), seq.num_written) == (5, 3, 3)
        refused(cache, lambda: seq.commit(4), pc.InvalidPositionError, seq)  # CASE C37
        seq.commit(3)
        assert seq.seq_len == 3


def test_flat_rows_and_all_source_dtypes():
    # SPEC F24; the same values whatever the source dtype
    with make_cache(8, heads=2, dim=6) as cache:
        k, v = rows(cache.spec, 0, range(3))
        for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
            for shape in ((3, 2, 6), (3, 12)):
                with cache.open() as seq:
                    seq.append(0, k.astype(dtype).reshape(shape), v.astype(dtype).reshape(shape))
                    seq.commit(3)
                    got_k, got_v = read(seq, 0)
                    np.testing.assert_array_equal(got_k, k.astype(dtype).astype(np.float32))
                    np.testing.assert_array_equal(got_v, v.astype(dtype).astype(np.float32))


def test_bad_rows_change_nothing():
    # SPEC F24, F23, CASE C44, C45, C59
    with make_cache(8, layers=2, heads=2, dim=4, fmt="q8") as cache, cache.open(range(3)) as seq:
        fill(cache, seq, range(3))
        k, v = rows(cache.spec, 0, [5, 6])
        nan = k.copy()
        nan[1, 1, 3] = np.nan
        bad = [
            (0, k.astype(np.float64), v, pc.FormatError),
            (0, k, v.astype(np.int8), pc.FormatError),
            (0, k, v.astype(np.complex64), pc.FormatError),
            (0, k.astype(object), v, pc.FormatError),
            (0, "text", v, pc.FormatError),
            (0, [[1.0], [2.0, 3.0]], v, pc.FormatError),
            (0, k.astype(">f4"), v, pc.FormatError),
            (0, k[:, :, :3], v, pc.ShapeError),
            (0, k[0], v, pc.ShapeError),
            (0, k, v[:1], pc.ShapeError),
            (0, k[None], v[None], pc.ShapeError),
            (2, k, v, pc.InvalidArgumentError),
            (-1, k, v, pc.InvalidArgumentError),
            (2**80, k, v, pc.InvalidArgumentError),
            (True, k, v, pc.InvalidArgumentError),
            (0, nan, v, pc.NonFiniteError),
            (1, k, nan, pc.NonFiniteError),
        ]
        for layer, bad_k, bad_v, kind in bad:
            refused(cache, lambda: seq.append(layer, bad_k, bad_v), kind, seq)  # noqa: B023
        refused(cache, lambda: seq.append(0, k, v, on_nonfinite="ignore"),
                pc.InvalidArgumentError, seq)
        seq.append(0, nan, v, on_nonfinite="saturate")  # SPEC F7
        want = nan.copy()
        want[1, 1, 3] = 0
        got, _ = seq.gather(0, 3, 5)
        np.testing.assert_array_equal(got, stored(want, "q8"))


def test_append_kv_at_a_position():
    # SPEC F24
    with make_cache(8, B=4, layers=1) as cache, cache.open() as seq:
        write(seq, cache.spec, range(6))
        k, v = rows(cache.spec, 0, [50, 51])
        assert seq.append_kv(0, k, v, 3).start == 3
        assert_holds(cache, seq, [0, 1, 2, 50, 51, 5])
        assert seq.num_written == 6
        seq.append_kv(0, k, v, 5)
        assert seq.num_written == 7
        for gap in (8, 2**40, 2**100, -1, -7):
            refused(cache, lambda: seq.append_kv(0, k, v, gap),  # noqa: B023
                    pc.InvalidPositionError, seq)
        for junk in (1.0, "3", None, True):
            refused(cache, lambda: seq.append_kv(0, k, v, junk),  # noqa: B023
                    pc.InvalidArgumentError, seq)
        assert_holds(cache, seq, [0, 1, 2, 50, 51, 50, 51])


def test_max_seq_len_stops_before_any_byte():
    # SPEC F24, CASE C35
    with make_cache(8, B=4, max_seq_len=6) as cache, cache.open() as seq:
        fill(cache, seq, range(5))
        assert seq.max_seq_len == 6
        error = refused(cache, lambda: seq.append(0, *rows(cache.spec, 0, [7, 8])),
                        pc.SequenceTooLongError, seq)
        assert (error.needed, error.max_seq_len) == (7, 6)
        refused(cache, lambda: seq.prepare(2), pc.SequenceTooLongError, seq)
        refused(cache, lambda: cache.open(range(7)), pc.SequenceTooLongError, seq)
        fill(cache, seq, [7])
        assert seq.seq_len == 6


def test_out_of_blocks_in_append():
    # SPEC F23
    with make_cache(2, B=4) as cache, cache.open() as seq:
        fill(cache, seq, range(6))
        error = refused(cache, lambda: seq.append(0, *rows(cache.spec, 0, range(3))),
                        pc.OutOfBlocksError, seq)
        assert (error.needed, error.available, error.total) == (1, 0, 2)
        fill(cache, seq, [6, 7])
        assert_holds(cache, seq, range(8))


def test_an_error_while_bytes_move_undoes_the_append(monkeypatch):
    # SPEC F23: the pin goes, lengths stay
    with make_cache(8) as cache, cache.open() as seq:
        fill(cache, seq, range(2))

        def fail(*arguments):
            raise RuntimeError("injected")

        with monkeypatch.context() as patch:
            patch.setattr(cache._storage, "store", fail)
            with pytest.raises(RuntimeError, match="injected"):
                seq.append(0, *rows(cache.spec, 0, [9]))
        assert seq.num_written == seq.seq_len == 2
        assert cache.stats().pinned == 0
        fill(cache, seq, [2])
        assert_holds(cache, seq, range(3))
        whole(cache)


def test_commit_bounds():
    # SPEC F25, CASE C37
    with make_cache(8, B=4) as cache, cache.open(range(4)) as seq:
        refused(cache, lambda: seq.commit(5), pc.InvalidPositionError, seq)
        for junk in (-1, 1.0, True, None, 2**70):
            refused(cache, lambda: seq.commit(junk), pc.InvalidArgumentError, seq)  # noqa: B023
        seq.commit(0)
        assert seq.seq_len == 0


def test_unknown_tokens_may_be_committed_and_are_never_cached():
    # SPEC F25, CASE C37
    with make_cache(8, B=4) as cache, cache.open(range(4)) as seq:
        fill(cache, seq, range(4))
        fill(cache, seq, range(4, 12))  # two blocks of tokens nobody named
        assert seq.seq_len == 12
        assert cache.num_cached_blocks == 1


def test_truncate():
    # SPEC F27, CASE C32
    with make_cache(8, B=4) as cache, cache.open(range(10)) as seq:
        fill(cache, seq, range(10))
        for bad in (-1, 11, 2**70, -(2**70)):
            refused(cache, lambda: seq.truncate(bad), pc.InvalidPositionError, seq)  # noqa: B023
        for junk in (1.0, None, True, "3"):
            refused(cache, lambda: seq.truncate(junk), pc.InvalidArgumentError, seq)  # noqa: B023
        seq.truncate(10)
        assert_holds(cache, seq, range(10))
        seq.truncate(5)
        assert (seq.seq_len, seq.num_tokens, seq.num_blocks) == (5, 5, 2)
        k, _ = seq.gather(0)
        assert len(k) == 5
        seq.truncate(0)
        assert (seq.seq_len, seq.num_tokens, seq.num_blocks) == (0, 0, 0)
        assert seq.gather(0)[0].shape == (0, 1, 4)
        assert len(seq.views(0)) == 0
        whole(cache)


def test_write_after_truncate_keeps_what_is_cached():
    # SPEC F27, CASE C33, TRAP 4
    with make_cache(8, B=4) as cache:
        with cache.open(range(8)) as seq:
            fill(cache, seq, range(8))
            seq.truncate(2)
            seq.append_tokens([90, 91])
            fill(cache, seq, [90, 91])
            assert_holds(cache, seq, [0, 1, 90, 91])
        with cache.open([*range(8), 8]) as again:
            assert again.num_cached_tokens == 8
            assert_holds(cache, again, range(8))
        whole(cache)


def test_fork_shares_until_written():
    # SPEC F28, CASE C30
    with make_cache(8, B=4) as cache, cache.open(range(6), request_id="parent") as seq:
        fill(cache, seq, range(6))
        used = cache.num_used_blocks
        twin = seq.fork(request_id="child")
        assert cache.num_used_blocks == used
        assert (twin.request_id, twin.seq_len, twin.num_tokens) == ("child", 6, 6)
        assert twin.seq_id != seq.seq_id
        np.testing.assert_array_equal(twin.block_table, seq.block_table)
        fill(cache, twin, [70])
        fill(cache, seq, [80, 81])
        assert_holds(cache, twin, [0, 1, 2, 3, 4, 5, 70])
        assert_holds(cache, seq, [0, 1, 2, 3, 4, 5, 80, 81])
        assert twin.block_table[0] == seq.block_table[0]
        assert twin.block_table[1] != seq.block_table[1]
        assert cache.stats().cow_copies == 1
        twin.free()
        assert_holds(cache, seq, [0, 1, 2, 3, 4, 5, 80, 81])
        whole(cache)


def test_copy_on_write_without_a_block_leaves_the_fork_readable():
    # SPEC F28, TRAP 12
    with make_cache(2, B=4) as cache, cache.open(range(6)) as seq:
        fill(cache, seq, range(6))
        with seq.fork() as twin:
            assert twin.blocks_needed(1) == 1
            refused(cache, lambda: twin.append(0, *rows(cache.spec, 0, [9])),
                    pc.OutOfBlocksError, seq, twin)
        fill(cache, seq, [6])
        assert_holds(cache, seq, range(7))


def test_an_append_that_a_truncate_overtakes_leaves_no_gap(monkeypatch):
    # SPEC F24, F27, F34: another thread cut the sequence while the bytes moved
    with make_cache(8, B=4) as cache:
        seq = cache.open()
        seq.append(0, *rows(cache.spec, 0, [1, 2, 3]))
        store = cache._storage.store

        def store_and_cut(*args):
            store(*args)
            seq.truncate(1)

        monkeypatch.setattr(cache._storage, "store", store_and_cut)
        seq.append(0, *rows(cache.spec, 0, [4]))
        assert seq.written(0) == 1
        assert_holds(cache, seq, [1])


def test_a_hit_whose_copy_fails_is_no_hit(monkeypatch):
    # SPEC F22, F23
    with make_cache(8, B=4, partial_block_reuse=1) as cache:
        with cache.open(range(8)) as first:
            fill(cache, first, range(8))
        seq = cache.open()

        def fail(*args):
            raise OSError("disk on fire")

        with monkeypatch.context() as patch:
            patch.setattr(cache._storage, "copy_blocks", fail)
            with pytest.raises(OSError, match="on fire"):
                seq.allocate_for_tokens(range(8))
        assert (seq.num_cached_tokens, seq.seq_len, seq.num_tokens, seq.num_blocks) == (0, 0, 0, 0)
        assert seq.allocate_for_tokens(range(8)) == 7
        whole(cache)


def test_commit_stays_within_what_append_wrote():
    # SPEC F25: also when everything written is committed already
    with make_cache(4, B=4) as cache:
        with cache.open(range(50, 66), salt="other") as other:
            fill(cache, other, range(16))
        seq = cache.open(range(8))
        k, v = rows(cache.spec, 0, range(4))
        for layer in range(cache.spec.num_layers):
            seq.append(layer, k, v)
        seq.commit(4)
        for again in (1, 4):
            with pytest.raises(pc.InvalidPositionError):
                seq.commit(again)
            with pytest.raises(pc.InvalidPositionError):
                cache.commit([seq], [again])
        assert (seq.seq_len, cache.probe(range(9))) == (4, 4)
        seq.prepare(1)                      # from here an engine vouches, one token at a time
        with pytest.raises(pc.InvalidPositionError):
            seq.commit(2)
        seq.commit(1)
        assert seq.seq_len == 5
        cache.check()


@pytest.mark.parametrize("forked", [False, True])
def test_growing_back_over_tokens_that_were_given_up(forked):
    # SPEC F21 F25: what was not written again is not computed again
    with make_cache(6, B=4) as cache:
        seq = cache.open()
        fill(cache, seq, range(4))
        other = seq.fork() if forked else None
        cache.update_tokens(seq.seq_id, 0)
        for layer in range(cache.spec.num_layers):
            seq.append(layer, *rows(cache.spec, layer, [9]))
        seq.commit(1)
        with pytest.raises(pc.InvalidPositionError):
            cache.update_tokens(seq.seq_id, 4)
        assert_holds(cache, seq, [9])
        if other is not None:
            assert_holds(cache, other, range(4))
        cache.check()


def test_commit_stops_at_max_seq_len():
    # SPEC F24, CASE C35: the table's last block may have more room than the sequence may use
    spec = pc.CacheSpec(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, max_seq_len=6)
    with pc.PagedKVCache(spec, 8, storage=None) as cache:
        seq = cache.open(range(6))
        seq.commit(6)
        by_id = cache.allocate_sequence(6)
        for call in (
            lambda: seq.commit(1),
            lambda: cache.commit([seq], [1]),
            lambda: cache.update_tokens(by_id, 7),
        ):
            with pytest.raises(pc.SequenceTooLongError) as caught:
                call()
            assert (caught.value.needed, caught.value.max_seq_len) == (7, 6)
        seq.append_tokens([])
        assert (seq.seq_len, cache.sequence_tokens(by_id)) == (6, 0)
        cache.check()


def test_counts_that_are_no_list():
    # SPEC section 7
    with make_cache(4, B=4) as cache, cache.open([1]) as seq:
        for counts in (np.array(1), range(10**30), 5, None, "1"):
            for call in (
                lambda counts=counts: cache.prepare([seq], counts),
                lambda counts=counts: cache.commit([seq], counts),
            ):
                with pytest.raises(pc.InvalidArgumentError):
                    call()
        with pytest.raises(pc.InvalidArgumentError):
            cache.block_tables([seq], np.array(1))
