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
from gpufaultkit import NAMES, PROMPT, STEPS, STEPS_OF, TAKE_FIRST, B, World, brought_to
from gpukit import append, on_gpu, streams_of

import pagedcache as pc
from pagedcache.errors import DeviceError, PagedCacheError, StorageMemoryError

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


def counts_of(emulated: Any) -> dict[str, int]:
    return {name: emulated.get(f"calls:{name}") for name in CODES}


class Faults:
    """One step of the history, again and again, with another call failing each time."""

    def __init__(
        self, device: Any, emulated: Any, step: str, streams: list[Any], kind: str
    ) -> None:
        self.device, self.emulated, self.step, self.streams = device, emulated, step, streams
        self.kind = kind
        self.call, self.note = STEPS[step]
        self.clean: Any = None  # counts after the step when nothing fails
        self.values: Any = None  # what tokens read as before it and after it

    def calls(self) -> dict[str, int]:
        """How often each function is called in this step when all goes well."""
        first = self.world()
        values = first.values()
        self.close(first)
        world = self.world()
        before = counts_of(self.emulated)
        self.note(world, self.call(world))
        after = counts_of(self.emulated)
        world.verify()
        self.clean = world.sums()
        self.values = values, world.values()
        self.close(world)
        return {name: after[name] - before[name] for name in CODES if after[name] > before[name]}

    def world(self) -> World:
        return brought_to(self.step, self.streams, self.kind)

    def close(self, world: World) -> None:
        world.close()
        if world.cache is not None:
            assert world.cache.closed
        gc.collect()

    def run(self, name: str, nth: int, times: int) -> None:
        world = self.world()
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
            if self.step not in TAKE_FIRST[self.kind]:
                assert world.blocks() == before[1], what
            world.verify()
            assert world.values() == self.values[0], what
            result = self.call(world)
        self.note(world, result)
        del result
        world.last = None
        world.lengths()
        assert world.sums() == self.clean, what
        world.verify()
        assert world.values() == self.values[1], what
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
@pytest.mark.parametrize(
    ("kind", "step"), [(kind, step) for kind, steps in STEPS_OF.items() for step in steps]
)
def test_every_call_of_every_step_fails(
    kind: str, step: str, times: int, cuda: Any, emulated: Any
) -> None:
    # SPEC F46, F23, CASE C51
    with streams_of(cuda, 2) as streams:
        faults = Faults(cuda, emulated, step, streams, kind)
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
        used = {step: set(Faults(cuda, emulated, step, streams, "rows").calls()) for step in NAMES}
        opened = {
            step: set(Faults(cuda, emulated, step, streams, "open").calls())
            for step in ("commit tail", "open partial hit", "writable_block_at")
        }
    assert {"cuMemAlloc", "cuMemsetD8Async", "cuMemcpyAsync"} <= used["construct"]
    for step in ("append host rows", "open partial hit", "append copies 1", "defragment"):
        assert {"pc_stub_enqueue", "cuMemcpyAsync"} <= used[step], step
    assert {"cuEventRecord"} <= used["commit"] & used["record_use"] & used["free"]
    assert "cuStreamWaitEvent" in used["open partial hit"] | used["append copies 0"]
    assert "pc_stub_enqueue" in used["store raw"]
    for step, calls in opened.items():  # blocks are sealed, or reopened
        assert {"pc_stub_enqueue", "cuMemcpyAsync"} <= calls, step


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
