"""A history of a cache on a GPU, step by step, for calls of the driver that fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from cachekit import assert_holds, rows
from devicekit import host
from gpukit import device_rows, forget_rows, on_gpu

import pagedcache as pc
from pagedcache.checks.devices import upload

B = 4
PROMPT = list(range(10))
#: The caches that the history is played on: blocks written row by row; and blocks that are open
#: until they are full, one kind of which is then quantised whole.
FORMATS = {"rows": ("q8", "float32"), "open": ("q4k", "q4_1")}


class World:
    """A cache with the sequences of a history, and the marks that each must hold."""

    def __init__(self, streams: list[Any], kind: str = "rows") -> None:
        self.one, self.two = streams
        self.kind = kind
        self.cache: Any = None
        self.held: dict[str, tuple[pc.Sequence, list[int]]] = {}
        self.mapping: Any = None
        self.last: Any = None

    def construct(self) -> None:
        self.cache = on_gpu(
            16, B=B, layers=2, dim=32, fmt=FORMATS[self.kind], partial_block_reuse=1
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
            (cache.stats().cow_copies, cache.stats().blocks_moved, cache.stats().open_blocks),
            {n: s.block_table.tolist() for n, (s, _) in self.held.items() if not s.freed},
            {
                n: (cache.open_slots(s) >= 0).tolist()
                for n, (s, _) in self.held.items()
                if not s.freed
            },
        )

    def sums(self) -> Any:
        """The same whichever blocks were handed out."""
        blocks = self.blocks()
        if blocks is None:
            return None
        refs, is_cached, copies, tables, is_open = blocks
        lengths = {n: len(table) for n, table in tables.items()}
        return sorted(refs), sum(is_cached), copies, lengths, is_open

    def values(self) -> Any:
        """What every committed token of every sequence reads as: the same each time the history
        is played."""
        if self.cache is None or self.cache.closed:
            return None
        return {
            name: [
                host(part).tobytes()
                for layer in range(2)
                for part in seq.gather(layer, 0, seq.seq_len, dtype=np.float32)
            ]
            for name, (seq, _) in self.held.items()
            if not seq.freed
        }

    def verify(self) -> None:
        """Every committed token of every sequence reads as what was written (of blocks written row
        by row; what open ones read as depends on when they were open)."""
        if self.cache is None or self.cache.closed or self.kind == "open":
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
TAIL = list(range(80, 86))
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
    "append tail 0": _append("first", 0, TAIL, "two", False),
    "append tail 1": _append("first", 1, TAIL, "two", False),
    "commit tail": (lambda w: w.seq("first").commit(6, stream=w.two), _nothing),
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
    "attend": (lambda w: w.cache.attend(0, w.ready["q"], w.seq("first"), stream=w.two), _nothing),
    "attend to the host": (
        lambda w: w.cache.attend(
            1, np.ones((2, 2, 32), np.float32), [w.seq("hit"), w.seq("first")], return_lse=True
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
#: Slots on a device are refused where blocks are open.
STEPS_OF = {"rows": NAMES, "open": [name for name in NAMES if name != "store raw"]}

#: Steps that take, open and copy blocks before they use the device for more.
TAKE_FIRST = {
    "rows": {"append copies 0", "prepare copies", "append tail 0"},
    "open": {"append host rows", "append copies 0", "prepare copies", "append tail 0"},
}


def brought_to(step: str, streams: list[Any], kind: str = "rows") -> World:
    world = World(streams, kind)
    names = STEPS_OF[kind]
    for name in names[: names.index(step)]:
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
    elif step == "attend":
        made["q"] = upload(np.ones((2, 1, 32), np.float32), "cuda:0")
    elif step == "store raw":
        slots = world.seq("child").prepare(1).slots
        made["slots"] = upload(slots, "cuda:0")
        made["raw", 0] = world.give(0, [99])
