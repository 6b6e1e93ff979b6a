"""Stored bytes stay readable: golden files, written once by tools/write_golden.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import reference_formats as ref

from pagedcache._native.arithmetic import block_geometry, decode, encode, row_address
from pagedcache.formats import FORMATS

GOLDEN = Path(__file__).parent / "golden"
X = np.load(GOLDEN / "inputs.npy")
TOKENS, HEADS, DIM = X.shape


def addresses(code: int, nbytes: int) -> dict[tuple[int, int], tuple[int, int]]:
    return {
        (token, head): row_address(code, 0, HEADS, TOKENS, DIM, nbytes, 0, head, token)
        for token in range(TOKENS)
        for head in range(HEADS)
    }


def test_every_format_has_its_file_and_no_other() -> None:
    assert {path.stem for path in GOLDEN.glob("*.bin")} == set(FORMATS)


# SPEC F9a F10
@pytest.mark.parametrize("name", list(FORMATS))
def test_golden_bytes(name: str) -> None:
    code = FORMATS[name].code
    golden = np.frombuffer((GOLDEN / f"{name}.bin").read_bytes(), np.uint8)
    assert golden.size == block_geometry(code, 0, HEADS, TOKENS, DIM)["block_nbytes"]
    assert np.array_equal(golden, ref.pack_block(name, "HND", X))  # the independent model agrees
    block = np.zeros_like(golden)
    for (token, head), (data, scales) in addresses(code, golden.size).items():
        row = np.ascontiguousarray(X[token, head])
        assert encode(code, row, block[data:], scales - data, 0) == 0
    assert np.array_equal(block, golden)


@pytest.mark.parametrize("name", list(FORMATS))
def test_golden_bytes_read_back(name: str) -> None:
    code = FORMATS[name].code
    golden = np.frombuffer((GOLDEN / f"{name}.bin").read_bytes(), np.uint8)
    for (token, head), (data, scales) in addresses(code, golden.size).items():
        row = np.empty(DIM, np.float32)
        decode(code, golden[data:], scales - data, row)
        expected = ref.round_trip(name, X[token, head][None])[0]
        assert np.array_equal(row.view(np.uint32), expected.view(np.uint32))
