"""The checks that ``pagedcache selftest`` runs, one test each, and tests of the judge itself."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from pagedcache import FORMATS, CacheSpec, PagedKVCache
from pagedcache.checks import Check, SkipCheck, all_checks, channels, judge, reference
from pagedcache.checks.block_bytes import block_bytes
from pagedcache.checks.bounds import block_bound, error_bound, relative_rmse
from pagedcache.checks.compare import raises, same_bits
from pagedcache.checks.registry import CheckFailed, Context

CHECKS = all_checks()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
@pytest.mark.parametrize("seed", [0, 1])
def test_check(check: Check, seed: int) -> None:
    check.run(seed)


def test_names_are_unique_and_every_format_is_judged() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    for name in FORMATS:
        assert reference.knows(name), f"the reference has no rules for {name}"
        operations = {n.split("/")[0] for n in names if f"/{name}/" in n}
        assert {"round_trip", "defragment", "prefix_hit", "real_sample"} <= operations


def test_a_run_depends_on_seed_and_name_only() -> None:
    drawn: list[int] = []

    def draw(context: Context) -> None:
        drawn.append(int(context.rng.integers(2**62)))

    for name, seed in (("a", 0), ("b", 0), ("a", 1), ("a", 0)):
        Check(name, draw).run(seed)
    assert drawn[0] == drawn[3]
    assert len(set(drawn)) == 3


def test_outcomes() -> None:
    def skip(context: Context) -> None:
        raise SkipCheck("no such thing here")

    def crash(context: Context) -> None:
        raise ZeroDivisionError("by zero")

    passed = judge(Check("p", lambda context: "a note"), 0, "cpu")
    assert (passed.status, passed.detail) == ("passed", "a note")
    skipped = judge(Check("s", skip), 0, "cpu")
    assert (skipped.status, skipped.detail) == ("skipped", "no such thing here")
    failed = judge(Check("f", crash), 0, "cpu")
    assert (failed.status, failed.detail) == ("failed", "ZeroDivisionError: by zero")
    assert "crash" in failed.trace


def test_same_bits_tells_zeros_and_nans_apart() -> None:
    values = np.array([0.0, np.nan], np.float32)
    same_bits(values, values.copy(), "equal")
    with pytest.raises(CheckFailed, match=r"first at \(0,\)"):
        same_bits(-values, values, "signs")
    with pytest.raises(CheckFailed, match="dtype"):
        same_bits(values.astype(np.float64), values, "dtype")
    with pytest.raises(CheckFailed, match="shape"):
        same_bits(values[:1], values, "shape")


def test_raises_names_what_came_instead() -> None:
    with pytest.raises(CheckFailed, match="nothing was raised"):
        raises(ValueError, lambda: None, "call")
    with pytest.raises(CheckFailed, match="KeyError"):
        raises(ValueError, lambda: {}["x"], "call")


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_1"])
def test_reference_agrees_with_gguf(name: str) -> None:
    kind = getattr(gguf.GGMLQuantizationType, name.upper())
    rows = np.random.default_rng(5).standard_normal((200, 96), dtype=np.float32) * 3
    theirs = gguf.quants.quantize(rows, kind)
    ours = reference.encode_rows(name, rows)
    assert np.array_equal(ours.data, theirs)
    back = gguf.quants.dequantize(theirs, kind)
    same_bits(reference.decode_rows(name, ours, 96), back.astype(np.float32), name)


def _q8_by_hand(row: list[float]) -> tuple[list[int], float]:
    scale = np.float32(max(abs(x) for x in row)) / np.float32(127)
    return [round(x / float(scale)) for x in row], float(scale)


def test_reference_q8_and_q4_by_hand() -> None:
    # SPEC F4, F5
    row = [float(i - 20) for i in range(32)]  # amax 20
    quants, scale = _q8_by_hand(row)
    stored = reference.encode_rows("q8", np.array([row], np.float32))
    assert stored.data.view(np.int8)[0].tolist() == quants
    assert stored.scales.view(np.float32)[0].tolist() == [scale]
    row = [7.0, -7.0, 0.5, -0.49] + [0.0] * 28
    stored = reference.encode_rows("q4", np.array([row], np.float32))
    assert stored.data[0, :3].tolist() == [15 | 1 << 4, 9 | 8 << 4, 8 | 8 << 4]
    assert stored.scales.view(np.float32)[0].tolist() == [1.0]
    zero = reference.encode_rows("q4", np.full((1, 32), 9e-11, np.float32))
    assert not zero.data.any() and not zero.scales.any()


def test_block_bytes_of_a_planar_block() -> None:
    # SPEC F9a: 4 tokens, 2 heads of 32 values: quants 32 bytes and scale 4 bytes per row.
    rows = np.random.default_rng(6).standard_normal((4, 2, 32), dtype=np.float32)
    assert block_bytes("q8", "HND", rows).size == 2 * (4 * 32 + 4 * 4)
    assert block_bytes("q8", "NHD", rows).size == 8 * 32 + 8 * 4
    # 3 rows of 16 quant bytes and 4 scale bytes: 48 + 12, padded to 64.
    assert block_bytes("q4", "HND", rows[:3]).size == 2 * 64
    first = reference.encode_rows("q8", rows[1, 0][None])
    data = block_bytes("q8", "HND", rows)
    assert data[32:64].tolist() == first.data[0].tolist()
    assert data[128 + 4 : 128 + 8].tolist() == first.scales[0].tolist()


def test_reference_q4k_by_hand() -> None:
    # 3 tokens of one head of 3 channels: ranges 15, 0 and 30
    block = np.array([[[0, 7, -10]], [[15, 7, 20]], [[4, 7, 0]]], np.float32)
    rows, scales = channels.block_parts(block)
    # nibbles 0 15 4, 0 0 0, 0 15 5; even channels low, nothing behind the last one
    assert rows[:, 0].tolist() == [[0, 0], [15, 15], [4, 5]]
    assert scales.view(np.float16)[0, 0].tolist() == [1, 0, 0, 7, 2, -10]
    assert np.array_equal(channels.channels_read_back(block), block)
    # NHD and HND are the same for one head: 6 bytes of rows, padded, 12 of scales, padded
    for layout in ("HND", "NHD"):
        data = block_bytes("q4k", layout, block)
        assert data.size == 32 and data[:6].tolist() == [0, 0, 15, 15, 4, 5]
    # Inf acts as 3 and NaN as 0: a range of 6, steps of 0.4 (0.39990234375 in float16) from -3
    bad = np.array([[[np.inf]], [[-3]], [[np.nan]]], np.float32)
    step = 0.39990234375
    assert channels.channels_read_back(bad)[:, 0, 0].tolist() == [15 * step - 3, -3, 8 * step - 3]


def test_readings_of_a_block() -> None:
    rows = np.random.default_rng(8).standard_normal((4, 2, 33), dtype=np.float32) * 1e5
    waiting = channels.opened("q4k", "float16", rows)
    assert np.abs(waiting).max() == 65504 and np.array_equal(
        channels.opened("float32", "float16", rows), rows)  # fmt: skip
    assert len(channels.readings("q4k", "float16", rows[:3], 4)) == 1
    choices = channels.readings("q4k", "float16", rows, 4)
    assert np.array_equal(choices[0], waiting)
    assert np.array_equal(choices[1], channels.channels_read_back(rows))
    assert np.array_equal(choices[2], channels.channels_read_back(waiting))
    assert len({choice.tobytes() for choice in choices}) == 5


@pytest.mark.parametrize("magnitude", [1.0, 1e4, 1e5, 1e6, 1e9])
def test_blocks_are_read_back_as_the_kernels_store_them(magnitude: float) -> None:
    rows: NDArray[np.float32] = np.random.default_rng(10).standard_normal((40, 2, 33)) * magnitude
    rows = rows.astype(np.float32)
    rows[:, :, 5], rows[3, 1, 6] = -rows[0, 0, 5], 0
    spec = CacheSpec(1, 2, 33, 40, k_format="q4k", v_format="q8")
    with PagedKVCache(spec, 1) as cache:
        seq = cache.open()
        seq.append(0, rows, rows)
        seq.commit(40)
        assert np.array_equal(seq.gather(0)[0], channels.channels_read_back(rows))


@pytest.mark.parametrize("name", ["q4k", "q4_1", "q8"])
def test_bounds_of_blocks_hold_and_are_tight(name: str) -> None:
    rng = np.random.default_rng(9)
    rows: NDArray[np.float32] = rng.standard_normal((200, 2, 70), dtype=np.float32)
    rows *= np.exp2(rng.integers(-8, 9, (1, 2, 70))).astype(np.float32)
    bound = block_bound(name, "float16", rows, 40)
    for given in (rows, channels.opened(name, "float16", rows)):
        blocks = [channels.sealed(name, given[i : i + 40]) for i in range(0, 200, 40)]
        error = np.abs(np.concatenate(blocks) - rows)
        assert (error <= bound).all()
        assert (error / bound).max() > 0.8


@pytest.mark.parametrize("name", list(FORMATS))
def test_bounds_hold_and_are_tight(name: str) -> None:
    rng = np.random.default_rng(7)
    rows: NDArray[np.float32] = rng.standard_normal((500, 70), dtype=np.float32)
    rows *= np.exp2(rng.integers(-8, 9, (500, 1))).astype(np.float32)
    error = np.abs(reference.read_back(name, rows) - rows)
    bound = error_bound(name, rows)
    assert (error <= bound).all()
    if name != "float32":
        assert (error / bound).max() > 0.8
        assert relative_rmse(rows, rows) == 0.0
