"""The format table as Python sees it."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError

import ml_dtypes
import numpy as np
import pytest

from pagedcache._native.arithmetic import format_table, status_table
from pagedcache.errors import FormatError, InvalidArgumentError
from pagedcache.formats import FORMATS, KVFormat, get_format, get_policy

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
}


# SPEC F4 F5 F9a F10
def test_the_table() -> None:
    assert list(FORMATS) == list(TABLE)
    for name, (code, group_size, group_nbytes, packing, dtype) in TABLE.items():
        fmt = FORMATS[name]
        assert (fmt.name, fmt.code, fmt.group_size) == (name, code, group_size)
        assert (fmt.group_nbytes, fmt.packing, fmt.dtype) == (group_nbytes, packing, dtype)
        assert fmt.is_quantized == (packing != "dense")
        assert (fmt.group_axis, fmt.open_format) == ("row", -1)


def test_native_tables_are_complete() -> None:
    assert [row["code"] for row in format_table()] == list(range(len(TABLE)))
    names = {name for name, _ in status_table().values()}
    assert {"PC_OK", "PC_E_NONFINITE", "PC_E_FORMAT", "PC_E_RANGE", "PC_E_MEMORY"} <= names
    assert list(status_table()) == list(range(len(names)))


# SPEC F9
def test_figures() -> None:
    q8, q4 = get_format("q8"), get_format("q4")
    assert (q8.bytes_per_value, q4.bytes_per_value) == (1.125, 0.625)
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
        for again in (pickle.loads(pickle.dumps(fmt)), copy.deepcopy(fmt)):
            assert again == fmt and hash(again) == hash(fmt)
    assert len(set(FORMATS.values())) == len(TABLE)
    with pytest.raises(FrozenInstanceError):
        FORMATS["q8"].code = 9  # type: ignore[misc]
    assert isinstance(FORMATS["q8"], KVFormat)
