"""What the storage refuses, and that it refuses before any byte is written."""

from __future__ import annotations

import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from devicekit import MIXED, ON_CPU, cpu_memory, host
from reference_storage import KINDS
from storagekit import (
    BFLOAT16,
    DTYPES,
    LAYOUTS,
    QUANTIZED,
    make_storage,
    snapshot,
    write_slab,
)

from pagedcache._native.rows import Slabs, find_nonfinite
from pagedcache.errors import (
    BlockError,
    FormatError,
    FreedHandleError,
    InvalidArgumentError,
    InvalidPositionError,
    NonFiniteError,
    PagedCacheError,
    ShapeError,
    SlotError,
    StorageMemoryError,
)
from pagedcache.spec import CacheSpec
from pagedcache.storage import CpuStorage, slabs


def make(fmt: str = "q8", v_format: str | None = None, layout: str = "HND") -> Any:
    spec = CacheSpec(2, 3, 40, 4, k_format=fmt, v_format=v_format or fmt, layout=layout)
    storage = make_storage(spec, 3)
    for layer in range(2):
        for kind in KINDS:
            write_slab(storage, layer, kind, 0x11)
    return storage


def rows(dtype: Any = np.float32, n: int = 5) -> Any:
    return np.linspace(-1, 1, n * 120).reshape(n, 3, 40).astype(np.float32).astype(dtype)


def try_to_store(storage: Any, k: Any, v: Any, slots: Any, policy: Any = None) -> None:
    slots = np.asarray(slots)
    storage.store(1, *storage.check_rows(1, k, v, len(slots), policy), slots, policy)


# SPEC F7: raise names the value and its place; K is untouched when the NaN is in V.
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", QUANTIZED)
def test_nonfinite_values_are_refused(fmt: str, dtype: Any, layout: str) -> None:
    storage = make(fmt, layout=layout)
    before = snapshot(storage)
    for kind, value in (("k", np.nan), ("v", np.inf), ("v", -np.inf), ("k", -np.inf)):
        for place in ((0, 0, 0), (4, 2, 39), (2, 1, 17)):
            given = {kind: rows(dtype) for kind in KINDS}
            given[kind][place] = value
            given[kind][4, 2, 39] = value  # a later one is not the one reported
            with pytest.raises(NonFiniteError) as caught:
                try_to_store(storage, given["k"], given["v"], range(5), "raise")
            error = caught.value
            assert (error.what, error.index) == (kind, place[0] * 120 + place[1] * 40 + place[2])
            np.testing.assert_equal(error.value, value)
            strided = {k: np.ascontiguousarray(x.T).T for k, x in given.items()}
            with pytest.raises(NonFiniteError) as caught:
                try_to_store(storage, strided["k"], strided["v"], range(5))
            assert caught.value.index == error.index
    assert snapshot(storage) == before


# SPEC F7: only quantised formats refuse; K and V are judged by their own formats.
def test_float_formats_take_nonfinite_values() -> None:
    storage = make("float16", "q8")
    bad = rows()
    bad[1, 1, 1] = np.nan
    bad[1, 1, 2] = -np.inf
    try_to_store(storage, bad, rows(), range(5))
    got = host(storage.gather(1, np.array([0, 1], np.int32), 0, 5, np.float32)[0])
    assert np.isnan(got[1, 1, 1]) and got[1, 1, 2] == -np.inf
    before = snapshot(storage)
    with pytest.raises(NonFiniteError):
        try_to_store(storage, rows(), bad, range(5))
    assert snapshot(storage) == before
    try_to_store(storage, rows(), bad, range(5), "saturate")
    v = host(storage.gather(1, np.array([0, 1], np.int32), 0, 5, np.float32)[1])
    assert v[1, 1, 1] == 0 and np.isfinite(v).all()


# SPEC F7: on_nonfinite is a field of the spec, overridable per call.
def test_policy_of_the_spec_and_of_the_call() -> None:
    spec = CacheSpec(1, 1, 32, 2, "q8", on_nonfinite="saturate")
    storage = make_storage(spec, 1)
    bad = np.full((1, 1, 32), np.nan, np.float32)
    storage.store(0, *storage.check_rows(0, bad, bad, 1), np.array([0]))
    with pytest.raises(NonFiniteError):
        storage.check_rows(0, bad, bad, 1, "raise")
    for policy in ("ignore", 0, "", []):
        with pytest.raises(InvalidArgumentError, match="on_nonfinite"):
            storage.check_rows(0, bad, bad, 1, policy)


# SPEC F7: a value that turns bad between the check and the store is still an error.
@cpu_memory("rows that are not copied before the store")
def test_a_value_that_turns_bad_after_the_check() -> None:
    storage = make("q8")
    k = rows()
    ready = storage.check_rows(0, k, rows(), 5)
    k[3, 0, 7] = np.inf
    with pytest.raises(NonFiniteError) as caught:
        storage.store(0, *ready, np.arange(5))
    assert caught.value.index == 3 * 120 + 7


# CASE C44, SPEC 2: other dtypes are errors that name both sides; nothing is converted silently.
@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (rows(np.float64), "float64"),
        (np.zeros((5, 3, 40), np.int8), "int8"),
        (np.zeros((5, 3, 40), np.complex64), "complex64"),
        (np.zeros((5, 3, 40), object), "object"),
        (np.full((5, 3, 40), "x"), "<U1"),
        (np.zeros((5, 3, 40), ml_dtypes.float8_e5m2), "float8_e5m2"),
        ([[0.0] * 120] * 5, "float64"),
        ([[0.0] * 120, [0.0]], "list"),
        (rows().astype(">f4"), ">f4"),
    ],
)
def test_other_dtypes_are_refused(bad: Any, named: str) -> None:
    storage = make("q4")
    before = snapshot(storage)
    for k, v, what in ((bad, rows(), "k"), (rows(), bad, "v")):
        with pytest.raises(FormatError) as caught:
            try_to_store(storage, k, v, range(5))
        text = str(caught.value)
        assert text.startswith(f"{what}: ") and named in text
        assert isinstance(caught.value, TypeError)
    assert snapshot(storage) == before


# SPEC 7: ranks, shapes, lengths, slots, layers.
def test_wrong_shapes_and_slots_change_nothing() -> None:
    storage = make("float16")
    before = snapshot(storage)
    for shape in ((5, 3, 39), (5, 40, 3), (600,), (5, 119), (1, 5, 3, 40), (5, 4, 40)):
        with pytest.raises(ShapeError):
            try_to_store(storage, np.zeros(shape, np.float32), rows(), range(5))
    with pytest.raises(ShapeError, match="v: expected 5 tokens"):
        try_to_store(storage, rows(), rows(n=4), range(5))
    with pytest.raises(ShapeError, match="as many tokens as k"):
        storage.check_rows(0, rows(), rows(n=4), None)
    ready = storage.check_rows(0, rows(), rows(), None)
    with pytest.raises(ShapeError, match="slots"):
        storage.store(0, *ready, np.arange(4))
    for bad, value in (
        ([0, 1, 2, 3, 12], 12),
        ([0, -2, 2, 3, 4], -2),
        ([0, 1, 2, 3, 2**62], 2**62),
    ):
        with pytest.raises(SlotError) as caught:
            storage.store(0, *ready, np.array(bad))
        assert caught.value.slot == value
    for layer in (-1, 2, 2**70, True, "0", None, 0.0):
        with pytest.raises(InvalidArgumentError, match="layer"):
            storage.check_rows(layer, rows(), rows(), 5)
        with pytest.raises(InvalidArgumentError, match="layer"):
            storage.store(layer, *ready, np.arange(5))
        with pytest.raises(InvalidArgumentError, match="layer"):
            storage.gather(layer, np.array([0], np.int32), 0, 1)
    assert snapshot(storage) == before


# SPEC 7: gather checks its range, its ids and what it is to fill.
def test_refused_gathers() -> None:
    storage = make("q8")
    ids = np.array([0, 2], np.int32)
    for start, stop in ((0, 9), (5, 4), (-1, 2), (4, 13), (2**40, 2**41)):
        with pytest.raises(InvalidPositionError):
            storage.gather(0, ids, start, stop, np.float32)
    for start, stop in ((0.0, 1), (0, True), (None, 1)):
        with pytest.raises(InvalidArgumentError):
            storage.gather(0, ids, start, stop, np.float32)
    for bad in ([0, 3], [-1], [2**31 - 1]):
        with pytest.raises(BlockError):
            storage.gather(0, np.array(bad, np.int32), 0, 1, np.float32)
    for dtype in (np.float64, np.int8, "q8", object):
        with pytest.raises(FormatError):
            storage.gather(0, ids, 0, 1, dtype)
    fine, read_only = np.zeros((2, 3, 40), np.float32), np.zeros((2, 3, 40), np.float32)
    read_only.flags.writeable = False
    shifted = np.zeros(961, np.uint8)[1:].view(np.float32).reshape(2, 3, 40)
    for bad_out, error in (
        (np.zeros((2, 3, 40), np.float16), FormatError),
        (np.zeros((2, 3, 40), ">f4"), FormatError),
        (np.zeros((3, 3, 40), np.float32), ShapeError),
        (np.zeros((2, 120), np.float32), ShapeError),
        (read_only, FormatError),
        (shifted, FormatError),
        ([[0.0]], FormatError),
        (fine, ShapeError),
        (fine[::-1], ShapeError),
    ):
        with pytest.raises(error):
            storage.gather(0, ids, 0, 2, np.float32, fine, bad_out)
    assert not fine.any()
    with pytest.raises(BlockError):
        storage.block_array(0, "k", 3)
    with pytest.raises(BlockError):
        storage.block_array(0, "k", -1)
    with pytest.raises(InvalidArgumentError, match="kind"):
        storage.block_array(0, "x", 0)
    if ON_CPU:
        with pytest.raises(InvalidPositionError):
            storage.dequantize_block(0, "k", 0, 5)


def test_a_closed_storage() -> None:
    storage = make()
    ready = storage.check_rows(0, rows(), rows(), 5)
    block = storage.block_array(0, "k", 0)
    assert "3 blocks" in repr(storage) and "bytes" in repr(storage)
    storage.close()
    ids = np.array([0], np.int32)
    calls = [
        lambda: storage.check_rows(0, rows(), rows(), 5),
        lambda: storage.store(0, *ready, np.arange(5)),
        lambda: storage.gather(0, ids, 0, 1),
        lambda: storage.copy_blocks(ids, ids, ids),
        lambda: storage.copy_tokens(ids, ids),
        lambda: storage.move_blocks(np.zeros((1, 2), np.int32)),
        lambda: storage.block_array(0, "k", 0),
        lambda: storage.slab_array(0, "k"),
    ]
    if ON_CPU:
        calls.append(lambda: storage.dequantize_block(0, "k", 0, 1))
    for call in calls:
        with pytest.raises(FreedHandleError):
            call()
    assert (host(block) == 0x11).all() and "closed" in repr(storage)


# SPEC F11, 7: a cache that cannot be had fails cleanly, with the bytes it would have taken.
def test_too_much_memory() -> None:
    spec = CacheSpec(100, 128, 1024, 1024, "float32")
    with pytest.raises(StorageMemoryError) as caught:
        make_storage(spec, 2**20)
    parts = 2 if MIXED else 1  # the first of two devices refuses its half
    assert caught.value.nbytes == spec.storage_nbytes(2**20) // parts > 2**45
    assert isinstance(caught.value, MemoryError)
    for num_blocks in (0, -1, 2**31, 2**70, 1.5, True, "4", None):
        with pytest.raises(PagedCacheError):
            make_storage(CacheSpec(1, 1, 32, 1, "q8"), num_blocks)  # type: ignore[arg-type]


# SPEC F23: memory that runs out at the n-th slab leaves none of the others behind.
@cpu_memory("NumPy's own allocations")
@pytest.mark.parametrize("failing", range(6))
def test_memory_runs_out_at_every_slab(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    zeros = np.zeros

    def limited(*args: Any, **kwargs: Any) -> Any:
        if len(taken) == failing:
            raise MemoryError
        memory = zeros(*args, **kwargs)
        taken.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(slabs.np, "zeros", limited)
    with pytest.raises(StorageMemoryError) as caught:
        CpuStorage(CacheSpec(3, 2, 32, 4, "q8"), 5)
    monkeypatch.undo()
    assert caught.value.nbytes == 5 * CacheSpec(3, 2, 32, 4, "q8").block_nbytes
    caught = None  # type: ignore[assignment]  # its traceback holds the frames
    assert len(taken) == failing and all(memory() is None for memory in taken)


# The native door checks what keeps an address inside a slab.
def test_native_checks() -> None:
    good = np.zeros((4, 288), np.uint8)  # q8, 2 heads, 4 tokens, 32 values
    for bad in (
        np.zeros((4, 287), np.uint8),
        np.zeros((4, 576), np.uint8)[:, ::2],
        good.view("u2"),
    ):
        with pytest.raises(ShapeError):
            Slabs([bad], 3, 0, 2, 4, 32)
    with pytest.raises(ShapeError, match="layer 1"):
        Slabs([good, np.zeros((5, 288), np.uint8)], 3, 0, 2, 4, 32)
    native = Slabs([good], 3, 0, 2, 4, 32)
    assert (native.num_layers, native.num_blocks, native.block_nbytes) == (1, 4, 288)
    slots = np.arange(3)
    for shape in ((2, 2, 32), (3, 1, 32), (3, 2, 31)):
        with pytest.raises(ShapeError):
            native.store(0, np.zeros(shape, np.uint32), 0, slots, 0)
    for array, dtype in ((np.zeros((3, 2, 32), np.uint16), 0), (np.zeros((3, 64), np.uint16), 1)):
        with pytest.raises(ShapeError):
            native.store(0, array, dtype, slots, 0)
    ids = np.zeros(1, np.int32)
    with pytest.raises(InvalidPositionError):
        native.load(0, ids, 2, np.zeros((3, 2, 32), np.uint16), 1)
    with pytest.raises(InvalidPositionError):
        native.load(0, ids, -1, np.zeros((3, 2, 32), np.uint16), 1)
    with pytest.raises(InvalidArgumentError):
        native.load(1, ids, 0, np.zeros((3, 2, 32), np.uint16), 1)
    with pytest.raises(ShapeError):
        native.move(ids, ids, np.zeros(287, np.uint8))
    rows, room = np.zeros((1, 2, 32), np.uint32), np.zeros(288, np.uint8)
    for slot in (-2, 16, 2**62):
        with pytest.raises(SlotError):
            native.store(0, rows, 0, np.array([slot]), 0)
        for pair in ([0, slot], [slot, 0], [-1, 0]):
            with pytest.raises(SlotError):
                native.copy_tokens(*(np.array([one]) for one in pair))
    for block in (-1, 4, 2**31 - 1):
        bad = np.array([block], np.int32)
        with pytest.raises(BlockError):
            native.load(0, bad, 0, rows, 0)
        for pair in ((bad, ids), (ids, bad)):
            with pytest.raises(BlockError):
                native.copy(*pair, ids)
            if block != -1:
                with pytest.raises(BlockError):
                    native.move(*pair, room)
    two = np.zeros(2, np.int32)
    for call in (
        lambda: native.copy(two, ids, two),
        lambda: native.copy(two, two, ids),
        lambda: native.move(two, ids, room),
        lambda: native.copy_tokens(np.zeros(2, np.int64), np.zeros(1, np.int64)),
    ):
        with pytest.raises(ShapeError, match="one length"):
            call()
    with pytest.raises(InvalidPositionError):
        native.copy(ids, ids, np.array([5], np.int32))
    with pytest.raises(InvalidPositionError):
        native.load(0, ids, 2**63 - 1, rows, 0)
    assert not good.any()


def test_find_nonfinite_knows_every_pattern() -> None:
    for dtype, code in ((np.dtype(np.float16), 1), (BFLOAT16, 2)):
        patterns = np.arange(2**16, dtype=np.uint16).reshape(-1, 1, 1)
        nonfinite = ~np.isfinite(patterns.view(dtype).astype(np.float32)).ravel()
        found = [find_nonfinite(patterns[i : i + 1], code) for i in range(2**16)]
        assert [index == 0 for index in found] == nonfinite.tolist()
    edges = [0, 0x80000000, 1, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, ~0]
    for bits in edges:
        value = np.array([[[bits & 0xFFFFFFFF]]], np.uint32)
        assert (find_nonfinite(value, 0) == 0) is not bool(np.isfinite(value.view(np.float32)))
