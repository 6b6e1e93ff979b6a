"""Views: zero-copy, cut to the length, read-only, and pinned as long as they live (SPEC F30)."""

from __future__ import annotations

import gc

import ml_dtypes
import numpy as np
import pytest
from cachekit import empty, expected, fill, make_cache, refused, rows, whole
from devicekit import ON_CPU, cpu_memory, host

import pagedcache as pc

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("fmt", list(DTYPES))
def test_float_views_are_the_storage_itself(fmt, layout):
    # SPEC F30
    with make_cache(8, B=4, layers=2, heads=3, fmt=fmt, layout=layout) as cache:
        with cache.open() as seq:
            fill(cache, seq, range(10))
            for layer in range(2):
                views = seq.views(layer)
                want = expected(cache.spec, layer, range(10))
                assert [(v.start, v.length) for v in views] == [(0, 4), (4, 4), (8, 2)]
                assert [v.block_id for v in views] == seq.block_table.tolist()
                where = cache.layer_device(layer)
                for view in views:
                    assert view.device == where
                    assert view.format == pc.get_format(fmt)
                    span = slice(view.start, view.start + view.length)
                    for array, rows, kind in ((view.k, want[0], "k"), (view.v, want[1], "v")):
                        assert array.dtype == np.dtype(DTYPES[fmt])
                        assert array.shape == (3, view.length, 4)  # head-major in both layouts
                        np.testing.assert_array_equal(
                            host(array).astype(np.float32), rows[span].transpose(1, 0, 2)
                        )
                        if ON_CPU:
                            slab = cache._storage.slab_array(layer, kind)
                            assert np.shares_memory(array, slab[view.block_id])
                    k, v, start, length, device = view
                    assert k is view.k and v is view.v
                    assert (start, length, device) == (view.start, view.length, where)


def test_ranges_cut_the_first_and_last_view():
    # SPEC F30
    with make_cache(8, B=4) as cache, cache.open() as seq:
        fill(cache, seq, range(11))
        want, _ = expected(cache.spec, 0, range(11))
        for start in range(12):
            for stop in range(start, 12):
                views = seq.views(0, start, stop)
                got = [x for v in views for x in host(v.k)[0].tolist()]
                assert got == want[start:stop, 0].tolist()
                assert len(views) == len({p // 4 for p in range(start, stop)})
        refused(cache, lambda: seq.views(0, 3, 12), pc.InvalidPositionError, seq)


def test_packed_views_carry_the_geometry():
    # SPEC F30
    with make_cache(8, B=4, heads=3, dim=6, fmt="float16", layout="NHD") as cache:
        with cache.open() as seq:
            fill(cache, seq, range(6))
            views = seq.packed_views(0)
            assert len(views) == 2
            for view in views:
                assert isinstance(view, pc.PackedView)
                assert (view.block_size, view.num_kv_heads, view.head_dim) == (4, 3, 6)
                assert view.k.shape == view.v.shape == (3, view.length, 6)
            want, _ = expected(cache.spec, 0, range(6))
            np.testing.assert_array_equal(views[1].k, want[4:].transpose(1, 0, 2))


@cpu_memory("NumPy's read-only flag")
def test_views_are_read_only():
    # SPEC F30
    for fmt in ("float32", "bfloat16", "q8"):
        with make_cache(8, fmt=fmt, dim=32) as cache, cache.open() as seq:
            fill(cache, seq, range(3))
            for dtype in (None, "float32"):
                array = seq.views(0, dtype=dtype)[0].k
                assert not array.flags.writeable
                with pytest.raises(ValueError, match="read-only"):
                    array[...] = 0
                with pytest.raises(ValueError, match="WRITEABLE"):
                    array.flags.writeable = True
                with pytest.raises(ValueError, match="WRITEABLE"):
                    array[:1].flags.writeable = True


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("fmt", ["q8", "q4", "q8_0", ("q8", "q4"), ("float16", "q8")])
def test_quantised_views(fmt, layout):
    # SPEC F30: raw bytes with the format, or dequantised copies
    with make_cache(8, B=4, heads=2, dim=40, fmt=fmt, layout=layout) as cache:
        spec = cache.spec
        with cache.open() as seq:
            fill(cache, seq, range(6))
            raw, copies = seq.views(0), seq.views(0, dtype="float32")
            want = expected(spec, 0, range(6))
            for view, copy in zip(raw, copies, strict=True):
                assert (view.k_format, view.v_format) == (spec.k_format, spec.v_format)
                assert view.format == (spec.k_format if isinstance(fmt, str) else None)
                assert view.v.dtype == np.uint8
                assert view.v.shape == (spec.layer_block_nbytes("v"),)
                if ON_CPU:
                    slab = cache._storage.slab_array(0, "v")
                    assert np.shares_memory(view.v, slab[view.block_id])
                span = slice(view.start, view.start + view.length)
                assert copy.format == pc.get_format("float32")
                for array, rows in ((copy.k, want[0]), (copy.v, want[1])):
                    assert array.dtype == np.float32
                    np.testing.assert_array_equal(array, rows[span].transpose(1, 0, 2))
            half = seq.views(0, 1, 3, dtype="float16")[0]
            np.testing.assert_array_equal(
                half.v, want[1][1:3].transpose(1, 0, 2).astype(np.float16)
            )
            refused(cache, lambda: seq.views(0, dtype="q8"), pc.FormatError, seq)
            refused(cache, lambda: seq.views(0, dtype=np.int8), pc.FormatError, seq)


@cpu_memory("an array that shares the slab's memory")
def test_same_dtype_asks_for_no_copy():
    with make_cache(8, fmt="float16") as cache, cache.open() as seq:
        fill(cache, seq, range(3))
        view = seq.views(0, dtype=np.float16)[0]
        assert np.shares_memory(view.k, cache._storage.slab_array(0, "k"))


# ---- lifetime ------------------------------------------------------------------------------


def pinned(cache):
    return cache.stats().pinned


def test_list_pins_all_its_blocks():
    # SPEC F30
    with make_cache(8, B=4) as cache, cache.open() as seq:
        fill(cache, seq, range(10))
        views = seq.views(0)
        assert pinned(cache) == 3
        views.release()
        assert pinned(cache) == 0
        views.release()
        with pytest.raises(pc.FreedHandleError, match="this list of views"):
            views[0]
        views = seq.views(0, 5, 9)
        assert pinned(cache) == 2
        del views
        assert pinned(cache) == 0
        with seq.views(0):
            assert pinned(cache) == 3
        assert pinned(cache) == 0


def test_a_view_pins_its_own_block():
    # SPEC F30
    with make_cache(8, B=4) as cache, cache.open() as seq:
        fill(cache, seq, range(10))
        view = seq.views(0)[1]
        assert pinned(cache) == 1
        view.release()
        assert view.released and pinned(cache) == 0
        view.release()
        with pytest.raises(pc.FreedHandleError, match="this view"):
            view.k  # noqa: B018
        with seq.packed_views(0)[2] as view:
            assert pinned(cache) == 1
        assert pinned(cache) == 0


@pytest.mark.parametrize("fmt", ["float32", "bfloat16", "q8"])
@pytest.mark.parametrize(
    "cut",
    [
        lambda a: a,
        lambda a: a[:1],
        lambda a: a.transpose(*reversed(range(a.ndim))),
        lambda a: a[..., ::-1],
    ],
    ids=["whole", "slice", "transposed", "reversed"],
)
def test_an_array_alone_keeps_the_pin(fmt, cut):
    # SPEC F30: released when the last array made from it is collected
    with make_cache(8, B=4, fmt=fmt, dim=32) as cache, cache.open() as seq:
        fill(cache, seq, range(6))
        array = cut(seq.views(0)[0].k)
        gc.collect()
        assert pinned(cache) == 1
        derived = array.view(np.ndarray)[:1] if ON_CPU else array[:1]
        del array
        assert pinned(cache) == 1
        del derived
        assert pinned(cache) == 0


def test_release_wins_over_arrays_at_hand():
    # SPEC F30: released is released; the memory stays valid
    with make_cache(8, B=4) as cache, cache.open() as seq:
        fill(cache, seq, range(4))
        view = seq.views(0)[0]
        array = view.k
        view.release()
        assert pinned(cache) == 0
        assert array.shape == (1, 4, 4)


def test_a_view_keeps_the_old_values_across_free_and_reuse():
    # SPEC F30, CASE C67
    with make_cache(3, B=4) as cache:
        seq = cache.open()
        fill(cache, seq, range(8))
        view = seq.views(0)[0]
        want = host(view.k).copy()
        seq.free()
        assert cache.num_free_blocks == 2  # the pinned block is not handed out
        with cache.open() as other:
            fill(cache, other, range(100, 108))
            np.testing.assert_array_equal(view.k, want)
            with pytest.raises(pc.OutOfBlocksError):
                other.prepare(1)
            del view
            other.prepare(1)
        whole(cache)
        empty(cache)


def test_a_view_keeps_the_old_values_across_truncate_and_append():
    # CASE C67
    with make_cache(8, B=4) as cache, cache.open() as seq:
        fill(cache, seq, range(6))
        views = seq.views(0)
        want = [host(view.k).copy() for view in views]
        seq.truncate(1)
        fill(cache, seq, range(50, 60))
        for view, old in zip(views, want, strict=True):
            np.testing.assert_array_equal(view.k, old)
        whole(cache)


def test_a_view_keeps_the_old_values_when_they_are_written_again():
    # SPEC F30, CASE C67: a rewrite of viewed tokens goes to a copy of the block
    with make_cache(4, B=4) as cache:
        seq = cache.open()
        seq.append(0, *rows(cache.spec, 0, [1, 2, 3]))
        with seq.views(0) as views:
            k, v = views[0].k, views[0].v
            seq.append_kv(0, *rows(cache.spec, 0, [7]), 1)
            want_k, want_v = expected(cache.spec, 0, [1, 2, 3])
            np.testing.assert_array_equal(k, want_k.transpose(1, 0, 2))
            np.testing.assert_array_equal(v, want_v.transpose(1, 0, 2))
            assert views[0].block_id != seq.block_for_position(0)
        np.testing.assert_array_equal(seq.gather(0)[0], expected(cache.spec, 0, [1, 7, 3])[0])
        whole(cache)


def test_a_viewed_block_is_not_found_behind_another_prefix():
    # SPEC F35: its parent is evicted and the parent's place in the index taken by other tokens
    with make_cache(2, B=4) as cache:
        with cache.open(range(8)) as seq:
            fill(cache, seq, range(8))
            views = seq.views(0, 4, 8)
        with cache.open(range(100, 104)) as other:
            fill(cache, other, range(4))
            assert cache.probe([*range(100, 104), *range(4, 9)]) == 4
            assert cache.probe(range(9)) == 0
        views.release()
        empty(cache)


def test_a_view_keeps_its_values_when_the_other_holder_is_left():
    # SPEC F30, CASE C67: the child never held the tokens that the parent's view shows
    with make_cache(4, B=4) as cache:
        parent = cache.open()
        parent.append(0, *rows(cache.spec, 0, [1, 2, 3]))
        child = parent.fork()
        child.truncate(1)
        with parent.views(0) as views:
            k = views[0].k
            parent.free()
            child.append(0, *rows(cache.spec, 0, [8, 9]))
            np.testing.assert_array_equal(
                k, expected(cache.spec, 0, [1, 2, 3])[0].transpose(1, 0, 2)
            )
        np.testing.assert_array_equal(child.gather(0)[0], expected(cache.spec, 0, [1, 8, 9])[0])
        whole(cache)


def test_a_view_keeps_its_values_when_a_step_writes_again():
    # SPEC F28a F30, CASE C67: appended, viewed, and then prepared for store
    with make_cache(4, B=4) as cache:
        seq = cache.open()
        seq.append(0, *rows(cache.spec, 0, [1, 2, 3]))
        with seq.views(0) as views:
            k = views[0].k
            cache.store(0, *rows(cache.spec, 0, [4, 5, 6]), seq.prepare(3))
            np.testing.assert_array_equal(
                k, expected(cache.spec, 0, [1, 2, 3])[0].transpose(1, 0, 2)
            )
        np.testing.assert_array_equal(seq.gather(0)[0], expected(cache.spec, 0, [4, 5, 6])[0])


def test_a_block_viewed_longer_than_its_parent_goes_first():
    # SPEC F14 F30: the tail of a prefix before its head, also where a view held the tail
    with make_cache(2, B=4) as cache:
        with cache.open(range(8)) as seq:
            fill(cache, seq, range(8))
            views = seq.views(0, 4, 8)
        views.release()
        cache.open([99])
        assert cache.probe(range(9)) == 4


def test_a_pinned_block_is_not_moved():
    # SPEC F19, F30
    with make_cache(8, B=4) as cache:
        first, second = cache.open(), cache.open()
        fill(cache, first, range(8))
        fill(cache, second, range(20, 28))
        view = second.views(0)[1]
        block = view.block_id
        want = host(view.k).copy()
        first.free()
        assert cache.defragment() > 0
        assert second.block_table[1] == block
        np.testing.assert_array_equal(view.k, want)
        del view
        cache.defragment()
        assert second.block_table.tolist() == [0, 1]
        k, _ = expected(cache.spec, 0, range(20, 28))
        np.testing.assert_array_equal(second.gather(0)[0], k)
        whole(cache)


def test_lists_behave_like_lists():
    with make_cache(8, B=4) as cache, cache.open() as seq:
        fill(cache, seq, range(10))
        views = seq.views(0)
        assert views[-1].start == 8
        assert views[0] is views[0]
        assert [v.start for v in views[1:]] == [4, 8]
        assert [v.start for v in reversed(views)] == [8, 4, 0]
        with pytest.raises(IndexError):
            views[3]
        with pytest.raises(TypeError):
            views["0"]
        assert repr(views) == "<ViewList of 3 blocks: tokens 0…9>"
        assert repr(views[2]) == f"<BlockView block {views[2].block_id}: tokens 8…9>"
        assert len(seq.views(0, 4, 4)) == 0
        assert list(seq.views(0, 10)) == []
