"""Integers and rows at the public door: right values, or an error that names the culprit."""

from __future__ import annotations

import array
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pagedcache import arrays
from pagedcache.errors import DeviceError, FormatError, InvalidArgumentError, ShapeError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ROW_DTYPES = [np.dtype(np.float32), np.dtype(np.float16), BFLOAT16]


class OnlyAnArrayInterface:
    """What a foreign library's array looks like from outside."""

    def __init__(self, x: np.ndarray[Any, Any]) -> None:
        self._kept, self.__array_interface__ = x, x.__array_interface__


# SPEC 7: tokens of every integer type and container arrive with their values.
@pytest.mark.parametrize(
    "given",
    [
        [3, 0, 4294967295],
        (3, 0, 4294967295),
        np.array([3, 0, 4294967295], np.uint32),
        np.array([3, 0, 4294967295], np.int64),
        np.array([3, 0, 4294967295], np.uint64),
        np.array([3, 0, 4294967295], ">u4"),
        np.array([3, 0, 4294967295], ">i8"),
        np.array([3, 9, 0, 9, 4294967295], np.int64)[::2],
        np.array([4294967295, 0, 3], np.uint32)[::-1],
        [np.int64(3), np.uint8(0), 4294967295],
        array.array("q", [3, 0, 4294967295]),
        memoryview(np.array([3, 0, 4294967295], np.uint64)),
        OnlyAnArrayInterface(np.array([3, 0, 4294967295], np.int64)),
    ],
)
def test_tokens_keep_their_values(given: Any) -> None:
    got = arrays.as_tokens(given)
    assert got.dtype == np.uint32 and got.dtype.isnative and got.flags.c_contiguous
    assert got.tolist() == [3, 0, 4294967295]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32])
def test_tokens_of_narrow_integers(dtype: Any) -> None:
    assert arrays.as_tokens(np.array([0, 5, 127], dtype)).tolist() == [0, 5, 127]


@pytest.mark.parametrize("given", [[], (), range(0), range(5, 5), np.empty(0, np.int64)])
def test_no_tokens(given: Any) -> None:
    got = arrays.as_tokens(given)
    assert got.dtype == np.uint32 and got.shape == (0,)


@pytest.mark.parametrize(
    "given",
    [range(7), range(10, 2, -3), range(4294967290, 4294967296), range(4294967295, -1, -(2**30))],
)
def test_tokens_of_a_range(given: range) -> None:
    assert arrays.as_tokens(given).tolist() == list(given)


def test_contiguous_tokens_are_not_copied() -> None:
    given = np.arange(5, dtype=np.uint32)
    given.flags.writeable = False
    assert arrays.as_tokens(given).base is given or arrays.as_tokens(given) is given


# SPEC 7: tokens outside uint32 are refused; the message names the first bad index and value.
@pytest.mark.parametrize(
    ("given", "index", "value"),
    [
        ([1, -1, -2], 1, -1),
        ([1, 2, 2**32], 2, 2**32),
        ([10**30], 0, 10**30),
        (np.array([1, -7], np.int8), 1, -7),
        (np.array([1, 2, -7, -8], np.int64), 2, -7),
        (np.array([1, 2**32], np.int64), 1, 2**32),
        (np.array([2**64 - 1], np.uint64), 0, 2**64 - 1),
        (np.array([1, -5], ">i4"), 1, -5),
        (range(2**32 - 2, 2**32 + 5), 2, 2**32),
        (range(3, -9, -2), 2, -1),
        (range(-4, 9), 0, -4),
        (range(10**30, 10**30 + 2), 0, 10**30),
    ],
)
def test_tokens_out_of_range(given: Any, index: int, value: int) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        arrays.as_tokens(given)
    assert f"value {value} at index {index} " in str(caught.value)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ([1, 2.0], "float 2.0 at index 1"),
        ([1, True], "bool True at index 1"),
        ([np.bool_(True)], "at index 0"),
        ([1, "2"], "str '2' at index 1"),
        ([1, None], "NoneType None at index 1"),
        ([1, [2, 3]], "list [2, 3] at index 1"),
        ([[1, 2], [3]], "list [1, 2] at index 0"),
        ("123", "str"),
        (b"123", "bytes"),
        (None, "NoneType"),
        (7, "int"),
        ({1, 2}, "set"),
        ({1: 2}, "dict"),
        ((x for x in (1, 2)), "generator"),
        (np.array([1.0]), "float64"),
        (np.empty(0, np.float32), "float32"),
        (np.array([True]), "bool"),
        (np.array(["a"]), "<U1"),
        (np.array([1, 2], object), "object"),
        (np.array([1j]), "complex128"),
        (np.ma.masked_array(np.ones(2, np.uint32)), "masked"),
        (np.array(1), "shape ()"),
        (np.ones((2, 2), np.int64), "shape (2, 2)"),
    ],
)
def test_tokens_that_are_none(given: Any, named: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        arrays.as_tokens(given)
    assert named in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_slots_and_ids() -> None:
    slots = arrays.as_slots([-1, 2**40])
    assert slots.dtype == np.int64 and slots.tolist() == [-1, 2**40]
    ids = arrays.as_ids(np.array([-1, 2**31 - 1], np.int64))
    assert ids.dtype == np.int32 and ids.tolist() == [-1, 2**31 - 1]
    with pytest.raises(InvalidArgumentError, match="value 2147483648 at index 0"):
        arrays.as_ids([2**31])
    with pytest.raises(InvalidArgumentError, match="value 9223372036854775808 at index 1"):
        arrays.as_slots(np.array([0, 2**63], np.uint64))
    with pytest.raises(InvalidArgumentError, match="value -2147483649 at index 0"):
        arrays.as_ids(np.array([-(2**31) - 1]))


def test_many_tokens_are_fast() -> None:
    def best(given: Any) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            arrays.as_tokens(given)
            times.append(time.perf_counter() - start)
        return min(times)

    tokens = np.random.default_rng(0).integers(0, 2**32, 32768)
    assert best(tokens.astype(np.uint32)) < 100e-6  # takes about 2 µs
    assert best(tokens) < 1e-3  # takes about 30 µs
    assert best(tokens.tolist()) < 20e-3  # takes about 1 ms


# ---- rows ---------------------------------------------------------------------------------


# SPEC 2: float32, float16, bfloat16 in and out; anything else names the dtype.
@pytest.mark.parametrize("dtype", ROW_DTYPES)
def test_row_format(dtype: np.dtype[Any]) -> None:
    assert arrays.row_format(dtype).dtype == dtype
    assert arrays.row_format(str(dtype)).dtype == dtype
    assert arrays.row_format(dtype.type).dtype == dtype


@pytest.mark.parametrize("dtype", ["q8", "float64", np.int8, "nonsense", object, complex, "f8"])
def test_row_format_refuses(dtype: Any) -> None:
    with pytest.raises(FormatError) as caught:
        arrays.row_format(dtype)
    assert "float32" in str(caught.value) and "bfloat16" in str(caught.value)


# CASE C44
@pytest.mark.parametrize(
    ("given", "named"),
    [
        (np.zeros((2, 3, 4)), "float64"),
        (np.zeros((2, 3, 4), np.int8), "int8"),
        (np.zeros((2, 3, 4), np.uint16), "uint16"),
        (np.zeros((2, 3, 4), np.complex64), "complex64"),
        (np.zeros((2, 3, 4), np.longdouble), str(np.dtype(np.longdouble))),
        (np.zeros((2, 3, 4), bool), "bool"),
        (np.zeros((2, 3, 4), object), "object"),
        (np.full((2, 3, 4), "x"), "<U1"),
        (np.zeros((2, 3, 4), ml_dtypes.float8_e4m3fn), "float8_e4m3fn"),
        (np.zeros((2, 3, 4), [("a", np.float32)]), "float32"),
        (np.zeros((2, 3, 4), "M8[s]"), "datetime64[s]"),
        ([[[1.0, 2.0]]], "float64"),
        ([[1.0, 2.0], [3.0]], "list"),
        ("rows", "<U4"),
        (None, "object"),
        (3.0, "float64"),
        (np.ma.masked_array(np.zeros((2, 3, 4), np.float32)), "masked"),
    ],
)
def test_foreign_rows_are_refused(given: Any, named: str) -> None:
    with pytest.raises(FormatError) as caught:
        arrays.as_rows(given, "k", 3, 4)
    assert named in str(caught.value) and str(caught.value).startswith("k: ")
    assert isinstance(caught.value, (ValueError, TypeError))


# CASE C45: the other byte order is a clear error that says the cure.
@pytest.mark.parametrize("dtype", [">f4", ">f2", BFLOAT16.newbyteorder(">")])
def test_big_endian_rows_are_refused(dtype: Any) -> None:
    native = np.dtype(dtype).newbyteorder("=")
    with pytest.raises(FormatError) as caught:
        arrays.as_rows(np.zeros((2, 3, 4), native).astype(dtype), "v", 3, 4)
    assert "byte order" in str(caught.value) and f".astype('{native}')" in str(caught.value)


def test_rows_keep_memory_and_strides() -> None:
    base = np.arange(2 * 6 * 4 * 2, dtype=np.float32).reshape(2, 6, 8)[:, ::-2, ::2]
    rows = arrays.as_rows(base, "k", 3, 4)
    assert rows.shape == (2, 3, 4) and rows.strides == base.strides
    assert np.shares_memory(rows, base)
    flat = np.arange(48, dtype=np.float16).reshape(4, 12)[::2]
    rows = arrays.as_rows(flat, "k", 3, 4, 2)
    assert np.shares_memory(rows, flat)
    assert rows.tolist() == [
        [[float(24 * t + 4 * h + i) for i in range(4)] for h in range(3)] for t in range(2)
    ]


def test_misaligned_rows_are_copied() -> None:
    memory = np.zeros(1 + 4 * 24, np.uint8)
    given = memory[1:].view(np.float32).reshape(2, 3, 4)
    given[:] = np.arange(24).reshape(2, 3, 4)
    assert not given.flags.aligned
    rows = arrays.as_rows(given, "k", 3, 4)
    assert rows.flags.aligned and rows.ravel().tolist() == [float(i) for i in range(24)]


def test_foreign_containers_of_rows() -> None:
    data = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
    for given in (OnlyAnArrayInterface(data), memoryview(data)):
        assert np.shares_memory(arrays.as_rows(given, "k", 3, 4), data)

    class Subclass(np.ndarray[Any, Any]):
        pass

    plain = arrays.as_rows(data.view(Subclass), "k", 3, 4)
    assert type(plain) is np.ndarray and np.shares_memory(plain, data)


@pytest.mark.parametrize("shape", [(), (12,), (2, 11), (2, 4, 3), (1, 2, 3, 4), (2, 3, 5), (2, 1)])
def test_wrong_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError) as caught:
        arrays.as_rows(np.zeros(shape, np.float32), "k", 3, 4)
    assert "[num_tokens, 3, 4] or [num_tokens, 12]" in str(caught.value)
    assert str(list(shape)) in str(caught.value)


def test_wrong_number_of_tokens() -> None:
    with pytest.raises(ShapeError, match="expected 3 tokens, got 2"):
        arrays.as_rows(np.zeros((2, 3, 4), np.float32), "k", 3, 4, 3)


def test_device_memory_is_refused() -> None:
    class OnADevice:
        __cuda_array_interface__: dict[str, Any] = {}

    with pytest.raises(DeviceError, match="expected memory of the CPU, got memory of a CUDA"):
        arrays.as_rows(OnADevice(), "k", 3, 4)


def test_overlap() -> None:
    both = np.zeros((10, 2, 8), np.float32)
    assert not arrays.overlap(both[:, 0], both[:, 1])
    assert arrays.overlap(both[:, 0], both[3:4, 0])
    assert not arrays.overlap(both, np.zeros(8, np.float32))


def test_ranges_that_no_memory_holds() -> None:
    for huge in (range(10**30), range(0, -(10**30), -1), range(2**64)):
        with pytest.raises(InvalidArgumentError, match="outside"):
            arrays.as_tokens(huge)
    with pytest.raises(InvalidArgumentError, match="more values than any memory"):
        arrays.as_slots(range(-(2**63), 2**63))
    assert arrays.as_tokens(range(10**30, 0)).tolist() == []
