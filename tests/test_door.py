"""The short way through ``cache.store``: taken where everything is plain, and only there.

Whoever asks the door itself learns whether it was taken; values and errors are compared with what
the call must do in either case, so a door that is too narrow shows here and one that is too wide
shows as a wrong value, a missing error or a changed cache.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cachekit import ROW_FORMATS, assert_holds, fill, make_cache, read, snapshot, stored

import pagedcache as pc

BF16 = np.dtype(ml_dtypes.bfloat16)
Array = np.ndarray[Any, Any]


def rows(marks: list[int], layer: int = 0) -> tuple[Array, Array]:
    """K and V of caches of :func:`cache_of` that name their mark: integers exact in bfloat16."""
    k = np.arange(16, dtype=np.float32).reshape(1, 2, 8) % 5 + 5 * layer
    k = k + 10 * np.array(marks, np.float32).reshape(-1, 1, 1)
    return k, -1 - k


def holds(seq: pc.Sequence, layer: int, start: int, k: Array, v: Array) -> None:
    """Positions from ``start`` on read as the stored format gives back these float32 rows."""
    spec = seq._cache.spec
    got = read(seq, layer, start, start + len(k))
    np.testing.assert_array_equal(got[0], stored(k, spec.k_format))
    np.testing.assert_array_equal(got[1], stored(v, spec.v_format))


class Rows(np.ndarray):
    """A subclass, which may reshape in its own way."""


def cache_of(**options: Any) -> pc.PagedKVCache:
    return make_cache(16, B=4, layers=2, heads=2, dim=8, device="cpu", **options)


def misaligned(x: Array) -> Array:
    raw = np.empty(x.nbytes + 1, np.uint8)
    out = raw[1:].view(x.dtype).reshape(x.shape)
    out[...] = x
    return out


def spread(x: Array) -> Array:
    """Every second token, head and value of a larger array, the heads backwards."""
    wide = np.full((2 * x.shape[0], 2 * x.shape[1], 2 * x.shape[2]), 77, x.dtype)
    part = wide[::2, ::-2, ::2]
    part[...] = x
    return part


def read_only(x: Array) -> Array:
    x = x.copy()
    x.flags.writeable = False
    return x


PLAIN: dict[str, Callable[[Array], Any]] = {
    "as it is": lambda x: x,
    "float16": lambda x: x.astype(np.float16),
    "bfloat16": lambda x: x.astype(BF16),
    "flat heads": lambda x: x.reshape(len(x), -1),
    "flat heads, every second value": lambda x: np.repeat(x.reshape(len(x), -1), 2, 1)[:, ::2],
    "spread": spread,
    "spread float16": lambda x: spread(x.astype(np.float16)),
    "Fortran order": np.asfortranarray,
    "backwards": lambda x: x[::-1].copy()[::-1],
    "read-only": read_only,
    "a part of a larger one": lambda x: np.concatenate([x, x, x])[len(x): 2 * len(x)],
}


@pytest.mark.parametrize("fmt", ROW_FORMATS)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_plain_calls_take_it(fmt: str, layout: str) -> None:
    # SPEC F33. The array's kind changes from call to call, and K's need not be V's.
    with cache_of(fmt=fmt, layout=layout) as cache, cache.open() as seq:
        kinds = list(PLAIN.items())
        for i, (name, k_kind) in enumerate(kinds):
            v_kind = kinds[(i + 3) % len(kinds)][1]
            marks = [i + 1, i + 2]
            slots = seq.prepare(2)
            for layer in range(2):
                k, v = rows(marks, layer)
                assert cache._door.store(layer, k_kind(k), v_kind(v), slots) is True, name
                holds(seq, layer, 2 * i, k, v)
            seq.commit(2)
        assert cache.stats().pinned == 0


def test_the_facade_goes_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # SPEC F33: with a storage that answers nothing, only the door can have stored.
    with cache_of() as cache, cache.open() as seq:
        slots = seq.prepare(1)
        storage = cache._storage
        monkeypatch.setattr(cache, "_storage", object())
        for layer in range(2):
            cache.store(layer, *rows([9], layer), slots)
        with pytest.raises(AttributeError):
            cache.store(0, *rows([8]), slots, "raise")
        monkeypatch.setattr(cache, "_storage", storage)
        for layer in range(2):
            holds(seq, layer, 0, *rows([9], layer))


def slots_of(seq: pc.Sequence) -> Array:
    return seq.slot_mapping(seq.seq_len, seq.seq_len + 2)


# name -> (arguments of store for (layer, k, v, mapping, raw slots)), error or None
Arguments = Callable[[int, Array, Array, Any, Array], tuple[Any, ...]]
DECLINED: dict[str, tuple[Arguments, type[Exception] | None]] = {
    "a layer that is no int": (lambda i, k, v, m, r: (np.int64(i), k, v, m), None),
    "a bool as layer": (lambda i, k, v, m, r: (True, k, v, m), pc.InvalidArgumentError),
    "no such layer": (lambda i, k, v, m, r: (2, k, v, m), pc.InvalidArgumentError),
    "a negative layer": (lambda i, k, v, m, r: (-1, k, v, m), pc.InvalidArgumentError),
    "a huge layer": (lambda i, k, v, m, r: (2**70, k, v, m), pc.InvalidArgumentError),
    "raw slots": (lambda i, k, v, m, r: (i, k, v, r), None),
    "a list of slots": (lambda i, k, v, m, r: (i, k, v, r.tolist()), None),
    "no slots": (lambda i, k, v, m, r: (i, k, v, None), pc.InvalidArgumentError),
    "a subclass": (lambda i, k, v, m, r: (i, k.view(Rows), v, m), None),
    "a masked array": (
        lambda i, k, v, m, r: (i, np.ma.masked_array(k, mask=False), v, m), pc.FormatError
    ),
    "a list": (lambda i, k, v, m, r: (i, k, v.tolist(), m), pc.FormatError),
    "None": (lambda i, k, v, m, r: (i, None, v, m), pc.FormatError),
    "misaligned": (lambda i, k, v, m, r: (i, misaligned(k), v, m), None),
    "misaligned bfloat16": (lambda i, k, v, m, r: (i, k, misaligned(v.astype(BF16)), m), None),
    "byte-swapped": (lambda i, k, v, m, r: (i, k.astype(">f4"), v, m), pc.FormatError),
    "byte-swapped V": (lambda i, k, v, m, r: (i, k, v.astype(">f2"), m), pc.FormatError),
    "float64": (lambda i, k, v, m, r: (i, k.astype(float), v, m), pc.FormatError),
    "int32": (lambda i, k, v, m, r: (i, k.astype(np.int32), v, m), pc.FormatError),
    "uint16": (lambda i, k, v, m, r: (i, k, v.view(np.uint16)[..., ::2], m), pc.FormatError),
    "bool": (lambda i, k, v, m, r: (i, k.astype(bool), v, m), pc.FormatError),
    "objects": (lambda i, k, v, m, r: (i, k.astype(object), v, m), pc.FormatError),
    "one axis": (lambda i, k, v, m, r: (i, k.ravel(), v, m), pc.ShapeError),
    "four axes": (lambda i, k, v, m, r: (i, k[None], v, m), pc.ShapeError),
    "no axis": (lambda i, k, v, m, r: (i, np.float32(1).reshape(()), v, m), pc.ShapeError),
    "heads and values swapped": (
        lambda i, k, v, m, r: (i, k.transpose(0, 2, 1), v, m), pc.ShapeError
    ),
    "too few values": (lambda i, k, v, m, r: (i, k, v[..., :7], m), pc.ShapeError),
    "too few tokens": (lambda i, k, v, m, r: (i, k[:1], v[:1], m), pc.ShapeError),
    "too many tokens": (
        lambda i, k, v, m, r: (i, np.concatenate([k, k]), v, m), pc.ShapeError
    ),
    "too few in V": (lambda i, k, v, m, r: (i, k, v[:1], m), pc.ShapeError),
    "no such policy": (
        lambda i, k, v, m, r: (i, k, v, m, "no such"), pc.InvalidArgumentError
    ),
    "a policy": (lambda i, k, v, m, r: (i, k, v, m, "raise"), None),
}


@pytest.mark.parametrize("fmt", ["float32", "q8"])
@pytest.mark.parametrize("name", DECLINED)
def test_what_is_not_plain_goes_the_long_way(name: str, fmt: str) -> None:
    # SPEC F33, 7
    make, error = DECLINED[name]
    with cache_of(fmt=fmt) as cache, cache.open() as seq:
        fill(cache, seq, [1, 2])
        mapping = seq.prepare(2)
        k, v = rows([3, 4])
        given = make(1, k, v, mapping, slots_of(seq))
        before = snapshot(cache, seq)
        if len(given) == 4:  # the façade does not ask it where a policy is given
            assert cache._door.store(*given) is False
        assert snapshot(cache, seq) == before
        assert not np.any(read(seq, 1, 2, 4))
        if error is not None:
            with pytest.raises(error):
                cache.store(*given)
            assert snapshot(cache, seq) == before
            assert not np.any(read(seq, 1, 2, 4))
        else:
            cache.store(*given)
            holds(seq, 1, 2, k, v)
        assert cache.stats().pinned == 0
        cache.check()


def test_rows_that_lie_in_the_slabs() -> None:
    # SPEC F33: each row comes from where another one goes, so the long way copies first.
    with cache_of(fmt="float32", layout="NHD") as cache, cache.open() as seq:
        for layer in range(2):
            seq.append(layer, *rows([1, 2, 3], layer))
        seq.commit(3)
        mapping = seq.prepare(1)
        k_slab, v_slab = cache.slabs(0)
        k, v = rows([5])
        block = int(seq.block_table[0])
        for given in ((k_slab[block, 1:2], v), (k, v_slab[block, 0:1]), (v_slab[block, 2:3], v)):
            assert cache._door.store(0, *given, mapping) is False
        other = cache.slabs(1)[0][block, 1:2]  # of another layer: written by nobody now
        assert cache._door.store(0, other, v, mapping) is True
        cache.store(0, k_slab[block, 1:2], v_slab[block, 0:1], mapping)
        holds(seq, 0, 3, rows([2])[0], rows([1])[1])


def test_adopted_slabs_and_the_arrays_that_were_adopted() -> None:
    # SPEC F33: the caller's own arrays lie in the slabs too.
    slab = [np.zeros((16, 2, 4, 8), np.float32) for _ in range(4)]
    with cache_of(fmt="float32", storage=(slab[:2], slab[2:])) as cache, cache.open() as seq:
        mapping = seq.prepare(1)
        k, v = rows([6])
        assert cache._door.store(1, k, v, mapping) is True
        block = int(seq.block_table[0])
        np.testing.assert_array_equal(slab[1][block, :, 0], k[0])
        np.testing.assert_array_equal(slab[3][block, :, 0], v[0])
        inside = slab[1][3:4, :, 1]
        assert cache._door.store(1, inside, v, mapping) is False
        assert cache._door.store(0, inside, v, mapping) is True


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("fmt", ["q8", "q4", "q4_1", ("q8", "float16"), ("float16", "q8")])
def test_values_that_are_not_finite(fmt: Any, bad: float) -> None:
    # SPEC F5: refused where the format is quantised, with the place; float formats keep them.
    with cache_of(fmt=fmt) as cache, cache.open() as seq:
        fill(cache, seq, [1])
        mapping = seq.prepare(2)
        for kind, x in zip("kv", range(2), strict=True):
            given = list(rows([2, 3]))
            given[x][1, 1, 5] = bad
            quantised = (cache.spec.k_format, cache.spec.v_format)[x].is_quantized
            before = snapshot(cache, seq)
            assert cache._door.store(0, *given, mapping) is not quantised
            if quantised:
                assert snapshot(cache, seq) == before
                with pytest.raises(pc.NonFiniteError) as caught:
                    cache.store(0, *given, mapping)
                assert (caught.value.what, caught.value.index) == (kind, (1 * 2 + 1) * 8 + 5)
                assert snapshot(cache, seq) == before
            else:
                got = read(seq, 0, 1, 3)[x]
                np.testing.assert_array_equal(got, given[x].astype(np.float16).astype(np.float32))
    spec = pc.CacheSpec(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4,
                        kv_format="q8", on_nonfinite="saturate")
    with pc.PagedKVCache(spec, 4) as cache, cache.open() as seq:
        k = np.array([[[bad, 1, -1, 0]]], np.float32)
        assert cache._door.store(0, k, k, seq.prepare(1)) is True
        assert np.isfinite(read(seq, 0, 0, 1)[0]).all()


def test_blocks_that_are_kept_open() -> None:
    # SPEC F5: q4k is stored in open slots until a block is full; a whole block goes straight on.
    with make_cache(8, B=4, layers=1, heads=1, dim=32, fmt="q4k", device="cpu") as cache:
        with cache.open() as seq, cache.open() as plain:
            for count in (1, 2, 4, 1):
                k = np.random.default_rng(count).standard_normal((count, 1, 32)).astype("f4")
                assert cache._door.store(0, k, -k, seq.prepare(count)) is True
                cache.store(0, k, -k, plain.prepare(count), "raise")  # the long way
                seq.commit(count)
                plain.commit(count)
                for short, long in zip(read(seq, 0), read(plain, 0), strict=True):
                    np.testing.assert_array_equal(short, long)
            assert np.any(read(seq, 0)[0])


def test_mappings_that_must_not_be_written_any_more() -> None:
    # SPEC F33: the ledger's error comes through, whichever way was taken.
    with cache_of() as cache, cache_of() as other:
        k, v = rows([1])
        seq, stranger = cache.open(), other.open()
        mapping = seq.prepare(1)
        seq.free()
        foreign = stranger.prepare(1)
        forked = cache.open()
        shared = forked.prepare(1)
        twin = forked.fork()
        for call in (cache._door.store, cache.store):
            for bad, error in ((mapping, pc.StaleMappingError), (shared, pc.StaleMappingError),
                               (foreign, pc.InvalidArgumentError)):
                with pytest.raises(error):
                    call(0, k, v, bad)
        assert cache.stats().pinned == other.stats().pinned == 0
        twin.free()
        assert cache._door.store(0, k, v, forked.prepare(1)) is True


def test_closed_caches_and_those_without_bytes() -> None:
    # SPEC 7
    k = np.ones((1, 2, 8), np.float32)
    cache = cache_of()
    mapping = cache.open().prepare(1)
    cache.close()
    assert cache._door is None
    with pytest.raises(pc.FreedHandleError):
        cache.store(0, k, k, mapping)
    with cache_of(storage=None) as bare:
        assert bare._door is None
        with pytest.raises(pc.FormatError):
            bare.store(0, k, k, bare.open().prepare(1))


def test_it_keeps_no_storage_alive() -> None:
    # SPEC F30
    cache = cache_of()
    door = cache._door
    gc.collect()
    assert cache._storage not in gc.get_referents(door)
    cache.close()


def test_a_writer_beside_a_thread_that_frees() -> None:
    # SPEC F30, CASE C66: a store either comes before the free or is refused; never after it.
    with cache_of(fmt="float32") as cache:
        k, v = rows([7])
        outcomes = set()
        for i in range(300):
            seq = cache.open()
            mapping = seq.prepare(1)
            thread = threading.Thread(target=seq.free)
            thread.start()
            try:
                for _ in range(1 + i % 20):
                    cache.store(0, k, v, mapping)
                outcomes.add("stored")
            except pc.StaleMappingError:
                outcomes.add("refused")
            thread.join()
            with cache.open() as heir:
                fill(cache, heir, [50, 51])
                with pytest.raises(pc.StaleMappingError):
                    cache.store(0, k, v, mapping)
                assert_holds(cache, heir, [50, 51])
        assert outcomes <= {"stored", "refused"}
        assert cache.stats().pinned == 0
        cache.check()
