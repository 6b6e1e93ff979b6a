"""Random histories of a BlockPool alone against a dict of reference counts."""

from __future__ import annotations

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
from pagedcache.errors import BlockError, OutOfBlocksError, PagedCacheError


class PoolMachine(RuleBasedStateMachine):
    pool: pc.BlockPool | None = None

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 4))
    def make(self, num_blocks, block_size):
        self.pool = pc.BlockPool(num_blocks, block_size)
        self.n = num_blocks
        self.refs: dict[int, int] = {}  # held ids only
        self.ever: set[int] = set()

    @property
    def num_free(self) -> int:
        return self.n - len(self.refs)

    @rule(n=st.integers(0, 14))
    def allocate(self, n):
        try:
            ids = self.pool.allocate(n).tolist()
        except OutOfBlocksError as e:
            assert n > self.num_free
            assert (e.needed, e.available, e.total) == (n, self.num_free, self.n)
            return
        assert len(ids) == len(set(ids)) == n
        assert not set(ids) & set(self.refs)
        assert all(0 <= b < self.n for b in ids)
        self.refs.update(dict.fromkeys(ids, 1))
        self.ever.update(ids)

    @rule()
    def allocate_one(self):
        try:
            b = self.pool.allocate_one()
        except OutOfBlocksError:
            assert self.num_free == 0
            return
        assert b not in self.refs and 0 <= b < self.n
        self.refs[b] = 1
        self.ever.add(b)

    @rule(ids=st.lists(st.integers(-1, 13), max_size=6))
    def free(self, ids):
        left = dict(self.refs)
        fits = True
        for b in ids:
            if left.get(b, 0) == 0:
                fits = False
                break
            left[b] -= 1
        try:
            self.pool.free(ids)
        except BlockError:
            assert not fits
            return
        assert fits
        self.refs = {b: c for b, c in left.items() if c}

    @rule(b=st.integers(-1, 13))
    def free_one(self, b):
        try:
            self.pool.free_one(b)
        except BlockError as e:
            assert self.refs.get(b, 0) == 0
            assert e.block_id == b
            return
        self.refs[b] -= 1
        if not self.refs[b]:
            del self.refs[b]

    @rule(picks=st.lists(st.integers(0, 11), max_size=4))
    def free_held(self, picks):
        held = sorted(self.refs)
        ids = list(dict.fromkeys(held[p % len(held)] for p in picks)) if held else []
        self.pool.free(ids)
        for b in ids:
            self.refs[b] -= 1
            if not self.refs[b]:
                del self.refs[b]

    @rule(ids=st.lists(st.integers(-1, 13), max_size=4))
    def touch(self, ids):
        try:
            self.pool.touch(ids)
        except BlockError:
            assert any(b not in self.refs for b in ids)
            return
        for b in ids:
            self.refs[b] += 1

    @rule()
    def queries(self):
        for b in range(-2, self.n + 2):
            if 0 <= b < self.n:
                assert self.pool.ref_count(b) == self.refs.get(b, 0)
                assert not self.pool.is_cached(b)
                continue
            for ask in (self.pool.ref_count, self.pool.is_cached):
                try:
                    ask(b)
                    raise AssertionError("an id out of range was accepted")
                except PagedCacheError:
                    pass

    @invariant()
    def whole(self):
        if self.pool is None:
            return
        self.pool.check()
        assert self.pool.num_free_blocks == self.num_free
        assert self.pool.num_used_blocks == len(self.refs)
        assert self.pool.num_cached_blocks == 0
        for b, c in self.refs.items():
            assert self.pool.ref_count(b) == c


def test_random_histories_of_a_pool():
    # SPEC F12 F13 F20
    run_state_machine_as_test(PoolMachine, settings=STATEFUL)
