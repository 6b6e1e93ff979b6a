"""Kernels of others read and write blocks by id: which calls make that safe, on which stream (F49).

An engine's attention kernel reads whole sequences out of ``cache.slabs`` after ``open`` or
``prepare`` on its stream. Streams are deferred: what nobody waits for has not happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from cachekit import expected
from devicekit import host
from gpukit import Foreign, append, device_rows, on_gpu, streams_of

import pagedcache as pc
from pagedcache.checks.devices import upload

B = 4


@pytest.fixture
def three(cuda: Any, emulated: Any) -> Iterator[list[Any]]:
    emulated.set("async", 1)
    with streams_of(cuda, 3) as streams:
        yield streams


def foreign_values(
    cache: pc.PagedKVCache, seq: pc.Sequence, count: int, device: Any, stream: Any
) -> list[np.ndarray]:
    """K of the first ``count`` tokens as a kernel on ``stream`` finds it now, layer by layer."""
    copies = []
    for layer in range(cache.spec.num_layers):
        slab = cache.slabs(layer)[0]
        copies.append(
            [Foreign(device, stream).read(slab[int(b)]) for b in seq.block_table[: -(-count // B)]]
        )
    return [
        np.concatenate([host(block)[0] for block in blocks])[:count] for blocks in copies
    ]


def assert_seen(
    cache: pc.PagedKVCache, seq: pc.Sequence, marks: Any, device: Any, stream: Any
) -> None:
    marks = list(marks)
    for layer, values in enumerate(foreign_values(cache, seq, len(marks), device, stream)):
        np.testing.assert_array_equal(values, expected(cache.spec, layer, marks)[0][:, 0])


def test_a_hit_is_safe_on_the_stream_it_was_opened_for(cuda: Any, three: Any) -> None:
    # SPEC F49, F22
    one, two, _ = three
    with on_gpu(8, B=B, layers=2, dim=4) as cache:
        with cache.open(range(9), stream=one) as seq:
            append(cache, seq, range(1, 10), one)
            seq.commit(9)
        with cache.open([*range(8), 70], stream=two) as hit:
            assert_seen(cache, hit, range(1, 9), cuda, two)
        late = cache.open(stream=two)
        late.allocate_for_tokens([*range(6), 80], stream=three[2])
        assert_seen(cache, late, range(1, 5), cuda, three[2])
        assert late.num_cached_tokens == 6
        assert_seen(cache, late, range(1, 7), cuda, three[2])  # the copied head too


def _store(cache: Any, seq: Any, s: Any, other: Any) -> None:
    slots = cache.prepare([seq], [4], stream=s)
    for layer in range(2):
        cache.store(layer, *device_rows(cache, layer, range(20, 24)), slots, stream=other)
    cache.commit([seq], [4])


def _store_raw(cache: Any, seq: Any, s: Any, other: Any) -> None:
    slots = upload(cache.prepare([seq], [4], stream=s).slots, "cuda:0")
    for layer in range(2):
        cache.store(layer, *device_rows(cache, layer, range(20, 24)), slots, stream=other)
    cache.commit([seq], [4], stream=other)


def _append(cache: Any, seq: Any, s: Any, other: Any) -> None:
    append(cache, seq, range(20, 24), other)
    seq.commit(4)


def _kernel(
    commit: Callable[[Any, Any, Any], None], first: bool = False
) -> Callable[[Any, Any, Any, Any], None]:
    """The engine's own kernel writes the rows on the other stream, then ``commit`` says so.

    ``first``: into slots that were prepared on the first stream.
    """

    def write(cache: Any, seq: Any, s: Any, other: Any) -> None:
        slots = cache.prepare([seq], [4], stream=s if first else other).slots
        block = int(slots[0]) // B
        for layer in range(2):
            given = device_rows(cache, layer, range(20, 24))
            for slab, values in zip(cache.slabs(layer), given, strict=True):
                Foreign(slab.gpu, other).write(slab[block], values.with_layout((1, 4, 4),
                                                                               (64, 16, 4)))
        commit(cache, seq, other)

    return write


COMMITS: dict[str, Callable[[Any, Any, Any], None]] = {
    "seq.commit": lambda cache, seq, s: seq.commit(4, stream=s),
    "cache.commit": lambda cache, seq, s: cache.commit([seq], [4], stream=s),
    "update_tokens": lambda cache, seq, s: cache.update_tokens(
        seq.seq_id, seq.seq_len + 4, stream=s
    ),
}
WRITERS: dict[str, Callable[[Any, Any, Any, Any], None]] = {
    "store": _store,
    "store by device slots": _store_raw,
    "append": _append,
    **{f"kernel, {name}": _kernel(commit) for name, commit in COMMITS.items()},
    **{f"kernel, prepared first, {n}": _kernel(c, True) for n, c in COMMITS.items()},
}


@pytest.mark.parametrize("writer", list(WRITERS))
def test_prepare_makes_all_of_a_sequence_safe_again(writer: str, cuda: Any, three: Any) -> None:
    # SPEC F28a, F49: another stream wrote in between; the kernel on stream 1 reads everything
    one, two, _ = three
    with on_gpu(12, B=B, layers=2, dim=4) as cache, cache.open(stream=one) as seq:
        append(cache, seq, range(1, 5), one)
        seq.commit(4)
        seq.prepare(1, stream=one)  # stream 1 has been made safe once
        WRITERS[writer](cache, seq, one, two)
        assert seq.seq_len == 8
        cache.prepare([seq], [1], stream=one)
        assert_seen(cache, seq, [*range(1, 5), *range(20, 24)], cuda, one)


@pytest.mark.parametrize("move", ["defragment", "compact_sequence"])
def test_prepare_comes_after_moves_of_another_stream(move: str, cuda: Any, three: Any) -> None:
    # SPEC F19, F49
    one, two, _ = three
    with on_gpu(3, B=B, layers=2, dim=4) as cache:
        first, second = cache.open(range(900, 904)), cache.open(range(800, 804))
        seq = cache.open(stream=one)
        append(cache, seq, range(1, 5), one)
        second.free()
        append(cache, seq, range(5, 8), one)
        seq.commit(7)
        seq.prepare(1, stream=one)  # stream 1 has been made safe once
        assert seq.block_table.tolist() == [2, 1]
        first.free()
        if move == "defragment":
            assert cache.defragment(stream=two) == 1
        else:
            assert cache.compact_sequence(seq, stream=two) == 1
        assert seq.block_table.tolist() == [0, 1]
        cache.prepare([seq], [1], stream=one)  # in the block that did not move
        assert_seen(cache, seq, range(1, 8), cuda, one)


def test_prepare_comes_after_copies_of_another_stream(cuda: Any, three: Any) -> None:
    # SPEC F28, F49: the copy-on-write ran on stream 2, the kernel reads on stream 1
    one, two, _ = three
    with on_gpu(12, B=B, layers=2, dim=4) as cache:
        seq = cache.open(stream=one)
        append(cache, seq, range(1, 7), one)
        child = seq.fork()
        child.prepare(1, stream=one)  # copies on stream 1
        grandchild = child.fork()
        block = cache.writable_block_at(grandchild.seq_id, 5, stream=two)  # copies on stream 2
        assert block == grandchild.block_table[1]
        grandchild.prepare(1, stream=one)
        assert_seen(cache, grandchild, range(1, 7), cuda, one)
        twin = seq.fork()
        append(cache, twin, [50], two)
        twin.prepare(1, stream=three[2])
        assert_seen(cache, twin, [*range(1, 7), 50], cuda, three[2])


def _last_reader(cache: Any, cuda: Any, reader: Any, maker: Any) -> tuple[list[Any], Any]:
    """A freed sequence whose blocks a kernel on ``reader`` still reads; what it must see."""
    old = cache.open(stream=maker)
    append(cache, old, range(1, 9), maker)
    with old.views(0, stream=reader) as views:
        copies = [Foreign(cuda, reader).read(view.k) for view in views]
    old.free(stream=reader)
    return copies, expected(cache.spec, 0, range(1, 9))[0][:, 0]


def _overwrite(cache: Any, device: Any, blocks: Any, stream: Any) -> None:
    for block in blocks:
        for slab in cache.slabs(0):
            device.call("pc_cuda_fill", slab[int(block)].address, 7, 64, stream.handle)


TAKERS: dict[str, Callable[[Any, Any], Any]] = {
    "open": lambda cache, s: cache.open(range(50, 58), stream=s).block_table,
    "allocate_for_tokens": lambda cache, s: _allocated(cache, s),
    "prepare": lambda cache, s: _prepared(cache, s),
    "writable_block_at": lambda cache, s: _writable(cache, s),
}


def _allocated(cache: Any, stream: Any) -> Any:
    seq = cache.open()
    seq.allocate_for_tokens(range(50, 58), stream=stream)
    return seq.block_table


def _prepared(cache: Any, stream: Any) -> Any:
    seq = cache.open()
    seq.prepare(8, stream=stream)
    return seq.block_table


def _writable(cache: Any, stream: Any) -> Any:
    seq_id = cache.allocate_sequence(8)
    return [cache.writable_block_at(seq_id, at, stream=stream) for at in (0, 4)]


@pytest.mark.parametrize("taker", list(TAKERS))
def test_blocks_taken_are_safe_to_be_written_by_kernels(
    taker: str, cuda: Any, emulated: Any, three: Any
) -> None:
    # SPEC F49, CASE C52: the kernel on stream 2 writes after the one on stream 3 has read
    one, two, reader = three
    with on_gpu(2, B=B, dim=4) as cache:
        copies, want = _last_reader(cache, cuda, reader, one)
        blocks = TAKERS[taker](cache, two)
        _overwrite(cache, cuda, blocks, two)
        cuda.call("pc_cuda_stream_synchronize", two.handle)
        got = np.concatenate([host(copy)[0] for copy in copies])
        np.testing.assert_array_equal(got, want)
        for block in blocks:
            assert (host(cache.slabs(0)[0][int(block)]).view(np.uint8) == 7).all()


def test_views_of_an_append_are_safe_on_its_stream(cuda: Any, three: Any) -> None:
    # SPEC F24, F30, F49: the rows before were written on stream 1
    one, two, _ = three
    with on_gpu(8, B=B, dim=4) as cache, cache.open(stream=one) as seq:
        append(cache, seq, range(1, 5), one)
        for kind in (seq.views, seq.packed_views):
            with kind(0, stream=two) as views:
                copy = Foreign(cuda, two).read(views[0].k)
                want, _ = expected(cache.spec, 0, range(1, 5))
                np.testing.assert_array_equal(host(copy)[0], want[:, 0])
        result = seq.append(0, *device_rows(cache, 0, range(5, 9)), stream=two)
        copies = [Foreign(cuda, two).read(view.k) for view in result.views]
        got = np.concatenate([host(copy)[0] for copy in copies])
        np.testing.assert_array_equal(got, expected(cache.spec, 0, range(1, 9))[0][:, 0])
        result.views.release()


@pytest.mark.parametrize("fmt", ["q8", "float32"])
def test_dequantised_views_are_made_on_their_stream(fmt: str, cuda: Any, three: Any) -> None:
    # SPEC F30, F49
    one, two, reader = three
    with on_gpu(8, B=B, dim=32, fmt=fmt) as cache, cache.open(stream=one) as seq:
        append(cache, seq, range(1, 7), one)
        for dtype in ("float32", "float16"):
            views = list(seq.views(0, dtype=dtype, stream=two))
            k = expected(cache.spec, 0, range(1, 7))[0].transpose(1, 0, 2).astype(dtype)
            got = np.concatenate([host(view.k) for view in views], axis=1)
            np.testing.assert_array_equal(got, k)
            del views
