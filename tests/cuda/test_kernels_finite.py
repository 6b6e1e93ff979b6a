"""The kernel that looks for the first NaN or Inf of rows outside the pool."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernelkit import Board, bits
from storagekit import ARRANGEMENTS, DTYPES

from pagedcache._native.rows import find_nonfinite
from pagedcache.formats import get_format

LIES = tuple(name for name in ARRANGEMENTS if name != "flat")


@pytest.fixture
def board(cuda: Any) -> Board:
    return Board(cuda)


def find(board: Board, rows: Any) -> int:
    """The flat index on the device, -1 for none; equal to the CPU's."""
    source, first = board.copy(rows), board.copy(np.zeros(1, np.uint64))
    code = get_format(rows.dtype.name).code
    board.call("pc_cuda_find_nonfinite", source.address, *rows.strides, code, *rows.shape,
               first.address)  # fmt: skip
    first.fetch()
    found = int(first.array[0])
    index = -1 if found == 2**64 - 1 else found
    assert index == find_nonfinite(bits(rows), code)
    return index


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_first_one(board: Board, dtype: Any, lie: str) -> None:
    # SPEC F7  # CASE C45
    rng = np.random.default_rng(4)
    for dim in (1, 12, 33, 64):
        rows = rng.standard_normal((70, 3, dim)).astype(dtype)
        largest = np.finfo(np.float32).max if dtype.itemsize == 4 else 60000
        rows[0] = np.array(largest).astype(dtype)  # finite, its exponent nearly all ones
        assert find(board, ARRANGEMENTS[lie](rows)) == -1
        for at in sorted(rng.integers(0, rows.size, 6).tolist(), reverse=True):
            rows.flat[at] = (np.nan, np.inf, -np.inf)[at % 3]
            assert find(board, ARRANGEMENTS[lie](rows)) == at


@pytest.mark.parametrize("order", ("fwd", "rev", "5"))
def test_any_order_of_threads(board: Board, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PC_EMU_ORDER", order)
    rows = np.full((300, 2, 64), np.nan, np.float16)
    assert find(board, rows) == 0
    rows[:7] = 1
    assert find(board, rows) == 7 * 2 * 64


def test_nothing_to_do(board: Board) -> None:
    assert find(board, np.zeros((0, 2, 64), np.float32)) == -1
