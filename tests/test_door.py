"""The short way through ``store``, ``gather`` and ``attend``: taken where everything is plain, and
only there.

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


class Smaller:
    """A CpuStorage of which K's or V's slabs have none of the blocks that are handed out."""

    def __init__(self, storage: Any, kind: str) -> None:
        self.spec, self.arrays_of = storage.spec, storage.arrays_of
        slabs = [np.zeros((1, 256), np.uint8) for _ in range(2)]
        small = type(storage.native_slabs()["k"])(slabs, 0, 0, 2, 4, 8)
        self.native_slabs = lambda: {**storage.native_slabs(), kind: small}


@pytest.mark.parametrize("kind", ["k", "v"])
def test_what_fails_half_way_holds_no_block(kind: str) -> None:
    # SPEC F24: the error comes through, the written end stays, the pin is gone
    with cache_of(fmt="float32") as cache, cache.open() as first, cache.open() as seq:
        fill(cache, first, [1])
        fill(cache, seq, [1, 2])
        mapping = seq.prepare(1)
        assert int(seq.block_table[0]) > 0
        door = type(cache._door)(cache._ledger, Smaller(cache._storage, kind), 0)
        before = snapshot(cache, seq)
        with pytest.raises(pc.SlotError):
            door.store(0, *rows([3]), mapping)
        with pytest.raises(pc.BlockError):
            door.gather(seq._state, 0, 0, 2, None)
        assert snapshot(cache, seq) == before
        assert cache.stats().pinned == 0
        assert cache._door.store(0, *rows([3]), mapping) is True
        cache.check()


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


# ---- gather -------------------------------------------------------------------------------------


def long_way(cache: pc.PagedKVCache, call: Callable[[], Any]) -> Any:
    """What a call gives or raises when there is no door."""
    door, cache._door = cache._door, None
    try:
        return call()
    finally:
        cache._door = door


@pytest.mark.parametrize("fmt", [*ROW_FORMATS, ("float16", "bfloat16")])
def test_plain_gathers_take_it(fmt: Any) -> None:
    # SPEC F30: whole, from the middle of a block on, across blocks, and into arrays of the caller's
    with cache_of(fmt=fmt) as cache, cache.open() as seq:
        for layer in range(2):
            seq.append(layer, *rows(list(range(1, 12)), layer))
        default = cache.spec.k_format.dtype if isinstance(fmt, str) else np.dtype(np.float32)
        default = np.dtype(np.float32) if default == np.uint8 else default
        for start, stop in ((0, None), (0, 11), (3, 11), (5, 6), (4, 8), (10, None)):
            end = 11 if stop is None else stop
            k, v = rows(list(range(1, 12)), 1)
            got = cache._door.gather(seq._state, 1, start, stop, None)
            assert got is not None
            for x, want, kind in zip(got, (k, v), (cache.spec.k_format, cache.spec.v_format),
                                     strict=True):
                assert x.dtype == default and x.ctypes.data % 64 == 0
                want = stored(want, kind)[start:end].astype(default)
                np.testing.assert_array_equal(x, want)
            for other in (seq.gather(1, start, stop),
                          long_way(cache, lambda: seq.gather(1, start, stop))):  # noqa: B023
                assert [type(x) for x in other] == [type(x) for x in got]
                assert [x.tobytes() for x in other] == [x.tobytes() for x in got]
            for dtype in (np.float32, np.float16, BF16):
                out = np.empty((end - start, 2, 8), dtype), np.empty((end - start, 2, 8), dtype)
                got = cache._door.gather(seq._state, 1, start, stop, list(out))
                assert got is not None and got[0] is out[0] and got[1] is out[1]
                for x, want, kind in zip(out, (k, v), (cache.spec.k_format, cache.spec.v_format),
                                         strict=True):
                    np.testing.assert_array_equal(x, stored(want, kind)[start:end].astype(dtype))
        assert cache.stats().pinned == 0


def outs(n: int = 3) -> tuple[Array, Array]:
    return np.zeros((n, 2, 8), np.float32), np.zeros((n, 2, 8), np.float32)


def overlapping() -> tuple[Array, Array]:
    both = np.zeros((4, 2, 8), np.float32)
    return both[:3], both[1:]


Gather = tuple[Callable[[], tuple[Any, ...]], type[Exception] | None]
NOT_GATHERED: dict[str, Gather] = {
    "a layer that is no int": (lambda: (np.int32(1), 0, 3, None), None),
    "a bool as layer": (lambda: (True, 0, 3, None), pc.InvalidArgumentError),
    "no such layer": (lambda: (2, 0, 3, None), pc.InvalidArgumentError),
    "nothing": (lambda: (1, 2, 2, None), None),
    "a stop that is no int": (lambda: (1, 0, np.int64(3), None), None),
    "a float": (lambda: (1, 0.0, 3, None), pc.InvalidArgumentError),
    "past the end": (lambda: (1, 0, 4, None), pc.InvalidPositionError),
    "far past the end": (lambda: (1, 0, 2**70, None), pc.InvalidPositionError),
    "backwards": (lambda: (1, 3, 2, None), pc.InvalidPositionError),
    "below 0": (lambda: (1, -1, 2, None), pc.InvalidPositionError),
    "no pair": (lambda: (1, 0, 3, outs()[0]), pc.InvalidArgumentError),
    "one array": (lambda: (1, 0, 3, outs()[:1]), pc.InvalidArgumentError),
    "a subclass": (lambda: (1, 0, 3, (outs()[0].view(Rows), outs()[1])), None),
    "strided": (lambda: (1, 0, 3, (spread(outs()[0]), outs()[1])), None),
    "misaligned": (lambda: (1, 0, 3, (misaligned(outs()[0]), outs()[1])), pc.FormatError),
    "read-only": (lambda: (1, 0, 3, (outs()[0], read_only(outs()[1]))), pc.FormatError),
    "two dtypes": (lambda: (1, 0, 3, (outs()[0], outs()[1].astype("f2"))), pc.FormatError),
    "byte-swapped": (lambda: (1, 0, 3, tuple(x.astype(">f4") for x in outs())), pc.FormatError),
    "integers": (lambda: (1, 0, 3, tuple(x.astype("i4") for x in outs())), pc.FormatError),
    "bools": (lambda: (1, 0, 3, tuple(x.astype(bool) for x in outs())), pc.FormatError),
    "too long": (lambda: (1, 0, 3, outs(4)), pc.ShapeError),
    "flat": (lambda: (1, 0, 3, tuple(x.reshape(3, 16) for x in outs())), pc.ShapeError),
    "overlapping": (lambda: (1, 0, 3, overlapping()), pc.ShapeError),
    "twice the same": (lambda: (1, 0, 3, outs()[:1] * 2), pc.ShapeError),
    "elements that share bytes": (
        lambda: (1, 0, 3, (np.broadcast_to(outs(1)[0], (3, 2, 8)), outs()[1])), pc.ShapeError
    ),
}


@pytest.mark.parametrize("name", NOT_GATHERED)
def test_gathers_that_are_not_plain(name: str) -> None:
    # SPEC F30, 7
    make, error = NOT_GATHERED[name]
    with cache_of(fmt="float32") as cache, cache.open() as seq:
        for layer in range(2):
            seq.append(layer, *rows([1, 2, 3], layer))
        layer, start, stop, out = make()
        assert cache._door.gather(seq._state, layer, start, stop, out) is None
        if error is not None:
            with pytest.raises(error):
                seq.gather(layer, start, stop, out=out)
            for x in out if isinstance(out, tuple) else ():
                assert not np.any(x)
        else:
            got = seq.gather(layer, start, stop, out=out)
            for x, want in zip(got, rows([1, 2, 3], 1), strict=True):
                np.testing.assert_array_equal(x, want[start:stop])
        assert cache.stats().pinned == 0


def test_gathers_into_the_slabs_are_refused() -> None:
    # SPEC F30
    with cache_of(fmt="float32", layout="NHD") as cache, cache.open() as seq:
        seq.append(0, *rows([1, 2]))
        slab = cache.slabs(1)[0][5, :2]
        for out in ((slab, outs(2)[1]), (outs(2)[0], slab)):
            assert cache._door.gather(seq._state, 0, 0, 2, out) is None
            with pytest.raises(pc.ShapeError):
                seq.gather(0, 0, 2, out=out)
        assert not slab.any()


def test_gathers_of_what_is_gone() -> None:
    # SPEC 7
    cache = cache_of()
    seq, other = cache.open(), cache.open()
    for each in (seq, other):
        each.append(0, *rows([1]))
    seq.free()
    for call in (lambda: cache._door.gather(seq._state, 0, 0, None, None), lambda: seq.gather(0)):
        with pytest.raises(pc.FreedHandleError):
            call()
    cache.close()
    with pytest.raises(pc.FreedHandleError):
        other.gather(0)


# ---- attend -------------------------------------------------------------------------------------


def attention(cache: pc.PagedKVCache, q: Any, seqs: Any, **options: Any) -> Any:
    """What the door itself answers."""
    names = ("q_lens", "lengths", "out", "scale", "causal", "window", "soft_cap")
    given = {"causal": True, **options}
    return cache._door.attend(cache, options.get("layer", 1), q, seqs,
                              *(given.get(name) for name in names))


def by_hand(q: Array, k: Array, v: Array, scale: float) -> Array:
    """One query per head that sees all keys, two query heads per KV head; float64."""
    k, v = np.repeat(k, 2, axis=1).astype(float), np.repeat(v, 2, axis=1).astype(float)
    scores = scale * np.einsum("hd,khd->hk", q.astype(float), k)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return np.einsum("hk,khd->hd", weights, v)


@pytest.fixture
def attended() -> Any:
    with cache_of(fmt="float16") as cache:
        rng = np.random.default_rng(5)
        seqs = [cache.open() for _ in range(3)]
        for i, seq in enumerate(seqs):
            for layer in range(2):
                k, v = rng.standard_normal((2, 3 * i + 2, 2, 8)).astype(np.float32)
                seq.append(layer, k, v)
        yield cache, seqs, rng.standard_normal((3, 4, 8)).astype(np.float32)


ATTENDED: dict[str, dict[str, Any]] = {
    "one query each": {},
    "a list of lengths": {"lengths": [2, 4, 5]},
    "an array of lengths": {"lengths": np.array([1, 5, 8])},
    "queries by sequence": {"q_lens": [1, 2, 0]},
    "an array of them": {"q_lens": np.array([0, 0, 3]), "lengths": [2, 5, 7]},
    "options": {"scale": 0.5, "causal": False, "window": 3, "soft_cap": 2.5},
}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=str)
@pytest.mark.parametrize("name", ATTENDED)
def test_plain_calls_of_attend_take_it(attended: Any, name: str, dtype: Any) -> None:
    # SPEC F41: to the bit what the long way gives, of the same type
    cache, seqs, q = attended
    q, options = q.astype(dtype), ATTENDED[name]
    want = long_way(cache, lambda: cache.attend(1, q, seqs, **options))
    out = np.empty_like(q)
    flat = np.empty((3, 32), dtype)
    strided = np.repeat(q, 2, axis=2)[..., ::2]
    for got in (attention(cache, q, seqs, **options), attention(cache, strided, seqs, **options),
                cache.attend(1, q, tuple(seqs), **options)):
        assert type(got) is type(want) and got.dtype == want.dtype
        assert got.tobytes() == want.tobytes() and got.shape == want.shape
        assert got.ctypes.data % 64 == 0
    assert attention(cache, q, seqs, out=out, **options) is out
    assert out.tobytes() == want.tobytes()
    assert attention(cache, q.reshape(3, 32), seqs, out=flat, **options) is flat
    assert flat.tobytes() == want.tobytes()
    assert cache.stats().pinned == 0


def test_values_of_attend_through_it(attended: Any) -> None:
    # SPEC F41
    cache, seqs, q = attended
    got = attention(cache, q, seqs, scale=0.25)
    for i, seq in enumerate(seqs):
        k, v = read(seq, 1)
        np.testing.assert_allclose(got[i], by_hand(q[i], k, v, 0.25), rtol=1e-5, atol=1e-6)
    k, v = read(seqs[2], 1)
    got = attention(cache, q[:1], seqs[2])
    np.testing.assert_allclose(got[0], by_hand(q[0], k, v, 8**-0.5), rtol=1e-5, atol=1e-6)
    mixed = attention(cache, q, seqs[2])  # the last three positions of one sequence
    np.testing.assert_allclose(mixed[2], by_hand(q[2], k, v, 8**-0.5), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        mixed[0], by_hand(q[0], k[:-2], v[:-2], 8**-0.5), rtol=1e-5, atol=1e-6
    )


class Seqs(list):
    """A subclass, which may iterate in its own way."""


Attend = Callable[[pc.PagedKVCache, list[pc.Sequence], Array], dict[str, Any]]
NOT_ATTENDED: dict[str, tuple[Attend, type[Exception] | None]] = {
    "a layer that is no int": (lambda c, s, q: {"layer": np.int8(1)}, None),
    "a bool as layer": (lambda c, s, q: {"layer": True}, pc.InvalidArgumentError),
    "no such layer": (lambda c, s, q: {"layer": 2}, pc.InvalidArgumentError),
    "a subclass": (lambda c, s, q: {"q": q.view(Rows)}, None),
    "misaligned": (lambda c, s, q: {"q": misaligned(q)}, None),
    "byte-swapped": (lambda c, s, q: {"q": q.astype(">f4")}, pc.FormatError),
    "float64": (lambda c, s, q: {"q": q.astype(float)}, pc.FormatError),
    "integers": (lambda c, s, q: {"q": q.astype(int)}, pc.FormatError),
    "a list": (lambda c, s, q: {"q": q.tolist()}, pc.FormatError),
    "too few heads": (lambda c, s, q: {"q": q[:, :3]}, pc.ShapeError),
    "no heads": (lambda c, s, q: {"q": q[:, :0]}, pc.ShapeError),
    "other values": (lambda c, s, q: {"q": q[..., :7]}, pc.ShapeError),
    "other flat values": (lambda c, s, q: {"q": q.reshape(3, 32)[:, :31]}, pc.ShapeError),
    "four axes": (lambda c, s, q: {"q": q[None]}, pc.ShapeError),
    "two queries for three": (lambda c, s, q: {"q": q[:2]}, pc.InvalidArgumentError),
    "another cache's": (
        lambda c, s, q: {"seqs": [*s[:2], cache_of().open()]}, pc.InvalidArgumentError
    ),
    "no sequence": (lambda c, s, q: {"seqs": [*s[:2], None]}, pc.InvalidArgumentError),
    "one made by hand": (
        lambda c, s, q: {"seqs": [*s[:2], pc.Sequence.__new__(pc.Sequence)]},
        pc.InvalidArgumentError,
    ),
    "a generator": (lambda c, s, q: {"seqs": (x for x in s)}, None),
    "a list of another type": (lambda c, s, q: {"seqs": Seqs(s)}, None),
    "none at all": (lambda c, s, q: {"seqs": []}, pc.InvalidArgumentError),
    "too few lengths": (lambda c, s, q: {"lengths": [2, 5]}, pc.InvalidArgumentError),
    "floats": (lambda c, s, q: {"lengths": [2.0, 5, 8]}, pc.InvalidArgumentError),
    "bools": (lambda c, s, q: {"lengths": [True, 5, 8]}, pc.InvalidArgumentError),
    "an array of int32": (lambda c, s, q: {"lengths": np.array([2, 5, 8], "i4")}, None),
    "an array of floats": (
        lambda c, s, q: {"lengths": np.array([2.0, 5, 8])}, pc.InvalidArgumentError
    ),
    "a tuple": (lambda c, s, q: {"lengths": (2, 5, 8)}, None),
    "below 0": (lambda c, s, q: {"lengths": [2, 5, -1]}, pc.InvalidPositionError),
    "huge": (lambda c, s, q: {"lengths": [2, 5, 2**64]}, pc.InvalidPositionError),
    "too many queries in all": (lambda c, s, q: {"q_lens": [1, 1, 2]}, pc.InvalidArgumentError),
    "queries below 0": (lambda c, s, q: {"q_lens": [2, 2, -1]}, pc.InvalidArgumentError),
    "a scale that is an int": (lambda c, s, q: {"scale": 1}, None),
    "no scale": (lambda c, s, q: {"scale": "1"}, pc.InvalidArgumentError),
    "NaN as scale": (lambda c, s, q: {"scale": float("nan")}, pc.InvalidArgumentError),
    "Inf as scale": (lambda c, s, q: {"scale": float("-inf")}, pc.InvalidArgumentError),
    "a scale past float32": (lambda c, s, q: {"scale": 1e39}, pc.InvalidArgumentError),
    "a cap of 0": (lambda c, s, q: {"soft_cap": 0.0}, pc.InvalidArgumentError),
    "NaN as cap": (lambda c, s, q: {"soft_cap": float("nan")}, pc.InvalidArgumentError),
    "a cap that is an int": (lambda c, s, q: {"soft_cap": 3}, None),
    "a window of 0": (lambda c, s, q: {"window": 0}, pc.InvalidArgumentError),
    "a bool as window": (lambda c, s, q: {"window": True}, pc.InvalidArgumentError),
    "causal by another name": (lambda c, s, q: {"causal": 1}, None),
    "out of a subclass": (lambda c, s, q: {"out": np.zeros_like(q).view(Rows)}, None),
    "out in strides": (lambda c, s, q: {"out": spread(np.zeros_like(q))}, None),
    "out that is misaligned": (
        lambda c, s, q: {"out": misaligned(np.zeros_like(q))}, pc.FormatError
    ),
    "out read-only": (lambda c, s, q: {"out": read_only(np.zeros_like(q))}, pc.FormatError),
    "out of another dtype": (lambda c, s, q: {"out": np.zeros(q.shape, "f2")}, pc.FormatError),
    "out of another shape": (lambda c, s, q: {"out": np.zeros((3, 32), "f4")}, pc.ShapeError),
    "out over q": (lambda c, s, q: {"out": q}, pc.ShapeError),
}


@pytest.mark.parametrize("name", NOT_ATTENDED)
def test_calls_of_attend_that_are_not_plain(attended: Any, name: str) -> None:
    # SPEC F41, 7
    cache, seqs, q = attended
    make, error = NOT_ATTENDED[name]
    before = q.copy()
    want = long_way(cache, lambda: cache.attend(1, q, seqs, lengths=[2, 5, 8]))
    given = {"q": q, "seqs": seqs, "lengths": [2, 5, 8], **make(cache, seqs, q)}
    if "generator" not in name:
        assert attention(cache, **given) is None
    out, layer = given.get("out"), given.pop("layer", 1)
    if error is not None:
        with pytest.raises(error):
            cache.attend(layer, **given)
        assert out is q or out is None or not np.any(out)
    else:
        got = cache.attend(layer, **given)
        if not {"scale", "soft_cap"} & set(given):
            assert np.asarray(got).tobytes() == want.tobytes()
        else:  # the same number as a float, which is plain
            numbers = {k: float(given.pop(k)) for k in ("scale", "soft_cap") if k in given}
            again = attention(cache, **given, **numbers)
            assert again is not None and got.tobytes() == again.tobytes()
    np.testing.assert_array_equal(q, before)
    assert cache.stats().pinned == 0


def test_attend_into_the_slabs_is_refused() -> None:
    # SPEC F41
    with cache_of(fmt="float32", layout="NHD") as cache, cache.open() as seq:
        seq.append(1, *rows([1]))
        q, slab = np.ones((2, 2, 8), np.float32), cache.slabs(0)[1][5, :2]
        assert attention(cache, q[:1], seq) is not None
        assert attention(cache, q[:1], seq, out=slab[:1]) is None
        with pytest.raises(pc.ShapeError):
            cache.attend(1, q[:1], seq, out=slab[:1])
        assert not slab.any()


def test_what_the_ledger_refuses_through_it(attended: Any) -> None:
    # SPEC F41, 7: freed, prepared but of unknown length, past what is written, too many queries
    cache, seqs, q = attended
    seqs[1].free()
    with cache.open() as fresh:
        fresh.prepare(2)
        cases: list[tuple[Any, Any, dict[str, Any], type[Exception]]] = [
            (q, seqs, {}, pc.FreedHandleError),
            (q[:1], seqs[1], {}, pc.FreedHandleError),
            (q[:1], fresh, {}, pc.InvalidArgumentError),
            (q[:1], fresh, {"lengths": [3]}, pc.InvalidPositionError),
            (q[:1], seqs[2], {"lengths": [9]}, pc.InvalidPositionError),
            (q[:2], seqs[2], {"lengths": [1]}, pc.InvalidPositionError),
        ]
        for rows_, names, options, error in cases:
            texts = []
            for call in (lambda: attention(cache, rows_, names, **options),  # noqa: B023
                         lambda: cache.attend(1, rows_, names, **options),  # noqa: B023
                         lambda: long_way(  # noqa: B023
                             cache, lambda: cache.attend(1, rows_, names, **options))):  # noqa: B023
                with pytest.raises(error) as caught:
                    call()
                texts.append(str(caught.value))
            assert len(set(texts)) == 1
        assert cache.stats().pinned == 0
