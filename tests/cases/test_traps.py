"""The traps of SPEC section 8: faults that earlier systems had, each as a test.

Trap 14 (32-bit byte offsets) is in test_number_cases.py beside case C46.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys

import numpy as np
import pytest
from cachekit import (
    assert_holds,
    by_profile,
    cached_prompt,
    empty,
    fill,
    make_cache,
    read,
    refused,
    rows,
    whole,
    write,
)

import pagedcache as pc
from pagedcache.errors import InvalidPositionError, OutOfBlocksError, SequenceNotFoundError

B = 4


def test_a_failed_allocation_of_many_layers_gives_all_back():
    # TRAP 1
    # SPEC F23
    cache = make_cache(5, B=B, layers=3)
    ids, _ = cached_prompt(cache, range(10, 18))
    holder = cache.open(range(50, 58))
    for _ in range(20):
        refused(
            cache,
            lambda: cache.open([*range(10, 18), *range(70, 83)]),
            OutOfBlocksError,
            holder,
            prompts=[[*range(10, 18), 1]],
        )
        assert [cache.pool.ref_count(b) for b in ids] == [0, 0]
    holder.free()
    with cache.open([*range(10, 18), *range(70, 82)]) as seq:
        assert seq.num_cached_tokens == 8 and seq.num_blocks == 5
    empty(cache)


def test_a_prefix_hit_holds_in_every_layer():
    # TRAP 2
    # SPEC F22 F25
    cache = make_cache(16, B=B, layers=4)
    prompt = list(range(10, 22))
    seq = cache.open(prompt)
    for layer in range(3):  # the last layer is late
        seq.append(layer, *rows(cache.spec, layer, range(1, 13)))
    with pytest.raises(InvalidPositionError):
        seq.commit(12)
    assert cache.probe([*prompt, 1]) == 0
    seq.append(3, *rows(cache.spec, 3, range(1, 6)))
    seq.commit(5)
    assert cache.probe([*prompt, 1]) == 4
    seq.append(3, *rows(cache.spec, 3, range(6, 13)))
    seq.commit(7)
    with cache.open([*prompt, 1]) as other:
        assert other.num_cached_tokens == 12
        assert [other.written(layer) for layer in range(4)] == [12] * 4
        assert_holds(cache, other, range(1, 13))  # every layer
    seq.free()
    empty(cache)


@pytest.mark.parametrize("fmt", ["float32", "q8"])
def test_the_recomputed_last_token_is_not_written_into_the_shared_block(fmt):
    # TRAP 3
    # SPEC F22
    cache = make_cache(16, B=B, layers=2, fmt=fmt)
    prompt = list(range(10, 18))
    first = cache.open(prompt)
    fill(cache, first, range(1, 9))
    again = cache.open(prompt)
    assert again.num_cached_tokens == 7
    fill(cache, again, [777])
    assert_holds(cache, first, range(1, 9))
    assert_holds(cache, again, [*range(1, 8), 777])
    third = cache.open([*prompt, 5])
    assert third.num_cached_tokens == 8
    assert_holds(cache, first, range(1, 9))
    for seq in (first, again, third):
        seq.free()
    empty(cache)


def test_truncate_then_write_keeps_what_the_cache_promises():
    # TRAP 4
    # SPEC F27
    for cut in range(9):
        cache = make_cache(16, B=B, layers=2)
        prompt = list(range(10, 18))
        seq = cache.open(prompt)
        fill(cache, seq, range(1, 9))
        seq.truncate(cut)
        write(seq, cache.spec, range(101, 110))  # over the old tokens, values not even named
        with cache.open([*prompt, 1]) as other:
            assert other.num_cached_tokens == 8
            assert_holds(cache, other, range(1, 9))
        assert_holds(cache, seq, [*range(1, cut + 1), *range(101, 110)])
        whole(cache)
        seq.free()
        empty(cache)


def test_a_table_that_cannot_grow_keeps_one_length_for_all_layers():
    # TRAP 5
    # SPEC F23 F24
    cache = make_cache(3, B=B, layers=3)
    seq = cache.open(range(6))
    fill(cache, seq, range(1, 7))
    other = cache.open([9])
    for layer in range(3):
        k, v = rows(cache.spec, layer, range(21, 28))
        refused(cache, lambda n=layer, k=k, v=v: seq.append(n, k, v), OutOfBlocksError, seq)
        assert [seq.written(i) for i in range(3)] == [6] * 3
    refused(cache, lambda: cache.prepare([other, seq], [4, 7]), OutOfBlocksError, seq, other)
    other.free()
    fill(cache, seq, range(21, 27))
    assert_holds(cache, seq, [*range(1, 7), *range(21, 27)])
    seq.free()
    empty(cache)


def test_the_part_filled_last_block_is_taken_at_open():
    # TRAP 6
    # SPEC F22
    for n in range(1, 3 * B + 1):
        cache = make_cache(3, B=B)
        seq = cache.open(range(n))
        assert seq.num_blocks == -(-n // B)
        taker = cache.open(range(50, 50 + B * cache.num_free_blocks))
        assert cache.num_free_blocks == 0
        fill(cache, seq, range(1, n + 1))  # needs no block any more
        assert_holds(cache, seq, range(1, n + 1))
        seq.free()
        taker.free()
        empty(cache)
    # and after a hit: the rest is taken then and there
    cache = make_cache(4, B=B)
    cached_prompt(cache, range(10, 18))
    seq = cache.open([*range(10, 18), 1, 2])
    other = cache.open([3])
    assert cache.num_free_blocks == 0
    fill(cache, seq, [31, 32])
    assert_holds(cache, seq, [*range(1, 9), 31, 32])
    seq.free()
    other.free()
    empty(cache)


def test_what_nobody_holds_is_evictable():
    # TRAP 7
    # SPEC F14 F38
    cache = make_cache(4, B=B)
    for i in range(50):  # the pool is full of cached blocks nearly from the start
        cached_prompt(cache, range(100 * i, 100 * i + 8), 10 * i + 1)
        empty(cache)
        assert cache.probe([*range(100 * i, 100 * i + 8), 1]) == 8
    assert cache.stats().evicted_blocks == 2 * 50 - 4
    index = pc.PrefixCache(max_entries=3)
    for i in range(20):
        assert index.insert([i, i + 1], i) is True
    assert len(index) == 3


def test_the_longest_prefix_is_found_in_linear_work():
    # TRAP 8
    # SPEC F37
    lengths = by_profile((1_000, 4_000), (4_000, 16_000))
    steps = []
    for n in lengths:
        cache = make_cache(2 * n // B + 8, B=B, storage=None)
        seq = cache.open(range(n))
        seq.commit(n)
        seq.free()
        before = cache.pool.steps
        with cache.open([*range(n), 1]) as again:
            assert again.num_cached_tokens == n
        steps.append(cache.pool.steps - before)
    assert steps[1] <= 4.5 * steps[0]


def test_an_id_leaves_the_middle_of_the_free_list_in_constant_work():
    # TRAP 9
    # SPEC F12
    counted = []
    for n in (1_000, by_profile(10_000, 100_000)):
        cache = make_cache(n, B=1, storage=None)
        seq = cache.open(range(n))
        seq.commit(n)
        seq.free()  # all cached and free, in one recency list
        pool = cache.pool
        middle = [n // 2 + i for i in range(100)]
        before = pool.steps
        pool.touch(middle)
        pool.free(middle)
        counted.append(pool.steps - before)
        cache.check()
    assert counted[0] == counted[1]


def test_update_tokens_on_a_fork_is_not_seen_by_the_parent():
    # TRAP 10
    # SPEC F21 F28
    cache = make_cache(16, B=B, layers=2)
    parent = cache.allocate_sequence(10)
    seq = cache.sequence(parent)
    write(seq, cache.spec, range(1, 11))
    cache.update_tokens(parent, 10)
    child = cache.fork_sequence(parent)
    fragments = cache.fragmentation()
    for n in (7, 7, 3, 0):
        cache.update_tokens(child, n)
        assert cache.sequence_tokens(child) == n
        assert cache.sequence_tokens(parent) == 10
        assert (seq.seq_len, seq.num_tokens, seq.num_written) == (10, 10, 10)
        assert cache.fragmentation() == fragments
        assert_holds(cache, seq, range(1, 11))
        whole(cache)
    fill(cache, cache.sequence(child), range(71, 83))
    assert_holds(cache, cache.sequence(child), range(71, 83))
    assert_holds(cache, seq, range(1, 11))
    cache.free_sequence(parent)
    cache.free_sequence(child)
    with pytest.raises(SequenceNotFoundError):
        cache.sequence_tokens(child)
    empty(cache)


@pytest.mark.parametrize("fmt", ["q8", "q4", "q8_0", "q4_0", "q4_1"])
def test_writing_a_token_re_quantises_no_other(fmt):
    # TRAP 11
    # SPEC F6
    rng = np.random.default_rng(11)
    cache = make_cache(4, B=16, heads=2, dim=48, fmt=fmt)
    seq = cache.open()
    first = rng.normal(size=(1, 2, 48)).astype(np.float32)
    seq.append(0, first, first)
    seq.commit(1)
    want = [a.copy() for a in read(seq, 0)]
    for _ in range(by_profile(50, 300)):
        if seq.seq_len == 16:
            seq.truncate(1)
        noise = (rng.normal(size=(1, 2, 48)) * 10.0 ** rng.integers(-4, 5)).astype(np.float32)
        seq.append(0, noise, noise)
        seq.commit(1)
        for got, old in zip(read(seq, 0, 0, 1), want, strict=True):
            np.testing.assert_array_equal(got, old)
    twin = seq.fork()
    twin.append(0, first, first)
    for got, old in zip(read(twin, 0, 0, 1), want, strict=True):
        np.testing.assert_array_equal(got, old)


@pytest.mark.parametrize("fmt", ["float32", "q4"])
def test_a_copy_on_write_that_finds_no_block_leaves_the_fork_readable(fmt):
    # TRAP 12
    # SPEC F23 F28
    cache = make_cache(2, B=B, layers=2, fmt=fmt)
    seq = cache.open(range(6))
    fill(cache, seq, range(1, 7))
    child = seq.fork()
    k, v = rows(cache.spec, 0, [50])
    for who in (child, seq):
        refused(cache, lambda s=who: s.append(0, k, v), OutOfBlocksError, seq, child)
        refused(cache, lambda s=who: s.prepare(1), OutOfBlocksError, seq, child)
        refused(
            cache,
            lambda s=who: cache.writable_block_at(s.seq_id, 5),
            OutOfBlocksError,
            seq,
            child,
        )
    assert_holds(cache, child, range(1, 7))
    seq.free()
    fill(cache, child, [50])  # alone now: no copy is needed
    assert_holds(cache, child, [*range(1, 7), 50])
    child.free()
    empty(cache)


COLLIDE = """
import sys, pagedcache as pc
spec = pc.CacheSpec(num_layers=1, num_kv_heads=1, head_dim=2, block_size=2, kv_format="float32")
cache = pc.PagedKVCache(spec, num_blocks=64, storage=None, partial_block_reuse=0)
# Python: hash(-1) == hash(-2), hash(2**61 - 1) == 0, and equal for 1 and True
pairs = [([2**31, 0], [0, 2**31]), ([1, 2], [2, 1]), ([0, 0], [0, 0]), ([2**32 - 1, 1], [1, 0])]
for a, b in pairs:
    with cache.open(a, salt=b"victim") as s:
        s.prepare(2)
        s.commit(2)
    assert cache.probe([*a, 9], b"victim") == 2
    assert cache.probe([*a, 9], b"thief") == 0
    if a != b:
        assert cache.probe([*b, 9], b"victim") == 0
print("ok")
"""


def test_identity_is_no_hash():
    # TRAP 13
    # SPEC F35 F36
    for seed in ("0", "7"):
        run = subprocess.run(
            [sys.executable, "-c", COLLIDE],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert run.stdout.strip() == "ok", run.stderr
    # the public 64-bit FNV is easily collided: x ^ y moves the difference into the next token
    rng = random.Random(13)
    prime, start, mask = 0x100000001B3, 0xCBF29CE484222325, 2**64 - 1

    def fnv(tokens):
        h = start
        for t in tokens:
            h = ((h ^ t) * prime) & mask
        return h

    seen: dict[int, int] = {}
    first = second = None
    base = fnv([])
    while first is None:  # one token each that leaves the upper 32 bits of the state equal
        t = rng.randrange(2**32)
        upper = (((base ^ t) * prime) & mask) >> 32
        if upper in seen and seen[upper] != t:
            first, second = seen[upper], t
        seen[upper] = t
    h1, h2 = fnv([first]), fnv([second])
    x, y = [first, 5], [second, (h1 ^ h2) ^ 5]
    assert y[1] < 2**32 and x != y
    assert pc.compute_prefix_hash(x) == pc.compute_prefix_hash(y) == fnv(x)
    cache = make_cache(8, B=2)
    _, marks = cached_prompt(cache, x)
    assert cache.probe([*y, 1]) == 0
    with cache.open([*x, 1]) as seq:
        assert_holds(cache, seq, marks)
    index = pc.PrefixCache()
    index.insert(x, "victim")
    assert not index.contains(y)
    index.insert(y, "thief")
    assert len(index) == 2
    empty(cache)
