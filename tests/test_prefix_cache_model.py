"""``PrefixCache`` against a slow model of a dict and a list, in random order of calls."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pagedcache.errors import InvalidArgumentError, PrefixNotFoundError
from pagedcache.hashing import compute_prefix_hash
from pagedcache.prefix_cache import PrefixCache

# Few tokens and short prompts: nested prefixes and repeats are frequent.
PROMPTS = st.lists(st.integers(0, 2), max_size=5).map(tuple)


class WeakHasher:
    """An honest but poor internal hash: many different prompts in each bucket."""

    def hash(self, tokens: Any) -> int:
        return int(tokens.sum()) % 3

    def prefixes(self, tokens: Any) -> list[int]:
        return [int(tokens[:n].sum()) % 3 for n in range(len(tokens) + 1)]


class PrefixCacheMachine(RuleBasedStateMachine):  # SPEC F38, SPEC F39
    @initialize(capacity=st.integers(0, 6), weak=st.booleans(), weak_public=st.booleans())
    def make(self, capacity: int, weak: bool, weak_public: bool) -> None:
        def public(tokens: Any) -> int:
            return len(tokens) % 2 if weak_public else compute_prefix_hash(tokens)

        self.public = public
        hasher = WeakHasher() if weak else None
        self.cache: PrefixCache[int] = PrefixCache(capacity, hash_function=public, hasher=hasher)
        self.capacity = capacity
        self.model: dict[tuple[int, ...], list[int]] = {}  # prompt -> [value, references]
        self.order: list[tuple[int, ...]] = []  # prompts, oldest use first
        self.counts = {"lookups": 0, "hits": 0, "insertions": 0, "evictions": 0}

    def use(self, prompt: tuple[int, ...]) -> None:
        self.order.remove(prompt)
        self.order.append(prompt)

    def with_hash(self, h: int) -> list[tuple[int, ...]]:
        return [prompt for prompt in self.model if self.public(prompt) == h]

    def expect_lookup(self, prompt: tuple[int, ...] | None, got: int | None) -> None:
        self.counts["lookups"] += 1
        if prompt in self.model:
            assert prompt is not None
            self.counts["hits"] += 1
            self.use(prompt)
            assert got == self.model[prompt][0]
        else:
            assert got is None

    @rule(prompt=PROMPTS, value=st.integers(0, 99))
    def insert(self, prompt: tuple[int, ...], value: int) -> None:
        got = self.cache.insert(prompt, value)
        if prompt in self.model:
            self.model[prompt][0] = value
            self.use(prompt)
            assert got is True
            return
        if len(self.model) >= self.capacity:
            idle = [p for p in self.order if self.model[p][1] == 0]
            if not idle:
                assert got is False
                return
            del self.model[idle[0]]
            self.order.remove(idle[0])
            self.counts["evictions"] += 1
        self.model[prompt] = [value, 0]
        self.order.append(prompt)
        self.counts["insertions"] += 1
        assert got is True

    @rule(prompt=PROMPTS)
    def lookup(self, prompt: tuple[int, ...]) -> None:
        self.expect_lookup(prompt, self.cache.lookup(prompt))

    @rule(prompt=PROMPTS)
    def lookup_hash(self, prompt: tuple[int, ...]) -> None:
        h = self.public(prompt)
        self.expect_lookup(prompt, self.cache.lookup_hash(h, prompt))
        same = self.with_hash(h)
        self.expect_lookup(same[0] if len(same) == 1 else None, self.cache.lookup_hash(h))

    @rule(prompt=PROMPTS, by_hash=st.booleans())
    def add_ref(self, prompt: tuple[int, ...], by_hash: bool) -> None:
        key: Any = (self.public(prompt), prompt) if by_hash else (prompt,)
        if prompt not in self.model:
            try:
                self.cache.add_ref(*key)
            except PrefixNotFoundError:
                return
            raise AssertionError("an unknown entry took a reference")
        self.model[prompt][1] += 1
        self.use(prompt)
        assert self.cache.add_ref(*key) == self.model[prompt][1]

    @rule(prompt=PROMPTS)
    def remove_ref(self, prompt: tuple[int, ...]) -> None:
        entry = self.model.get(prompt)
        if entry is None or entry[1] == 0:
            try:
                self.cache.remove_ref(prompt)
            except PrefixNotFoundError:
                assert entry is None
            except InvalidArgumentError:
                assert entry is not None
            else:
                raise AssertionError("a reference was removed that nobody held")
            return
        entry[1] -= 1
        assert self.cache.remove_ref(prompt) is (entry[1] == 0)
        if entry[1] == 0:
            self.use(prompt)

    @rule(prompt=PROMPTS)
    def find_longest_prefix(self, prompt: tuple[int, ...]) -> None:
        lengths = [n for n in range(1, len(prompt) + 1) if prompt[:n] in self.model]
        got = self.cache.find_longest_prefix(prompt)
        if not lengths:
            assert got is None
            return
        best = prompt[: lengths[-1]]
        assert got == (self.public(best), len(best))
        self.use(best)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.model, self.order = {}, []

    @invariant()
    def same_content(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert len(self.cache) == len(self.model)
        for prompt, (_, refs) in self.model.items():
            assert self.cache.contains(prompt)
            assert self.cache.ref_count(prompt) == refs
        assert self.cache.utilization == (len(self.model) / self.capacity if self.capacity else 0.0)
        stats = self.cache.stats()
        for name in ("lookups", "hits", "insertions", "evictions"):
            assert getattr(stats, name) == self.counts[name]
        assert stats.misses == stats.lookups - stats.hits

    @invariant()
    def same_order_of_use(self) -> None:
        if hasattr(self, "cache"):
            idle = [p for p in self.order if self.model[p][1] == 0]
            assert [list(e.data[::4]) for e in self.cache._idle.values()] == [list(p) for p in idle]
            assert self.cache._lengths == sorted({len(p) for p in self.model})


TestPrefixCacheModel = PrefixCacheMachine.TestCase
TestPrefixCacheModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
