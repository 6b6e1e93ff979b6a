"""No bad argument crashes, is cut silently, or changes anything (SPEC section 7).

Every public call is given every bad value in every place, on one living cache. Each must raise a
``PagedCacheError`` (or, where the value is a count, do exactly what a valid call does), and the
cache must be the same afterwards, the stored bytes included.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from badvalues import (
    ARRAYS,
    COUNTS,
    DTYPES,
    EXTRA,
    HUGE,
    LAYERS,
    NEGATIVE,
    NOT_INTEGERS,
    POSITIONS,
    SALTS,
    SEQS,
    SLOTS,
    TOKENS,
    Odd,
    World,
)
from cachekit import assert_holds, empty

import pagedcache as pc
from pagedcache.errors import PagedCacheError

Call = Callable[[World, Any], Any]


# What is no stream, on the CPU and on a GPU alike.
STREAMS = [0.5, "a", b"", True, False, -1, 2**64, 2, [], {"cuda:9": 1}, object(), Odd()]

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
    "open_many prompts": (
        lambda w, x: w.cache.open_many(x), [None, 5, Odd(), "ab", b"ab", {1: 2}, [5], [[1], "a"]]
    ),
    "open_many tokens": (lambda w, x: w.cache.open_many([[1], x]), TOKENS),
    "open_many salt": (
        lambda w, x: w.cache.open_many([[1], [2]], x), [*SALTS, [b"a", 5], ["a", "b", "c"]]
    ),
    "open_many adapter": (
        lambda w, x: w.cache.open_many([[1], [2]], adapter=x), [*SALTS, [b"a", 5], (None,)]
    ),
    "open_many extra_keys": (
        lambda w, x: w.cache.open_many([[1], [2]], extra_keys=x),
        [5, "ab", [], [[]], [(1, 2, b"")], *([[], each] for each in EXTRA if each is not None)],
    ),
    "open_many request_ids": (
        lambda w, x: w.cache.open_many([[1], [2]], request_ids=x),
        [5, "ab", ["a"], ["a", "a"], ["a", "live"], ["a", []], {}],
    ),
    "open_many resumed": (
        lambda w, x: w.cache.open_many([[1], [2]], resumed=x), [[], [True], np.array([1, 2])]
    ),
    "open_many allocate_upto": (
        lambda w, x: w.cache.open_many([[1, 2], [2]], allocate_upto=x),
        [*COUNTS[1:], 3, [1], [1, 2], [None, -1]],
    ),
    "open_many as_many_as_fit": (
        lambda w, x: w.cache.open_many([[1]], as_many_as_fit=x), [np.array([1, 2])]
    ),
    "open_many stream": (lambda w, x: w.cache.open_many([[1]], stream=x), STREAMS),
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
    "cache.step seqs": (lambda w, x: w.cache.step(x, [1]), [*SEQS, []]),
    "cache.step tokens": (lambda w, x: w.cache.step([w.seq], x), [*TOKENS, [1, 2], []]),
    "cache.step counts": (
        lambda w, x: w.cache.step([w.seq], [1], x),
        [5, "a", [1.0], [True], [-1], [2], [0], [2**40], [2**64], [1, 0], [], [[1]], Odd()],
    ),
    "cache.step foreign": (
        lambda w, x: w.cache.step([w.seq, getattr(w, x)], [1, 2]), ["gone", "stranger", "seq"]
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
    "attend layer": (lambda w, x: w.cache.attend(x, w.rows, w.seq), LAYERS),
    "attend seqs": (lambda w, x: w.cache.attend(0, w.rows, x), SEQS),
    "attend stream": (lambda w, x: w.cache.attend(0, w.rows, w.seq, stream=x), STREAMS),
    "open_slots": (lambda w, x: w.cache.open_slots(x), [None, 5, [], Odd()]),
    "open_slabs": (lambda w, x: w.cache.open_slabs(x), LAYERS),
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
    "open stream": (lambda w, x: w.cache.open([1], stream=x), STREAMS),
    "append stream": (lambda w, x: w.seq.append(0, w.rows, w.rows, stream=x), STREAMS),
    "append_kv stream": (lambda w, x: w.seq.append_kv(0, w.rows, w.rows, 0, stream=x), STREAMS),
    "gather stream": (lambda w, x: w.seq.gather(0, stream=x), STREAMS),
    "views stream": (lambda w, x: w.seq.views(0, stream=x), STREAMS),
    "packed_views stream": (lambda w, x: w.seq.packed_views(0, stream=x), STREAMS),
    "prepare stream": (lambda w, x: w.seq.prepare(1, stream=x), STREAMS),
    "cache.prepare stream": (lambda w, x: w.cache.prepare([w.seq], [1], stream=x), STREAMS),
    "cache.step stream": (lambda w, x: w.cache.step([w.seq], [1], stream=x), STREAMS),
    "store stream": (lambda w, x: w.cache.store(0, w.rows, w.rows, [-1], stream=x), STREAMS),
    "commit stream": (lambda w, x: w.seq.commit(0, stream=x), STREAMS),
    "cache.commit stream": (lambda w, x: w.cache.commit([w.seq], [0], stream=x), STREAMS),
    "truncate stream": (lambda w, x: w.seq.truncate(0, stream=x), STREAMS),
    "update_tokens stream": (
        lambda w, x: w.cache.update_tokens(w.seq.seq_id, 6, stream=x), STREAMS
    ),
    "free stream": (lambda w, x: w.seq.free(stream=x), STREAMS),
    "free_sequence stream": (
        lambda w, x: w.cache.free_sequence(w.seq.seq_id, stream=x), STREAMS
    ),
    "writable_block_at stream": (
        lambda w, x: w.cache.writable_block_at(w.seq.seq_id, 1, stream=x), STREAMS
    ),
    "defragment stream": (lambda w, x: w.cache.defragment(stream=x), STREAMS),
    "compact_sequence stream": (
        lambda w, x: w.cache.compact_sequence(w.seq, stream=x), STREAMS
    ),
    "record_use seqs": (lambda w, x: w.cache.record_use(x), SEQS),
    "record_use stream": (lambda w, x: w.cache.record_use([w.seq], x), STREAMS),
    "slabs": (lambda w, x: w.cache.slabs(x), LAYERS),
    "layer_device_ptr_tables": (lambda w, x: w.seq.layer_device_ptr_tables(x), LAYERS),
    "layer_device_ptr_tables n": (
        lambda w, x: w.seq.layer_device_ptr_tables(0, x),
        [*NOT_INTEGERS[1:], *HUGE, *NEGATIVE, 3],
    ),
    "layer_device_ptr_tables stream": (
        lambda w, x: w.seq.layer_device_ptr_tables(0, stream=x), STREAMS
    ),
    "layer_block_ptr_tables": (lambda w, x: w.seq.layer_block_ptr_tables(x), LAYERS),
    "device_ptr_tables seqs": (lambda w, x: w.cache.device_ptr_tables(x, 0), SEQS),
    "device_ptr_tables layer": (lambda w, x: w.cache.device_ptr_tables([w.seq], x), LAYERS),
    "device_ptr_tables lengths": (
        lambda w, x: w.cache.device_ptr_tables([w.seq], 0, x), [5, "a", [1.0], [-1], [9], [1, 2]]
    ),
    "device_ptr_tables stream": (
        lambda w, x: w.cache.device_ptr_tables([w.seq], 0, stream=x), STREAMS
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
        "synchronize",
    }
    for cls in (pc.PagedKVCache, pc.Sequence, pc.BlockPool):
        left = _public(cls) - swept - no_arguments - {"fork"}
        assert not left, f"{cls.__name__}: no bad arguments for {sorted(left)}"
