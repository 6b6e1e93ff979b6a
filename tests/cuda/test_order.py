"""The order of streams against a model of vector clocks: conflicts are ordered, nothing else is."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from streammodel import ModelDevice

from pagedcache._cuda.order import RING, Mark, Order
from pagedcache._cuda.streams import Stream, Streams
from pagedcache.errors import CudaCallError, DeviceError, StorageMemoryError

FAILURE = CudaCallError("pc_cuda_anything", 999, "cudaErrorUnknown", "unknown error")
GONE = CudaCallError("pc_cuda_anything", 400, "cudaErrorInvalidResourceHandle", "invalid handle")


def ids(*blocks: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(blocks, np.int32)


class Setting:
    """An order over a model, and work done the way storage does it."""

    def __init__(self, num_streams: int = 3, num_blocks: int = 12) -> None:
        self.device: Any = ModelDevice(FAILURE, GONE)
        self.model = self.device.model
        self.order = Order(self.device, num_blocks)
        self.streams = [self.new_stream(index) for index in range(num_streams)]

    def new_stream(self, index: int) -> Stream:
        return Stream(self.device, 0x50 + index if index else 0, None, index)

    def work(self, stream: int, *blocks: int, writing: bool) -> None:
        """Acquire, queue, used; whatever conflicts with it must come before it."""
        where = self.streams[stream]
        self.order.acquire(where, ids(*blocks), writing)
        self.queue(stream, *blocks, writing=writing)
        self.order.used(where, ids(*blocks), writing)

    def queue(self, stream: int, *blocks: int, writing: bool, ordered: bool = True) -> None:
        touched = set(blocks)
        made = self.model.queue(
            self.streams[stream].handle,
            set() if writing else touched,
            touched if writing else set(),
        )
        if ordered:
            assert not self.model.unordered(made)


# ---- single rules ---------------------------------------------------------------------------


def test_one_stream_makes_no_driver_call() -> None:  # SPEC F49
    setting = Setting(1)
    for block in range(12):
        setting.work(0, block, (block + 1) % 12, writing=bool(block % 2))
    setting.order.wait(setting.streams[0], [setting.order.mark(setting.streams[0])])
    setting.order.follow(setting.streams[0], setting.streams[0])
    assert not setting.device.calls


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_two_streams_are_ordered_where_one_writes(first: bool, second: bool) -> None:  # SPEC F49
    setting = Setting(2)
    setting.work(0, 3, writing=first)
    setting.work(1, 3, writing=second)
    conflict = int(first or second)
    assert setting.device.calls["pc_cuda_event_record"] == conflict
    assert setting.device.calls["pc_cuda_stream_wait"] == conflict


def test_other_blocks_are_not_waited_for() -> None:  # SPEC F49
    setting = Setting(2)
    setting.work(0, 1, 2, writing=True)
    setting.work(1, 3, 4, writing=True)
    assert setting.device.order_calls == 0


def test_a_stream_waits_once_for_the_same_work() -> None:  # SPEC F49
    setting = Setting(2)
    setting.work(0, 1, 2, 3, writing=True)
    for block in (1, 2, 3):
        setting.work(1, block, writing=False)
    assert setting.device.calls["pc_cuda_stream_wait"] == 1
    setting.work(0, 1, writing=True)  # after the reader, and new work for it to come after
    setting.work(1, 1, writing=False)
    assert setting.device.calls["pc_cuda_stream_wait"] == 3


def test_publishing_records_one_event_and_later_work_is_not_waited_for() -> None:  # SPEC F49
    setting = Setting(2)
    setting.work(0, 1, 2, writing=True)
    setting.order.publish(ids(1), None)
    setting.order.publish(ids(2), None)
    assert setting.device.calls["pc_cuda_event_record"] == 1
    setting.work(0, 7, writing=True)
    setting.work(1, 1, writing=False)
    assert setting.device.calls["pc_cuda_event_record"] == 1
    last = setting.model.operations[-1]
    behind, unrelated = setting.model.operations[:2]
    assert behind.comes_before(last)
    assert not unrelated.comes_before(last)
    setting.work(1, 7, writing=False)  # that event did not cover it
    assert setting.device.calls["pc_cuda_event_record"] == 2


def test_publishing_what_nobody_used_calls_nothing() -> None:  # SPEC F49
    setting = Setting(2)
    setting.work(0, 1, writing=True)
    setting.work(1, 2, writing=False)
    setting.order.publish(ids(5, 6), None)
    setting.order.publish(ids(), setting.streams[1], True)
    assert not setting.device.calls


def test_a_foreign_reader_is_waited_for_by_the_next_writer() -> None:  # SPEC F49, CASE C52
    setting = Setting(3)
    setting.work(0, 4, writing=True)
    setting.order.follow(setting.streams[2], setting.streams[0])
    setting.queue(2, 4, writing=False)  # a kernel of somebody else
    setting.order.publish(ids(4), setting.streams[2], False)
    setting.work(1, 4, writing=True)
    assert setting.model.operations[1].comes_before(setting.model.operations[2])


def test_a_foreign_writer_is_waited_for_by_the_next_reader() -> None:  # SPEC F49
    setting = Setting(3)
    setting.queue(2, 4, writing=True)
    setting.order.publish(ids(4), setting.streams[2], True)
    setting.work(1, 4, writing=False)
    setting.work(0, 4, writing=False)
    assert setting.device.calls["pc_cuda_event_record"] == 1


def test_following_covers_what_the_order_never_saw() -> None:  # SPEC F47, F49
    setting = Setting(2)
    for _ in range(3):
        setting.queue(1, 8, writing=True, ordered=False)  # the producer of an array, not of ours
        setting.order.follow(setting.streams[0], setting.streams[1])
        setting.queue(0, 8, writing=False)


def test_an_old_tag_outlives_its_events() -> None:  # SPEC F49
    """The ring is recorded anew many times; what its lost events covered stays ordered."""
    setting = Setting(2)
    setting.work(0, 0, writing=True)
    setting.order.publish(ids(0), None)
    for turn in range(3 * RING):
        setting.work(0, 1 + turn % 11, writing=True)
        setting.order.publish(ids(1 + turn % 11), None)
    assert len(setting.device.live_events) == RING
    setting.work(1, 0, writing=True)
    assert setting.device.calls["pc_cuda_event_record"] == 1 + 3 * RING


def test_the_latest_events_are_kept() -> None:  # SPEC F49
    """A ring that is full gives up its oldest event: what was published lately needs no other."""
    setting = Setting(2, 100)
    for block in range(3 * RING):
        setting.work(0, block, writing=True)
        setting.order.publish(ids(block), None)
    setting.work(0, 99, writing=True)
    for block in range(2 * RING, 3 * RING):
        setting.work(1, block, writing=False)
        assert not setting.model.operations[3 * RING].comes_before(setting.model.operations[-1])
    assert setting.device.calls["pc_cuda_event_record"] == 3 * RING
    assert setting.device.calls["pc_cuda_stream_wait"] == RING


def test_marks_order_scratch_memory() -> None:  # SPEC F49
    setting = Setting(2)
    first, second = setting.streams
    setting.queue(0, 5, writing=True)
    mark = setting.order.mark(first)
    assert setting.device.order_calls == 0
    setting.order.wait(second, [mark, Mark(first, mark.number)])
    setting.queue(1, 5, writing=True)
    setting.order.wait(second, [mark])
    assert setting.device.calls["pc_cuda_stream_wait"] == 1


@pytest.mark.parametrize("newest_first", [False, True])
def test_the_last_of_several_marks_counts(newest_first: bool) -> None:  # SPEC F49
    setting = Setting(3)
    first, second, third = setting.streams
    setting.queue(0, 5, writing=True)
    marks = [setting.order.mark(first)]
    setting.order.wait(third, marks)  # an event that covers the first mark only
    setting.queue(0, 6, writing=True)
    marks.append(setting.order.mark(first))
    setting.order.wait(second, reversed(marks) if newest_first else marks)
    setting.queue(1, 5, 6, writing=True)


def test_forgetting_needs_the_last_call() -> None:  # SPEC F49
    setting = Setting(2)
    first, second = setting.streams
    setting.work(0, 5, writing=True)
    setting.work(1, 5, writing=True)
    mark = setting.order.mark(first)
    done = setting.order.last_call(first)
    assert done == 2
    setting.work(0, 6, writing=True)  # another thread was faster
    assert not setting.order.forget(first, done)
    setting.model.finish(first.handle)
    assert setting.order.forget(first, setting.order.last_call(first))
    assert setting.order.last_call(first) == 0
    before = setting.device.order_calls
    setting.work(1, 5, 6, writing=True)
    setting.order.wait(second, [mark])  # done, as all of that stream
    assert setting.device.order_calls == before
    setting.queue(0, 7, writing=False)  # it may come back, and counts anew
    assert setting.order.mark(first).number < mark.number
    setting.order.wait(second, [mark])
    assert setting.device.order_calls == before
    setting.work(0, 5, writing=False)
    setting.work(1, 5, writing=True)


def test_events_are_destroyed() -> None:  # SPEC F46
    setting = Setting(3)
    for stream in (0, 1, 2, 0):
        setting.work(stream, 1, writing=True)
    assert len(setting.device.live_events) == 3
    assert setting.order.forget(setting.streams[1], setting.order.last_call(setting.streams[1]))
    assert len(setting.device.live_events) == 2
    setting.order.close()
    setting.order.close()
    assert not setting.device.live_events
    other = Setting(2)
    other.work(0, 1, writing=True)
    other.work(1, 1, writing=True)
    del other.order
    assert not other.device.live_events


def test_a_capture_is_refused_before_anything_is_queued() -> None:  # SPEC F49
    setting = Setting(3)
    setting.work(0, 1, writing=True)
    setting.work(1, 2, writing=True)
    setting.device.captured = {0x51}
    for call in (
        lambda: setting.order.acquire(setting.streams[1], ids(1), False),  # would wait
        lambda: setting.order.acquire(setting.streams[2], ids(1, 2), False),  # would record on 1
        lambda: setting.order.publish(ids(1, 2), None),
        lambda: setting.order.publish(ids(7), setting.streams[1], True),
        lambda: setting.order.follow(setting.streams[0], setting.streams[1]),
        lambda: setting.order.follow(setting.streams[1], setting.streams[0]),
    ):
        with pytest.raises(DeviceError, match="a stream that is not being captured") as caught:
            call()
        assert "0x51" in str(caught.value)
        assert setting.device.order_calls == 0
    setting.work(1, 2, 3, writing=True)  # its own blocks may be captured
    assert setting.device.order_calls == 0
    setting.device.captured = set()
    setting.work(2, 1, 2, 3, writing=True)


@pytest.mark.parametrize("code", [400, 709])
@pytest.mark.parametrize("published", [False, True])
def test_a_destroyed_stream_is_still_come_after(published: bool, code: int) -> None:  # SPEC F49
    """Its work goes on. An event from before covers it; else the whole device is waited for."""
    setting = Setting(3)
    setting.device.gone = CudaCallError("pc_cuda_event_record", code, "cudaErrorGone", "gone")
    setting.work(0, 1, writing=True)
    setting.work(0, 2, writing=True)
    if published:
        setting.order.publish(ids(1, 2))
    setting.device.destroyed = {0}
    setting.work(1, 1, writing=True)
    setting.work(2, 1, 2, writing=True)
    assert setting.device.calls["synchronize"] == (not published)
    setting.work(1, 1, 2, writing=True)


def test_foreign_work_on_a_destroyed_stream() -> None:  # SPEC F49
    setting = Setting(3)
    setting.queue(1, 4, writing=False)
    setting.device.destroyed = {0x51}
    with pytest.raises(DeviceError, match="which was destroyed"):
        setting.order.publish(ids(4), setting.streams[1])
    setting.work(0, 4, writing=True)
    setting.queue(1, 5, writing=True)
    setting.order.follow(setting.streams[0], setting.streams[1])
    setting.queue(0, 5, writing=False)


def test_no_memory_for_tags() -> None:  # SPEC F46
    device: Any = ModelDevice(FAILURE)
    order = Order(device, 2**55)
    with pytest.raises(StorageMemoryError, match="the order of work on <the default stream") as e:
        order.acquire(Stream(device, 0, None, 0), ids(1), True)
    assert e.value.nbytes == 16 * 2**55
    assert not device.calls


# ---- failing calls ----------------------------------------------------------------------------


@pytest.mark.parametrize("nth", range(1, 12))
def test_a_failed_call_can_be_repeated(nth: int) -> None:  # SPEC F46, F49
    """Whichever call of the driver fails, the same acquire then orders all the same."""
    setting = Setting(4)
    for stream in (0, 1, 2):
        setting.work(stream, 10 + stream - 1, writing=True)
        setting.work(stream, 2, writing=False)
    assert setting.device.order_calls == 0
    setting.device.fail_in = nth
    failed = 0
    try:
        setting.order.acquire(setting.streams[3], ids(2, 9, 10, 11), True)
    except CudaCallError as error:
        assert error is FAILURE
        failed = 1
    assert failed == (setting.device.fail_in == 0)
    setting.device.fail_in = 0
    setting.work(3, 2, 9, 10, 11, writing=True)
    assert len(setting.device.live_events) == 3


def test_a_failed_record_in_a_full_ring_loses_nothing() -> None:  # SPEC F46, F49
    setting = Setting(2)
    setting.work(0, 0, writing=True)
    for _ in range(RING):
        setting.work(0, 1, writing=True)
        setting.order.publish(ids(1), None)
    for _ in range(RING - 1):
        setting.work(0, 1, writing=True)
        setting.device.fail_in = 2  # asking for a capture comes first
        with pytest.raises(CudaCallError):
            setting.order.publish(ids(1), None)
        assert len(setting.device.live_events) == RING
    setting.work(1, 0, 1, writing=True)
    assert len(setting.device.live_events) == RING


# ---- any history -------------------------------------------------------------------------------

BLOCKS = 12
STREAMS = 5

blocks = st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=4, unique=True)
stream_ids = st.integers(0, STREAMS - 1)
actions = st.one_of(
    st.tuples(st.just("work"), stream_ids, blocks, st.booleans()),
    st.tuples(st.just("work"), stream_ids, blocks, st.booleans()),
    st.tuples(st.just("publish"), blocks),
    st.tuples(st.just("foreign"), stream_ids, blocks, st.booleans()),
    st.tuples(st.just("follow"), stream_ids, stream_ids),
    st.tuples(st.just("burst"), stream_ids, blocks),
    st.tuples(st.just("forget"), stream_ids),
    st.tuples(st.just("destroy"), stream_ids),
)


def perform(setting: Setting, action: tuple[Any, ...], fail_in: int) -> None:
    """Do one action; where a call of the driver fails, do it once more."""
    kind, *rest = action
    order, device = setting.order, setting.device

    def twice(call: Any) -> None:
        device.fail_in = fail_in
        try:
            call()
        except CudaCallError:
            device.fail_in = 0
            call()
        device.fail_in = 0

    if kind == "work":
        stream, touched, writing = rest
        where = setting.streams[stream]
        twice(lambda: order.acquire(where, ids(*touched), writing))
        setting.queue(stream, *touched, writing=writing)
        order.used(where, ids(*touched), writing)
    elif kind == "publish":
        twice(lambda: order.publish(ids(*rest[0])))
    elif kind == "foreign":
        stream, touched, writing = rest
        # Ordered after us by its own means, as an engine's stream is that was acquired before.
        twice(lambda: order.acquire(setting.streams[stream], ids(*touched), writing))
        setting.queue(stream, *touched, writing=writing)
        twice(lambda: order.publish(ids(*touched), setting.streams[stream], writing))
    elif kind == "follow":
        behind, ahead = (setting.streams[index] for index in rest)
        twice(lambda: order.follow(behind, ahead))
        seen = setting.model.moment(behind.handle).get(ahead.handle, 0)
        assert seen == setting.model.moment(ahead.handle).get(ahead.handle, 0)
    elif kind == "burst":  # turns the ring over
        stream, touched = rest
        for _ in range(RING + 1):
            perform(setting, ("work", stream, touched, True), 0)
            order.publish(ids(*touched))
    elif kind == "destroy":  # another one takes its place
        device.destroyed.add(setting.streams[rest[0]].handle)
        setting.streams[rest[0]] = setting.new_stream(len(device.destroyed) + STREAMS)
    else:
        stream = setting.streams[rest[0]]
        setting.model.finish(stream.handle)
        assert order.forget(stream, order.last_call(stream))


@given(
    num_streams=st.integers(1, STREAMS),
    history=st.lists(st.tuples(actions, st.integers(0, 8)), max_size=40),
)
def test_every_conflict_is_ordered(
    num_streams: int, history: list[tuple[Any, int]]
) -> None:  # SPEC F49
    """``Setting.queue`` asks the model for each operation, whatever has happened before."""
    setting = Setting(STREAMS, BLOCKS)
    for action, fail_in in history:
        kind, *rest = action
        if kind != "publish":
            rest[0] %= num_streams
        if kind == "follow":
            rest[1] %= num_streams
        perform(setting, (kind, *rest), fail_in)
    streams = num_streams + len(setting.device.destroyed)
    assert len(setting.device.live_events) <= streams * RING
    setting.order.close()
    assert not setting.device.live_events


@given(
    writes=st.lists(st.tuples(st.integers(0, 5), stream_ids), max_size=6),
    reads=st.lists(st.tuples(st.integers(6, BLOCKS - 1), stream_ids), max_size=30),
)
def test_readers_are_never_tied_together(
    writes: list[tuple[int, int]], reads: list[tuple[int, int]]
) -> None:  # SPEC F49
    setting = Setting(STREAMS, BLOCKS)
    for block, stream in writes:
        setting.work(stream, block, writing=True)
    before = setting.device.order_calls
    for block, stream in reads:  # of blocks that nobody writes
        setting.work(stream, block, writing=False)
    assert setting.device.order_calls == before


# ---- with the registry of streams, and threads ---------------------------------------------------


def test_more_streams_than_are_tracked() -> None:  # SPEC F49
    setting = Setting(0)
    registry = Streams(setting.device, limit=4)
    for handle in (0, 100, 200, 300, 400, 100, 500, 200):
        stream = registry.resolve(handle)
        setting.streams = [stream]
        setting.work(0, 3, writing=True)
        assert len(registry) <= 4
    assert setting.device.calls["pc_cuda_stream_synchronize"] == 4
    assert len(setting.device.live_events) <= 4


def test_threads_on_streams_of_their_own() -> None:  # SPEC F34, F49
    """Each thread writes blocks of its own and reads those of all, one at a time per block."""
    setting = Setting(4)
    turn = threading.Lock()  # the model is not thread-safe, and the blocks are shared
    errors: list[BaseException] = []

    def run(stream: int) -> None:
        rng = np.random.default_rng(stream)
        try:
            for _ in range(60):
                block, writing = int(rng.integers(12)), bool(rng.integers(2))
                with turn:
                    setting.work(stream, block, writing=writing)
                setting.order.mark(setting.streams[stream])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(stream,)) for stream in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
