"""Many threads on a cache with open blocks: each fills, cuts, forks and views sequences of its own
beside others that seal, reopen, move and evict, and reads theirs; every token says what it is."""

from __future__ import annotations

import gc
import random
import time
from typing import Any

import numpy as np
import pytest
from bitrows import DIM, HEADS, bit_rows, following, marks_of, spelt
from cachekit import empty, make_cache
from devicekit import host
from threadkit import SECONDS, THREADS, run_threads

import pagedcache as pc

LAYERS = 2


class Worker:
    """One thread's sequences. ``shown``: some that anybody may read meanwhile."""

    def __init__(self, cache: pc.PagedKVCache, seed: int, until: float, shown: list[Any]) -> None:
        self.cache, self.rng, self.until, self.shown = cache, random.Random(seed), until, shown
        self.live: list[tuple[pc.Sequence, list[int]]] = []
        self.others = self.steps = 0

    def __call__(self) -> None:
        while time.monotonic() < self.until or self.steps < 60:  # on a busy machine, too
            try:
                self.step()
            except pc.OutOfBlocksError:
                if self.live:
                    self.live.pop(self.rng.randrange(len(self.live)))[0].free()
            self.steps += 1
        for seq, tokens in self.live:
            self.verify(seq, tokens)
            seq.free()

    def tokens(self, most: int) -> list[int]:
        return [self.rng.randrange(2) for _ in range(self.rng.randrange(1, most))]

    def verify(self, seq: pc.Sequence, tokens: list[int]) -> None:
        for layer in range(LAYERS):
            for rows in seq.gather(layer, 0, len(tokens), dtype=np.float32):
                assert spelt(rows, layer) == marks_of(tokens)

    def extend(self, seq: pc.Sequence, tokens: list[int], more: list[int], step: bool) -> None:
        """Write and commit more tokens, or leave the sequence as it was."""
        marks = marks_of(tokens + more)[len(tokens) :]
        try:
            slots = self.cache.prepare([seq], [len(more)]) if step else None
            for layer in range(LAYERS):
                k, v = bit_rows(marks, layer)
                if slots is None:
                    seq.append(layer, k, v)
                else:
                    self.cache.store(layer, k, v, slots)
            seq.commit(len(more))
        except (pc.OutOfBlocksError, pc.StaleMappingError):  # no room, or somebody moved blocks
            seq.truncate(len(tokens))
            raise
        tokens += more

    def step(self) -> None:
        rng, cache, size = self.rng, self.cache, self.cache.block_size
        action = rng.random()
        if action < 0.25 or not self.live:
            prompt = self.tokens(3 * size + 3)
            seq = cache.open(prompt)
            tokens = prompt[: seq.num_cached_tokens]
            self.live.append((seq, tokens))
            self.verify(seq, tokens)  # whoever wrote it
            self.extend(seq, tokens, prompt[len(tokens) :], False)
            self.shown[rng.randrange(len(self.shown))] = seq
            return
        seq, tokens = rng.choice(self.live)
        if action < 0.45:
            more = self.tokens(2 * size + 2)
            seq.append_tokens(more)
            try:
                self.extend(seq, tokens, more, rng.random() < 0.5)
            except pc.StaleMappingError:
                return
        elif action < 0.55 and len(self.live) < 5:
            self.live.append((seq.fork(), list(tokens)))
        elif action < 0.65:
            keep = rng.randrange(len(tokens) + 1)
            seq.truncate(keep)
            del tokens[keep:]
        elif action < 0.75:
            self.look(seq, marks_of(tokens))
        elif action < 0.77:
            cache.defragment()
        elif action < 0.78:
            cache.reset_prefix_cache()
        elif action < 0.8:
            cache.check()
        elif action < 0.9:
            self.look_at_another()
        else:
            self.live.remove((seq, tokens))
            if rng.random() < 0.7:  # else it is dropped, perhaps while others read it
                seq.free()
            return
        self.verify(seq, tokens)

    def look(self, seq: pc.Sequence, marks: list[int]) -> None:
        """Views keep what they show, whatever becomes of their blocks."""
        with seq.views(0) as views, seq.views(1, dtype=np.float32) as read:
            shown = [(host(view.k), host(view.k).copy()) for view in views]
            time.sleep(0.001 * self.rng.random())
            for view in read:
                part = marks[view.start : view.start + view.length]
                assert spelt(host(view.k).transpose(1, 0, 2), 1) == part
            for now, before in shown:
                np.testing.assert_array_equal(now, before)

    def look_at_another(self) -> None:
        seq = self.rng.choice(self.shown)
        if seq is None:
            return
        try:
            n = seq.seq_len
            found = [spelt(rows, 1) for rows in seq.gather(1, 0, n, dtype=np.float32)]
        except (pc.InvalidPositionError, pc.FreedHandleError):
            return  # its thread has cut or freed it
        assert found[0] == found[1]
        mark = 1
        for each in found[0]:
            assert each in (following(mark, 0), following(mark, 1))
            mark = each
        self.others += 1


@pytest.mark.parametrize(
    ("fmt", "options", "size"),
    [
        ("q4k", {"num_open_blocks": 10}, 4),
        ("q4k", {"num_open_blocks": 3}, 3),
        ("q8_0", {"open_blocks": "bfloat16", "num_open_blocks": 6}, 5),
        (("q4k", "float32"), {}, 2),
    ],
)
def test_threads_on_a_cache_with_open_blocks(fmt: Any, options: dict[str, Any], size: int) -> None:
    # SPEC F34 F19 F20 F28 F30, TRAP 4
    cache = make_cache(
        40, B=size, layers=LAYERS, heads=HEADS, dim=DIM, fmt=fmt, partial_block_reuse=1, **options
    )
    until = time.monotonic() + SECONDS / 4
    shown: list[Any] = [None] * 6
    workers = [Worker(cache, seed, until, shown) for seed in range(THREADS)]
    run_threads(list(workers))
    for seq in shown:
        if seq is not None:
            seq.free()
    shown.clear()
    for worker in workers:
        worker.live.clear()
    gc.collect()
    empty(cache)
    stats = cache.stats()
    assert stats.open_blocks == 0
    assert stats.hit_tokens > 0 and stats.blocks_sealed > 0
    assert sum(worker.others for worker in workers) > 0
