"""Rows of zeros and ones that spell a number: quantised to 4 bits, alone or among others, read back
through an open block or not, they round to the same number, so that every token says what it is."""

from __future__ import annotations

from typing import Any

import numpy as np
from devicekit import host

HEADS, DIM = 2, 32
_BITS = np.arange(DIM - 1)


def following(mark: int, token: int) -> int:
    """The number of a token behind the one of number ``mark``; 1 is the start."""
    return (mark * 1_103_515_245 + token * 7_919 + 12_345) % (2**31 - 1)


def marks_of(tokens: list[int]) -> list[int]:
    """The numbers of all tokens of a prompt: each names everything before it."""
    marks, mark = [], 1
    for token in tokens:
        mark = following(mark, token)
        marks.append(mark)
    return marks


def bit_rows(marks: list[int], layer: int) -> tuple[np.ndarray, np.ndarray]:
    """float32 K and V ``[n, 2, 32]``: the bits, their complement; V is negative."""
    bits = (np.asarray(marks, np.int64)[:, None] >> _BITS & 1).astype(np.float32)
    k = np.ones((len(marks), HEADS, DIM), np.float32)
    k[:, 0, :-1], k[:, 1, :-1] = bits, 1 - bits
    k *= np.float32(4) ** layer
    return k, -k


def spelt(rows: Any, layer: int) -> list[int]:
    """The numbers of K or V rows that were read back."""
    x = np.abs(host(rows).astype(np.float32)) / np.float32(4) ** layer
    bits = np.rint(x)
    assert (np.abs(x - bits) < 0.1).all()
    first, second = bits[:, 0, :-1], 1 - bits[:, 1, :-1]
    np.testing.assert_array_equal(first, second)
    return (first.astype(np.int64) << _BITS).sum(axis=1).tolist()
