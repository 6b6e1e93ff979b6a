"""A ledger with several layers beside a model of lists: every token has the value that its whole
prefix gives it, or one of its own where it is unnamed or rewritten, so that a wrong byte shows."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from pagedcache import (
    OutOfBlocksError,
    OutOfOpenBlocksError,
    PagedCacheError,
    SlotError,
    StaleMappingError,
)
from pagedcache.bookkeeping import Ledger

LAYERS = 2


class MoverError(PagedCacheError):
    """The bytes did not move."""


def value_of(tokens: list[int]) -> int:
    value = 17
    for token in tokens:
        value = (value * 1_000_003 + token + 1) % (2**61 - 1)
    return value


class Bytes:
    """One number per layer and slot of every place, and movers that fail as often as ``fails``."""

    def __init__(self, num_blocks: int, size: int, num_open: int, rng: random.Random) -> None:
        self.num_blocks, self.size, self.rng, self.fails = num_blocks, size, rng, 0.0
        self.whole = num_blocks if num_open else 0  # places below it take whole blocks only
        self.rows = np.full((LAYERS, num_blocks + num_open, size), -7, np.int64)

    def copy(self, src: Any, dst: Any, rows: Any) -> None:
        if self.rng.random() < self.fails:
            raise MoverError("no copies today")
        for a, b, n in zip(src.tolist(), dst.tolist(), rows.tolist(), strict=True):
            assert b >= self.whole or n == self.size
            self.rows[:, b, :n] = self.rows[:, a, :n]

    def move(self, moves: Any) -> None:
        if self.rng.random() < self.fails:
            raise MoverError("no moves today")
        spare = None
        for a, b in moves.tolist():
            row = spare if a == -1 else self.rows[:, a].copy()
            if b == -1:
                spare = row
            else:
                self.rows[:, b] = row

    def store(self, layer: int, slots: Any, values: list[int]) -> None:
        sealed = slots[slots < self.whole * self.size]
        for start in range(0, len(sealed), self.size):
            run = sealed[start : start + self.size]
            assert len(run) == self.size and run[0] % self.size == 0 and (np.diff(run) == 1).all()
        self.rows[layer].reshape(-1)[slots] = values

    def read(self, layer: int, places: Any, stop: int) -> list[int]:
        return self.rows[layer][places].reshape(-1)[:stop].tolist()


class Held:
    """A sequence and what it should read as."""

    def __init__(self, state: Any, tokens: list[int], unnamed: bool = False) -> None:
        self.state, self.tokens, self.unnamed = state, tokens, unnamed
        self.computed = state.num_cached_tokens
        self.written = [0] * LAYERS
        self.values = [[value_of(tokens[: p + 1]) for p in range(self.computed)]] * LAYERS
        self.values = [list(values) for values in self.values]
        self.rewritten: set[int] = set()

    def end(self, layer: int) -> int:
        return max(self.computed, self.written[layer])

    def put(self, layer: int, start: int, values: list[int]) -> None:
        self.values[layer][start : start + len(values)] = values

    def cut(self, n: int) -> None:
        self.computed = min(self.computed, n)
        self.written = [min(end, n) for end in self.written]
        self.tokens = self.tokens[:n]
        self.values = [values[:n] for values in self.values]
        self.rewritten = {p for p in self.rewritten if p < n}

    def twin(self, state: Any) -> Held:
        made = Held(state, list(self.tokens), self.unnamed)
        made.computed, made.written = self.computed, list(self.written)
        made.values = [list(values) for values in self.values]
        made.rewritten = set(self.rewritten)
        return made


class Pending:
    """A step that was prepared and is stored layer by layer, with other calls in between."""

    def __init__(self, seqs: list[Held], counts: list[int], mapping: Any, epoch: int) -> None:
        self.seqs, self.counts, self.mapping, self.epoch = seqs, counts, mapping, epoch
        self.left = list(range(LAYERS))
        self.values: dict[int, list[list[int]]] = {}


class World:
    """Sequences, views and prepared steps over one ledger; ``step()`` does something and looks."""

    def __init__(self, seed: int, num_open: int) -> None:
        self.rng = rng = random.Random(seed)
        self.size, self.num_blocks = rng.choice([1, 2, 3, 4]), rng.choice([10, 16, 30])
        self.bytes = Bytes(self.num_blocks, self.size, num_open, random.Random(seed + 1))
        self.bytes.fails = rng.choice([0, 0, 0.1])
        self.ledger = Ledger(
            self.num_blocks, self.size, num_layers=LAYERS, num_open=num_open,
            partial_block_reuse=rng.choice([0, 1]), queued=rng.choice([False, True]),
            mover=self.bytes.copy, move_mover=self.bytes.move,
        )
        self.live: list[Held] = []
        self.views: list[tuple[Any, int, list[list[int]], Held]] = []
        self.pending: list[Pending] = []
        self.unique = 2**62
        self.done = dict.fromkeys(["stale", "blocks", "slots", "moves", "rewritten", "hits"], 0)

    # ---- tools ---------------------------------------------------------------------------

    def idle(self) -> list[Held]:
        return [s for s in self.live if not any(s in step.seqs for step in self.pending)]

    def own(self) -> int:
        self.unique += 1
        return self.unique

    def name(self, s: Held, stop: int) -> None:
        """Choose and tell the tokens before ``stop`` of a sequence whose tokens are named."""
        if not s.unnamed:
            s.tokens += [self.rng.randrange(2) for _ in range(stop - len(s.tokens))]
            known = s.state.num_known
            if known < stop:
                self.ledger.append_tokens(s.state, np.asarray(s.tokens[known:stop], np.uint32))

    def fresh(self, s: Held, start: int, n: int) -> list[int]:
        if s.unnamed:
            return [self.own() for _ in range(n)]
        return [value_of(s.tokens[: p + 1]) for p in range(start, start + n)]

    def may_cut(self, s: Held, n: int) -> bool:
        """Not into a block with rewritten tokens that stay: filled anew, it may be cached."""
        return not any(n // self.size * self.size <= p < n for p in s.rewritten)

    # ---- operations ----------------------------------------------------------------------

    def open(self, s: Held | None) -> None:
        if len(self.live) < 7:
            unnamed = self.rng.random() < 0.15
            length = 0 if unnamed else self.rng.randrange(3 * self.size + 3)
            tokens = [self.rng.randrange(2) for _ in range(length)]
            state = self.ledger.open(np.asarray(tokens, np.uint32), b"", [])
            self.live.append(Held(state, tokens, unnamed))

    def append(self, s: Held) -> None:
        layer, n = self.rng.randrange(LAYERS), self.rng.randrange(2 * self.size + 2)
        self.name(s, s.end(layer) + n)
        start, pin = self.ledger.begin_append(s.state, layer, n)
        assert start == s.end(layer)
        values = self.fresh(s, start, n)
        self.bytes.store(layer, pin.slots, values)
        self.ledger.end_append(s.state, layer, start, n, pin)
        s.put(layer, start, values)
        s.written[layer] = max(s.written[layer], start + n)

    def commit(self, s: Held) -> None:
        most = min(map(s.end, range(LAYERS))) - s.computed
        n = self.rng.choice([most, most, self.rng.randrange(most + 1)])
        self.ledger.commit(s.state, n)
        s.computed += n

    def prepare(self, s: Held) -> None:
        idle = self.idle()
        seqs = self.rng.sample(idle, min(len(idle), self.rng.choice([1, 1, 2, 3])))
        seqs = [each for each in seqs if max(each.written) <= each.computed]
        counts = [self.rng.randrange(2 * self.size + 2) for _ in seqs]
        for each, n in zip(seqs, counts, strict=True):
            self.name(each, each.computed + n)
        mapping = self.ledger.prepare([each.state for each in seqs], counts)
        if seqs:
            self.pending.append(Pending(seqs, counts, mapping, self.ledger.layout_epoch))

    def store(self, s: Held | None) -> None:
        if not self.pending:
            return
        step = self.rng.choice(self.pending)
        if not step.left:
            return self.finish(step)
        parts = list(zip(step.seqs, step.counts, strict=True))
        try:
            if self.rng.random() < 0.3:
                slots = [x.state.slot_mapping(x.computed, x.computed + n) for x, n in parts]
                pin = self.ledger.pin_slots(np.concatenate(slots))
            else:
                pin = self.ledger.pin_mapping(step.mapping)
        except StaleMappingError:
            assert self.ledger.layout_epoch != step.epoch, "nothing had changed"
            self.done["stale"] += 1
            self.pending.remove(step)
            return None
        layer = step.left.pop()
        step.values[layer] = [self.fresh(x, x.computed, n) for x, n in parts]
        with pin:
            self.bytes.store(layer, pin.slots, [v for part in step.values[layer] for v in part])
        return None

    def finish(self, step: Pending) -> None:
        self.pending.remove(step)
        counts = [self.rng.choice([n, self.rng.randrange(n + 1)]) for n in step.counts]
        self.ledger.commit_many([s.state for s in step.seqs], counts)
        for index, (s, n) in enumerate(zip(step.seqs, counts, strict=True)):
            for layer in range(LAYERS):
                s.put(layer, s.computed, step.values[layer][index][:n])
            s.computed += n

    def rewrite(self, s: Held) -> None:
        """Write from an earlier position: the same values again, or others to full blocks."""
        layer = self.rng.randrange(LAYERS)
        start = self.rng.randrange(s.end(layer) + 1)
        n = self.rng.randrange(2 * self.size + 2)
        others = self.rng.random() < 0.5
        if others:
            n = min(n, max(0, s.computed // self.size * self.size - start))
        self.name(s, start + n)
        start, pin = self.ledger.begin_append(s.state, layer, n, start)
        values = self.fresh(s, start, n)
        for i, p in enumerate(range(start, start + n)):
            if others:
                values[i] = self.own()
            elif p in s.rewritten:
                values[i] = s.values[layer][p]
        self.bytes.store(layer, pin.slots, values)
        self.ledger.end_append(s.state, layer, start, n, pin)
        s.put(layer, start, values)
        s.written[layer] = max(s.written[layer], start + n)
        if others:
            s.rewritten |= set(range(start, start + n))
            self.done["rewritten"] += n

    def write_block(self, s: Held) -> None:
        """Ask for a block to write to, and write one token of it by its slot."""
        if not s.computed or max(s.written) > s.computed:
            return
        p, layer = self.rng.randrange(s.computed), self.rng.randrange(LAYERS)
        block = self.ledger.make_writable(s.state, p)
        assert block == s.state.block_table()[p // self.size]
        try:
            pin = self.ledger.pin_slots(np.asarray([block * self.size + p % self.size]))
        except SlotError:
            assert any(view[3] is s for view in self.views), "only a view keeps others from it"
            return
        value = s.values[layer][p]
        if p < s.computed // self.size * self.size and self.rng.random() < 0.5:
            value = self.own()
            s.rewritten.add(p)
        with pin:
            self.bytes.store(layer, pin.slots, [value])
        s.put(layer, p, [value])

    def truncate(self, s: Held) -> None:
        n = self.rng.randrange(max(map(s.end, range(LAYERS))) + 1)
        if self.may_cut(s, n):
            self.ledger.truncate(s.state, n)
            s.cut(n)

    def shrink(self, s: Held) -> None:
        if s.computed and max(s.written) <= s.computed:
            n = self.rng.randrange(s.computed)
            if self.may_cut(s, n):
                self.ledger.set_computed(s.state, n)
                s.cut(n)

    def fork(self, s: Held) -> None:
        if len(self.live) < 7:
            self.live.append(s.twin(self.ledger.fork(s.state)))

    def free(self, s: Held) -> None:
        self.live.remove(s)
        self.ledger.free(s.state)

    def drop(self, s: Held) -> None:
        self.live.remove(s)
        del s.state

    def view(self, s: Held) -> None:
        stop = min(map(s.end, range(LAYERS)))
        if stop and len(self.views) < 4:
            pin = self.ledger.pin_range(s.state, 0, stop)
            if self.rng.random() < 0.3:
                pin = pin.part(0, len(pin.places))
            self.views.append((pin, stop, [values[:stop] for values in s.values], s))

    def release(self, s: Held | None) -> None:
        if self.views:
            self.views.pop(self.rng.randrange(len(self.views)))[0].release()

    def move(self, s: Held) -> None:
        if self.rng.random() < 0.6:
            self.ledger.defragment()
        else:
            self.ledger.compact_sequence(s.state)

    def reset(self, s: Held | None) -> None:
        if self.rng.random() < 0.2:
            self.ledger.reset_prefix_cache()

    # ---- one step ------------------------------------------------------------------------

    def step(self) -> None:
        often = [self.append] * 4 + [self.store] * 3 + [self.commit] * 2 + [self.view]
        once = [
            self.open, self.prepare, self.rewrite, self.write_block, self.truncate, self.shrink,
            self.fork, self.free, self.drop, self.release, self.move, self.reset,
        ]  # fmt: skip
        idle = self.idle()
        action = self.rng.choice([*often, *once, self.open, self.prepare])
        if not idle:
            action = self.rng.choice([self.open, self.store, self.release])
        s = self.rng.choice(idle) if idle else None
        try:
            action(s)  # type: ignore[arg-type]
        except OutOfBlocksError as error:
            assert error.needed > error.available
            self.done["slots" if isinstance(error, OutOfOpenBlocksError) else "blocks"] += 1
        except MoverError:
            self.done["moves"] += 1
        self.look()
        if self.rng.random() < 0.3:
            self.hit()

    def look(self) -> None:
        self.ledger.check()
        for s in self.live:
            assert s.state.seq_len == s.computed
            for layer in range(LAYERS):
                end = s.end(layer)
                with self.ledger.pin_range(s.state, 0, end, layer) as pin:
                    assert self.bytes.read(layer, pin.places, end) == s.values[layer][:end]
        for pin, stop, values, _ in self.views:
            for layer in range(LAYERS):
                assert self.bytes.read(layer, pin.places, stop) == values[layer], "a view changed"

    def hit(self) -> None:
        """Whatever is found in the prefix cache is what its tokens promise."""
        tokens = [self.rng.randrange(2) for _ in range(3 * self.size)]
        if self.live and self.rng.random() < 0.7:
            tokens = list(self.rng.choice(self.live).tokens)
        tokens.append(self.rng.randrange(2))
        try:
            state = self.ledger.open(np.asarray(tokens, np.uint32), b"", [])
        except (OutOfBlocksError, MoverError):
            return
        n = state.num_cached_tokens
        self.done["hits"] += n
        with self.ledger.pin_range(state, 0, n) as pin:
            for layer in range(LAYERS):
                want = [value_of(tokens[: p + 1]) for p in range(n)]
                assert self.bytes.read(layer, pin.places, n) == want, "the cache lies"
        self.ledger.free(state)

    def end(self) -> None:
        """Everything goes, and everything is free."""
        self.bytes.fails = 0.0
        for pin, *_ in self.views:
            pin.release()
        for s in self.live:
            self.ledger.free(s.state)
        self.ledger.check()
        assert self.ledger.open_in_use == 0
        assert self.ledger.pool.num_free_blocks == self.num_blocks
