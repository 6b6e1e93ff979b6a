"""Calls while their stream is captured into a CUDA graph (SPEC F49): kernels only, or an error
before anything has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from cachekit import assert_holds, expected, fill, rows
from devicekit import host
from gpukit import Calls, Capture, append, device_rows, finish, on_gpu, read_on, streams_of

import pagedcache as pc
from pagedcache.checks.devices import upload
from pagedcache.errors import DeviceError

B = 4


@pytest.fixture
def two(cuda: Any) -> Iterator[list[Any]]:
    with streams_of(cuda, 2) as streams:
        yield streams


def overwrite(array: Any, values: Any, stream: Any) -> None:
    """New values in device memory that a graph reads, queued before its next run."""
    fresh = upload(np.ascontiguousarray(values), array.device)
    array.gpu.call("pc_cuda_copy", array.address, fresh.address, fresh.nbytes, stream.handle)
    finish(stream, array.gpu)


@pytest.mark.parametrize("mode", [0, 2])
@pytest.mark.parametrize(("fmt", "policy"), [("float32", None), ("q8", "saturate")])
def test_a_decode_step_is_captured_and_replayed(
    fmt: str, policy: str | None, mode: int, cuda: Any, emulated: Any, two: Any
) -> None:
    # SPEC F49, F33: raw device slots and device arrays: only kernels are queued
    stream, _ = two
    emulated.set("async", 1)
    with on_gpu(8, B=B, layers=2, heads=2, dim=32, fmt=fmt) as cache:
        seqs = [cache.open(stream=stream) for _ in range(2)]
        slots = cache.prepare(seqs, [4, 4], stream=stream).slots
        steps = slots.reshape(2, 4).T  # token by token: one slot of each sequence
        place = upload(np.ascontiguousarray(steps[0]), "cuda:0")
        given = [device_rows(cache, layer, [0, 0]) for layer in range(2)]
        launches = emulated.get("launches")
        with Calls(emulated) as calls, Capture(cuda, stream, mode) as graph:
            for layer in range(2):
                cache.store(layer, *given[layer], place, policy, stream=stream)
        assert emulated.get("capture_violations") == 0 and calls.waits == {}
        for name in ("cuEventRecord", "cuStreamWaitEvent", "cuMemAlloc", "cuMemcpyAsync"):
            assert calls[name] == 0, name
        assert emulated.get("launches") - launches == 4  # K and V of two layers
        for step in range(4):
            overwrite(place, steps[step], stream)
            for layer in range(2):
                for array, values in zip(
                    given[layer], rows(cache.spec, layer, [10 + step, 50 + step]), strict=True
                ):
                    overwrite(array, values, stream)
            graph.launch()
        for seq in seqs:
            seq.commit(4, stream=stream)
        for first, seq in zip((10, 50), seqs, strict=True):
            for layer in range(2):
                got = read_on(seq, layer, 4, stream)
                want = expected(cache.spec, layer, range(first, first + 4))
                for array, values in zip(got, want, strict=True):
                    np.testing.assert_array_equal(array, values)
        cache.synchronize()  # no slot was out of range
        graph.close()


class Half:
    """A cache in the middle of its work, used by two streams; the first one is captured."""

    def __init__(self, one: Any, two: Any, fmt: str) -> None:
        self.one, self.two = one, two
        options: dict[str, Any] = {"B": B, "layers": 2, "dim": 32, "partial_block_reuse": 1}
        cache = self.cache = on_gpu(20, fmt=fmt, **options)
        low = cache.open(range(900, 908), stream=one)
        self.parent = cache.open(range(6), stream=one)
        append(cache, self.parent, range(1, 7), one)
        self.parent.commit(6)
        self.child = self.parent.fork()
        self.late = cache.open(stream=one)
        append(cache, self.late, range(21, 26), one)
        self.mapping = self.late.prepare(2, stream=one)
        with cache.open(range(40, 49), stream=two) as prompt:
            append(cache, prompt, range(41, 50), two)
            prompt.commit(9)
        append(cache, self.late, [26], one)  # and no event says so yet
        self.slots = upload(self.mapping.slots, "cuda:0")
        self.rows = [device_rows(cache, layer, [80, 81]) for layer in range(2)]
        self.host_rows = rows(cache.spec, 0, [80, 81])
        self.q = upload(np.ones((1, 1, 32), np.float32), "cuda:0")
        self.out = [upload(np.zeros((6, 1, 32), np.float32), "cuda:0") for _ in "kv"]
        low.free()

    def shot(self) -> Any:
        """All that must stay, but for the values: reading them would have to wait."""
        cache, pool = self.cache, self.cache.pool
        cache.check()
        return (
            [pool.ref_count(b) for b in range(pool.num_blocks)],
            [pool.is_cached(b) for b in range(pool.num_blocks)],
            (pool.num_free_blocks, cache.stats().pinned, cache.stats().sequences_active),
            (cache.stats().cow_copies, cache.stats().blocks_moved, cache.layout_epoch),
            [
                (s.seq_len, s.num_tokens, s.written(0), s.written(1), s.block_table.tolist())
                for s in (self.parent, self.child, self.late)
            ],
        )

    def done(self) -> None:
        for seq in (self.parent, self.child, self.late):
            seq.free()
        assert self.cache.num_free_blocks == 20
        self.cache.close()


#: Every call that would have to copy from or to the host, record or wait on the captured stream.
REFUSED: dict[str, Callable[[Half], Any]] = {
    "append device rows": lambda h: h.late.append(0, *h.rows[0], stream=h.one),
    "append host rows": lambda h: h.late.append(0, *h.host_rows, stream=h.one),
    "append_kv": lambda h: h.late.append_kv(0, *h.rows[0], 1, stream=h.one),
    "append copies": lambda h: h.child.append(0, *h.rows[0], stream=h.one),
    "store by a mapping": lambda h: h.cache.store(0, *h.rows[0], h.mapping, stream=h.one),
    "store by host slots": lambda h: h.cache.store(
        0, *h.rows[0], h.mapping.slots, stream=h.one
    ),
    "gather": lambda h: h.parent.gather(0, stream=h.one),
    "gather out": lambda h: h.parent.gather(0, 0, 6, out=h.out, stream=h.one),
    "attend": lambda h: h.cache.attend(0, h.q, h.parent, stream=h.one),
    "attend of the host": lambda h: h.cache.attend(
        0, np.ones((1, 1, 32), np.float32), h.parent, stream=h.one
    ),
    "open partial hit": lambda h: h.cache.open([*range(40, 46), 7, 8], stream=h.one),
    "open hit of the other stream": lambda h: h.cache.open(range(60, 70), stream=h.one),
    "prepare copies": lambda h: h.child.prepare(1, stream=h.one),
    "writable_block_at copies": lambda h: h.cache.writable_block_at(
        h.child.seq_id, 5, stream=h.one
    ),
    "commit": lambda h: h.late.commit(6),
    "commit many": lambda h: h.cache.commit([h.late], [6]),
    "commit foreign": lambda h: h.late.commit(6, stream=h.one),
    "record_use": lambda h: h.cache.record_use([h.parent], h.one),
    "defragment": lambda h: h.cache.defragment(stream=h.one),
    "free foreign": lambda h: h.child.free(stream=h.one),
    "truncate foreign": lambda h: h.child.truncate(1, stream=h.one),
}


def _prompt_of_the_other_stream(half: Half) -> None:
    with half.cache.open(range(60, 69), stream=half.two) as prompt:
        append(half.cache, prompt, range(61, 70), half.two)
        prompt.commit(9)


#: What has to happen last before the capture, so that a call has something to wait for.
BEFORE: dict[str, Callable[[Half], Any]] = {
    "open hit of the other stream": _prompt_of_the_other_stream,
}


@pytest.mark.parametrize("mode", [0, 2])
@pytest.mark.parametrize("name", list(REFUSED))
def test_what_needs_more_than_kernels_is_refused_before_any_change(
    name: str, mode: int, cuda: Any, emulated: Any, two: Any
) -> None:
    # SPEC F49, F23
    half = Half(*two, fmt="float32")
    BEFORE.get(name, lambda _: None)(half)
    before = half.shot()
    with Capture(cuda, two[0], mode) as graph:
        with pytest.raises(DeviceError):
            REFUSED[name](half)
        assert half.shot() == before
    assert emulated.get("capture_violations") == 0  # and the capture is as good as it was
    graph.close()
    assert half.shot() == before
    assert_holds(half.cache, half.parent, range(1, 7))
    assert_holds(half.cache, half.child, range(1, 7))
    assert_holds(half.cache, half.late, range(21, 27))
    made = REFUSED[name](half)  # after the capture the same call works
    if isinstance(made, pc.Sequence):
        made.free()
    del made
    half.cache.check()
    assert_holds(half.cache, half.parent, range(1, 7))
    half.done()


def test_looking_for_nan_is_refused(cuda: Any, emulated: Any, two: Any) -> None:
    # SPEC F7, F49: it would have to wait for the answer
    half = Half(*two, fmt="q8")
    with Capture(cuda, two[0]) as graph:
        with pytest.raises(DeviceError, match="saturate"):
            half.cache.store(0, *half.rows[0], half.slots, stream=two[0])
        half.cache.store(0, *half.rows[0], half.slots, "saturate", stream=two[0])
    graph.close()
    half.done()


def test_what_touches_no_stream_goes_on(cuda: Any, emulated: Any, two: Any) -> None:
    # SPEC F49: ids and tables, and plain calls that free, need no event
    half = Half(*two, fmt="float32")
    one, _ = two
    with Capture(cuda, one) as graph:
        twin = half.parent.fork()
        assert half.cache.probe(range(40, 50)) == 8
        assert half.cache.block_tables([half.parent]).shape == (1, 2)
        half.cache.page_table([half.parent])
        half.parent.slot_mapping(0, 6)
        half.late.append_tokens(range(6))
        half.cache.stats(), half.cache.fragmentation(), half.cache.check()
        twin.free()
        half.cache.reset_prefix_cache()
    assert emulated.get("capture_violations") == 0
    graph.close()
    assert_holds(half.cache, half.parent, range(1, 7))
    half.done()


@pytest.mark.parametrize("thread", ["of the capture", "another"])
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_another_stream_goes_on_meanwhile(
    mode: int, thread: str, cuda: Any, emulated: Any, two: Any
) -> None:
    # SPEC F49, F34: one stream is captured, the other one works with blocks of its own, and waits
    half = Half(*two, fmt="float32")
    cache = half.cache

    def work() -> None:
        with cache.open(range(500, 507), stream=two[1]) as seq:
            fill_on(cache, seq, range(1, 8), two[1])
            for layer in range(2):
                seq.append(layer, *rows(cache.spec, layer, [8]), stream=two[1])  # of the host
            seq.commit(1)
            for layer in range(2):
                got = read_on(seq, layer, 8, two[1])
                want = expected(cache.spec, layer, range(1, 9))
                np.testing.assert_array_equal(got[0], want[0])
            # what the captured stream wrote without an event cannot be waited for now
            with pytest.raises(DeviceError):
                half.late.gather(0, stream=two[1])

    with Capture(cuda, two[0], mode) as graph:
        if thread == "another":
            with ThreadPoolExecutor(1) as pool:
                pool.submit(work).result()
        else:
            work()
        assert emulated.get("capture_violations") == 0
    graph.close()
    assert_holds(cache, half.late, range(21, 27))
    half.done()


def fill_on(cache: Any, seq: Any, marks: Any, stream: Any) -> None:
    append(cache, seq, marks, stream)
    seq.commit(len(marks))


def test_raw_slots_out_of_range_are_skipped_and_reported(cuda: Any, two: Any) -> None:
    # SPEC F33, F49: nobody can look at them on the host
    one, _ = two
    with on_gpu(4, B=B, dim=4) as cache, cache.open() as seq:
        fill(cache, seq, range(1, 5))
        good = int(seq.prepare(1, stream=one).slots[0])
        before = [host(slab).tobytes() for slab in cache.slabs(0)]
        for bad in (16, 2**40, -2, -(2**63), 2**63 - 1):
            slots = upload(np.array([bad, -1], np.int64), "cuda:0")
            cache.store(0, *device_rows(cache, 0, [7, 8]), slots, stream=one)
            with pytest.raises(pc.SlotError) as caught:
                cache.synchronize()
            assert caught.value.slot == bad
            cache.synchronize()  # reported once
            assert [host(slab).tobytes() for slab in cache.slabs(0)] == before
        slots = upload(np.array([good, 99], np.int64), "cuda:0")
        cache.store(0, *device_rows(cache, 0, [7, 8]), slots, stream=one)
        with pytest.raises(pc.SlotError):
            cache.synchronize()
        seq.commit(1, stream=one)
        assert_holds(cache, seq, [1, 2, 3, 4, 7])
        for wrong, kind in (
            (np.array([good], np.int32), pc.FormatError),
            (np.array([[good]], np.int64), pc.ShapeError),
            (np.array([good, 1], np.int64)[::2], None),
            (np.array([good, 1], np.int64), pc.ShapeError),
            (np.array([good, 1, 2], np.int64)[::2], pc.ShapeError),
        ):
            given = device_rows(cache, 0, [7])
            if kind is None:
                cache.store(0, *given, upload(wrong, "cuda:0"), stream=one)
                continue
            with pytest.raises(kind):
                cache.store(0, *given, upload(wrong, "cuda:0"), stream=one)
        misplaced = upload(np.full(2, good), "cuda:0").with_layout([1], [8], 4)
        with pytest.raises(pc.FormatError, match="multiple of 8 bytes"):
            cache.store(0, *device_rows(cache, 0, [7]), misplaced, stream=one)
