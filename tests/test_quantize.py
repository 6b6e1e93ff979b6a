"""Quantised formats bit for bit: against the NumPy reference, by hand, and against gguf."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import reference_formats as ref
from hypothesis import given
from hypothesis import strategies as st
from profiles import scaled

from pagedcache.arithmetic import dequantize, quantize
from pagedcache.errors import FormatError, InvalidArgumentError, NonFiniteError

SAMPLE = Path(__file__).parent / "data" / "smollm2_kv_sample.npz"
MAX = np.finfo(np.float32).max

formats = pytest.mark.parametrize("name", ref.QUANTIZED)


def check(name: str, x: np.ndarray) -> None:
    """Stored bytes and values read back equal the reference's, bit for bit."""
    flat = np.ascontiguousarray(x, np.float32).reshape(-1)
    got = quantize(flat, name, on_nonfinite="saturate")
    expected = ref.pack_flat(name, flat)
    if not np.array_equal(got.data, expected):
        byte = int(np.flatnonzero(got.data != expected)[0])
        pytest.fail(f"{name}: byte {byte} is {got.data[byte]:#x}, not {expected[byte]:#x}")
    back = ref.round_trip(name, flat.reshape(1, -1)).reshape(-1)
    assert np.array_equal(dequantize(got).view(np.uint32), back.view(np.uint32))


def bits(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.integers(0, 1 << 32, size, dtype=np.uint32).view(np.float32)


def random_kinds(rng: np.random.Generator, n: int) -> dict[str, np.ndarray]:
    """Groups of 32 of every nature that has ever mattered."""
    normal = rng.standard_normal((n, 32)).astype(np.float32)
    exponents = rng.integers(-149, 128, (n, 1))
    with np.errstate(all="ignore"):
        scaled_groups = (normal * np.exp2(exponents.astype(np.float64))).astype(np.float32)
    scaled_groups = np.nan_to_num(scaled_groups, posinf=MAX, neginf=-MAX)
    subnormal = rng.integers(0, 1 << 23, (n, 32), dtype=np.uint32)
    subnormal |= rng.integers(0, 2, (n, 32), dtype=np.uint32) << np.uint32(31)
    return {
        "normal": normal,
        "every exponent": scaled_groups,
        "subnormal": subnormal.view(np.float32),
        "few bits": rng.integers(-20, 21, (n, 32)).astype(np.float32) / np.float32(4),
        "huge": (normal * np.float32(5e37)),
        "signed zeros": np.where(rng.random((n, 32)) < 0.5, np.float32(0.0), np.float32(-0.0)),
        "one value": np.where(np.arange(32) == rng.integers(0, 32, (n, 1)), normal, 0),
        "constant": np.repeat(normal[:, :1], 32, axis=1),
        "positive": np.abs(normal) + 3,
        "at the zero threshold": normal / np.abs(normal).max(1, keepdims=True) * np.float32(1e-10),
        "float16 scale edge": scale_edge(rng, n),
        "any bits": bits(rng, n * 32).reshape(n, 32),
        "rarely non-finite": np.where(rng.random((n, 32)) < 0.05, np.float32(np.inf), normal)
        * rng.choice(np.array([1, -1], np.float32), (n, 32)),
        "often non-finite": rng.choice(
            np.array([np.nan, np.inf, -np.inf, 1.5, -0.0], np.float32), (n, 32)
        ),
    }


def scale_edge(rng: np.random.Generator, n: int) -> np.ndarray:
    """Groups whose ggml scale or minimum lies around 65504 and 65520."""
    edge = rng.choice(np.array([65503, 65504, 65519.996, 65520, 65536, 1e6], np.float32), (n, 1))
    factor = rng.choice(np.array([1, -1, 8, -8, 15, 127, -127], np.float32), (n, 1))
    groups = rng.uniform(-1, 1, (n, 32)).astype(np.float32) * np.abs(factor) * edge
    groups[:, :1] = edge * factor
    return groups.astype(np.float32)


# SPEC F4 F5 F7 F10
@formats
def test_random_groups_of_every_kind(name: str) -> None:
    rng = np.random.default_rng(3)
    for kind, groups in random_kinds(rng, scaled(20_000, 1_000)).items():
        try:
            check(name, groups)
        except pytest.fail.Exception as failure:
            pytest.fail(f"{kind}: {failure}")


# SPEC F4 F5
@formats
def test_half_way_values(name: str) -> None:
    """Values on and one float beside every rounding edge of groups with simple scales."""
    steps = 127 if name in ("q8", "q8_0") else 16
    halves = np.arange(-2 * steps, 2 * steps + 1, dtype=np.float32) / 2
    for factor in (1.0, 0.5, 2.0**-20, 2.0**15, 1.1, 3e-5):
        near = halves * np.float32(factor)
        values = np.concatenate([near, np.nextafter(near, 9e9), np.nextafter(near, -9e9)])
        for top in (7.0, -8.0, 8.0, 15.0, 127.0, -127.0):
            body = values[: values.size // 31 * 31].reshape(-1, 31).astype(np.float32)
            peak = np.full((body.shape[0], 1), top * factor, np.float32)
            check(name, np.concatenate([peak, body], axis=1))


# SPEC F4 F5
@formats
@given(data=st.data())
def test_any_float32(name: str, data: st.DataObject) -> None:
    values = st.floats(width=32, allow_nan=True, allow_infinity=True)
    check(name, np.array(data.draw(st.lists(values, min_size=1, max_size=70)), np.float32))


# SPEC F6
@formats
def test_short_last_groups(name: str) -> None:
    rng = np.random.default_rng(4)
    for size in [*range(1, 66), 80, 96, 97, 127]:
        check(name, rng.standard_normal(size).astype(np.float32))
        check(name, np.full(size, np.inf, np.float32))
        check(name, bits(rng, size))


# SPEC F5
def test_q4_padding_is_nibble_8_and_zero_groups_are_zero_bytes() -> None:
    data = quantize(np.array([7, -7, 3], np.float32), "q4").data
    assert data.tobytes() == bytes([0x1F, 0x8B, *[0x88] * 14]) + np.float32(1).tobytes()
    for tiny in (0.0, -0.0, 9.9e-11, 1e-38, -1e-45):
        stored = quantize(np.full(40, tiny, np.float32), "q4")
        assert not stored.data.any()
        assert not dequantize(stored).view(np.uint32).any()  # +0.0, sign bit included


# SPEC F4
def test_q8_by_hand() -> None:
    x = np.zeros(32, np.float32)
    x[:7] = [127, -127, 0.5, -0.5, 0.49999997, 1.5, -0.0]
    data = quantize(x, "q8").data
    assert data[:8].view(np.int8).tolist() == [127, -127, 1, -1, 0, 2, 0, 0]
    assert data[32:].tobytes() == np.float32(1).tobytes()
    back = dequantize(quantize(np.array([1, -0.0], np.float32), "q8"))
    assert back.view(np.uint32)[1] == 0  # -0.0 reads back as +0.0
    assert not quantize(np.full(32, 9.9e-11, np.float32), "q8").data.any()
    assert quantize(np.full(32, 1.1e-10, np.float32), "q8").data.all()


def test_ggml_by_hand() -> None:
    x = np.zeros(32, np.float32)
    x[0], x[1], x[16], x[17] = -8, 7, 3, 0.5
    half = np.float16(1).tobytes()
    # value i in the low, value i + 16 in the high half; trunc(x + 8.5): 0.5 goes up to 9
    assert quantize(x, "q4_0").data.tobytes() == half + bytes([0xB0, 0x9F, *[0x88] * 14])
    x -= 8 * (x == -8)
    zeros = quantize(np.zeros(32, np.float32), "q4_0").data
    assert zeros.tobytes() == bytes([0x00, 0x80, *[0x88] * 16])  # ggml divides 0 by -8
    y = np.zeros(32, np.float32)
    y[0], y[1], y[16] = 15, 7.5, 2.5
    expected = np.float16(1).tobytes() + np.float16(0).tobytes() + bytes([0x3F, 0x08, *[0] * 14])
    assert quantize(y, "q4_1").data.tobytes() == expected


# SPEC F7
@formats
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("index", [0, 31, 32, 69])
def test_raise_names_the_value(name: str, bad: float, index: int) -> None:
    x = np.ones(70, np.float32)
    x[index] = bad
    with pytest.raises(NonFiniteError) as caught:
        quantize(x, name)
    assert caught.value.index == index
    assert np.array_equal(caught.value.value, bad, equal_nan=True)


# SPEC F7
@formats
def test_saturate_stays_in_its_group(name: str) -> None:
    rng = np.random.default_rng(5)
    x = rng.standard_normal((4, 32)).astype(np.float32)
    clean = dequantize(quantize(x, name)).copy()
    dirty = x.copy()
    dirty[1, 3:6] = [np.inf, -np.inf, np.nan]
    dirty[2] = [np.nan, np.inf] * 16
    tamed = x.copy()
    most = np.abs(np.delete(x[1], [3, 4, 5])).max()
    tamed[1, 3:6] = [most, -most, 0]
    tamed[2] = 0
    got = quantize(dirty, name, on_nonfinite="saturate")
    assert np.array_equal(got.data, quantize(tamed, name).data)
    assert np.array_equal(dequantize(got)[[0, 3]], clean[[0, 3]])
    assert not dequantize(got)[2].any()


# CASE C60
@formats
@pytest.mark.parametrize("size", [32, 33])
def test_tiny_and_huge_groups_stay_finite(name: str, size: int) -> None:
    rng = np.random.default_rng(6)
    for magnitude in (1e-45, 1e-38, 1e-10, 1e-7, 1.0, 65504.0, 8.4e6, 1e30, 3.4e38):
        x = rng.uniform(-magnitude, magnitude, size).astype(np.float32)
        x[0] = magnitude
        back = dequantize(quantize(x, name))
        assert np.isfinite(back).all(), magnitude
        assert float(np.abs(back).max()) <= float(np.abs(x).max()) * (1 + 2.0**-6) + 1e-7


# CASE C60
def test_ggml_formats_are_cut_off_where_their_scale_ends() -> None:
    x = np.zeros(32, np.float32)
    x[:4] = [1e30, -1e30, 65504, -3e6]
    assert dequantize(quantize(x, "q8_0"))[:5].tolist() == [
        127 * 65504, -127 * 65504, 65504, -46 * 65504, 0,
    ]  # fmt: skip
    # the first of equal magnitudes is positive, so the scale is negative: -8 steps reach it
    assert dequantize(quantize(x, "q4_0"))[:5].tolist() == [
        8 * 65504, -7 * 65504, 65504, -7 * 65504, 0,
    ]  # fmt: skip
    assert dequantize(quantize(x, "q4_1"))[:5].tolist() == [
        14 * 65504, -65504, 65504, -65504, 0,
    ]  # fmt: skip
    y = np.linspace(1e5, 1.1e5, 32, dtype=np.float32)  # the minimum alone is too large
    assert np.abs(dequantize(quantize(y, "q4_1")) - y).max() <= np.ptp(y) + 1e5 - 65504
    z = np.full(32, -1e9, np.float32)
    assert (dequantize(quantize(z, "q4_1")) == -65504).all()


def bound(name: str, x: np.ndarray) -> np.ndarray:
    """Largest error of each value of groups [n, 32] whose scales float16 can hold."""
    x = x.astype(np.float64)
    amax = np.abs(x).max(axis=1, keepdims=True)
    if name in ("q8", "q4"):
        return amax / {"q8": 127, "q4": 7}[name] / 2 + 2.0**-20 * amax
    steps = {"q8_0": 127, "q4_0": 8, "q4_1": 15, "q4k": 15}[name]
    step = (np.ptp(x, axis=1, keepdims=True) if steps == 15 else amax) / steps
    half_step = np.broadcast_to(step / 2, x.shape)
    if name == "q4_0":  # the extreme is -8 steps, the other side ends at 7: cut by up to a step
        extreme = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)
        half_step = np.where(x * np.sign(extreme) < -7.5 * step, step, half_step)
    # float16 rounds the scale (times `steps`) and q4_1's minimum, by 2^-11 or half of 2^-24
    rounding = 3 * 2.0**-11 * amax + (steps + 1) * 2.0**-25
    return half_step + 2.0**-20 * amax + rounding


# CASE C38 C39
@formats
def test_error_is_within_the_bound_of_its_own_group(name: str) -> None:
    rng = np.random.default_rng(7)
    x = rng.standard_normal((4_000, 32)).astype(np.float32)
    x *= np.repeat(np.array([1, 1000, 1e-3, 1e-6], np.float32), 1_000)[:, None]
    x = x[rng.permutation(4_000)]
    error = np.abs(dequantize(quantize(x, name)).astype(np.float64) - x)
    assert (error <= bound(name, x)).all()


# CASE C44 C45
@formats
def test_sources_and_strides(name: str) -> None:
    import ml_dtypes

    rng = np.random.default_rng(8)
    x = rng.standard_normal((6, 10, 8)).astype(np.float32)
    for view in (x.T, x[::-1, ::2], x[..., ::-3], x[:0], x[0, 0, 0]):
        stored = quantize(view, name)
        assert np.array_equal(stored.data, quantize(np.array(view, order="C"), name).data)
        assert dequantize(stored).shape == view.shape
    for dtype in (np.float16, ml_dtypes.bfloat16):
        narrow = x.astype(dtype)
        assert np.array_equal(
            quantize(narrow, name).data, quantize(narrow.astype(np.float32), name).data
        )
    before = x.copy()
    quantize(x, name)
    assert np.array_equal(x, before)
    for bad in (x.astype(np.float64), np.zeros(3, np.int8), x.astype(">f4"), [1.0], "x", None):
        with pytest.raises(FormatError):
            quantize(bad, name)


def test_bad_choices() -> None:
    x = np.zeros(3, np.float32)
    for bad in ("q5", "", None, 3, "Q8"):
        with pytest.raises(FormatError, match="float32, float16, bfloat16, q8"):
            quantize(x, bad)  # type: ignore[arg-type]
    for policy in ("ignore", None, 1, []):
        with pytest.raises(InvalidArgumentError, match="on_nonfinite"):
            quantize(x, "q8", on_nonfinite=policy)  # type: ignore[arg-type]
    with pytest.raises(FormatError):
        dequantize(x)  # type: ignore[arg-type]


# SPEC F4 F5: the errors that tests/data/README.md of the sample states, to 3 digits
@pytest.mark.parametrize(
    ("name", "k_error", "v_error"),
    [
        ("float16", "2.09e-04", "2.08e-04"),
        ("q8", "8.00e-03", "5.44e-03"),
        ("q4", "1.46e-01", "9.86e-02"),
    ],
)
def test_round_trip_errors_on_real_keys_and_values(
    name: str, k_error: str, v_error: str
) -> None:
    sample = np.load(SAMPLE)
    for key, expected in (("k", k_error), ("v", v_error)):
        x = sample[key]
        error = dequantize(quantize(x, name)).astype(np.float64) - x
        rmse = np.sqrt((error**2).sum() / (x.astype(np.float64) ** 2).sum())
        assert f"{rmse:.2e}" == expected


def gguf_agrees(name: str, groups: np.ndarray) -> np.ndarray:
    """Groups where gguf's NumPy code follows ggml's C: normal scales that float16 holds; for q4_1
    a minimum that is no zero, and for q4_0 not all zeros (NumPy keeps other signs of zero)."""
    amax = np.abs(groups).max(axis=1)
    usable = np.isfinite(groups).all(axis=1) & (amax > 1e-30) & (amax < 60000)
    return usable & (groups.min(axis=1) != 0) if name == "q4_1" else usable


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_1"])
def test_against_gguf(name: str) -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
    kind = gguf.GGMLQuantizationType[name.upper()]
    rng = np.random.default_rng(9)
    compared = 0
    for groups in random_kinds(rng, scaled(5_000, 500)).values():
        groups = groups[gguf_agrees(name, groups)]
        if groups.shape[0] == 0:
            continue
        expected = gguf.quantize(groups, kind)
        got = quantize(groups, name).data.reshape(expected.shape)
        assert np.array_equal(got, expected)
        values = gguf.dequantize(expected, kind)
        assert np.array_equal(dequantize(quantize(groups, name)), values)
        compared += groups.shape[0]
    assert compared > scaled(15_000, 1_500)
    x = np.load(SAMPLE)["k"].reshape(-1, 32)
    x = x[gguf_agrees(name, x)]
    assert np.array_equal(quantize(x, name).data.reshape(x.shape[0], -1), gguf.quantize(x, kind))
