"""The format table as Python sees it."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pagedcache._native import arithmetic as native
from pagedcache._native.arithmetic import format_table, status_table
from pagedcache._native.rows import Slabs, find_nonfinite
from pagedcache.arithmetic import FlatQuantized, quantize
from pagedcache.errors import FormatError, InvalidArgumentError, ShapeError
from pagedcache.formats import FORMATS, KVFormat, get_format, get_policy
from pagedcache.spec import CacheSpec

# name: code, values per group, bytes per group, packing, dtype
TABLE = {
    "float32": (0, 1, 4, "dense", np.float32),
    "float16": (1, 1, 2, "dense", np.float16),
    "bfloat16": (2, 1, 2, "dense", ml_dtypes.bfloat16),
    "q8": (3, 32, 36, "planar", np.uint8),
    "q4": (4, 32, 20, "planar", np.uint8),
    "q8_0": (5, 32, 34, "interleaved", np.uint8),
    "q4_0": (6, 32, 18, "interleaved", np.uint8),
    "q4_1": (7, 32, 20, "interleaved", np.uint8),
    "q4k": (8, 32, 20, "planar", np.uint8),
}

DENSE = [name for name, row in TABLE.items() if row[3] == "dense"]


# SPEC F4 F5 F9a F10
def test_the_table() -> None:
    assert list(FORMATS) == list(TABLE)
    for name, (code, group_size, group_nbytes, packing, dtype) in TABLE.items():
        fmt = FORMATS[name]
        assert (fmt.name, fmt.code, fmt.group_size) == (name, code, group_size)
        assert (fmt.group_nbytes, fmt.packing, fmt.dtype) == (group_nbytes, packing, dtype)
        assert fmt.is_quantized == (packing != "dense")
        by_channel = name == "q4k"  # SPEC F6: its groups run along the tokens of a block
        assert fmt.group_axis == ("tokens" if by_channel else "row")
        assert fmt.open_format == (1 if by_channel else -1)
        assert fmt.default_open_format is (FORMATS["float16"] if by_channel else None)
        assert fmt.v_partner is (FORMATS["q4_1"] if by_channel else fmt)


def test_native_tables_are_complete() -> None:
    assert [row["code"] for row in format_table()] == list(range(len(TABLE)))
    names = {name for name, _ in status_table().values()}
    assert {"PC_OK", "PC_E_NONFINITE", "PC_E_FORMAT", "PC_E_RANGE", "PC_E_MEMORY"} <= names
    assert list(status_table()) == list(range(len(names)))


# SPEC F9
def test_figures() -> None:
    q8, q4 = get_format("q8"), get_format("q4")
    assert (q8.bytes_per_value, q4.bytes_per_value) == (1.125, 0.625)
    assert get_format("q4k").bytes_per_value == 0.625  # in blocks of 32 tokens
    assert f"{q8.reduction_vs_float32:.2f} {q4.reduction_vs_float32:.1f}" == "3.56 6.4"
    assert f"{q8.reduction_vs_16bit:.2f} {q4.reduction_vs_16bit:.1f}" == "1.78 3.2"
    assert get_format("float16").reduction_vs_float32 == 2
    assert get_format("float32").reduction_vs_16bit == 0.5


def test_names_and_aliases() -> None:
    for alias, name in {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}.items():
        assert get_format(alias) is FORMATS[name]
    for name, fmt in FORMATS.items():
        assert get_format(name) is fmt and get_format(fmt) is fmt
        assert str(fmt) == name and repr(fmt) == f"KVFormat('{name}')"


@pytest.mark.parametrize("bad", ["q5", "Q8", "", "float64", None, 3, 1.0, [], np.float16, b"q8"])
def test_unknown_formats(bad: object) -> None:
    with pytest.raises(FormatError) as caught:
        get_format(bad)  # type: ignore[arg-type]
    assert all(name in str(caught.value) for name in TABLE)


def test_policies() -> None:
    assert (get_policy("raise"), get_policy("saturate")) == (0, 1)
    for bad in ("Raise", "", None, 0, {}):
        with pytest.raises(InvalidArgumentError, match="'raise' or 'saturate'"):
            get_policy(bad)  # type: ignore[arg-type]


def test_formats_are_values() -> None:
    for fmt in FORMATS.values():
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            assert pickle.loads(pickle.dumps(fmt, protocol)) is fmt
        assert copy.copy(fmt) is fmt and copy.deepcopy(fmt) is fmt
    assert len(set(FORMATS.values())) == len(TABLE)
    with pytest.raises(FrozenInstanceError):
        FORMATS["q8"].code = 9  # type: ignore[misc]
    assert isinstance(FORMATS["q8"], KVFormat)


def made_by_hand(**changes: Any) -> KVFormat:
    """A format that is not a row of the table, got past the constructor."""
    made = object.__new__(KVFormat)
    q8 = FORMATS["q8"]
    for field in dataclasses.fields(q8):
        object.__setattr__(made, field.name, changes.get(field.name, getattr(q8, field.name)))
    return made


# SPEC 7: native code trusts the numbers of a format, so there are no others than the table's.
def test_there_are_no_other_formats() -> None:
    for make in (
        lambda: KVFormat(),
        lambda: KVFormat("q8", 99, 32, 32, 4, "row", "planar", -1),
        lambda: dataclasses.replace(FORMATS["q8"], code=99),
    ):
        with pytest.raises(FormatError, match="made by hand"):
            make()
    with pytest.raises(TypeError):
        FORMATS["q9"] = FORMATS["q8"]  # type: ignore[index]
    for fake in (made_by_hand(), made_by_hand(code=99), object.__new__(KVFormat)):
        for use in (
            get_format,
            lambda x: quantize(np.ones(4, np.float32), x),
            lambda x: FlatQuantized(x, 4),
            lambda x: CacheSpec(1, 1, 32, kv_format=x),
            lambda x: CacheSpec(1, 1, 32, k_format=x),
            lambda x: CacheSpec(1, 1, 32).replace(v_format=x),
        ):
            with pytest.raises(FormatError, match="another KVFormat"):
                use(fake)


# SPEC 7: the native doors are importable, and refuse what would leave an array.
@pytest.mark.parametrize("code", [-1, len(TABLE), 99, 2**31 - 1, -(2**31)])
def test_native_doors_refuse_unknown_codes(code: int) -> None:
    values, data = np.ones(64, np.float32), np.zeros(4096, np.uint8)
    slab, rows = np.zeros((2, 4096), np.uint8), np.zeros((1, 1, 32), np.uint32)
    good = Slabs([np.zeros((2, 128), np.uint8)], 0, 0, 1, 1, 32)
    for call in (
        lambda: native.encode(code, values, data, 0, 0),
        lambda: native.decode(code, data, 0, values),
        lambda: native.flat_read(code, data, 0, 3, values),
        lambda: native.flat_write(code, data, 0, 100, 3, values, 0),
        lambda: native.block_geometry(code, 0, 1, 1, 32),
        lambda: native.row_address(code, 0, 1, 1, 32, 4096, 0, 0, 0),
        lambda: Slabs([slab], code, 0, 1, 1, 32),
        lambda: Slabs([slab[:, :128]], 0, 0, 1, 1, 32, [slab], code),
        lambda: good.store(0, rows, code, np.zeros(1, np.int64), 0),
        lambda: good.load(0, np.zeros(1, np.int32), 0, rows, code),
        lambda: find_nonfinite(rows, code),
    ):
        with pytest.raises(FormatError):
            call()
    assert not data.any() and not slab.any()


@pytest.mark.parametrize("name", TABLE)
def test_native_doors_refuse_what_the_bytes_do_not_hold(name: str) -> None:
    buffer = FlatQuantized(name, 100)
    code, size, at = buffer.format.code, buffer.nbytes, buffer._scale_offset
    data, short = buffer.data, buffer.data[:-1]
    values, many = np.ones(100, np.float32), np.ones(300, np.float32)
    huge = 2**63 - 1
    for call in (
        lambda: native.encode(code, values, short, at, 0),
        lambda: native.encode(code, many, data, at, 0),
        lambda: native.encode(code, values, data, size + 1, 0),
        lambda: native.encode(code, values, data, -1, 0),
        lambda: native.decode(code, short, at, values),
        lambda: native.decode(code, data, huge, values),
        lambda: native.flat_read(code, data, at, 100 if name in DENSE else 128, values),
        lambda: native.flat_read(code, data, at, -1, values),
        lambda: native.flat_read(code, data, at, huge, values),
        lambda: native.flat_write(code, data, at, huge, 0, values, 0),
        lambda: native.flat_write(code, data, at, 100, 1, values, 0),
        lambda: native.flat_write(code, data, at, 100, huge, values, 0),
        lambda: native.flat_write(code, data, at, -1, 0, values, 0),
        lambda: native.flat_write(code, short, at, 100, 0, values, 0),
    ):
        with pytest.raises(ShapeError):
            call()
    assert not data.any()


@pytest.mark.parametrize(
    "geometry",
    [(2, 1, 1, 32), (-1, 1, 1, 32), (0, 0, 1, 32), (0, 1, 0, 32), (0, 1, 1, 0), (1, -1, 1, 32),
     (0, 2**31, 1, 32), (0, 2**30, 2**30, 2**30), (1, 2**63 - 1, 1, 1)],
)  # fmt: skip
def test_native_doors_refuse_geometries_that_no_block_has(geometry: tuple[int, ...]) -> None:
    for call in (
        lambda: native.block_geometry(0, *geometry),
        lambda: native.row_address(0, *geometry, 128, 0, 0, 0),
        lambda: Slabs([np.zeros((2, 128), np.uint8)], 0, *geometry),
    ):
        with pytest.raises(InvalidArgumentError):
            call()
