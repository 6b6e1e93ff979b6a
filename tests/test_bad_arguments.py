"""No bad argument crashes, is cut silently, or changes anything (SPEC section 7).

Every public call is given every bad value in every place, on one living cache. Each must raise a
``PagedCacheError`` (or, where the value is a count, do exactly what a valid call does), and the
cache must be the same afterwards, the stored bytes included.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cachekit import assert_holds, cached_prompt, empty, fill, make_cache, snapshot

import pagedcache as pc
from pagedcache.errors import CopyRefusedError, PagedCacheError

B = 4


class Odd:
    """An object that is nothing in particular."""

    def __repr__(self) -> str:
        return "Odd()"


class BrokenIndex:
    """Claims to be an integer and raises."""

    def __index__(self) -> int:
        raise TypeError("no integer after all")


class World:
    """One cache with all kinds of blocks, and another cache's handles."""

    def __init__(self) -> None:
        self.cache = make_cache(16, B=B, layers=2, max_seq_len=40)
        self.other = make_cache(16, B=B, layers=2)
        cached_prompt(self.cache, range(10, 18))
        self.seq = self.cache.open(range(50, 56), request_id="live")
        fill(self.cache, self.seq, range(1, 7))
        self.twin = self.seq.fork()
        self.gone = self.cache.open(range(60, 63))
        self.gone.free()
        self.stranger = self.other.open(range(50, 56))
        fill(self.other, self.stranger, range(21, 27))
        self.mapping = self.stranger.prepare(1)
        self.rows = np.ones((1, 1, 4), np.float32)

    def shot(self) -> tuple[Any, ...]:
        prompts = [[*range(10, 18), 1]]
        return (
            snapshot(self.cache, self.seq, self.twin, prompts=prompts),
            snapshot(self.other, self.stranger),
        )


NOT_INTEGERS = [None, True, False, 1.0, float("nan"), "1", b"1", [], (), {}, Odd(), 1j,
                np.float32(1), np.bool_(True), np.array([1, 2]), BrokenIndex()]
HUGE = [2**31, 2**40, 2**62, 2**63, 2**64, 10**30]
NEGATIVE = [-1, -(2**31), -(2**63), -(2**64)]
COUNTS = [*NOT_INTEGERS, *HUGE, *NEGATIVE]
LAYERS = [*NOT_INTEGERS, *HUGE, *NEGATIVE, 2]
POSITIONS = [*NOT_INTEGERS, *HUGE, *NEGATIVE]
TOKENS = [None, 5, 1.0, True, "12", b"12", Odd(), {1: 2}, [1.0], [None], ["a"], [True], [-1],
          [2**32], [2**63], [2**64], [[1, 2]], [[1], [2, 3]], [1, [2]], np.array([1.0]),
          np.array([True]), np.array([[1, 2]]), np.array(["a"]), np.array([-1]),
          np.array([2**32], np.int64), np.array([2**63], np.uint64), np.array(5), np.array(None),
          np.array([1, None], object), np.array([1 + 0j]), np.array([1], "M8[s]"),
          np.zeros((0, 2), np.int64), np.array([1], ml_dtypes.bfloat16)]
SALTS = [5, 1.0, True, [], [b"a"], Odd(), "\ud800", {}]
EXTRA = [5, None, "ab", [1], [(1, 2)], [(1, 2, 3)], [(1, 2, None)], [(-1, 2, b"")], [(2, 1, b"")],
         [(1, 1, b"")], [(1.0, 2, b"")], [(0, 2**64, b"")], [(True, 2, b"")], [Odd()],
         [(1, 2, b"", 4)], [("0", 2, b"")]]
SEQS = [None, 5, Odd(), "ab", [None], [5], [Odd()], {1: 2}]
K = np.ones((1, 1, 4), np.float32)
ARRAYS = [None, 5, 1.0, "a", b"a", Odd(), [], [[[1.0, 2.0, 3.0, 4.0]]], np.float32(1),
          K.astype(np.float64), K.astype(np.int8), K.astype(np.complex64), K.astype(object),
          K[0, 0], K[0, 0, 0], K[None], K[..., :3], np.ones((1, 2, 4), np.float32),
          np.ones((1, 5), np.float32), np.ones((2, 2, 2, 2), np.float32),
          np.ma.masked_array(K, mask=True)]
SLOTS = [None, 5, 1.0, "a", Odd(), [1.0], [None], [True], [[0]], ["a"], [0, 1], [],
         [-2], [64], [2**31], [2**40], [2**63 - 1], [2**63], [2**64], [-(2**63)],
         np.array([0.5]), np.array([[0]]), np.array([2**63], np.uint64), np.array([True])]
DTYPES = ["float64", "int8", np.float64, "q8", "no such", 5, Odd(), np.dtype("i4"), object]

Call = Callable[[World, Any], Any]

# name -> (call, bad values); a value that must be accepted somewhere is not in its list.
SWEEP: dict[str, tuple[Call, list[Any]]] = {
    "open tokens": (lambda w, x: w.cache.open(x), TOKENS),
    "open salt": (lambda w, x: w.cache.open([1], x), SALTS),
    "open adapter": (lambda w, x: w.cache.open([1], adapter=x), SALTS),
    "open extra_keys": (lambda w, x: w.cache.open([1], extra_keys=x), EXTRA),
    "open request_id": (lambda w, x: w.cache.open([1], request_id=x), [[], {}, "live"]),
    "open allocate_upto": (
        lambda w, x: w.cache.open([1, 2], allocate_upto=x), [*COUNTS[1:], 3]
    ),
    "probe tokens": (lambda w, x: w.cache.probe(x), TOKENS),
    "probe salt": (lambda w, x: w.cache.probe([1], x), SALTS),
    "probe extra_keys": (lambda w, x: w.cache.probe([1], extra_keys=x), EXTRA),
    "blocks_needed tokens": (lambda w, x: w.cache.blocks_needed(x), TOKENS),
    "blocks_needed salt": (lambda w, x: w.cache.blocks_needed([1], x), SALTS),
    "blocks_needed extra_keys": (lambda w, x: w.cache.blocks_needed([1], extra_keys=x), EXTRA),
    "blocks_needed allocate_upto": (
        lambda w, x: w.cache.blocks_needed([1], allocate_upto=x), [*COUNTS[1:], 2]
    ),
    "allocate_for_tokens live": (lambda w, x: w.seq.allocate_for_tokens(x), [*TOKENS, [1]]),
    "append_token": (lambda w, x: w.seq.append_token(x), [*COUNTS[0:16], *HUGE[1:], *NEGATIVE]),
    "append_tokens": (lambda w, x: w.seq.append_tokens(x), TOKENS),
    "append layer": (lambda w, x: w.seq.append(x, w.rows, w.rows), LAYERS),
    "append k": (lambda w, x: w.seq.append(0, x, w.rows), ARRAYS),
    "append v": (lambda w, x: w.seq.append(0, w.rows, x), ARRAYS),
    "append on_nonfinite": (
        lambda w, x: w.seq.append(0, w.rows, w.rows, on_nonfinite=x), [5, "no", b"raise", [], Odd()]
    ),
    "append_kv start": (lambda w, x: w.seq.append_kv(0, w.rows, w.rows, x), [*POSITIONS, 7]),
    "append_kv layer": (lambda w, x: w.seq.append_kv(x, w.rows, w.rows, 0), LAYERS),
    "append_kv k": (lambda w, x: w.seq.append_kv(0, x, w.rows, 0), ARRAYS),
    "commit": (lambda w, x: w.seq.commit(x), [*COUNTS, 3]),
    "truncate": (lambda w, x: w.seq.truncate(x), [*POSITIONS, 7]),
    "prepare": (lambda w, x: w.seq.prepare(x), [*COUNTS, 35]),
    "seq.blocks_needed": (lambda w, x: w.seq.blocks_needed(x), [*NOT_INTEGERS, *HUGE[3:], -1]),
    "fork request_id": (lambda w, x: w.seq.fork(request_id=x), [[], {}, "live"]),
    "slot_mapping start": (lambda w, x: w.seq.slot_mapping(x, 2), [*POSITIONS, 3]),
    "slot_mapping stop": (lambda w, x: w.seq.slot_mapping(0, x), [*POSITIONS, 9]),
    "block_for_position": (lambda w, x: w.seq.block_for_position(x), [*POSITIONS, 8]),
    "block_offset": (lambda w, x: w.seq.block_offset(x), [*POSITIONS, 8]),
    "layer_block_ids layer": (lambda w, x: w.seq.layer_block_ids(x), LAYERS),
    "layer_block_ids n": (
        lambda w, x: w.seq.layer_block_ids(0, x), [*NOT_INTEGERS[1:], *HUGE, *NEGATIVE, 3]
    ),
    "layer_device": (lambda w, x: w.seq.layer_device(x), LAYERS),
    "cache.layer_device": (lambda w, x: w.cache.layer_device(x), LAYERS),
    "written": (lambda w, x: w.seq.written(x), LAYERS),
    "gather layer": (lambda w, x: w.seq.gather(x), LAYERS),
    "gather start": (lambda w, x: w.seq.gather(0, x), [*POSITIONS, 7]),
    "gather stop": (lambda w, x: w.seq.gather(0, 0, x), [*NOT_INTEGERS[1:], *HUGE, *NEGATIVE, 9]),
    "gather dtype": (lambda w, x: w.seq.gather(0, dtype=x), DTYPES),
    "gather out": (
        lambda w, x: w.seq.gather(0, out=x),
        [5, "ab", [], (w_ := np.zeros((6, 1, 4), np.float32),), (w_, None), (None, w_),
         (w_[:5], w_[:5].copy()), (w_, w_), (w_.astype(np.float64), w_),
         (w_, w_.astype(np.float16)), (w_.tolist(), w_.tolist())],
    ),
    "views layer": (lambda w, x: w.seq.views(x), LAYERS),
    "views stop": (lambda w, x: w.seq.views(0, 0, x), [*NOT_INTEGERS[1:], *HUGE, *NEGATIVE, 9]),
    "views dtype": (lambda w, x: w.seq.views(0, dtype=x), DTYPES),
    "packed_views start": (lambda w, x: w.seq.packed_views(0, x), [*POSITIONS, 7]),
    "cache.prepare seqs": (lambda w, x: w.cache.prepare(x, [1]), [*SEQS, []]),
    "cache.prepare counts": (
        lambda w, x: w.cache.prepare([w.seq], x),
        [None, 5, "a", [1.0], [None], [True], [-1], [2**40], [2**63], [2**64], [1, 2], [], [[1]],
         [35], Odd()],
    ),
    "cache.prepare foreign": (
        lambda w, x: w.cache.prepare([w.seq, getattr(w, x)], [1, 1]), ["gone", "stranger", "seq"]
    ),
    "cache.commit seqs": (lambda w, x: w.cache.commit(x, [1]), [*SEQS, []]),
    "cache.commit counts": (
        lambda w, x: w.cache.commit([w.seq], x),
        [None, 5, "a", [1.0], [None], [True], [-1], [9], [2**40], [2**64], [1, 2], [], [[1]]],
    ),
    "cache.commit foreign": (
        lambda w, x: w.cache.commit([w.seq, getattr(w, x)], [0, 0]), ["gone", "stranger", "seq"]
    ),
    "cache.append_tokens seqs": (lambda w, x: w.cache.append_tokens(x, [1]), [*SEQS, []]),
    "cache.append_tokens tokens": (
        lambda w, x: w.cache.append_tokens([w.seq], x), [*TOKENS, [1, 2], []]
    ),
    "cache.append_tokens counts": (
        lambda w, x: w.cache.append_tokens([w.seq], [1], x),
        [5, "a", [1.0], [True], [-1], [2], [0], [2**40], [2**64], [1, 0], [], [[1]]],
    ),
    "cache.append_tokens foreign": (
        lambda w, x: w.cache.append_tokens([w.seq, getattr(w, x)], [1, 2]),
        ["gone", "stranger", "seq"],
    ),
    "store layer": (lambda w, x: w.cache.store(x, w.rows, w.rows, [-1]), LAYERS),
    "store k": (lambda w, x: w.cache.store(0, x, w.rows, [-1]), ARRAYS),
    "store v": (lambda w, x: w.cache.store(0, w.rows, x, [-1]), ARRAYS),
    "store slots": (lambda w, x: w.cache.store(0, w.rows, w.rows, x), SLOTS),
    "store foreign": (
        lambda w, x: w.cache.store(0, w.rows, w.rows, getattr(w, x)), ["mapping", "seq", "cache"]
    ),
    "block_tables": (lambda w, x: w.cache.block_tables(x), SEQS),
    "block_tables lengths": (
        lambda w, x: w.cache.block_tables([w.seq], x),
        [5, "a", [1.0], [None], [True], [-1], [9], [2**40], [2**63], [2**64], [1, 2], [], [[1]]],
    ),
    "page_table": (lambda w, x: w.cache.page_table(x), SEQS),
    "page_table lengths": (
        lambda w, x: w.cache.page_table([w.seq], x),
        [5, "a", [1.0], [None], [True], [-1], [0], [9], [2**40], [2**64], [1, 2], [], [[1]]],
    ),
    "group": (lambda w, x: w.cache.page_table([w.seq], group=x), [1, -1, None, "a", True, 2**64]),
    "compact_sequence": (lambda w, x: w.cache.compact_sequence(x), [None, 5, "a", [], Odd()]),
    "sequence_contiguity": (lambda w, x: w.cache.sequence_contiguity(x), [None, 5, [], Odd()]),
    "should_defragment": (
        lambda w, x: w.cache.should_defragment(x), [None, "a", [], Odd(), 1j, b"", True]
    ),
    "copies_done": (lambda w, x: w.cache.copies_done(x), [*NOT_INTEGERS, *HUGE, *NEGATIVE, 1]),
    "allocate_sequence": (lambda w, x: w.cache.allocate_sequence(x), [*COUNTS, 41]),
    "extend id": (lambda w, x: w.cache.extend(x, 1), [*NOT_INTEGERS, *HUGE, *NEGATIVE, 0, 10**6]),
    "extend n": (lambda w, x: w.cache.extend(w.seq.seq_id, x), [*COUNTS, 35]),
    "fork_sequence": (lambda w, x: w.cache.fork_sequence(x), [*NOT_INTEGERS, *HUGE, *NEGATIVE, 0]),
    "free_sequence": (lambda w, x: w.cache.free_sequence(x), NOT_INTEGERS),
    "sequence": (lambda w, x: w.cache.sequence(x), [*NOT_INTEGERS, *HUGE, *NEGATIVE, 0]),
    "sequence_tokens": (lambda w, x: w.cache.sequence_tokens(x), [*NOT_INTEGERS, *HUGE, -1, 0]),
    "update_tokens id": (lambda w, x: w.cache.update_tokens(x, 1), [*NOT_INTEGERS, *HUGE, -1, 0]),
    "update_tokens n": (lambda w, x: w.cache.update_tokens(w.seq.seq_id, x), [*POSITIONS, 9]),
    "block_at id": (lambda w, x: w.cache.block_at(x, 0), [*NOT_INTEGERS, *HUGE, -1, 0]),
    "block_at position": (lambda w, x: w.cache.block_at(w.seq.seq_id, x), [*POSITIONS, 8]),
    "writable_block_at id": (lambda w, x: w.cache.writable_block_at(x, 0), [*NOT_INTEGERS, 0]),
    "writable_block_at position": (
        lambda w, x: w.cache.writable_block_at(w.seq.seq_id, x), [*POSITIONS, 8]
    ),
    "pool.allocate": (lambda w, x: w.cache.pool.allocate(x), [*COUNTS, 17]),
    "pool.free": (
        lambda w, x: w.cache.pool.free(x),
        [None, 1.0, "a", [1.0], [None], [True], [[0]], [-1], [16], [15], [2**31], [2**63], [2**64],
         np.array([0.5]), np.array([[0]]), Odd()],
    ),
    "pool.free_one": (lambda w, x: w.cache.pool.free_one(x), [*NOT_INTEGERS, *HUGE, -1, 15, 16]),
    "pool.touch": (
        lambda w, x: w.cache.pool.touch(x),
        [None, 1.0, "a", [1.0], [None], [True], [[0]], [-1], [16], [15], [2**31], [2**63], Odd()],
    ),
    "pool.ref_count": (lambda w, x: w.cache.pool.ref_count(x), [*NOT_INTEGERS, *HUGE, -1, 16]),
    "pool.is_cached": (lambda w, x: w.cache.pool.is_cached(x), [*NOT_INTEGERS, *HUGE, -1, 16]),
}


@pytest.mark.parametrize("name", list(SWEEP))
def test_a_bad_argument_is_refused_and_changes_nothing(name):
    # SPEC F23 F13 F33
    call, values = SWEEP[name]
    world = World()
    before = world.shot()
    for value in values:
        try:
            call(world, value)
        except PagedCacheError as e:
            assert str(e)
            copied = pickle.loads(pickle.dumps(e))
            assert type(copied) is type(e) and str(copied) == str(e)
        except Exception as e:
            raise AssertionError(f"{name} of {value!r:.60}: {type(e).__name__}: {e}") from e
        else:
            raise AssertionError(f"{name} accepted {value!r:.60}")
        after = world.shot()
        assert after == before, f"{name} of {value!r:.60} changed something"
    world.cache.check()
    world.other.check()
    assert_holds(world.cache, world.seq, range(1, 7))
    world.seq.free()
    world.twin.free()
    empty(world.cache)


def _public(cls: type) -> set[str]:
    return {
        name
        for name, member in inspect.getmembers(cls)
        if not name.startswith("_") and callable(member)
    }


def test_the_sweep_covers_every_public_call():
    # SPEC F21
    swept = {name.split()[0].split(".")[-1] for name in SWEEP}
    no_arguments = {
        "close", "check", "defragment", "fragmentation", "stats", "reset_prefix_cache",
        "take_block_copies", "live_sequences", "free", "release", "allocate_one",
    }
    for cls in (pc.PagedKVCache, pc.Sequence, pc.BlockPool):
        left = _public(cls) - swept - no_arguments - {"fork"}
        assert not left, f"{cls.__name__}: no bad arguments for {sorted(left)}"


GOOD_SPEC: dict[str, Any] = {
    "num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "block_size": 4, "kv_format": "float16",
}


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim", "block_size"])
def test_bad_sizes_of_a_spec(field):
    # SPEC F11
    for value in [*NOT_INTEGERS, *NEGATIVE, *HUGE[1:], 0]:
        with pytest.raises(PagedCacheError):
            pc.CacheSpec(**{**GOOD_SPEC, field: value})


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("kv_format", [5, "no such", "float64", b"q8", [], np.float64]),
        ("k_format", [5, "no such", "float64", []]),
        ("layout", [None, 5, "hnd ", "NDH", b"HND", []]),
        ("max_seq_len", [0, -1, 1.0, True, "5", []]),
        ("on_nonfinite", [None, 5, "ignore", b"raise", []]),
        ("no_such_field", [1]),
    ],
)
def test_bad_fields_of_a_spec(field, values):
    # SPEC F7 F11
    for value in values:
        with pytest.raises((PagedCacheError, TypeError) if field == "no_such_field"
                           else PagedCacheError):
            pc.CacheSpec(**{**GOOD_SPEC, field: value})
            print(field, value)


def test_bad_arguments_of_a_cache():
    # SPEC F11 F15
    spec = pc.CacheSpec(**GOOD_SPEC)
    bad: list[dict[str, Any]] = [
        {},
        {"num_blocks": 4, "memory": 10**6},
        *({"num_blocks": v} for v in [*NOT_INTEGERS[1:], *NEGATIVE, *HUGE, 0]),
        *({"memory": v} for v in
          ["", "2 parsecs", "-1GiB", -1, 0, 1, spec.block_nbytes - 1, True, 1.5, [], Odd(),
           {}, {"cuda:0": 10**6}, {"cpu": "x"}, {5: 5}]),
        *({"num_blocks": 4, "device": v} for v in
          [None, 5, "", "gpu9000x", "tpu", "cuda", "cuda:0", ["cpu"], ["cpu", "cuda:0"],
           ["cpu"] * 3, [None, None], Odd()]),
        *({"num_blocks": 4, "storage": v} for v in
          [5, "mine", (), ([],), ([], []), ([None] * 2, [None] * 2), Odd(), {}]),
        *({"num_blocks": 4, "partial_block_reuse": v} for v in [-1, 1.0, True, "1", [], 2**64]),
        *({"num_blocks": 4, "eviction": v} for v in [None, "fifo", "LRU", 5, []]),
    ]
    for arguments in bad:
        with pytest.raises(PagedCacheError):
            pc.PagedKVCache(spec, **arguments)
            print(arguments)
    for not_a_spec in (None, 5, "spec", GOOD_SPEC, pc.CacheSpec):
        with pytest.raises(PagedCacheError):
            pc.PagedKVCache(not_a_spec, 4)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_slabs_that_do_not_fit(layout):
    # SPEC F48
    spec = pc.CacheSpec(**{**GOOD_SPEC, "layout": layout})
    shape = (4, 2, 4, 8) if layout == "HND" else (4, 4, 2, 8)
    good = [np.zeros(shape, np.float16) for _ in range(4)]
    frozen = np.zeros(shape, np.float16)
    frozen.flags.writeable = False
    wrong = [
        np.zeros((3, *shape[1:]), np.float16),
        np.zeros((*shape[:3], 7), np.float16),
        np.zeros(shape[1:], np.float16),
        np.zeros(shape, np.float32),
        np.zeros(shape, np.int16),
        np.zeros(shape, ">f2"),
        np.zeros((*shape[:3], 16), np.float16)[..., ::2],
        np.zeros(shape[::-1], np.float16).T,
        np.broadcast_to(np.zeros(shape[1:], np.float16), shape),
        np.zeros(256 * 2 + 1, np.uint8)[1:].view(np.float16).reshape(shape),
        frozen,
        good[1],  # the same memory twice
        None,
        good[0].tolist(),
    ]
    for bad in wrong:
        for where in range(4):
            slabs = list(good)
            slabs[where] = bad if bad is not good[1] else good[(where + 1) % 4]
            with pytest.raises(PagedCacheError):
                pc.PagedKVCache(spec, 4, storage=(slabs[:2], slabs[2:]))
    with pytest.raises(PagedCacheError):
        pc.PagedKVCache(spec, 4, storage=(good[:1], good[2:]))
    cache = pc.PagedKVCache(spec, 4, storage=(good[:2], good[2:]))
    assert not any(g.any() for g in good)
    cache.check()


def test_handles_are_not_copied_or_pickled():
    # SPEC F11
    world = World()
    before = world.shot()
    for thing in (world.cache, world.seq, world.cache.pool, world.mapping):
        for use in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(PagedCacheError):
                use(thing)
    for thing in (world.cache, world.seq):
        with pytest.raises(CopyRefusedError):
            copy.copy(thing)
    assert world.shot() == before
    again = pickle.loads(pickle.dumps(world.cache.spec))
    assert again == world.cache.spec and hash(again) == hash(world.cache.spec)


def test_a_closed_cache():
    # SPEC F11
    world = World()
    cache, seq = world.cache, world.seq
    cache.close()
    cache.close()
    assert "closed" in repr(cache)
    rows = world.rows
    for call in (
        lambda: cache.open([1]),
        lambda: cache.probe([1]),
        lambda: cache.blocks_needed([1]),
        lambda: cache.stats(),
        lambda: cache.check(),
        lambda: cache.defragment(),
        lambda: cache.fragmentation(),
        lambda: cache.reset_prefix_cache(),
        lambda: cache.pool,
        lambda: cache.num_free_blocks,
        lambda: cache.utilization,
        lambda: cache.allocate_sequence(1),
        lambda: cache.sequence(seq.seq_id),
        lambda: cache.block_tables([]),
        lambda: cache.prepare([], []),
        lambda: cache.store(0, rows, rows, [-1]),
        lambda: cache.take_block_copies(),
        lambda: cache.layout_epoch,
        lambda: cache.__enter__(),
        lambda: seq.append(0, rows, rows),
        lambda: seq.gather(0),
        lambda: seq.views(0),
        lambda: seq.commit(0),
        lambda: seq.block_table,
        lambda: seq.fork(),
    ):
        with pytest.raises(pc.FreedHandleError):
            call()
    seq.free()  # nothing happens
    assert "freed" in repr(seq)
