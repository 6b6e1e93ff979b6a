"""One judge on every device: the checks of ``selftest``, and stored bytes that equal the CPU's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cachekit import ROW_FORMATS, by_profile, make_cache
from devicekit import host
from formatkit import raw_blocks
from reference_formats import QUANTIZED

import pagedcache as pc
from pagedcache.checks import Check, all_checks
from pagedcache.checks.devices import device_problem, upload
from pagedcache.checks.registry import DEVICE, HOST

CHECKS = [check for check in all_checks() if check.gives_rows or check.name == "export_tables"]
DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
LAYOUTS = ["HND", "NHD"]
PAIRS = [*ROW_FORMATS, ("q8", "q4"), ("float16", "q4_1"), ("q8_0", "bfloat16")]
#: Formats of K and V, and the one in which blocks are open.
OPEN = [("q4k", "q4_1", None), ("q4k", "float32", "bfloat16"), ("q8", "q4k", "float16"),
        ("q4", "q4", "float16"), ("q8_0", "bfloat16", "float32")]  # fmt: skip


RUNS = [(check, arrays) for check in CHECKS for arrays in check.arrays("cuda:0")]


@pytest.mark.parametrize(("check", "arrays"), RUNS, ids=lambda x: getattr(x, "name", x))
def test_check(check: Check, arrays: str, cuda: Any) -> None:
    # SPEC F43, F44: rows given from the host and from the device
    check.run(0, "cuda:0", arrays)


def test_the_device_can_be_used(cuda: Any) -> None:
    assert device_problem("cuda") is None
    assert device_problem("cuda:0") is None
    problem = device_problem("cuda:99")
    assert problem is not None and "there is no cuda:99" in problem


# ---- the same history on the CPU and on the device --------------------------------------------


def _rows(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Rows whose amplitudes differ, zeros and signed zeros among them, NaN and Inf not."""
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-8, 8, (*shape[:-1], 1))
    x[rng.random(shape) < 0.05] = -0.0
    x[rng.random(shape[:-1]) < 0.1] = 0
    return x.astype(np.float32).astype(dtype)


class Twins:
    """The same calls on a cache of the CPU and on one of the device; handles come in pairs."""

    def __init__(self, fmt: Any, layout: str, dtype: Any, seed: int) -> None:
        self.rng, self.random = np.random.default_rng(seed), random.Random(seed)
        self.dtype = dtype
        self.heads, self.dim = self.random.choice([(3, 40), (2, 64), (1, 33), (5, 16)])
        size = self.random.choice([3, 4, 16])
        opened = None
        if not isinstance(fmt, str) and len(fmt) == 3:
            fmt, opened = fmt[:2], fmt[2]
        self.caches = [
            make_cache(
                24, B=size, layers=2, heads=self.heads, dim=self.dim, fmt=fmt, layout=layout,
                partial_block_reuse=1, device=device, open_blocks=opened,
            )
            for device in ("cpu", "cuda:0")
        ]  # fmt: skip
        self.size = size
        self.live: list[list[pc.Sequence]] = []
        self.prompts: list[list[int]] = []

    def given(self, array: np.ndarray, device: bool) -> Any:
        """The same rows for each side: as they are, or on the device, with any strides."""
        return upload(array, "cuda:0") if device and self.random.random() < 0.5 else array

    def rows(self, count: int) -> list[np.ndarray]:
        shape = (count, self.heads, self.dim)
        pair = [_rows(self.rng, shape, self.dtype) for _ in "kv"]
        if self.random.random() < 0.3:  # head-major in memory
            pair = [np.ascontiguousarray(x.transpose(1, 0, 2)).transpose(1, 0, 2) for x in pair]
        return pair

    def open(self) -> None:
        tokens: list[int] = []
        if self.prompts and self.random.random() < 0.6:
            tokens = self.random.choice(self.prompts)
            tokens = tokens[: self.random.randint(0, len(tokens))]
        tokens = [*tokens, *(self.random.randint(0, 3) for _ in range(self.random.randint(1, 9)))]
        try:
            pair = [cache.open(tokens) for cache in self.caches]
        except pc.OutOfBlocksError:
            if self.live:
                self.free()
            return
        assert pair[0].num_cached_tokens == pair[1].num_cached_tokens
        self.live.append(pair)
        self.append(pair, len(tokens) - pair[0].num_cached_tokens)
        self.prompts.append(tokens)

    def append(self, pair: list[pc.Sequence], count: int) -> None:
        for layer in range(2):
            k, v = self.rows(count)
            on_device = self.random.random() < 0.5
            for seq, gpu in zip(pair, (False, True), strict=True):
                both = (upload(x, "cuda:0") if gpu and on_device else x for x in (k, v))
                try:
                    seq.append(layer, *both)
                except pc.OutOfBlocksError:
                    assert layer == 0
                    if gpu:
                        raise
                    return
        for seq in pair:
            seq.commit(count)

    def grow(self) -> None:
        if self.live:
            self.append(self.random.choice(self.live), self.random.randint(1, 5))

    def store(self) -> None:
        chosen = self.random.sample(self.live, min(3, len(self.live)))
        counts = [self.random.randint(0, 3) for _ in chosen]
        rows = [self.rows(sum(counts)) for _ in range(2)]
        for side, cache in enumerate(self.caches):
            seqs = [pair[side] for pair in chosen]
            try:
                slots = cache.prepare(seqs, counts)
            except pc.OutOfBlocksError:
                assert side == 0
                return
            for layer in range(2):
                cache.store(layer, *rows[layer], slots)
            cache.commit(seqs, counts)

    def fork(self) -> None:
        if self.live and len(self.live) < 6:
            self.live.append([seq.fork() for seq in self.random.choice(self.live)])

    def truncate(self) -> None:
        if self.live:
            pair = self.random.choice(self.live)
            length = self.random.randint(0, pair[0].num_tokens)
            for seq in pair:
                seq.truncate(length)

    def free(self) -> None:
        if self.live:
            for seq in self.live.pop(self.random.randrange(len(self.live))):
                seq.free()

    def defragment(self) -> None:
        for cache in self.caches:
            cache.defragment()

    def compare(self) -> None:
        """Every byte of full blocks, and what all dtypes read, is the same on both sides."""
        for cache in self.caches:
            cache.check()
        counts = [
            (stats.blocks_sealed, stats.blocks_reopened, stats.open_blocks)
            for stats in (cache.stats() for cache in self.caches)
        ]
        assert counts[0] == counts[1]
        for cpu, gpu in self.live:
            assert (cpu.seq_len, cpu.num_tokens) == (gpu.seq_len, gpu.num_tokens)
            for layer in range(2):
                for dtype in DTYPES.values():
                    for a, b in zip(
                        cpu.gather(layer, dtype=dtype), gpu.gather(layer, dtype=dtype), strict=True
                    ):
                        assert a.tobytes() == host(b).tobytes()
            self._compare_blocks(cpu, gpu)

    def _compare_blocks(self, cpu: pc.Sequence, gpu: pc.Sequence) -> None:
        left, right = (raw_blocks(c, s) for c, s in zip(self.caches, (cpu, gpu), strict=True))
        per_layer = len(left) // 2
        full = cpu.num_written // self.size  # behind it lie bytes of former owners
        for layer in range(2):
            for block in range(min(full, per_layer)):
                at = layer * per_layer + block
                assert left[at] == right[at], (layer, block)


STEPS: list[tuple[Callable[[Twins], None], int]] = [
    (Twins.open, 6), (Twins.grow, 4), (Twins.store, 3), (Twins.fork, 2), (Twins.truncate, 2),
    (Twins.free, 2), (Twins.defragment, 1),
]  # fmt: skip


@pytest.mark.parametrize("source", list(DTYPES))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", [*PAIRS, *OPEN], ids=str)
def test_a_random_history_leaves_the_same_bytes(
    fmt: Any, layout: str, source: str, cuda: Any
) -> None:
    # SPEC F43, F44: copy-on-write, partial hits, moves and rows of every format, layout and dtype;
    # blocks that are opened, sealed and reopened
    calls = [call for call, times in STEPS for _ in range(times)]
    for seed in range(by_profile(1, 3)):
        twins = Twins(fmt, layout, DTYPES[source], seed)
        sealed, step = fmt not in OPEN, 0
        while step < 40 or (not sealed and step < 800):  # long enough to seal a block
            twins.random.choice(calls)(twins)
            step += 1
            if step % 8 == 0:
                twins.compare()
                sealed = sealed or twins.caches[1].stats().blocks_sealed > 0
        twins.compare()
        assert bool(twins.caches[1].stats().blocks_sealed) == (fmt in OPEN)
        while twins.live:
            twins.free()
        for cache in twins.caches:
            assert cache.num_free_blocks == 24
            cache.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", QUANTIZED)
def test_bad_values_are_saturated_alike(fmt: str, layout: str, cuda: Any) -> None:
    # SPEC F7: defined, and the same on CPU and GPU
    rng = np.random.default_rng(7)
    x = _rows(rng, (9, 3, 40), np.float32)
    for value in (np.nan, np.inf, -np.inf):
        x[rng.random(x.shape) < 0.1] = value
    x[3, 1, :32] = np.nan
    x[4, 1, 32:] = np.inf
    for dtype in DTYPES.values():
        given = x.astype(dtype), (-x).astype(dtype)
        bytes_of = []
        for device, arrays in (("cpu", HOST), ("cuda:0", HOST), ("cuda:0", DEVICE)):
            options = {"B": 3, "heads": 3, "dim": 40, "fmt": fmt, "layout": layout}
            with make_cache(4, device=device, **options) as cache, cache.open() as seq:
                pair = [upload(a, device) if arrays == DEVICE else a for a in given]
                seq.append(0, *pair, on_nonfinite="saturate")
                bytes_of.append(raw_blocks(cache, seq))
        assert bytes_of[0] == bytes_of[1] == bytes_of[2]


@pytest.mark.parametrize("arrays", [HOST, DEVICE])
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("fmt", ["q8", "q4k"])
def test_bad_values_are_refused_alike(fmt: str, dtype: str, arrays: str, cuda: Any) -> None:
    # SPEC F7: the first bad value is named, nothing is written
    with make_cache(4, B=4, heads=2, dim=40, fmt=fmt, device="cuda:0") as cache:
        with cache.open() as seq:
            good = np.ones((5, 2, 40), np.float32).astype(DTYPES[dtype])
            seq.append(0, good, good)
            before = raw_blocks(cache, seq)
            for which, place in (("k", (1, 0, 3)), ("v", (4, 1, 39)), ("v", (0, 0, 0))):
                bad = good.copy()
                bad[place] = np.inf
                bad[4, 1, 39] = np.nan  # a later one is not the one named
                pair = [bad if which == name else good for name in "kv"]
                if arrays == DEVICE:
                    pair = [upload(a, "cuda:0") for a in pair]
                with pytest.raises(pc.NonFiniteError) as caught:
                    seq.append(0, *pair)
                assert caught.value.what == which
                assert caught.value.index == int(np.ravel_multi_index(place, bad.shape))
                assert seq.num_written == 5 and cache.stats().pinned == 0
                assert raw_blocks(cache, seq) == before


def test_a_failure_says_where_the_rows_were(cuda: Any) -> None:
    from pagedcache.checks import judge
    from pagedcache.checks.registry import Context

    def fails(context: Context) -> None:
        assert context.arrays == HOST, "device rows"

    outcome = judge(Check("x", fails, gives_rows=True), 0, "cuda:0")
    assert outcome.status == "failed" and "device rows" in outcome.detail
    assert outcome.detail.endswith("(rows in the memory of cuda:0)")
