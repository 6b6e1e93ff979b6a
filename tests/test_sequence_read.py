"""What a handle shows: lengths, tables, slots, gathered arrays (SPEC F31, F32)."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from cachekit import assert_holds, expected, fill, make_cache, read, refused, rows, write
from devicekit import ON_CPU, cpu_memory, host

import pagedcache as pc


def test_lengths_and_tables():
    # SPEC F31
    with make_cache(8, B=4, layers=2, max_seq_len=30) as cache, cache.open(range(9)) as seq:
        assert (seq.seq_len, seq.num_tokens, seq.num_written, seq.num_blocks) == (0, 9, 0, 3)
        assert (seq.block_size, seq.max_seq_len, seq.is_on_gpu) == (4, 30, not ON_CPU)
        assert seq.request_id is None and not seq.freed
        fill(cache, seq, range(6))
        assert (seq.seq_len, seq.num_tokens, seq.num_written, seq.num_blocks) == (6, 9, 6, 3)
        table = seq.block_table
        assert table.dtype == np.int32 and table.shape == (3,)
        assert len(set(table.tolist())) == 3
        with pytest.raises(ValueError, match="read-only"):
            table[0] = 7
        for position in range(12):
            block = table[position // 4]
            assert seq.block_for_position(position) == block
            assert type(seq.block_for_position(position)) is int
            assert seq.block_offset(position) == position % 4
            assert seq.slot_mapping(position, position + 1).tolist() == [
                block * 4 + position % 4
            ]
        slots = seq.slot_mapping(2, 7)
        assert slots.dtype == np.int64
        assert slots.tolist() == [table[p // 4] * 4 + p % 4 for p in range(2, 7)]
        assert seq.slot_mapping(12, 12).tolist() == []
        np.testing.assert_array_equal(seq.layer_block_ids(1), table)
        np.testing.assert_array_equal(seq.layer_block_ids(0, 2), table[:2])
        assert seq.layer_block_ids(0, 0).shape == (0,)


def test_a_table_kept_is_a_snapshot():
    # SPEC F31, CASE C67
    with make_cache(8, B=4) as cache:
        seq = cache.open(range(5))
        table = seq.block_table
        before = table.tolist()
        seq.prepare(20)
        assert table.tolist() == before
        seq.free()
        assert table.tolist() == before


def test_bad_positions():
    # SPEC 7
    with make_cache(8, B=4) as cache, cache.open(range(5)) as seq:
        for bad in (-1, 8, 2**40, 2**100, -(2**100)):
            for call in (seq.block_for_position, seq.block_offset):
                error = refused(cache, lambda: call(bad), pc.InvalidPositionError, seq)  # noqa: B023
                assert isinstance(error, IndexError)
        for start, stop in ((0, 9), (-1, 2), (3, 2), (0, 2**100), (2**100, 2**101)):
            refused(cache, lambda: seq.slot_mapping(start, stop),  # noqa: B023
                    pc.PagedCacheError, seq)
        for junk in (1.0, None, True, "1", np.float32(1)):
            for call in (
                lambda: seq.block_for_position(junk),  # noqa: B023
                lambda: seq.block_offset(junk),  # noqa: B023
                lambda: seq.slot_mapping(junk, 3),  # noqa: B023
                lambda: seq.slot_mapping(0, junk),  # noqa: B023
                lambda: seq.gather(0, junk),  # noqa: B023
                lambda: seq.views(0, junk),  # noqa: B023
                lambda: seq.gather(junk),  # noqa: B023
            ):
                refused(cache, call, pc.InvalidArgumentError, seq)
        refused(cache, lambda: seq.layer_block_ids(0, 3), pc.InvalidPositionError, seq)
        refused(cache, lambda: seq.layer_block_ids(1, 1), pc.InvalidArgumentError, seq)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_every_range(layout):
    # SPEC F32
    with make_cache(8, B=4, layers=2, heads=2, layout=layout) as cache, cache.open() as seq:
        fill(cache, seq, range(11))
        for layer in range(2):
            want = expected(cache.spec, layer, range(11))
            for start in range(12):
                for stop in range(start, 12):
                    got = seq.gather(layer, start, stop)
                    for a, b in zip(got, want, strict=True):
                        np.testing.assert_array_equal(host(a), b[start:stop])
                        assert not ON_CPU or a.flags.c_contiguous


def test_dtypes():
    # SPEC F32
    for fmt, default in (("float32", np.float32), ("float16", np.float16),
                         ("bfloat16", ml_dtypes.bfloat16), ("q8", np.float32),
                         (("float16", "q8"), np.float32), (("float16", "bfloat16"), np.float32)):
        with make_cache(8, fmt=fmt, dim=32) as cache, cache.open() as seq:
            fill(cache, seq, range(3))
            k, v = seq.gather(0)
            assert k.dtype == v.dtype == np.dtype(default)
            want = expected(cache.spec, 0, range(3))
            for dtype in ("float32", np.float16, "bfloat16", ml_dtypes.bfloat16):
                got = seq.gather(0, dtype=dtype)
                for a, b in zip(got, want, strict=True):
                    np.testing.assert_array_equal(host(a), b.astype(a.dtype))
            for bad in ("int8", np.float64, "nonsense", 3, "q8"):
                refused(cache, lambda: seq.gather(0, dtype=bad), pc.FormatError, seq)  # noqa: B023


def test_out():
    # SPEC F32
    with make_cache(8, heads=2, dim=4) as cache, cache.open() as seq:
        fill(cache, seq, range(5))
        out = (np.full((3, 2, 4), np.nan, np.float16), np.full((3, 2, 4), np.nan, np.float16))
        got = seq.gather(0, 1, 4, out=out)
        assert got[0] is out[0] and got[1] is out[1]
        want = expected(cache.spec, 0, range(1, 4))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b.astype(np.float16))
        strided = np.zeros((3, 4, 4), np.float32)[:, ::2]
        seq.gather(0, 1, 4, out=(strided, np.zeros((3, 2, 4), np.float32)))
        np.testing.assert_array_equal(strided, want[0])
        frozen = np.zeros((3, 2, 4), np.float16)
        frozen.flags.writeable = False
        bad = [
            ((out[0],), pc.InvalidArgumentError),
            (out[0], pc.InvalidArgumentError),
            ((out[0], [1]), pc.InvalidArgumentError),
            ((out[0], out[1][:2]), pc.ShapeError),
            ((out[0], out[1].astype(np.float32)), pc.FormatError),
            ((out[0], frozen), pc.FormatError),
            ((out[0], out[0]), pc.ShapeError),
        ]
        for pair, kind in bad:
            refused(cache, lambda: seq.gather(0, 1, 4, out=pair), kind, seq)  # noqa: B023
        assert cache.stats().pinned == 0


def test_stop_defaults_to_the_written_end():
    # SPEC F32
    with make_cache(8, B=4, layers=2) as cache, cache.open(range(9)) as seq:
        assert seq.gather(0)[0].shape == (0, 1, 4)
        seq.append(0, *rows(cache.spec, 0, range(5)))
        assert len(seq.gather(0)[0]) == 5
        assert len(seq.gather(1)[0]) == 0
        assert len(seq.views(0)) == 2 and len(seq.views(1)) == 0


def test_stop_defaults_to_the_computed_length_after_store():
    # SPEC F32
    with make_cache(8, B=4, layers=1) as cache, cache.open(range(9)) as seq:
        slots = seq.prepare(6)
        cache.store(0, *rows(cache.spec, 0, range(6)), slots)
        assert len(seq.gather(0)[0]) == 0
        assert seq.num_written == 0
        assert_holds(cache, seq, range(6))  # an explicit range that was prepared can be read
        seq.commit(6)
        k, _ = read(seq, 0)
        np.testing.assert_array_equal(k, expected(cache.spec, 0, range(6))[0])


@cpu_memory("NaN written into the slabs from outside")
def test_nothing_unwritten_is_ever_read():
    # CASE C41: other sequences' values and NaN in reused blocks stay out of sight
    with make_cache(4, B=4) as cache:
        with cache.open(range(16)) as old:
            for kind in "kv":
                cache._storage.slab_array(0, kind, writable=True)[...] = np.nan
            assert old.num_blocks == 4
        with cache.open(range(9)) as seq:
            fill(cache, seq, range(5))
            for array in (*seq.gather(0), *(v.k for v in seq.views(0)),
                          *(v.v for v in seq.packed_views(0))):
                assert not np.isnan(array).any()
            refused(cache, lambda: seq.gather(0, 0, 6), pc.InvalidPositionError, seq)
            refused(cache, lambda: seq.views(0, 4, 7), pc.InvalidPositionError, seq)


def test_readers_see_a_consistent_length_while_a_writer_grows():
    # SPEC F34
    import threading

    with make_cache(64, B=4, layers=1) as cache, cache.open() as seq:
        stop, seen, errors = threading.Event(), [], []

        def reader():
            try:
                while not stop.is_set():
                    length = seq.seq_len
                    k, v = read(seq, 0, 0, length)
                    want_k, want_v = expected(cache.spec, 0, range(length))
                    assert np.array_equal(k, want_k) and np.array_equal(v, want_v)
                    seen.append(length)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=reader)
        thread.start()
        for i in range(200):
            write(seq, cache.spec, [i])
            seq.commit(1)
        stop.set()
        thread.join()
        assert not errors
        assert seen == sorted(seen)


def test_what_was_prepared_and_given_up_is_not_read():
    # SPEC F27, CASE C32
    with make_cache(8, B=4) as cache:
        seq = cache.open(range(4))
        cache.store(0, *rows(cache.spec, 0, range(4)), seq.prepare(4))
        assert len(seq.gather(0, 0, 4)[0]) == 4
        seq.truncate(1)
        with pytest.raises(pc.InvalidPositionError):
            seq.gather(0, 0, 2)


def test_a_writable_block_makes_nothing_before_it_readable():
    # SPEC F21, F32
    with make_cache(8, B=4) as cache:
        seq_id = cache.allocate_sequence(8)
        cache.writable_block_at(seq_id, 6)
        with pytest.raises(pc.InvalidPositionError):
            cache.sequence(seq_id).gather(0, 0, 7)


def test_cached_tokens_go_with_a_fork_and_a_truncate():
    # SPEC F22 F27 F28
    with make_cache(8, B=4) as cache:
        with cache.open(range(9)) as first:
            fill(cache, first, range(9))
        seq = cache.open(range(9))
        child = seq.fork()
        assert (seq.num_cached_tokens, child.num_cached_tokens) == (8, 8)
        child.truncate(5)
        assert (seq.num_cached_tokens, child.num_cached_tokens) == (8, 5)
