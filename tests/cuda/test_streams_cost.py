"""What order between streams costs: events, waits, memory, and nothing on the host (SPEC F49)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cachekit import expected
from devicekit import host
from gpukit import Calls, append, device_rows, on_gpu, streams_of

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


def test_one_event_for_each_commit_and_each_free(deferred: Any, three: Any) -> None:
    # SPEC F49
    one, two, _ = three
    with on_gpu(32, B=B, layers=3, dim=4) as cache:
        seqs = [cache.open(range(10 * i, 10 * i + 9), stream=one) for i in range(4)]
        for seq in seqs:
            append(cache, seq, range(1, 10), one)
        with Calls(deferred) as calls:
            seqs[0].commit(9)
        assert (calls["cuEventRecord"], calls["cuStreamWaitEvent"]) == (1, 0)
        append(cache, seqs[1], [3], one)
        with Calls(deferred) as calls:
            cache.commit(seqs[1:], [9, 9, 9])  # a batch, every layer: one
        assert calls["cuEventRecord"] == 1
        with Calls(deferred) as calls:
            seqs[0].free(stream=two)
        assert calls["cuEventRecord"] == 1
        with Calls(deferred) as calls:
            seqs[1].truncate(0, stream=two)
        assert calls["cuEventRecord"] == 1
        with Calls(deferred) as calls:
            cache.record_use(seqs[2:], two)
        assert calls["cuEventRecord"] == 1
        with Calls(deferred) as calls:
            seqs[2].free()  # an event covers all its work already
        assert calls["cuEventRecord"] == 0


def test_one_stream_never_waits(deferred: Any, three: Any) -> None:
    # SPEC F49: freed blocks are reused at once on the same stream
    one, _, _ = three
    with on_gpu(4, B=B, layers=2, dim=4) as cache:
        with Calls(deferred) as calls:
            for turn in range(6):
                with cache.open(range(100 * turn, 100 * turn + 9), stream=one) as seq:
                    append(cache, seq, range(1, 10), one)
                    seq.commit(9)
                    with seq.fork() as child:
                        append(cache, child, [50], one)
        assert calls["cuStreamWaitEvent"] == 0
        waits = {name: n for name, n in calls.waits.items() if name != "cuStreamSynchronize"}
        assert not waits  # the uploads of this test's rows wait by themselves


def test_freed_blocks_are_reused_in_the_order_they_were_freed(cuda: Any) -> None:
    # SPEC F49: what was freed first has had the most time to be done with
    with on_gpu(9, B=B, dim=4) as cache:
        seqs = [cache.open(range(100 * i, 100 * i + 12)) for i in range(3)]
        freed = []
        for i in (1, 2, 0):
            freed += seqs[i].block_table.tolist()[::-1]  # the tail of each first
            seqs[i].free()
        assert cache.open(range(36)).block_table.tolist() == freed


@pytest.mark.parametrize("fmt", ["float32", "q8"])
def test_nothing_waits_or_asks_on_the_host(fmt: str, deferred: Any, three: Any) -> None:
    # SPEC F49: store, commit, free, prepare and all that goes with them, over three streams
    one, two, other = three
    options = {"B": B, "layers": 2, "dim": 32, "fmt": fmt, "partial_block_reuse": 1}
    with on_gpu(24, **options) as cache:
        given = [device_rows(cache, layer, range(1, 10)) for layer in range(2)]
        step = [device_rows(cache, layer, [11, 12, 13]) for layer in range(2)]
        warm = cache.open(range(900, 909), stream=one)  # the pinned ring and the events exist
        for layer in range(2):
            warm.append(layer, *given[layer], on_nonfinite="saturate", stream=one)
        warm.commit(9)
        warm.free(stream=other)
        with Calls(deferred) as calls:
            seqs = [cache.open(range(10 * i, 10 * i + 9), stream=one) for i in range(2)]
            for seq in seqs:
                for layer in range(2):
                    seq.append(layer, *given[layer], on_nonfinite="saturate", stream=one)
                seq.commit(9)
            hit = cache.open([*range(6), 77], stream=two)
            assert hit.num_cached_tokens == 6
            batch = [*seqs, hit]
            slots = cache.prepare(batch, [1, 1, 1], stream=two)
            for layer in range(2):
                cache.store(layer, *step[layer], slots, "saturate", stream=two)
            cache.commit(batch, [1, 1, 1], stream=two)
            twin = seqs[0].fork()
            cache.prepare([twin], [2], stream=other)
            seqs[1].truncate(5, stream=other)
            cache.record_use(batch, other)
            held = seqs[0].gather(0, stream=other)
            for seq in (*batch, twin):
                seq.free(stream=two)
            cache.open(range(500, 500 + 4 * cache.num_free_blocks), stream=one).free()
            assert cache.defragment(stream=one) >= 0
        assert calls.waits == {}
        assert calls["cuEventRecord"] > 0 and calls["cuStreamWaitEvent"] > 0
        want, _ = expected(cache.spec, 0, [*range(1, 10), 11])
        np.testing.assert_array_equal(host(held[0]), want.astype(held[0].dtype))


def test_no_memory_is_taken_in_a_decode_step(deferred: Any, three: Any) -> None:
    # SPEC F49: an allocation may wait for the whole device
    one, two, _ = three
    with on_gpu(64, B=B, layers=2, dim=4) as cache:
        seqs = [cache.open(range(10 * i, 10 * i + 3), stream=one) for i in range(4)]
        given = [device_rows(cache, layer, range(1, 5)) for layer in range(2)]

        def step(stream: Any) -> None:
            slots = cache.prepare(seqs, [1] * 4, stream=stream)
            for layer in range(2):
                cache.store(layer, *given[layer], slots, stream=stream)
            cache.commit(seqs, [1] * 4, stream=stream)

        for stream in (one, two, one):
            step(stream)
        with Calls(deferred) as calls:
            for turn in range(20):
                step((one, two)[turn % 2])
        assert (calls["cuMemAlloc"], calls["cuMemHostAlloc"], calls.waits) == (0, 0, {})
