"""Block ids: taking and giving back one block, many blocks, and cached blocks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import pagedcache

from . import peers
from .rows import Options, Row, measure
from .timing import Timer, staged, timed

BLOCK_SIZE = 16
NUM_BLOCKS = 8192
BATCH = 2048
_SINGLES = 1000  # single-block calls per sample
_GROWTH = (10**3, 10**5, 10**7)


def rows(options: Options) -> Iterator[Row]:
    """Single and batch calls, eviction, and growth with the pool; peer: vLLM's block pool."""
    yield from _single(options)
    yield from _batch(options)
    yield from _evict(options)
    yield from _growth(options)


def _growth(options: Options) -> Iterator[Row]:
    """The same work in pools of other sizes, beside the smallest."""
    least, *_ = pools = [pagedcache.BlockPool(n, BLOCK_SIZE) for n in _GROWTH]
    for num_blocks, pool in zip(_GROWTH, pools, strict=True):
        timers = {"ours": _cycle(pool)}
        if pool is not least:
            timers[f"ours, {_GROWTH[0]} blocks"] = _cycle(least)
        yield from measure(
            "pool", "allocate + free 512", None, num_blocks, 512, timers, options.runs
        )


def _cycle(pool: pagedcache.BlockPool) -> Timer:
    return timed(lambda: pool.free(pool.allocate(512)))


def _nothing() -> None:
    """Nothing to prepare or to restore."""


def _single(options: Options) -> Iterator[Row]:
    pool, held = pagedcache.BlockPool(NUM_BLOCKS, BLOCK_SIZE), list[int]()

    def take() -> None:
        for _ in range(_SINGLES):
            held.append(pool.allocate_one())

    def give() -> None:
        for block in held:
            pool.free_one(block)

    def give_all() -> None:
        pool.free(np.array(held, np.int32))
        held.clear()

    takes: dict[str, Timer] = {"ours": staged(_nothing, take, give_all)}
    gives: dict[str, Timer] = {"ours": staged(take, give, held.clear)}
    cycles: dict[str, Timer] = {"ours": timed(lambda: pool.free_one(pool.allocate_one()))}
    vllm = peers.vllm()
    if vllm is not None:
        other, theirs = vllm.pool(NUM_BLOCKS, BLOCK_SIZE), []

        def peer_take() -> None:
            for _ in range(_SINGLES):
                theirs.append(other.get_new_blocks(1)[0])

        def peer_give() -> None:
            for block in theirs:
                other.free_blocks([block])

        def peer_give_all() -> None:
            other.free_blocks(theirs)
            theirs.clear()

        takes["vllm"] = staged(_nothing, peer_take, peer_give_all)
        gives["vllm"] = staged(peer_take, peer_give, theirs.clear)
        cycles["vllm"] = timed(lambda: other.free_blocks(other.get_new_blocks(1)))
    for variant, timers, items in (
        ("allocate one", takes, _SINGLES),
        ("free one", gives, _SINGLES),
        ("allocate + free one", cycles, 1),
    ):
        yield from measure("pool", variant, None, NUM_BLOCKS, items, timers, options.runs)


def _batch(options: Options) -> Iterator[Row]:
    pool, held = pagedcache.BlockPool(NUM_BLOCKS, BLOCK_SIZE), list[np.ndarray]()

    def take() -> None:
        held.append(pool.allocate(BATCH))

    def give() -> None:
        pool.free(held.pop())

    takes: dict[str, Timer] = {"ours": staged(_nothing, take, give, 20)}
    gives: dict[str, Timer] = {"ours": staged(take, give, _nothing, 20)}
    cycles: dict[str, Timer] = {"ours": timed(lambda: pool.free(pool.allocate(BATCH)))}
    vllm = peers.vllm()
    if vllm is not None:
        other, theirs = vllm.pool(NUM_BLOCKS, BLOCK_SIZE), []

        def peer_take() -> None:
            theirs.append(other.get_new_blocks(BATCH))

        def peer_give() -> None:
            other.free_blocks(theirs.pop())

        takes["vllm"] = staged(_nothing, peer_take, peer_give, 5)
        gives["vllm"] = staged(peer_take, peer_give, _nothing, 5)
        cycles["vllm"] = timed(lambda: other.free_blocks(other.get_new_blocks(BATCH)))
    for variant, timers in (
        (f"allocate {BATCH}", takes),
        (f"free {BATCH}", gives),
        (f"allocate + free {BATCH}", cycles),
    ):
        yield from measure("pool", variant, None, NUM_BLOCKS, BATCH, timers, options.runs)


def _evict(options: Options) -> Iterator[Row]:
    """Take blocks that are all cached: every one must leave the prefix index first."""
    num_blocks = BATCH + 1  # vLLM keeps one block for itself
    tokens = np.arange(BATCH * BLOCK_SIZE, dtype=np.uint32)
    spec = pagedcache.CacheSpec(
        num_layers=1, num_kv_heads=1, head_dim=64, block_size=BLOCK_SIZE
    )
    cache = pagedcache.PagedKVCache(spec, BATCH, storage=None)
    held: list[np.ndarray] = []

    def fill() -> None:
        with cache.open(tokens) as seq:
            seq.commit(len(tokens))
        if cache.num_cached_blocks != BATCH:
            raise AssertionError("the pool is not full of cached blocks: not timed")

    timers: dict[str, Timer] = {
        "ours": staged(
            fill,
            lambda: held.append(cache.pool.allocate(BATCH)),
            lambda: cache.pool.free(held.pop()),
        )
    }
    vllm = peers.vllm()
    if vllm is not None:
        manager, theirs, listed = vllm.Manager(num_blocks, BLOCK_SIZE), [], tokens.tolist()
        other = manager.manager.block_pool
        timers["vllm"] = staged(
            lambda: manager.free(manager.open(listed)),
            lambda: theirs.append(other.get_new_blocks(BATCH)),
            lambda: other.free_blocks(theirs.pop()),
        )
    yield from measure(
        "pool", f"allocate {BATCH}, all cached", None, BATCH, BATCH, timers, options.runs
    )
    cache.close()
