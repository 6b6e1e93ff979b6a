"""Flat access: any (offset, length) of a flat buffer."""

from __future__ import annotations

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest
import reference_formats as ref
from hypothesis import given
from hypothesis import strategies as st
from profiles import scaled

from pagedcache.arithmetic import FlatQuantized, dequantize, quantize
from pagedcache.errors import (
    FormatError,
    InvalidArgumentError,
    InvalidPositionError,
    NonFiniteError,
    ShapeError,
    StorageMemoryError,
)

formats = pytest.mark.parametrize("name", ref.ALL)
MAX = np.finfo(np.float32).max


def group_size(name: str) -> int:
    return 1 if name in ref.DENSE else 32


def written(name: str, values: np.ndarray, offset: int, new: np.ndarray) -> np.ndarray:
    """What a buffer that reads as ``values`` must read as after a write: the touched groups
    are stored again as a whole, the others not at all."""
    out = values.copy()
    if new.size == 0:
        return out
    size = group_size(name)
    start = offset // size * size
    stop = min(-(-(offset + new.size) // size) * size, values.size)
    merged = values.copy()
    merged[offset : offset + new.size] = new
    out[start:stop] = ref.round_trip(name, merged[start:stop].reshape(1, -1))[0]
    return out


# SPEC F8
@formats
def test_every_range_reads_what_the_whole_reads(name: str) -> None:
    x = np.random.default_rng(1).standard_normal(101).astype(np.float32)
    buffer = quantize(x, name)
    whole = ref.round_trip(name, x.reshape(1, -1))[0]
    assert np.array_equal(dequantize(buffer), whole)
    for offset in range(102):
        for length in range(102 - offset):
            got = buffer.read(offset, length)
            assert np.array_equal(got, whole[offset : offset + length])
    assert np.array_equal(buffer.read(), whole)
    assert np.array_equal(buffer.read(33), whole[33:])


# SPEC F8
@formats
def test_random_writes_against_the_model(name: str) -> None:
    rng = np.random.default_rng(2)
    for size in (1, 31, 32, 33, 64, 100, 257):
        x = rng.standard_normal(size).astype(np.float32)
        buffer = quantize(x, name)
        model = buffer.to_float32()
        for _ in range(scaled(60, 15)):
            offset = int(rng.integers(0, size + 1))
            length = int(rng.integers(0, size - offset + 1))
            new = (rng.standard_normal(length) * 10.0 ** rng.integers(-3, 4)).astype(np.float32)
            before, size_of = buffer.data.copy(), group_size(name)
            buffer.write(offset, new)
            model = written(name, model, offset, new)
            assert np.array_equal(buffer.to_float32(), model)
            # groups outside the range keep their bytes
            fresh = FlatQuantized(name, size, data=before)
            first, last = offset // size_of * size_of, -(-(offset + length) // size_of) * size_of
            if length:
                assert np.array_equal(fresh.read(0, first), buffer.read(0, first))
                if last < size:
                    assert np.array_equal(fresh.read(last), buffer.read(last))
            else:
                assert np.array_equal(before, buffer.data)


# SPEC F8
@formats
def test_whole_writes_give_the_bytes_of_quantize(name: str) -> None:
    rng = np.random.default_rng(3)
    for size in (1, 32, 45, 96):
        x = rng.standard_normal(size).astype(np.float32)
        buffer = FlatQuantized(name, size)
        assert not buffer.to_float32().any()
        assert len(buffer) == size and buffer.nbytes == ref.pack_flat(name, x).size
        buffer.write(0, x)
        assert np.array_equal(buffer.data, ref.pack_flat(name, x))
        # piecewise along group edges gives the same
        pieces = FlatQuantized(name, size)
        for at in range(0, size, 32):
            pieces.write(at, x[at : at + 32])
        assert np.array_equal(pieces.data, buffer.data)


# SPEC F8
@formats
@pytest.mark.parametrize(
    ("offset", "length", "position"),
    [(-1, 1, -1), (0, 41, 41), (40, 1, 41), (41, 0, 41), (39, 2, 41), (5, -1, 4),
     (2**63, 1, 2**63), (-(2**70), 1, -(2**70)), (0, 2**63, 2**63)],
)  # fmt: skip
def test_out_of_range_is_an_error_and_changes_nothing(
    name: str, offset: int, length: int, position: int
) -> None:
    buffer = quantize(np.arange(40, dtype=np.float32), name)
    before = buffer.data.copy()
    with pytest.raises(InvalidPositionError) as caught:
        buffer.read(offset, length)
    assert (caught.value.position, caught.value.length) == (position, 40)
    if 0 <= length < 100:
        with pytest.raises(InvalidPositionError):
            buffer.write(offset, np.ones(length, np.float32))
    assert np.array_equal(buffer.data, before)


# SPEC F8
def test_empty_buffers_and_ranges() -> None:
    for name in ref.ALL:
        buffer = quantize(np.zeros((0, 7), np.float32), name)
        assert buffer.nbytes == 0 and buffer.read().size == 0
        assert dequantize(buffer).shape == (0, 7)
        buffer.write(0, np.zeros(0, np.float32))
        with pytest.raises(InvalidPositionError):
            buffer.read(0, 1)


# SPEC F7 F8
@pytest.mark.parametrize("name", ref.QUANTIZED)
def test_non_finite_writes(name: str) -> None:
    x = np.random.default_rng(4).standard_normal(96).astype(np.float32)
    buffer = quantize(x, name)
    before, old = buffer.data.copy(), buffer.to_float32()
    new = np.ones(50, np.float32)
    new[47] = np.nan
    with pytest.raises(NonFiniteError) as caught:
        buffer.write(20, new)
    assert caught.value.index == 47
    assert np.array_equal(buffer.data, before)  # nothing is half written
    buffer.write(33, np.array([np.inf, np.nan, -np.inf], np.float32), on_nonfinite="saturate")
    most = np.abs(np.delete(old[32:64], [1, 2, 3])).max()
    expected = written(name, old, 33, np.array([most, 0, -most], np.float32))
    assert np.array_equal(buffer.to_float32(), expected)
    with pytest.raises(InvalidArgumentError):
        buffer.write(0, new, on_nonfinite="skip")


# SPEC F7
@pytest.mark.parametrize("name", list(ref.DENSE))
def test_float_formats_keep_nan_and_inf(name: str) -> None:
    x = np.array([np.nan, np.inf, -np.inf, -0.0, 1], np.float32)
    buffer = quantize(x, name)
    assert np.array_equal(buffer.to_float32(), x, equal_nan=True)
    buffer.write(4, np.array([np.inf], np.float32))
    assert buffer.read(4)[0] == np.inf


# SPEC F8
def test_the_largest_float_survives_a_write_beside_it() -> None:
    """127 * (max / 127) rounds to Inf in float32; a rewrite must not spread that."""
    x = np.ones(32, np.float32)
    x[0] = MAX
    buffer = quantize(x, "q8")
    with np.errstate(over="ignore"):
        assert buffer.read(0, 1)[0] == np.float32(127) * (MAX / np.float32(127))
    before = buffer.data.copy()
    buffer.write(1, np.zeros(1, np.float32))
    assert np.array_equal(buffer.data, before)


# SPEC F8
@formats
@given(data=st.data())
def test_any_write(name: str, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 100))
    offset = data.draw(st.integers(0, size))
    length = data.draw(st.integers(0, size - offset))
    values = st.floats(-1e4, 1e4, width=32)
    x = np.array(data.draw(st.lists(values, min_size=size, max_size=size)), np.float32)
    new = np.array(data.draw(st.lists(values, min_size=length, max_size=length)), np.float32)
    buffer = quantize(x, name)
    old = buffer.to_float32()
    buffer.write(offset, new)
    assert np.array_equal(buffer.to_float32(), written(name, old, offset, new))


def test_sources_of_writes() -> None:
    x = np.random.default_rng(5).standard_normal((2, 6, 4)).astype(np.float32)
    for view in (x[:, ::2].T, x.astype(np.float16), x.astype(ml_dtypes.bfloat16)):
        buffer = FlatQuantized("q8", 60)
        buffer.write(7, view)
        expected = FlatQuantized("q8", 60)
        expected.write(7, np.array(view, order="C").astype(np.float32).reshape(-1))
        assert np.array_equal(buffer.data, expected.data)
    for bad in (x.astype(np.float64), [1.0], x.astype(np.int32), None):
        with pytest.raises(FormatError):
            buffer.write(0, bad)  # type: ignore[arg-type]
    for bad_offset in (1.0, "0", None, True):
        with pytest.raises(InvalidArgumentError):
            buffer.write(bad_offset, x)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError):
            buffer.read(bad_offset, 1)  # type: ignore[arg-type]


# SPEC F9
def test_sizes() -> None:
    for name, nbytes in {"q8": 36, "q4": 20, "q8_0": 34, "q4_0": 18, "q4_1": 20}.items():
        for groups in (1, 2, 3, 1000):
            assert FlatQuantized(name, 32 * groups).nbytes == groups * nbytes
            assert FlatQuantized(name, 32 * groups - 31).nbytes == groups * nbytes
    assert FlatQuantized("bf16", 33).nbytes == 66


def test_adopted_bytes() -> None:
    x = np.random.default_rng(6).standard_normal(50).astype(np.float32)
    buffer = quantize(x, "q4")
    again = FlatQuantized("q4", 50, data=buffer.data)
    assert again.data is buffer.data
    assert np.array_equal(again.to_float32(), buffer.to_float32())
    for bad in (np.zeros(41, np.uint8), np.zeros(39, np.uint8), np.zeros((40, 1), np.uint8),
                np.zeros(80, np.uint8)[::2]):  # fmt: skip
        with pytest.raises(ShapeError):
            FlatQuantized("q4", 50, data=bad)
    frozen = np.zeros(40, np.uint8)
    frozen.flags.writeable = False
    with pytest.raises(ShapeError, match="writeable"):
        FlatQuantized("q4", 50, data=frozen)
    for wrong in (np.zeros(40, np.int8), bytes(40)):
        with pytest.raises(FormatError):
            FlatQuantized("q4", 50, data=wrong)  # type: ignore[arg-type]


def test_foreign_bytes_cannot_poison_a_write() -> None:
    """A scale of NaN in adopted bytes reads as NaN; a write into the group makes it finite."""
    buffer = FlatQuantized("q8", 32, data=np.full(36, 0xFF, np.uint8))
    assert np.isnan(buffer.to_float32()).all()
    buffer.write(3, np.array([2.0], np.float32))
    assert buffer.to_float32().tolist() == [0] * 3 + [2] + [0] * 28


@pytest.mark.parametrize("count", [-1, 2**60, 1.5, "3", None, True])
def test_bad_counts(count: object) -> None:
    with pytest.raises(InvalidArgumentError):
        FlatQuantized("q8", count)  # type: ignore[arg-type]


def test_memory_that_cannot_be_had() -> None:
    with pytest.raises(StorageMemoryError):
        FlatQuantized("float32", 2**48)


def test_copies_and_names() -> None:
    buffer = quantize(np.ones((2, 20), np.float32), "q4_1")
    assert repr(buffer) == "<FlatQuantized q4_1: 40 values, 40 bytes>"
    for again in (pickle.loads(pickle.dumps(buffer)), copy.deepcopy(buffer)):
        assert np.array_equal(again.to_float32(), buffer.to_float32())
        again.write(0, np.zeros(40, np.float32))
        assert buffer.to_float32().all()


# SPEC 7: what native code trusts cannot be replaced from outside.
def test_what_a_buffer_is_made_of_is_fixed() -> None:
    x = np.arange(64, dtype=np.float32)
    buffer = quantize(x.reshape(2, 32), "q8")
    kept = buffer.data.copy()
    for name, value in {
        "num_values": 10**9, "data": np.zeros(1, np.uint8), "format": buffer.format,
        "nbytes": 1, "shape": (10**9,),
    }.items():  # fmt: skip
        with pytest.raises(AttributeError):
            setattr(buffer, name, value)
    assert (buffer.num_values, buffer.shape, buffer.nbytes) == (64, (2, 32), 72)
    assert np.array_equal(buffer.data, kept)


# SPEC 7
def test_bytes_that_change_their_form_are_refused() -> None:
    values = np.ones(64, np.float32)
    data = np.zeros(72, np.uint8)
    buffer = FlatQuantized("q8", 64, data)
    data.flags.writeable = False
    with pytest.raises(ShapeError, match="writeable"):
        buffer.write(0, values)
    assert not buffer.to_float32().any()  # it can still be read
    data.flags.writeable = True
    data.resize(10, refcheck=False)
    for call in (lambda: buffer.write(0, values), buffer.read, buffer.to_float32):
        with pytest.raises(ShapeError, match="72 contiguous"):
            call()


def test_a_buffer_written_with_its_own_values() -> None:
    buffer = quantize(np.arange(8, dtype=np.float32), "float32")
    buffer.write(1, buffer.data.view(np.float32)[:7])
    assert buffer.to_float32().tolist() == [0, 0, 1, 2, 3, 4, 5, 6]


def test_a_read_only_pickled_buffer_can_be_written() -> None:
    buffers: list[pickle.PickleBuffer] = []
    buffer = quantize(np.ones((2, 4), np.float32), "q8")
    text = pickle.dumps(buffer, protocol=5, buffer_callback=buffers.append)
    again = pickle.loads(text, buffers=[bytes(b.raw()) for b in buffers])
    again.write(0, np.full(8, 2, np.float32))
    assert again.shape == (2, 4) and again.to_float32().min() == 2 and buffer.read().max() == 1
