"""The plain read that benchmarks measure others by reads every byte once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernelkit import Board


@pytest.fixture
def board(cuda: Any) -> Board:
    return Board(cuda)


@pytest.mark.parametrize("order", ("fwd", "rev"))
def test_the_sum_of_all_words(board: Board, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PC_EMU_ORDER", order)
    rng = np.random.default_rng(0)
    for words in (0, 2, 510, 512, 4096, 50_002):
        values = rng.integers(0, 2**64, words + 2, np.uint64)
        source, total = board.copy(values), board.copy(np.full(1, 7, np.uint64))
        board.call("pc_cuda_read", source.address, 8 * words, total.address)
        total.fetch()
        assert total.array[0] == values[:words].sum(dtype=np.uint64), words
