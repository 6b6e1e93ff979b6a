"""A thread that works on a shared cache and checks every value it reads."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
from cachekit import expected, rows
from devicekit import host

import pagedcache as pc
from pagedcache.errors import OutOfBlocksError


class Worker:
    """One thread's own sequences in a shared cache, every value checked.

    ``on``: options of every call that takes a stream, ``{"stream": …}`` or none.
    """

    def __init__(
        self, cache: pc.PagedKVCache, seed: int, until: float, on: dict[str, Any] | None = None
    ) -> None:
        self.cache, self.rng, self.until, self.on = cache, random.Random(seed), until, on or {}
        self.live: list[tuple[pc.Sequence, list[int], list[int]]] = []
        self.base = (seed + 1) * 10_000
        self.mark = 0
        self.steps = 0

    def told(self) -> dict[str, Any]:
        """Calls that only name a stream for the sake of others' kernels need not name it."""
        return self.on if self.rng.random() < 0.5 else {}

    def marks(self, n: int) -> list[int]:
        self.mark += n
        return [self.base + (self.mark + i) % 9_000 for i in range(n)]

    def __call__(self) -> None:
        while time.monotonic() < self.until:
            try:
                self.step()
            except OutOfBlocksError:
                if self.live:
                    self.live.pop(self.rng.randrange(len(self.live)))[0].free(**self.told())
            self.steps += 1
        for seq, _, marks in self.live:
            self.verify(seq, marks)
            seq.free(**self.told())

    def verify(self, seq: pc.Sequence, marks: list[int]) -> None:
        spec = self.cache.spec
        for layer in range(spec.num_layers):
            k, v = self.read(seq, layer, len(marks))
            want_k, want_v = expected(spec, layer, marks)
            assert np.array_equal(k, want_k)
            assert np.array_equal(v, want_v)

    def read(self, seq: pc.Sequence, layer: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        k, v = seq.gather(layer, 0, stop, dtype=np.float32, **self.on)
        return host(k), host(v)

    def step(self) -> None:
        rng, cache, spec = self.rng, self.cache, self.cache.spec
        action = rng.random()
        if action < 0.3 or not self.live:
            # prompts are shared by all threads, so hits are on other threads' bytes
            tokens = [rng.randint(0, 1) for _ in range(rng.randint(1, 14))]
            seq = cache.open(tokens, **self.on)
            hit = seq.num_cached_tokens
            found = self.identify(seq, hit)
            marks = found + self.marks(len(tokens) - hit)
            self.live.append((seq, tokens, marks))
            for layer in range(spec.num_layers):
                seq.append(layer, *rows(spec, layer, marks[hit:]), **self.on)
            seq.commit(len(tokens) - hit, **self.told())
            return
        i = rng.randrange(len(self.live))
        seq, tokens, marks = self.live[i]
        if action < 0.45:
            new = self.marks(rng.randint(1, 5))
            for layer in range(spec.num_layers):
                seq.append(layer, *rows(spec, layer, new), **self.on)
            seq.commit(len(new), **self.told())
            marks += new
        elif action < 0.55 and len(self.live) < 6:
            self.live.append((seq.fork(), list(tokens), list(marks)))
        elif action < 0.65:
            n = rng.randint(0, len(marks))
            seq.truncate(n, **self.told())
            del marks[n:], tokens[n:]
        elif action < 0.75:
            slots = cache.prepare([seq], [2], **self.on)
            new = self.marks(2)
            try:
                for layer in range(spec.num_layers):
                    cache.store(layer, *rows(spec, layer, new), slots, **self.on)
            except pc.StaleMappingError:
                return  # another thread defragmented between the calls: not committed
            seq.commit(2, **self.told())
            marks += new
        elif action < 0.85:
            with seq.views(0, **self.on) as views:
                shown = [(v.k, v.start, v.length) for v in views]
                want = expected(spec, 0, marks)[0]
                for _ in range(3):
                    for k, start, length in shown:
                        got = host(k).transpose(1, 0, 2).astype(np.float32)
                        assert np.array_equal(got, want[start : start + length])
        elif action < 0.87:
            cache.defragment(**self.on)
        elif action < 0.89:
            cache.compact_sequence(seq, **self.on)
        elif action < 0.9:
            cache.reset_prefix_cache()
        elif action < 0.93:
            cache.stats()
            cache.fragmentation()
            cache.block_tables([seq])
        elif action < 0.95:
            cache.check()
        else:
            self.verify(seq, marks)
            seq.free(**self.told())
            del self.live[i]
            return
        self.verify(seq, marks)

    def identify(self, seq: pc.Sequence, hit: int) -> list[int]:
        """The marks another thread wrote, the same in every layer, in K and in V."""
        if not hit:
            return []
        k, _ = self.read(seq, 0, hit)
        marks = np.rint(k[:, 0, 0] / 64).astype(int).tolist()
        self.verify(seq, marks)
        return marks
