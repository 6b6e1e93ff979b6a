"""What a cache must look like after any history: lists of tokens and marks, and what may hit.

Every write has its own number, a *mark*; rows are tables indexed by mark, so that comparing and
recognising them is one array operation.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from cachekit import stored

import pagedcache as pc

MARKS = 2000
FORMATS = [
    ("float32", "float32", 2),
    ("float32", "float32", 3),
    ("float16", "float16", 2),
    ("q8", "q8", 32),
    ("q4", "q4", 32),
    ("q8", "q4", 40),
    ("q8_0", "float16", 32),
]
CANDIDATES = 8
"""Blocks with the same parent and first token that a partial hit looks at."""


@lru_cache
def tables(k_format: str, v_format: str, dim: int) -> tuple[np.ndarray, ...]:
    """Rows of every mark as written and as read: K, V, K read, V read, ``[MARKS + 1, 1, dim]``."""
    k = np.repeat(np.arange(MARKS + 1, dtype=np.float32), dim).reshape(-1, 1, dim)
    return k, -k, stored(k, k_format), stored(-k, v_format)


class Model:
    """What one sequence must look like."""

    def __init__(self, handle: pc.Sequence, salt: str, tokens: list[int], layers: int) -> None:
        self.handle, self.salt = handle, salt
        self.tokens = list(tokens)  # known from the start
        self.history = len(tokens)
        self.opened = len(tokens)
        self.computed = 0
        self.blocks = 0
        self.written = [0] * layers
        self.marks: list[list[int]] = [[] for _ in range(layers)]
        self.cached: list[bool] = []  # per full block: registered through an unbroken chain
        self.outdated = 0  # computed before the last reset

    def end(self, layer: int) -> int:
        return max(self.written[layer], self.computed)

    @property
    def num_written(self) -> int:
        return min(self.end(layer) for layer in range(len(self.written)))

    @property
    def high_water(self) -> int:
        return max(self.computed, *self.written)

    @property
    def num_tokens(self) -> int:
        return max(self.history, self.opened, self.high_water)

    def put(self, layer: int, start: int, marks: list[int]) -> None:
        row = self.marks[layer]
        assert start <= len(row)
        row[start : start + len(marks)] = marks

    def cut(self, n: int, keep_blocks: bool, block_size: int) -> None:
        self.computed = min(self.computed, n)
        self.history = min(self.history, n)
        self.outdated = min(self.outdated, n)
        del self.tokens[n:]
        self.written = [min(w, n) for w in self.written]
        for row in self.marks:
            del row[n:]
        del self.cached[n // block_size :]
        if not keep_blocks:
            self.opened = min(self.opened, n)
            self.blocks = min(self.blocks, -(-n // block_size))

    def forked(self, handle: pc.Sequence) -> Model:
        twin = Model(handle, self.salt, self.tokens, len(self.written))
        twin.history, twin.opened = self.history, self.opened
        twin.computed, twin.blocks = self.computed, self.blocks
        twin.outdated = self.outdated
        twin.written = list(self.written)
        twin.marks = [list(row) for row in self.marks]
        twin.cached = list(self.cached)
        return twin


class HitModel:
    """What has been registered in the prefix cache since the last reset, and what must hit."""

    cache: pc.PagedKVCache | None
    live: list[Model]
    B: int
    layers: int
    partial: int
    evicted_before_open: int

    def forget(self) -> None:
        """Nothing is cached: (salt, tokens up to a block's end) -> contents ever registered."""
        self.registered: dict[tuple, set[tuple]] = {}
        self.sure: set[tuple] = set()
        self.evicted = self.cache.stats().evicted_blocks
        for model in self.live:
            model.cached = [False] * len(model.cached)
            model.outdated = model.computed

    def children(self, keys, salt: str, prefix: tuple) -> list[tuple]:
        size, n = len(prefix) + self.B, len(prefix)
        return [k[1] for k in keys if k[0] == salt and len(k[1]) == size and k[1][:n] == prefix]

    def full_blocks(self, keys, salt: str, tokens: tuple) -> int:
        f = 0
        while (f + 1) * self.B <= len(tokens) and (salt, tokens[: (f + 1) * self.B]) in keys:
            f += 1
        return f

    def most(self, keys, salt: str, tokens: tuple) -> tuple[int, int, bool]:
        """(least, most, whether both are exact) hit tokens if everything in ``keys`` is there."""
        n, B = len(tokens), self.B
        f = self.full_blocks(keys, salt, tokens)
        if f and f * B == n:
            return n - 1, n - 1, True
        start = f * B
        if not self.partial or n - 1 <= start:
            return start, start, True
        found = self.children(keys, salt, tokens[:start])
        same_first = [c for c in found if c[start] == tokens[start]]
        common = 0
        for child in same_first:
            r = 0
            while r < B and start + r < n - 1 and child[start + r] == tokens[start + r]:
                r += 1
            common = max(common, r)
        best = start + common if common >= self.partial else start
        exact = len(same_first) <= CANDIDATES or best == start
        return (best if exact else start), best, exact

    def check_hit(self, hit: int, salt: str, tokens: list[int], free: int) -> None:
        n, prompt = len(tokens), tuple(tokens)
        assert hit <= max(0, n - 1)
        if not n:
            return
        _, most, _ = self.most(self.registered, salt, prompt)
        assert hit <= most, (hit, most)
        if free < -(-n // self.B) + 1:
            return  # hits may have been given up for lack of blocks
        if self.cache.stats().evicted_blocks == self.evicted_before_open == self.evicted:
            least, most, _ = self.most(self.sure, salt, prompt)
            assert least <= hit <= most, (least, hit, most)
        for model in self.live:
            if model.salt != salt:
                continue
            chain = 0
            while chain < len(model.cached) and model.cached[chain]:
                chain += 1
            common = 0
            while (
                common < chain
                and (common + 1) * self.B <= n
                and model.tokens[: (common + 1) * self.B] == tokens[: (common + 1) * self.B]
            ):
                common += 1
            assert hit >= min(common * self.B, n - 1), (hit, common)

    def take_hit(self, model: Model, hit: int) -> None:
        """The hit's bytes are those of one commit per block; from now on the model knows them."""
        for layer in range(self.layers):
            k, _ = model.handle.gather(layer, 0, hit, dtype=np.float32)
            model.marks[layer] = np.rint(k[:, 0, 0]).astype(int).tolist()
        prompt = tuple(model.tokens)
        for start in range(0, hit, self.B):
            stop = min(start + self.B, hit)
            content = tuple(tuple(row[start:stop]) for row in model.marks)
            if stop - start == self.B:
                assert content in self.registered[(model.salt, prompt[:stop])]
                model.cached.append(True)
                continue
            heads = {
                tuple(row[: stop - start] for row in c)
                for key, contents in self.registered.items()
                if key[0] == model.salt
                and len(key[1]) == start + self.B
                and key[1][:stop] == prompt[:stop]
                for c in contents
            }
            assert content in heads
        model.computed = hit
        model.written = [hit] * self.layers

    def register(self, model: Model, old: int) -> None:
        """Blocks that became full by computing from ``old`` on."""
        B = self.B
        for i in range(old // B, model.computed // B):
            stop = (i + 1) * B
            known = stop <= len(model.tokens) and i * B >= model.outdated
            del model.cached[i:]
            model.cached.append(known and (i == 0 or model.cached[i - 1]))
            key = (model.salt, tuple(model.tokens[:stop]))
            if model.cached[i]:
                self.sure.add(key)
            if known:  # behind a block rewritten with the same tokens it may be cached or not
                content = tuple(tuple(row[stop - B : stop]) for row in model.marks)
                self.registered.setdefault(key, set()).add(content)
