"""Stored bytes stay readable: golden files, written once by tools/write_golden.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import reference_formats as ref

from pagedcache.formats import FORMATS
from pagedcache.spec import CacheSpec
from pagedcache.storage import CpuStorage

GOLDEN = Path(__file__).parent / "golden"
X = np.load(GOLDEN / "inputs.npy")
TOKENS, HEADS, DIM = X.shape


def storage_of(name: str) -> CpuStorage:
    return CpuStorage(CacheSpec(1, HEADS, DIM, TOKENS, k_format=name, v_format="float32"), 1)


def test_every_format_has_its_file_and_no_other() -> None:
    assert {path.stem for path in GOLDEN.glob("*.bin")} == set(FORMATS)


# SPEC F9a F10
@pytest.mark.parametrize("name", list(FORMATS))
def test_golden_bytes(name: str) -> None:
    golden = np.frombuffer((GOLDEN / f"{name}.bin").read_bytes(), np.uint8)
    storage = storage_of(name)
    assert golden.size == storage.spec.layer_block_nbytes("k")
    assert np.array_equal(golden, ref.pack_block(name, "HND", X))  # the independent model agrees
    storage.store(0, *storage.check_rows(0, X, X, TOKENS), np.arange(TOKENS))
    block = storage.block_array(0, "k", 0)
    assert np.array_equal(block.reshape(-1).view(np.uint8), golden)


@pytest.mark.parametrize("name", list(FORMATS))
def test_golden_bytes_read_back(name: str) -> None:
    golden = np.frombuffer((GOLDEN / f"{name}.bin").read_bytes(), np.uint8)
    storage = storage_of(name)
    block = storage.block_array(0, "k", 0, writable=True)
    block.reshape(-1).view(np.uint8)[:] = golden
    got = storage.gather(0, np.zeros(1, np.int32), 0, TOKENS, np.float32)[0]
    if name in ref.BY_CHANNEL:
        expected = ref.round_trip_channels(X)
    else:
        expected = ref.round_trip(name, X.reshape(-1, DIM)).reshape(X.shape)
    assert np.array_equal(got.view(np.uint32), expected.view(np.uint32))
