"""Prompts and decode steps: match, open, commit, free, and a batch step of 256 sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import pagedcache

from . import peers
from .rows import Options, Row, measure
from .timing import Timer, staged, timed

BLOCK_SIZE = 16
PROMPT = 32_768
SEQUENCES = 256
_NUM_BLOCKS = 3 * PROMPT // BLOCK_SIZE
_QUEUE = 64  # prompts that wait
_SYSTEM = 512  # tokens that they have in common, and as many of their own
_CONTEXT = 1000  # tokens of each sequence before it decodes


def _cache(num_blocks: int = _NUM_BLOCKS) -> pagedcache.PagedKVCache:
    spec = pagedcache.CacheSpec(
        num_layers=1, num_kv_heads=1, head_dim=64, block_size=BLOCK_SIZE
    )
    return pagedcache.PagedKVCache(spec, num_blocks, storage=None, partial_block_reuse=0)


def rows(options: Options) -> Iterator[Row]:
    """One long prompt, hit and cold, then decode steps; peer: vLLM's cache manager."""
    yield from _hit(options)
    yield from _cold(options)
    yield from _queue(options)
    yield from _decode(options)


def _hit(options: Options) -> Iterator[Row]:
    # One token more than the blocks hold, so that all of them hit and none is copied.
    prompt = np.random.default_rng(0).integers(0, 2**31, PROMPT + 1, dtype=np.uint32)
    listed = prompt.tolist()
    cache, held = _cache(), list[Any]()
    with cache.open(prompt) as seq:
        seq.commit(len(prompt))
    with cache.open(prompt) as seq:
        if seq.num_cached_tokens != PROMPT:
            raise AssertionError("the prompt does not hit: not timed")

    def opened(tokens: Any) -> Timer:
        return staged(
            lambda: None, lambda: held.append(cache.open(tokens)), lambda: held.pop().free(), 5
        )

    opens = {"ours": opened(prompt)}
    from_list = {"ours": opened(listed)}
    frees: dict[str, Timer] = {
        "ours": staged(
            lambda: held.append(cache.open(prompt)), lambda: held[-1].free(), held.clear, 5
        )
    }
    probes: dict[str, Timer] = {"ours": timed(lambda: cache.probe(prompt))}
    vllm = peers.vllm()
    if vllm is not None:
        manager, theirs = vllm.Manager(_NUM_BLOCKS, BLOCK_SIZE), []
        manager.free(manager.open(listed))
        request = manager.request(listed)
        opens["vllm"] = from_list["vllm"] = staged(
            lambda: None,
            lambda: theirs.append(manager.open(listed)),
            lambda: manager.free(theirs.pop()),
        )
        frees["vllm"] = staged(
            lambda: theirs.append(manager.open(listed)),
            lambda: manager.free(theirs[-1]),
            theirs.clear,
        )
        probes["vllm, hashed before"] = timed(lambda: manager.match(request))
    for variant, timers in (
        ("open, full hit", opens),
        ("open, full hit, list", from_list),
        ("match only (probe)", probes),
        ("free after a hit", frees),
    ):
        yield from measure("prefix", variant, None, PROMPT, 1, timers, options.runs)
    cache.close()


def _cold(options: Options) -> Iterator[Row]:
    """Open and commit a prompt that nobody has seen, in a pool that has room for it."""
    rng = np.random.default_rng(1)
    cache = _cache()
    state: dict[str, Any] = {}

    def fresh() -> None:
        state["tokens"] = rng.integers(0, 2**31, PROMPT, dtype=np.uint32)
        state["list"] = state["tokens"].tolist()
        cache.reset_prefix_cache()

    def open_ours() -> None:
        state["seq"] = cache.open(state["tokens"])

    def commit_ours() -> None:
        state["seq"].commit(PROMPT)

    def both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            first()
            second()

        return run

    def free_ours() -> None:
        state["seq"].free()

    admits: dict[str, Timer] = {"ours": staged(fresh, both(open_ours, commit_ours), free_ours)}
    opens: dict[str, Timer] = {"ours": staged(fresh, open_ours, free_ours)}
    commits: dict[str, Timer] = {"ours": staged(both(fresh, open_ours), commit_ours, free_ours)}
    # five each: the first call after the other contender finds caches that were emptied
    frees: dict[str, Timer] = {
        "ours": staged(both(fresh, both(open_ours, commit_ours)), free_ours, repeats=5)
    }
    vllm = peers.vllm()
    if vllm is not None:
        manager = vllm.Manager(_NUM_BLOCKS, BLOCK_SIZE)

        def fresh_peer() -> None:
            fresh()
            manager.manager.reset_prefix_cache()

        def open_peer() -> None:
            state["request"] = manager.open(state["list"])

        def free_peer() -> None:
            manager.free(state["request"])

        admits["vllm"] = staged(fresh_peer, open_peer, free_peer)
        frees["vllm"] = staged(both(fresh_peer, open_peer), free_peer, repeats=5)
    for variant, timers in (
        ("open cold + commit", admits),
        ("open cold", opens),
        ("commit", commits),
        ("free after commit", frees),
    ):
        yield from measure("prefix", variant, None, PROMPT, 1, timers, options.runs)
    cache.close()


def _queue(options: Options) -> Iterator[Row]:
    """Open a queue of prompts that begin alike: in one call, and one by one."""
    rng = np.random.default_rng(3)
    system = rng.integers(0, 2**31, _SYSTEM, dtype=np.uint32)
    prompts = np.empty((_QUEUE, 2 * _SYSTEM), np.uint32)
    prompts[:, :_SYSTEM] = system
    num_blocks = 2 * prompts.size // BLOCK_SIZE
    cache, held, listed = _cache(num_blocks), list[Any](), list[list[int]]()
    with cache.open(system) as seq:
        seq.commit(_SYSTEM)

    def fresh() -> None:
        prompts[:, _SYSTEM:] = rng.integers(0, 2**31, (_QUEUE, _SYSTEM), dtype=np.uint32)
        listed[:] = prompts.tolist()

    def each() -> None:
        held.extend([cache.open(prompt) for prompt in prompts])

    def close() -> None:
        if {seq.num_cached_tokens for seq in held} != {_SYSTEM}:
            raise AssertionError("the prompts do not hit their common head")
        for seq in held:
            seq.free()
        held.clear()

    many: dict[str, Timer] = {
        "ours": staged(fresh, lambda: held.extend(cache.open_many(prompts)), close, 5)
    }
    single: dict[str, Timer] = {"ours": staged(fresh, each, close, 5)}
    vllm = peers.vllm()
    if vllm is not None:
        manager, theirs = vllm.Manager(num_blocks, BLOCK_SIZE), list[Any]()
        manager.free(manager.open(system.tolist()))

        def peer() -> None:
            theirs.extend([manager.open(tokens) for tokens in listed])

        def close_peer() -> None:
            for request in theirs:
                manager.free(request)
            theirs.clear()

        many["vllm"] = single["vllm"] = staged(fresh, peer, close_peer, 5)
    for variant, timers in (("open_many", many), ("open, one by one", single)):
        yield from measure("prefix", variant, None, _QUEUE, _QUEUE, timers, options.runs)
    cache.close()


def _decode(options: Options) -> Iterator[Row]:
    """One token for each of 256 sequences: slots, computed length, token history; in one call, and
    in the three that it stands for."""
    rng = np.random.default_rng(2)
    prompts = rng.integers(0, 2**31, (SEQUENCES, _CONTEXT), dtype=np.uint32)
    spec = pagedcache.CacheSpec(
        num_layers=1, num_kv_heads=1, head_dim=64, block_size=BLOCK_SIZE
    )
    num_blocks = 4 * SEQUENCES * _CONTEXT // BLOCK_SIZE
    cache = pagedcache.PagedKVCache(spec, num_blocks, storage=None)
    seqs = [cache.open(prompt) for prompt in prompts]
    for seq in seqs:
        seq.commit(_CONTEXT)
    ones = [1] * SEQUENCES
    sampled = np.full(SEQUENCES, 7, np.uint32)

    def three() -> None:
        cache.append_tokens(seqs, sampled)
        cache.prepare(seqs, ones)
        cache.commit(seqs, ones)

    repeats = 8
    timers: dict[str, Timer] = {
        "ours": staged(lambda: None, lambda: cache.step(seqs, sampled), repeats=repeats)
    }
    vllm = peers.vllm()
    if vllm is not None:
        manager = vllm.Manager(num_blocks, BLOCK_SIZE)
        requests = [manager.open(prompt.tolist()) for prompt in prompts]
        timers["vllm, no slots"] = staged(
            lambda: None, lambda: manager.step(requests, 7), repeats=repeats
        )
    yield from measure("prefix", "decode step", None, SEQUENCES, SEQUENCES, timers, options.runs)
    for variant, function in (
        ("decode step, three calls", three),
        ("prepare only", lambda: cache.prepare(seqs, ones)),
    ):
        ours: dict[str, Timer] = {"ours": staged(lambda: None, function, repeats=repeats)}
        yield from measure("prefix", variant, None, SEQUENCES, SEQUENCES, ours, options.runs)
    cache.close()
