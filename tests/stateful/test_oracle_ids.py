"""Random histories of a cache without bytes (``storage=None``) beside an engine that has them.

The engine here is an array ``memory[block, offset]`` of marks (which write is there). It writes
through slot mappings, runs the block copies it is told to, in parallel or in order, sometimes
late, and every sequence must then find exactly its own marks through its block table.
"""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from profiles import STATEFUL

import pagedcache as pc
from pagedcache.errors import (
    InvalidArgumentError,
    OutOfBlocksError,
    PagedCacheError,
    PendingCopyError,
    StaleMappingError,
)

OPERATIONS = {
    "open": 8,
    "step": 8,
    "fork": 4,
    "free": 4,
    "truncate": 3,
    "append_tokens": 2,
    "copies_late": 4,
    "defragment": 3,
    "compact": 2,
    "pressure": 2,
    "writable": 2,
    "reset": 1,
}


class State:
    def __init__(self, handle: pc.Sequence, tokens: list[int], marks: list[int]) -> None:
        self.handle, self.tokens, self.marks = handle, tokens, marks
        self.named = True  # no token of unknown value so far


class EngineMachine(RuleBasedStateMachine):
    cache: pc.PagedKVCache | None = None

    @initialize(
        block_size=st.integers(1, 4), num_blocks=st.integers(4, 12), partial=st.integers(0, 2)
    )
    def make(self, block_size, num_blocks, partial):
        spec = pc.CacheSpec(
            num_layers=1, num_kv_heads=1, head_dim=1, block_size=block_size, kv_format="float32"
        )
        self.cache = pc.PagedKVCache(
            spec, num_blocks, storage=None, partial_block_reuse=min(partial, block_size)
        )
        self.B, self.total = block_size, num_blocks
        self.memory = np.zeros((num_blocks, block_size), np.int64)
        self.live: list[State] = []
        self.history: list[list[int]] = []
        self.committed: dict[tuple[int, ...], set[int]] = {}  # tokens up to one -> its marks
        self.tickets: list[tuple[np.ndarray, int]] = []
        self.pending: set[int] = set()
        self.mark = 0
        self.fresh_token = 1000
        self.sleepy = False

    @rule(
        name=st.sampled_from([name for name, times in OPERATIONS.items() for _ in range(times)]),
        a=st.integers(0, 63),
        b=st.integers(0, 63),
        c=st.integers(0, 3**7 - 1),
    )
    def operate(self, name, a, b, c):
        getattr(self, name)(a, b, c)

    # ---- the engine ----------------------------------------------------------------------

    def take(self) -> bool:
        pairs, ticket = self.cache.take_block_copies()
        if not len(pairs):
            return False
        src, dst = pairs[:, 0].tolist(), pairs[:, 1].tolist()
        assert len(set(dst)) == len(dst) and not set(src) & set(dst)
        refs = [self.cache.pool.ref_count(b) for b in dst]
        assert all(r >= 0 for r in refs)
        for earlier, _ in self.tickets:  # nor does it cross a batch that is still on its way
            assert not set(dst) & set(earlier.reshape(-1).tolist())
            assert not set(src) & set(earlier[:, 1].tolist())
        self.tickets.append((pairs, ticket))
        return True

    def finish(self, i: int) -> None:
        pairs, ticket = self.tickets.pop(i)
        parallel, in_order = self.memory.copy(), self.memory
        parallel[pairs[:, 1]] = self.memory[pairs[:, 0]]
        for src, dst in pairs:
            in_order[dst] = in_order[src]
        assert np.array_equal(parallel, in_order)
        self.cache.copies_done(ticket)
        try:
            self.cache.copies_done(ticket)
            raise AssertionError("a ticket was finished twice")
        except InvalidArgumentError:
            pass

    def settle(self) -> None:
        """Make all copies that are owed."""
        while True:
            while self.tickets:
                self.finish(0)
            if not self.take():
                return

    def copies_late(self, a, b, c):
        """Take a batch now, run it at some later step."""
        if c % 3 == 0 and self.tickets:
            self.finish(a % len(self.tickets))
        else:
            self.take()

    # ---- operations ----------------------------------------------------------------------

    def pick(self, a: int) -> State | None:
        return self.live[a % len(self.live)] if self.live else None

    @staticmethod
    def digits(n: int, value: int) -> list[int]:
        return [value // 3**i % 3 for i in range(n)]

    def admit(self, tokens: list[int]) -> State | None:
        while len(self.live) >= 5:
            self.live.pop(0).handle.free()
        try:
            seq = self.cache.open(tokens)
        except OutOfBlocksError as e:
            assert -(-len(tokens) // self.B) > self.cache.num_free_blocks
            assert e.total == self.total
            return None
        hit = seq.num_cached_tokens
        assert hit <= max(0, len(tokens) - 1)
        state = State(seq, list(tokens), [])
        self.live.append(state)
        if hit:
            self.settle()  # the head of a partly matched block is copied first
            slots = seq.slot_mapping(0, hit)
            state.marks = self.memory.reshape(-1)[slots].tolist()
            for p, m in enumerate(state.marks):
                assert m in self.committed[tuple(tokens[: p + 1])], (p, m)
        self.history = [*self.history[-7:], list(tokens)]
        return state

    def open(self, a, b, c):
        tokens: list[int] = []
        if self.history and b % 8 < 6:
            tokens = self.history[b % len(self.history)][: b // 4]
        state = self.admit([*tokens, *self.digits(a % 8, c)])
        if state is not None and a < 40:
            self.run(state, len(state.tokens) - len(state.marks))

    def pressure(self, a, b, c):
        n = (b % 3 + 1) * self.B
        state = self.admit(list(range(self.fresh_token, self.fresh_token + n)))
        self.fresh_token += n
        if state is not None:
            self.run(state, n)
            self.live.remove(state)
            state.handle.free()

    def run(self, state: State, n: int, commit: bool = True) -> None:
        """One step of the engine: prepare, copy, write, commit."""
        before = self.cache.num_free_blocks
        try:
            slots = state.handle.prepare(n)
        except OutOfBlocksError as e:
            assert e.needed > e.available
            assert self.cache.num_free_blocks == before
            return
        at = np.asarray(slots)
        assert len(at) == n
        new = list(range(self.mark + 1, self.mark + n + 1))
        self.mark += n
        owed = self.owed()
        if n and owed & set((at // self.B).tolist()):
            try:
                state.handle.commit(n)
                raise AssertionError("a commit on an unfinished copy was accepted")
            except PendingCopyError:
                pass
        self.settle()
        self.memory.reshape(-1)[at] = new
        if not commit:
            return
        state.handle.commit(n)
        state.marks += new
        if len(state.tokens) < len(state.marks):
            state.named = False
        for p in range(len(state.marks) - n, min(len(state.marks), len(state.tokens))):
            self.committed.setdefault(tuple(state.tokens[: p + 1]), set()).add(state.marks[p])

    def owed(self) -> set[int]:
        """Blocks that are an end of a copy already handed out."""
        return {int(b) for pairs, _ in self.tickets for b in pairs.reshape(-1)}

    def step(self, a, b, c):
        state = self.pick(a)
        if state is None:
            return
        n = b % 7
        if state.named and len(state.tokens) == len(state.marks) and b < 50:
            new = self.digits(n, c)
            state.handle.append_tokens(new)
            state.tokens += new
        self.run(state, n, commit=c % 5 > 0)

    def append_tokens(self, a, b, c):
        state = self.pick(a)
        if state is not None and len(state.tokens) < 20:
            new = self.digits(b % 5, c)
            state.handle.append_tokens(new)
            if state.named:
                state.tokens += new

    def fork(self, a, b, c):
        state = self.pick(a)
        if state is None or len(self.live) >= 5:
            return
        twin = State(state.handle.fork(), list(state.tokens), list(state.marks))
        twin.named = state.named
        self.live.append(twin)

    def free(self, a, b, c):
        if self.live:
            self.live.pop(a % len(self.live)).handle.free()

    def truncate(self, a, b, c):
        state = self.pick(a)
        if state is None:
            return
        n = state.handle.num_tokens
        n -= b % (n + 1) % 9
        state.handle.truncate(n)
        del state.marks[n:]
        if n <= len(state.tokens):
            state.named = True
            del state.tokens[n:]

    def writable(self, a, b, c):
        """The id-based way to a private block."""
        state = self.pick(a)
        if state is None or not state.marks:
            return
        position = b % len(state.marks)
        try:
            block = self.cache.writable_block_at(state.handle.seq_id, position)
        except OutOfBlocksError:
            return
        assert block == state.handle.block_table[position // self.B]
        assert self.cache.pool.ref_count(block) == 1 and not self.cache.pool.is_cached(block)

    def defragment(self, a, b, c):
        mapping = None
        state = self.pick(a)
        if state is not None and c % 2:
            try:
                mapping = state.handle.prepare(1)
            except OutOfBlocksError:
                pass
        epoch = self.cache.layout_epoch
        before = [s.handle.block_table.tolist() for s in self.live]
        ends = self.owed()
        try:
            moved = self.cache.defragment()
        except PendingCopyError:
            moved = 0
            assert self.cache.layout_epoch == epoch
        after = [s.handle.block_table.tolist() for s in self.live]
        if not moved:
            assert before == after
        for old, new in zip(before, after, strict=True):
            for x, y in zip(old, new, strict=True):
                assert x == y or x not in ends  # an unfinished copy stays where it is
        if moved and mapping is not None:
            assert self.cache.layout_epoch > epoch
            self.stale(mapping)

    def stale(self, mapping) -> None:
        try:
            self.cache._ledger.pin_mapping(mapping).release()
            raise AssertionError("a mapping older than a defragmentation was accepted")
        except StaleMappingError:
            pass

    def compact(self, a, b, c):
        state = self.pick(a)
        if state is not None:
            try:
                self.cache.compact_sequence(state.handle)
            except PendingCopyError:
                pass

    def reset(self, a, b, c):
        self.cache.reset_prefix_cache()
        assert self.cache.num_cached_blocks == 0
        self.committed.clear()

    # ---- after each step -----------------------------------------------------------------

    @invariant()
    def every_sequence_finds_its_marks(self):
        cache = self.cache
        if cache is None:
            return
        cache.check()
        for state in self.live:
            assert state.handle.seq_len == len(state.marks)
            assert state.handle.tokens.tolist() == state.tokens
        if self.mark % 2:  # every other time copies stay owed over several steps
            return
        self.settle()
        flat = self.memory.reshape(-1)
        for state in self.live:
            slots = state.handle.slot_mapping(0, len(state.marks))
            assert flat[slots].tolist() == state.marks

    def teardown(self):
        cache = self.cache
        if cache is None:
            return
        self.settle()
        flat = self.memory.reshape(-1)
        for state in self.live:
            slots = state.handle.slot_mapping(0, len(state.marks))
            assert flat[slots].tolist() == state.marks
            state.handle.free()
        cache.check()
        assert cache.num_free_blocks == self.total
        assert cache.stats().pinned == 0
        try:
            cache.copies_done(10**6)
            raise AssertionError("an unknown ticket was accepted")
        except PagedCacheError:
            pass


def test_random_histories_of_an_engine_with_its_own_bytes():
    # CASE C69
    # SPEC F48 F19 F28a
    run_state_machine_as_test(EngineMachine, settings=STATEFUL)
