"""Order between streams, seen from the façade (SPEC F49): streams run as late as they may."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cachekit import expected, refused, rows
from devicekit import host
from gpukit import (
    Foreign,
    append,
    device_rows,
    finish,
    on_gpu,
    read_on,
    streams_of,
)

import pagedcache as pc
from pagedcache.checks.devices import upload

FORMATS = ["float32", "bfloat16", "q8", ("q4", "float16")]
B = 4


@pytest.fixture
def deferred(cuda: Any, emulated: Any) -> Any:
    """The stub driver with streams that run only when something waits for them."""
    emulated.set("async", 1)
    return emulated


@pytest.fixture
def three(cuda: Any, deferred: Any) -> Iterator[list[Any]]:
    with streams_of(cuda, 3) as streams:
        yield streams


def assert_reads(cache: pc.PagedKVCache, seq: pc.Sequence, marks: Any, stream: Any) -> None:
    for layer in range(cache.spec.num_layers):
        got = read_on(seq, layer, len(marks), stream)
        for array, want in zip(got, expected(cache.spec, layer, marks), strict=True):
            np.testing.assert_array_equal(array, want)


def give(cache: pc.PagedKVCache, layer: int, marks: Any, on_device: bool) -> tuple[Any, Any]:
    return device_rows(cache, layer, marks) if on_device else rows(cache.spec, layer, marks)


# ---- what one stream wrote, another reads ----------------------------------------------------


@pytest.mark.parametrize("on_device", [True, False], ids=["device rows", "host rows"])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_a_hit_waits_for_the_store_of_another_stream(
    fmt: Any, on_device: bool, deferred: Any, three: Any
) -> None:
    # SPEC F49, F22: the store is still queued when the hit is read
    one, two, _ = three
    with on_gpu(8, B=B, layers=2, heads=2, dim=40, fmt=fmt) as cache:
        with cache.open(range(9), stream=one) as seq:
            for layer in range(2):
                seq.append(layer, *give(cache, layer, range(1, 10), on_device), stream=one)
            seq.commit(9)
            assert deferred.get("pending") > 0
            with cache.open([*range(8), 70], stream=two) as hit:
                assert hit.num_cached_tokens == 8
                assert_reads(cache, hit, range(1, 9), two)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_a_partial_hit_copies_after_the_store_of_another_stream(fmt: Any, three: Any) -> None:
    # SPEC F40, F49
    one, two, three_ = three
    with on_gpu(8, B=B, layers=2, dim=40, fmt=fmt, partial_block_reuse=1) as cache:
        with cache.open(range(8), stream=one) as seq:
            append(cache, seq, range(1, 9), one)
            seq.commit(8)
            with cache.open([0, 1, 2, 3, 4, 5, 90], stream=two) as hit:
                assert hit.num_cached_tokens == 6
                append(cache, hit, [60], three_)
                hit.commit(1)
                assert_reads(cache, hit, [1, 2, 3, 4, 5, 6, 60], two)
                assert_reads(cache, seq, range(1, 9), three_)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_copy_on_write_follows_the_store_of_another_stream(fmt: Any, three: Any) -> None:
    # SPEC F28, F49: the child's stream copies what the parent's stream has not written yet
    one, two, _ = three
    with on_gpu(8, B=B, layers=2, dim=40, fmt=fmt) as cache:
        seq = cache.open(stream=one)
        append(cache, seq, range(1, 7), one)
        child = seq.fork()
        append(cache, child, [50], two)
        append(cache, seq, [60], one)
        assert_reads(cache, child, [1, 2, 3, 4, 5, 6, 50], two)
        assert_reads(cache, seq, [1, 2, 3, 4, 5, 6, 60], one)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_a_mapping_made_on_one_stream_serves_others(fmt: Any, three: Any) -> None:
    # SPEC F28a, F49: each layer stored on another stream, read on a third
    one, two, three_ = three
    with on_gpu(8, B=B, layers=2, dim=40, fmt=fmt) as cache, cache.open() as seq:
        slots = cache.prepare([seq], [6], stream=one)
        for layer, stream in enumerate((two, three_)):
            cache.store(layer, *device_rows(cache, layer, range(1, 7)), slots, stream=stream)
        cache.commit([seq], [6])
        # Layer 1 first: nobody has run stream 2 by then, where the slots were uploaded.
        got = read_on(seq, 1, 6, three_)
        np.testing.assert_array_equal(got[0], expected(cache.spec, 1, range(1, 7))[0])
        assert_reads(cache, seq, range(1, 7), one)


def test_stores_by_device_slots_are_ordered_although_nobody_knows_the_blocks(
    cuda: Any, three: Any
) -> None:
    # SPEC F49, F33: read after write and write after read, on three streams
    one, two, reader = three
    with on_gpu(8, B=B, dim=4) as cache, cache.open(stream=one) as seq:
        slots = upload(cache.prepare([seq], [4], stream=one).slots, "cuda:0")
        cache.store(0, *device_rows(cache, 0, range(1, 5)), slots, stream=two)
        early = seq.gather(0, 0, 4, stream=reader)
        cache.store(0, *device_rows(cache, 0, range(11, 15)), slots, stream=one)
        finish(one, cuda)
        late = seq.gather(0, 0, 4, stream=two)
        for pair, first in ((early, 1), (late, 11)):
            want = expected(cache.spec, 0, range(first, first + 4))
            for got, values in zip(pair, want, strict=True):
                np.testing.assert_array_equal(host(got), values)


def test_a_commit_with_a_stream_vouches_for_a_foreign_writer(cuda: Any, three: Any) -> None:
    # SPEC F49: an engine's own kernel writes the slabs on stream 1; the hit is read on stream 2
    one, two, _ = three
    with on_gpu(8, B=B, dim=4) as cache:
        seq = cache.open(range(4), stream=one)
        cache.prepare([seq], [4], stream=one)
        block = int(seq.block_table[0])
        k, v = rows(cache.spec, 0, range(1, 5))
        foreign = Foreign(cuda, one)
        values = [
            device_rows(cache, 0, range(1, 5))[i].with_layout((1, 4, 4), (64, 16, 4))
            for i in range(2)
        ]
        for slab, new in zip(cache.slabs(0), values, strict=True):
            foreign.write(slab[block], new)
        seq.commit(4, stream=one)
        with cache.open([*range(4), 9], stream=two) as hit:
            assert hit.num_cached_tokens == 4
            got = read_on(hit, 0, 4, two)
            np.testing.assert_array_equal(got[0], k)
            np.testing.assert_array_equal(got[1], v)


@pytest.mark.parametrize("call", ["append", "store", "gather"])
def test_arrays_still_being_made_elsewhere_are_waited_for(
    call: str, cuda: Any, three: Any
) -> None:
    # SPEC F47, F49: the array says on which stream it is being made (or read)
    one, maker, _ = three
    with on_gpu(8, B=B, dim=4) as cache, cache.open(stream=one) as seq:
        final = device_rows(cache, 0, range(1, 5))
        given = device_rows(cache, 0, range(100, 104))  # what is there before the maker runs
        for array, values in zip(given, final, strict=True):
            Foreign(cuda, maker).write(array, values)
            array.stream = maker
        if call == "append":
            seq.append(0, *given, stream=one)
        elif call == "store":
            cache.store(0, *given, cache.prepare([seq], [4], stream=one), stream=one)
        else:
            append(cache, seq, range(50, 54), one)
            seq.gather(0, out=given, stream=one)  # the maker's values come first, then these
            finish(one, cuda)
            want = expected(cache.spec, 0, range(50, 54))
            finish(maker, cuda)
            for array, values in zip(given, want, strict=True):
                np.testing.assert_array_equal(array.get(one), values)
            return
        finish(one, cuda)
        got = read_on(seq, 0, 4, one) if call == "append" else map(host, seq.gather(0, 0, 4))
        for array, values in zip(got, expected(cache.spec, 0, range(1, 5)), strict=True):
            np.testing.assert_array_equal(array, values)


def test_views_are_safe_on_their_stream(cuda: Any, three: Any) -> None:
    # SPEC F30, F49
    one, two, _ = three
    with on_gpu(8, B=B, dim=4) as cache, cache.open(stream=one) as seq:
        append(cache, seq, range(1, 5), one)
        with seq.views(0, stream=two) as views:
            copy = Foreign(cuda, two).read(views[0].k)
            want, _ = expected(cache.spec, 0, range(1, 5))
            np.testing.assert_array_equal(host(copy), want.transpose(1, 0, 2))
            # and as an array by itself: its own stream is the one it was asked for on
            np.testing.assert_array_equal(host(views[0].v), -(want + 0.5).transpose(1, 0, 2))


# ---- what one stream still reads, another must not write -------------------------------------


def _take_all(cache: pc.PagedKVCache, first_mark: int, stream: Any) -> pc.Sequence:
    """A sequence over every free block, written on ``stream``."""
    n = cache.num_free_blocks * B
    seq = cache.open(range(5000, 5000 + n), stream=stream)
    append(cache, seq, range(first_mark, first_mark + n), stream)
    return seq


WAYS = {
    "free(stream)": lambda cache, seq, s: seq.free(stream=s),
    "truncate(stream)": lambda cache, seq, s: seq.truncate(0, stream=s),
    "free_sequence(stream)": lambda cache, seq, s: cache.free_sequence(seq.seq_id, stream=s),
    "record_use, free": lambda cache, seq, s: (cache.record_use([seq], s), seq.free()),
    "record_use, truncate": lambda cache, seq, s: (cache.record_use([seq], s), seq.truncate(0)),
    "record_use, child freed": lambda cache, seq, s: _by_a_child(cache, seq, s),
}


def _by_a_child(cache: pc.PagedKVCache, seq: pc.Sequence, stream: Any) -> None:
    child = seq.fork()
    cache.record_use([child], stream)
    child.free()
    seq.free()


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("writer", ["store", "foreign store"])
def test_a_freed_block_is_not_overwritten_under_a_foreign_reader(
    way: str, writer: str, cuda: Any, deferred: Any, three: Any
) -> None:
    # SPEC F49, CASE C52: stream 3 reads the blocks when they are freed; stream 2 gets them
    one, two, reader = three
    with on_gpu(2, B=B, dim=4) as cache:
        seq = cache.open(stream=one)
        append(cache, seq, range(1, 9), one)
        with seq.views(0, stream=reader) as views:
            copies = [Foreign(cuda, reader).read(view.k) for view in views]
        frees = deferred.get("calls:cuMemFree")
        WAYS[way](cache, seq, reader)
        assert cache.num_free_blocks == 2
        if writer == "store":
            other = _take_all(cache, 100, two)
        else:
            other = cache.open(range(8), stream=two)
            cache.prepare([other], [8], stream=two)
            for block in other.block_table:
                for slab in cache.slabs(0):
                    cuda.call("pc_cuda_fill", slab[int(block)].address, 7, 64, two.handle)
        assert deferred.get("calls:cuMemFree") == frees  # which would have waited for everything
        finish(two, cuda)  # runs whatever stream 2 waits for, and nothing else
        want, _ = expected(cache.spec, 0, range(1, 9))
        got = np.concatenate([host(copy)[0] for copy in copies])
        np.testing.assert_array_equal(got, want[:, 0])
        if writer == "store":
            assert_reads(cache, other, range(100, 108), two)


def test_without_a_word_the_reader_would_lose(cuda: Any, deferred: Any, three: Any) -> None:
    """The test above can see the fault: nobody told of the foreign reader."""
    one, two, reader = three
    with on_gpu(2, B=B, dim=4) as cache:
        seq = cache.open(stream=one)
        append(cache, seq, range(1, 9), one)
        with seq.views(0, stream=reader) as views:
            copy = Foreign(cuda, reader).read(views[0].k)
        seq.free()
        _take_all(cache, 100, two)
        finish(two, cuda)
        want, _ = expected(cache.spec, 0, range(1, 5))
        assert (host(copy)[0] != want[:, 0]).all()


def test_a_gather_still_queued_keeps_its_values(
    cuda: Any, deferred: Any, three: Any
) -> None:
    # SPEC F49, CASE C52: the read on stream 3 is our own; nobody has to tell of it
    one, two, reader = three
    for again in ("freed", "truncated", "rewritten"):
        with on_gpu(2, B=B, dim=4) as cache:
            seq = cache.open(stream=one)
            append(cache, seq, range(1, 9), one)
            k, v = seq.gather(0, stream=reader)
            if again == "freed":
                seq.free()
                _take_all(cache, 100, two)
            elif again == "truncated":
                seq.truncate(0)
                append(cache, seq, range(100, 108), two)
            else:
                seq.append_kv(0, *device_rows(cache, 0, range(100, 108)), 0, stream=two)
            finish(two, cuda)
            for got, want in zip((k, v), expected(cache.spec, 0, range(1, 9)), strict=True):
                np.testing.assert_array_equal(host(got), want)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_defragment_comes_after_readers_and_writers_of_other_streams(
    fmt: Any, cuda: Any, deferred: Any, three: Any
) -> None:
    # SPEC F19, F49
    one, two, reader = three
    with on_gpu(8, B=B, layers=2, dim=40, fmt=fmt) as cache:
        low = cache.open(stream=one)
        append(cache, low, range(1, 9), one)
        seq = cache.open(stream=one)
        append(cache, seq, range(21, 33), one)
        table = seq.block_table.tolist()
        slab = cache.slabs(0)[0]
        copies = [Foreign(cuda, reader).read(slab[block]) for block in [0, 1, *table]]
        cache.record_use([low, seq], reader)
        low.free()
        assert cache.defragment(stream=two) == 3
        assert seq.block_table.tolist() == [0, 1, 2]
        finish(two, cuda)
        moved = [host(cache.slabs(0)[0][block]) for block in range(3)]
        for copy, block in zip(copies[2:], moved, strict=True):
            np.testing.assert_array_equal(host(copy).view(np.uint8), block.view(np.uint8))
        # the free blocks that the reader saw were overwritten only after it
        assert not np.array_equal(host(copies[0]).view(np.uint8), moved[0].view(np.uint8))
        assert_reads(cache, seq, range(21, 33), one)


def test_a_mapping_freed_early_is_still_read_right(deferred: Any, three: Any) -> None:
    # SPEC F49: slots on the device live as long as the kernels that read them
    one, two, _ = three
    with on_gpu(8, B=B, dim=4) as cache, cache.open() as seq:
        slots = cache.prepare([seq], [5], stream=one)
        given = device_rows(cache, 0, range(1, 6))
        cache.store(0, *given, slots, stream=one)
        del slots
        with cache.open(range(3)) as other:  # takes the scratch memory again, on another stream
            cache.store(0, *device_rows(cache, 0, [8, 9]), other.prepare(2, stream=two), stream=two)
            assert_reads(cache, seq, range(1, 6), one)
            other.commit(2)
            assert_reads(cache, other, [8, 9], two)


@pytest.mark.parametrize("queued", [True, False], ids=["queued work", "no work"])
def test_a_stream_destroyed_while_its_work_is_queued(
    queued: bool, cuda: Any, deferred: Any, three: Any
) -> None:
    # SPEC F49, 7: a bare handle keeps no stream alive; what was queued there is not lost
    one, two, _ = three
    with on_gpu(4, B=B, dim=4) as cache, streams_of(cuda, 1) as last:
        seq = cache.open(stream=one)
        handle = last[0].handle
        if queued:
            append(cache, seq, range(1, 6), handle)
        else:
            append(cache, seq, range(1, 6), one)
            cache.record_use([seq], handle)
            append(cache, seq, [], handle)
        with cuda.current():
            last.clear()
        assert_reads(cache, seq, range(1, 6), two)
        append(cache, seq, [6, 7], two)
        assert_reads(cache, seq, range(1, 8), one)


def test_a_stream_that_is_gone_is_refused_at_first_sight(cuda: Any, three: Any) -> None:
    # SPEC F49, 7
    one, _, _ = three
    with on_gpu(4, B=B, dim=4) as cache, cache.open() as seq:
        with streams_of(cuda, 1) as last:
            handle = last[0].handle
        for call in (
            lambda: append(cache, seq, [1], handle),
            lambda: cache.open([1], stream=handle),
            lambda: cache.record_use([seq], handle),
            lambda: seq.commit(0, stream=handle),
            lambda: seq.free(stream=handle),
        ):
            refused(cache, call, pc.DeviceError, seq)
        append(cache, seq, [1, 2], one)
        assert_reads(cache, seq, [1, 2], one)
