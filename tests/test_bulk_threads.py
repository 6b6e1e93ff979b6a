"""Store, gather and flat conversions: one result, whatever the instruction set and the threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import pagedcache as pc
from pagedcache import machine
from pagedcache._native import machine as native
from pagedcache.storage.cpu import CpuStorage

HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 6, 96, 16, 64
COUNT = 700  # tokens: some threads' worth of bytes, and no whole number of blocks
DTYPES = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    threads = pc.get_num_threads()
    native.share_from(1 << 17)
    yield
    native.share_from(0)
    machine.use_isa(None)
    pc.set_num_threads(threads)


def make(fmt: str, layout: str, **more: Any) -> Any:
    spec = pc.CacheSpec(
        num_layers=1, num_kv_heads=HEADS, head_dim=HEAD_DIM, block_size=BLOCK_SIZE,
        kv_format=fmt, layout=layout, **more,
    )  # fmt: skip
    return CpuStorage(spec, NUM_BLOCKS, 4 if spec.has_open_blocks else 0)


def rows(dtype: np.dtype, count: int = COUNT) -> np.ndarray:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((count, HEADS, HEAD_DIM), np.float32) * 3
    x[5, 1] = 0.0
    x[6, 2, :40] *= 1e4
    return x.astype(dtype)


def as_models_have_it(x: np.ndarray) -> np.ndarray:
    """The same values with the tokens of a head side by side."""
    return np.ascontiguousarray(x.transpose(1, 0, 2)).transpose(1, 0, 2)


def spread_out(x: np.ndarray) -> np.ndarray:
    """The same values, each apart from the next one."""
    wide = np.zeros((*x.shape[:2], 2 * x.shape[2]), x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def slot_lists(fmt: str) -> dict[str, np.ndarray]:
    blocks = np.random.default_rng(4).permutation(NUM_BLOCKS)
    slots = (blocks[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(-1)
    whole = {"scattered": slots[: COUNT // BLOCK_SIZE * BLOCK_SIZE]}
    if fmt == "q4k":
        return whole
    skipped = np.sort(slots[:COUNT])
    skipped[::7] = -1
    twice = slots[:COUNT].copy()
    twice[300:600] = twice[:300]  # the last one counts
    return {**whole, "ascending, some skipped": skipped, "twice": twice}


def everything(storage: Any) -> list[bytes]:
    return [storage.slab_array(0, kind).tobytes() for kind in ("k", "v")]


# SPEC F7 F8 F9
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("fmt", [f for f in pc.FORMATS])
def test_stores_and_gathers_are_the_same_on_all(fmt: str, layout: str) -> None:
    places = np.arange(NUM_BLOCKS, dtype=np.int32)
    for dtype in DTYPES:
        k, v = rows(dtype), rows(dtype)[::-1]
        for name, slots in slot_lists(fmt).items():
            expected: list[Any] | None = None
            for isa, threads, shape in [
                (machine.usable_isas()[0], 1, np.ascontiguousarray),
                *((isa, n, shape) for isa in machine.usable_isas() for n in (1, 3)
                  for shape in (np.ascontiguousarray, as_models_have_it, spread_out)),
            ]:  # fmt: skip
                machine.use_isa(isa)
                pc.set_num_threads(threads)
                storage = make(fmt, layout)
                n = len(slots)
                storage.store(0, shape(k[:n]), shape(v[:n]), slots.astype(np.int64))
                out = [shape(np.zeros((900, HEADS, HEAD_DIM), dtype)) for _ in range(2)]
                storage.gather(0, places, 3, 903, dtype, *out)
                got = [*everything(storage), *(np.ascontiguousarray(x).tobytes() for x in out)]
                if expected is None:
                    expected = got
                assert got == expected, (dtype, name, isa, threads, shape.__name__)


# SPEC F4
@pytest.mark.parametrize("fmt", ["q8", "q4_0", "q4k"])
def test_nothing_is_written_where_a_thread_finds_nan(fmt: str) -> None:
    slots = next(iter(slot_lists(fmt).values())).astype(np.int64)
    for isa in machine.usable_isas():
        machine.use_isa(isa)
        for threads in (1, 4):
            pc.set_num_threads(threads)
            storage = make(fmt, "HND")
            storage.store(0, rows(DTYPES[0], len(slots)), rows(DTYPES[0], len(slots)), slots)
            before = everything(storage)
            for at in (0, len(slots) // 2, len(slots) - 1):
                k = rows(DTYPES[0], len(slots))
                v = k.copy()
                v[at, 3, 17] = np.nan
                v[at, 4, 1] = np.inf
                with pytest.raises(pc.NonFiniteError) as caught:
                    storage.store(0, *storage.check_rows(0, k * 2, v, len(slots)), slots)
                assert str((at * HEADS + 3) * HEAD_DIM + 17) in str(caught.value)
                assert everything(storage) == before


# SPEC F3 F5
@pytest.mark.parametrize("fmt", ["float16", "bfloat16", "q8", "q4", "q8_0", "q4_0", "q4_1", "q4k"])
def test_flat_buffers_are_the_same_on_all(fmt: str) -> None:
    # past the size from which on results bypass the caches, and a rest behind it
    for count in (200_003, (32 << 18) + 100_001):
        x = np.random.default_rng(5).standard_normal(count, np.float32)
        expected: tuple[bytes, bytes] | None = None
        for isa in machine.usable_isas():
            machine.use_isa(isa)
            for threads in (1, 2):
                pc.set_num_threads(threads)
                flat = pc.FlatQuantized(fmt, count)
                flat.write(0, x)
                got = (flat.data.tobytes(), flat.to_float32().tobytes())
                expected = got if expected is None else expected
                assert got == expected, (isa, threads, count)


# SPEC F8
@pytest.mark.parametrize(("fmt", "layout"), [("bfloat16", "HND"), ("q8_0", "NHD"), ("q8", "HND")])
def test_stores_past_the_caches_are_the_same(fmt: str, layout: str) -> None:
    """Rows of more bytes than the caches keep are written past them."""
    heads, head_dim, count = 8, 128, 10_240
    spec = pc.CacheSpec(num_layers=1, num_kv_heads=heads, head_dim=head_dim, block_size=16,
                        kv_format=fmt, layout=layout)  # fmt: skip
    storage = CpuStorage(spec, count // 16)
    k = np.random.default_rng(6).standard_normal((count, heads, head_dim), np.float32)
    blocks = np.random.default_rng(7).permutation(count // 16)
    slots = (blocks[:, None] * 16 + np.arange(16)).reshape(-1).astype(np.int64)
    assert k.nbytes >= 32 << 20
    places = blocks.astype(np.int32)
    expected = None
    for isa in machine.usable_isas():
        machine.use_isa(isa)
        for threads in (1, 2):
            pc.set_num_threads(threads)
            storage.fill_blocks(places, 0)
            for first in range(0, count, 2048):  # small enough to go the usual way
                part = slice(first, first + 2048)
                storage.store(0, k[part], k[part], slots[part])
            usual = storage.slab_array(0, "k").tobytes()
            back, _ = storage.gather(0, places[:64], 0, 1024, np.float32)
            storage.fill_blocks(places, 0)
            storage.store(0, k, k, slots)
            assert storage.slab_array(0, "k").tobytes() == usual, (isa, threads)
            whole, other = storage.gather(0, places, 0, count, np.float32)
            assert np.array_equal(whole[:1024], back) and np.array_equal(whole, other)
            expected = whole.tobytes() if expected is None else expected
            assert whole.tobytes() == expected, (isa, threads)


def test_callers_from_many_threads_do_not_disturb_each_other() -> None:
    pc.set_num_threads(2)
    storage = make("q8_0", "HND")
    x = np.random.default_rng(8).standard_normal((COUNT, HEADS, HEAD_DIM), np.float32)
    half = NUM_BLOCKS // 2 * BLOCK_SIZE
    slots = np.arange(half, dtype=np.int64)
    errors: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for turn in range(20):
                mine = np.resize(x * (turn + 1 + first), (half, HEADS, HEAD_DIM))
                storage.store(0, mine, mine, slots + first)
                places = np.arange(first // BLOCK_SIZE, NUM_BLOCKS, dtype=np.int32)
                got, _ = storage.gather(0, places, 0, half, np.float32)
                assert np.abs(got - mine).max() <= np.abs(mine).max() / 127
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, half)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
