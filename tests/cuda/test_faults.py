"""Every call of the driver fails once, in turn, at every step of a history (SPEC F46).

For each step: an identical cache is brought up to it, one call of one function of the driver is
made to fail, once or from then on, and the step is made. Whatever it raises is one of our errors;
lengths, cached prefixes and values are as before it; ids, counts and tables too, unless blocks were
taken and copied already when the device failed: then the same step, which works now, uses those,
and all ends as if nothing had failed. After ``close()`` nothing is left on the device.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cachekit import assert_holds, by_profile, rows
from devicekit import host
from gpukit import append, device_rows, forget_rows, on_gpu, streams_of

import pagedcache as pc
from pagedcache.checks.devices import upload
from pagedcache.errors import DeviceError, PagedCacheError, StorageMemoryError

B = 4
PROMPT = list(range(10))

#: What can fail, and the code it fails with. Not among them: what gives something back, and what
#: ends a wait (tests below).
CODES = {
    "cuMemAlloc": 2,
    "cuMemHostAlloc": 2,
    "cuEventCreate": 2,
    "cuMemcpyAsync": 1,
    "cuMemsetD8Async": 1,
    "cuEventRecord": 999,
    "cuEventSynchronize": 999,
    "cuStreamWaitEvent": 999,
    "cuStreamSynchronize": 999,
    "cuCtxSynchronize": 999,
    "cuStreamIsCapturing": 999,
    "cuStreamGetCtx": 999,
    "cuPointerGetAttribute": 1,
    "cuPointerGetAttributes": 1,
    "cuCtxGetDevice": 201,
    "cuCtxPushCurrent": 201,
    "cuCtxSetCurrent": 201,
    "cuThreadExchangeStreamCaptureMode": 999,
    "pc_stub_enqueue": 9,  # a launch
}


class World:
    """A cache with the sequences of a history, and the marks that each must hold."""

    def __init__(self, streams: list[Any]) -> None:
        self.one, self.two = streams
        self.cache: Any = None
        self.held: dict[str, tuple[pc.Sequence, list[int]]] = {}
        self.mapping: Any = None
        self.last: Any = None

    def construct(self) -> None:
        self.cache = on_gpu(
            16, B=B, layers=2, dim=32, fmt=("q8", "float32"), partial_block_reuse=1
        )

    def hold(self, name: str, seq: pc.Sequence, marks: Any = ()) -> None:
        self.held[name] = seq, list(marks)

    def seq(self, name: str) -> pc.Sequence:
        return self.held[name][0]

    def give(self, layer: int, marks: Any) -> tuple[Any, Any]:
        """Rows in device memory, uploaded before anything fails."""
        return device_rows(self.cache, layer, marks)

    def lengths(self) -> Any:
        """What no refused step ever changes."""
        cache = self.cache
        if cache is None or cache.closed:
            return None
        cache.check()
        stats = cache.stats()
        return (
            [cache.probe([*PROMPT[:n], 70, 71]) for n in range(len(PROMPT) + 1)],
            (stats.pinned, stats.sequences_active, cache.layout_epoch),
            {
                name: (s.seq_len, s.num_tokens, s.written(0), s.written(1))
                for name, (s, _) in self.held.items()
                if not s.freed
            },
        )

    def blocks(self) -> Any:
        """Ids, counts and tables."""
        cache = self.cache
        if cache is None or cache.closed:
            return None
        pool = cache.pool
        return (
            [pool.ref_count(b) for b in range(pool.num_blocks)],
            [pool.is_cached(b) for b in range(pool.num_blocks)],
            (cache.stats().cow_copies, cache.stats().blocks_moved),
            {n: s.block_table.tolist() for n, (s, _) in self.held.items() if not s.freed},
        )

    def sums(self) -> Any:
        """The same whichever blocks were handed out."""
        blocks = self.blocks()
        if blocks is None:
            return None
        refs, is_cached, copies, tables = blocks
        return sorted(refs), sum(is_cached), copies, {n: len(t) for n, t in tables.items()}

    def verify(self) -> None:
        """Every committed token of every sequence reads as what was written."""
        if self.cache is None or self.cache.closed:
            return
        for seq, marks in self.held.values():
            if not seq.freed:
                assert_holds(self.cache, seq, marks[: seq.seq_len])

    def close(self) -> None:
        forget_rows()
        self.last = self.mapping = None
        self.held.clear()
        if self.cache is not None:
            self.cache.close()


Step = tuple[Callable[[World], Any], Callable[[World, Any], None]]


def _written(name: str, marks: list[int]) -> Callable[[World, Any], None]:
    def note(world: World, _: Any) -> None:
        world.held[name][1].extend(marks)

    return note


def _nothing(world: World, result: Any) -> None:
    world.last = result


def _append(name: str, layer: int, marks: list[int], stream: str, on_device: bool) -> Step:
    """One layer's append; the rows are made when the step is prepared, not when it is made."""

    def make(world: World) -> Any:
        given = world.ready[(name, layer)] if on_device else rows(world.cache.spec, layer, marks)  # type: ignore[attr-defined]
        return world.seq(name).append(layer, *given, stream=getattr(world, stream))

    def note(world: World, _: Any) -> None:
        if layer == 1:
            world.held[name][1].extend(marks)

    return make, note


NEW = list(range(1, 11))
STEPS: dict[str, Step] = {
    "construct": (World.construct, _nothing),
    "open": (
        lambda w: w.cache.open(PROMPT, stream=w.one), lambda w, seq: w.hold("first", seq)
    ),
    "append host rows": _append("first", 0, NEW, "one", False),
    "append device rows": _append("first", 1, NEW, "one", True),
    "commit": (lambda w: w.seq("first").commit(10), _nothing),
    "open partial hit": (
        lambda w: w.cache.open([*PROMPT[:6], 70, 71], stream=w.two),
        lambda w, seq: w.hold("hit", seq, NEW[:6]),
    ),
    "open full hit": (
        lambda w: w.cache.open(PROMPT[:8], stream=w.two),
        lambda w, seq: w.hold("full", seq, NEW[:7]),
    ),
    "fork": (lambda w: w.seq("first").fork(), lambda w, seq: w.hold("child", seq, NEW)),
    "append copies 0": _append("child", 0, [50], "two", True),
    "append copies 1": _append("child", 1, [50], "two", False),
    "commit child": (lambda w: w.seq("child").commit(1, stream=w.two), _nothing),
    "prepare copies": (
        lambda w: w.cache.prepare([w.seq("first"), w.seq("hit")], [5, 2], stream=w.one),
        lambda w, mapping: setattr(w, "mapping", mapping),
    ),
    "store 0": (
        lambda w: w.cache.store(0, *w.ready["store", 0], w.mapping, stream=w.one), _nothing
    ),
    "store 1": (
        lambda w: w.cache.store(1, *w.ready["store", 1], w.mapping, stream=w.two), _nothing
    ),
    "commit many": (
        lambda w: w.cache.commit([w.seq("first"), w.seq("hit")], [5, 2]),
        lambda w, _: (
            w.held["first"][1].extend(range(60, 65)), w.held["hit"][1].extend([65, 66])
        ),
    ),
    "store raw": (
        lambda w: w.cache.store(0, *w.ready["raw", 0], w.ready["slots"], stream=w.two), _nothing
    ),
    "gather": (lambda w: w.seq("hit").gather(0, stream=w.two), _nothing),
    "gather to the host": (
        lambda w: w.seq("hit").gather(
            1, dtype=np.float32, out=tuple(np.zeros((8, 1, 32), np.float32) for _ in "kv")
        ),
        _nothing,
    ),
    "fetch": (lambda w: host(w.seq("child").views(1)[0].v), _nothing),
    "views": (lambda w: [v.k for v in w.seq("first").views(0, stream=w.two)], _nothing),
    "record_use": (lambda w: w.cache.record_use([w.seq("first")], w.two), _nothing),
    "pointer tables": (
        lambda w: w.seq("first").layer_device_ptr_tables(0, stream=w.one), _nothing
    ),
    "pointers of many": (
        lambda w: w.cache.device_ptr_tables([w.seq("first"), w.seq("hit")], 1), _nothing
    ),
    "truncate": (lambda w: w.seq("first").truncate(9, stream=w.two), _nothing),
    "update_tokens": (lambda w: w.cache.update_tokens(w.seq("child").seq_id, 10), _nothing),
    "writable_block_at": (
        lambda w: w.cache.writable_block_at(w.seq("child").seq_id, 2, stream=w.two), _nothing
    ),
    "pointer tables again": (
        lambda w: w.seq("first").layer_device_ptr_tables(1, stream=w.two), _nothing
    ),
    "free": (lambda w: w.seq("full").free(stream=w.one), _nothing),
    "defragment": (lambda w: w.cache.defragment(stream=w.one), _nothing),
    "compact": (lambda w: w.cache.compact_sequence(w.seq("hit"), stream=w.two), _nothing),
    "synchronize": (lambda w: w.cache.synchronize(), _nothing),
    "close": (lambda w: w.cache.close(), _nothing),
}
NAMES = list(STEPS)

#: Steps that take and copy blocks before they use the device for more.
TAKE_FIRST = {"append copies 0", "prepare copies"}


def brought_to(step: str, streams: list[Any]) -> World:
    world = World(streams)
    for name in NAMES[: NAMES.index(step)]:
        ready(world, name)
        call, note = STEPS[name]
        note(world, call(world))
    ready(world, step)
    world.last = None
    return world


def ready(world: World, step: str) -> None:
    """What a step takes from the test, made before anything is to fail."""
    made: dict[Any, Any] = {}
    world.ready = made  # type: ignore[attr-defined]
    if step == "append device rows":
        made["first", 1] = world.give(1, NEW)
    elif step == "append copies 0":
        made["child", 0] = world.give(0, [50])
    elif step.startswith("store ") and step[-1].isdigit():
        layer = int(step[-1])
        made["store", layer] = world.give(layer, [60, 61, 62, 63, 64, 65, 66])
    elif step == "store raw":
        slots = world.seq("child").prepare(1).slots
        made["slots"] = upload(slots, "cuda:0")
        made["raw", 0] = world.give(0, [99])


def counts_of(emulated: Any) -> dict[str, int]:
    return {name: emulated.get(f"calls:{name}") for name in CODES}


class Faults:
    """One step of the history, again and again, with another call failing each time."""

    def __init__(self, device: Any, emulated: Any, step: str, streams: list[Any]) -> None:
        self.device, self.emulated, self.step, self.streams = device, emulated, step, streams
        self.call, self.note = STEPS[step]
        self.clean: Any = None  # counts after the step when nothing fails

    def calls(self) -> dict[str, int]:
        """How often each function is called in this step when all goes well."""
        world = brought_to(self.step, self.streams)
        before = counts_of(self.emulated)
        self.note(world, self.call(world))
        after = counts_of(self.emulated)
        world.verify()
        self.clean = world.sums()
        self.close(world)
        return {name: after[name] - before[name] for name in CODES if after[name] > before[name]}

    def close(self, world: World) -> None:
        world.close()
        if world.cache is not None:
            assert world.cache.closed
        gc.collect()

    def run(self, name: str, nth: int, times: int) -> None:
        world = brought_to(self.step, self.streams)
        before = world.lengths(), world.blocks()
        self.emulated.fail(name, nth, CODES[name], times)
        error: BaseException | None = None
        result: Any = None
        try:
            result = self.call(world)
        except BaseException as e:
            error = e.with_traceback(None)
        finally:
            self.emulated.fail(name, 0)
        what = (name, nth, times, repr(error))
        if self.device.broken is not None:
            self._is_broken(world, what)
            return
        if error is not None:
            assert isinstance(error, PagedCacheError), what
            assert isinstance(error, DeviceError | StorageMemoryError), what
            error = None
            gc.collect()
            assert world.lengths() == before[0], what
            if self.step not in TAKE_FIRST:
                assert world.blocks() == before[1], what
            world.verify()
            result = self.call(world)
        self.note(world, result)
        del result
        world.last = None
        world.lengths()
        assert world.sums() == self.clean, what
        world.verify()
        self.close(world)

    def _is_broken(self, world: World, what: Any) -> None:
        """The device could not even be left as it was found: everything says so, and all goes."""
        origin = self.device.broken
        assert isinstance(origin, DeviceError), what
        if world.cache is not None and not world.cache.closed:
            world.cache.check()
            for seq in [seq for seq, _ in world.held.values() if not seq.freed]:
                with pytest.raises(DeviceError):
                    seq.gather(0)
                seq.free()
        self.close(world)
        self.device.broken = None


def baseline(device: Any, emulated: Any) -> dict[str, int]:
    """What lives on the device, but for the pinned memory that it keeps for copies of arrays."""
    gc.collect()
    device.staging.close()
    live: dict[str, int] = emulated.live()
    return live


@pytest.mark.parametrize("times", [1, 0], ids=["once", "from then on"])
@pytest.mark.parametrize("step", NAMES)
def test_every_call_of_every_step_fails(
    step: str, times: int, cuda: Any, emulated: Any
) -> None:
    # SPEC F46, F23, CASE C51
    with streams_of(cuda, 2) as streams:
        faults = Faults(cuda, emulated, step, streams)
        faults.calls()  # what is made once and kept, by PyCUDA or the device, exists now
        live = baseline(cuda, emulated)
        for name, count in faults.calls().items():
            for nth in sorted({*range(1, count + 1)[: by_profile(3, 60)], count}):
                faults.run(name, nth, times)
                now = baseline(cuda, emulated)
                left = {k: n - live[k] for k, n in now.items() if n != live[k]}
                assert not left, (name, nth, left, emulated.describe())


def test_the_steps_reach_the_driver(cuda: Any, emulated: Any) -> None:
    """The injection reaches what it is meant for: who uses what."""
    # SPEC F46
    with streams_of(cuda, 2) as streams:
        used = {step: set(Faults(cuda, emulated, step, streams).calls()) for step in NAMES}
    assert {"cuMemAlloc", "cuMemsetD8Async", "cuMemcpyAsync"} <= used["construct"]
    for step in ("append host rows", "open partial hit", "append copies 1", "defragment"):
        assert {"pc_stub_enqueue", "cuMemcpyAsync"} <= used[step], step
    assert {"cuEventRecord"} <= used["commit"] & used["record_use"] & used["free"]
    assert "cuStreamWaitEvent" in used["open partial hit"] | used["append copies 0"]
    assert "pc_stub_enqueue" in used["store raw"]


# ---- sticky errors ---------------------------------------------------------------------------


BROKEN_CALLS: dict[str, Callable[[World], Any]] = {
    "open hit": lambda w: w.cache.open([*PROMPT[:8], 1], stream=w.one),
    "append": lambda w: w.seq("first").append(0, *w.give_host(0, [7]), stream=w.one),  # type: ignore[attr-defined]
    "store": lambda w: w.cache.store(0, *w.give_host(0, [7]), w.mapping),  # type: ignore[attr-defined]
    "gather": lambda w: w.seq("first").gather(0),
    "prepare": lambda w: w.seq("child").prepare(1),
    "commit": lambda w: w.cache.commit([w.seq("first")], [1]),
    "defragment": lambda w: w.cache.defragment(),
    "views": lambda w: w.seq("first").views(0)[0].k,
    "synchronize": lambda w: w.cache.synchronize(),
    "record_use": lambda w: w.cache.record_use([w.seq("first")], w.one),
    "pointer tables": lambda w: w.seq("first").layer_device_ptr_tables(0),
    "construct": lambda w: on_gpu(4),
}


@pytest.mark.parametrize("code", [700, 719])
@pytest.mark.parametrize("way", ["a call returns it", "a kernel failed"])
def test_a_sticky_error_marks_the_device_broken(
    way: str, code: int, cuda: Any, emulated: Any
) -> None:
    # SPEC F46: calls raise DeviceError with the origin, free and close still work
    with streams_of(cuda, 2) as streams:
        world = brought_to("gather", streams)
        world.give_host = lambda layer, marks: rows(world.cache.spec, layer, marks)  # type: ignore[attr-defined]
        before = world.lengths(), world.blocks()
        if way == "a call returns it":
            emulated.fail("pc_stub_enqueue", 1, code)
        emulated.sticky(code)
        with pytest.raises(DeviceError) as caught:
            world.seq("first").append(0, *rows(world.cache.spec, 0, [7]), stream=world.one)
        assert caught.value.code == code  # type: ignore[attr-defined]
        origin = str(code)
        del caught
        assert cuda.broken is not None
        for name, call in BROKEN_CALLS.items():
            with pytest.raises(DeviceError) as again:
                call(world)
            assert origin in str(again.value), (name, str(again.value))
            del again
        gc.collect()
        assert (world.lengths(), world.blocks()) == before
        # ids and tables know nothing of it
        assert world.cache.probe([*PROMPT[:8], 1]) == 8
        world.seq("child").truncate(3)
        world.seq("hit").free(stream=world.two)
        assert world.cache.stats().sequences_active == 3
        for seq, _ in world.held.values():
            seq.free()
        assert world.cache.num_free_blocks == 16
        world.cache.check()
        world.close()
        emulated.sticky(0)
        cuda.broken = None


def test_another_device_goes_on_when_one_is_broken(cuda: Any, emulated: Any) -> None:
    # SPEC F46, F15
    emulated.set("devices", 2)
    with on_gpu(4, B=B) as broken, on_gpu(4, B=B, device="cuda:1") as other:
        seq, fine = broken.open(range(5)), other.open(range(5))
        append(other, fine, range(1, 6))
        emulated.sticky(719)
        with pytest.raises(DeviceError):
            append(broken, seq, range(1, 6))
        fine.commit(5)
        assert_holds(other, fine, range(1, 6))
        seq.free()
        broken.close()
        emulated.sticky(0)
        cuda.broken = None


# ---- memory --------------------------------------------------------------------------------


def test_a_cache_that_does_not_fit_takes_nothing(cuda: Any, emulated: Any) -> None:
    # SPEC F11: it says how many bytes it would have taken
    before = baseline(cuda, emulated)
    spec = pc.CacheSpec(4, 8, 128, 16)
    emulated.set("total_memory", 10 << 20)
    with pytest.raises(StorageMemoryError) as caught:
        pc.PagedKVCache(spec, 1000, device="cuda:0")
    assert isinstance(caught.value, MemoryError)
    assert caught.value.nbytes == spec.storage_nbytes(1000)
    del caught
    assert baseline(cuda, emulated) == before
    with pc.PagedKVCache(spec, memory="4MiB", device="cuda:0") as cache:
        assert cache.num_blocks == (4 << 20) // spec.block_nbytes


def test_views_keep_the_memory_after_close(cuda: Any, emulated: Any) -> None:
    # SPEC F11, F30: close() gives the storage back once no view holds it
    before = baseline(cuda, emulated)
    cache = on_gpu(4, B=B, layers=1, dim=4)
    seq = cache.open(range(6))
    append(cache, seq, range(1, 7))
    view = seq.views(0)[1]
    array = view.k
    cache.close()
    gc.collect()
    assert emulated.live()["live_bytes"] > before["live_bytes"]
    np.testing.assert_array_equal(host(array)[0], rows(cache.spec, 0, [5, 6])[0][:, 0])
    del view, array, seq
    gc.collect()
    after = baseline(cuda, emulated)
    assert after["live_allocations"] == before["live_allocations"]
    assert after["live_events"] == before["live_events"]
