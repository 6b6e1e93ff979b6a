"""Values that no call may accept, and a living cache to try them on."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from cachekit import cached_prompt, fill, make_cache, snapshot

B = 4


class Odd:
    """An object that is nothing in particular."""

    def __repr__(self) -> str:
        return "Odd()"


class BrokenIndex:
    """Claims to be an integer and raises."""

    def __index__(self) -> int:
        raise TypeError("no integer after all")


class World:
    """One cache with all kinds of blocks, and another cache's handles."""

    def __init__(self) -> None:
        self.cache = make_cache(16, B=B, layers=2, max_seq_len=40)
        self.other = make_cache(16, B=B, layers=2)
        cached_prompt(self.cache, range(10, 18))
        self.seq = self.cache.open(range(50, 56), request_id="live")
        fill(self.cache, self.seq, range(1, 7))
        self.twin = self.seq.fork()
        self.gone = self.cache.open(range(60, 63))
        self.gone.free()
        self.stranger = self.other.open(range(50, 56))
        fill(self.other, self.stranger, range(21, 27))
        self.mapping = self.stranger.prepare(1)
        self.rows = np.ones((1, 1, 4), np.float32)

    def shot(self) -> tuple[Any, ...]:
        prompts = [[*range(10, 18), 1]]
        return (
            snapshot(self.cache, self.seq, self.twin, prompts=prompts),
            snapshot(self.other, self.stranger),
        )


NOT_INTEGERS = [None, True, False, 1.0, float("nan"), "1", b"1", [], (), {}, Odd(), 1j,
                np.float32(1), np.bool_(True), np.array([1, 2]), BrokenIndex()]
HUGE = [2**31, 2**40, 2**62, 2**63, 2**64, 10**30]
NEGATIVE = [-1, -(2**31), -(2**63), -(2**64)]
COUNTS = [*NOT_INTEGERS, *HUGE, *NEGATIVE]
LAYERS = [*NOT_INTEGERS, *HUGE, *NEGATIVE, 2]
POSITIONS = [*NOT_INTEGERS, *HUGE, *NEGATIVE]
TOKENS = [None, 5, 1.0, True, "12", b"12", Odd(), {1: 2}, [1.0], [None], ["a"], [True], [-1],
          [2**32], [2**63], [2**64], [[1, 2]], [[1], [2, 3]], [1, [2]], np.array([1.0]),
          np.array([True]), np.array([[1, 2]]), np.array(["a"]), np.array([-1]),
          np.array([2**32], np.int64), np.array([2**63], np.uint64), np.array(5), np.array(None),
          np.array([1, None], object), np.array([1 + 0j]), np.array([1], "M8[s]"),
          np.zeros((0, 2), np.int64), np.array([1], ml_dtypes.bfloat16)]
SALTS = [5, 1.0, True, [], [b"a"], Odd(), "\ud800", {}]
EXTRA = [5, None, "ab", [1], [(1, 2)], [(1, 2, 3)], [(1, 2, None)], [(-1, 2, b"")], [(2, 1, b"")],
         [(1, 1, b"")], [(1.0, 2, b"")], [(0, 2**64, b"")], [(True, 2, b"")], [Odd()],
         [(1, 2, b"", 4)], [("0", 2, b"")]]
SEQS = [None, 5, Odd(), "ab", [None], [5], [Odd()], {1: 2}]
K = np.ones((1, 1, 4), np.float32)
ARRAYS = [None, 5, 1.0, "a", b"a", Odd(), [], [[[1.0, 2.0, 3.0, 4.0]]], np.float32(1),
          K.astype(np.float64), K.astype(np.int8), K.astype(np.complex64), K.astype(object),
          K[0, 0], K[0, 0, 0], K[None], K[..., :3], np.ones((1, 2, 4), np.float32),
          np.ones((1, 5), np.float32), np.ones((2, 2, 2, 2), np.float32),
          np.ma.masked_array(K, mask=True)]
SLOTS = [None, 5, 1.0, "a", Odd(), [1.0], [None], [True], [[0]], ["a"], [0, 1], [],
         [-2], [64], [2**31], [2**40], [2**63 - 1], [2**63], [2**64], [-(2**63)],
         np.array([0.5]), np.array([[0]]), np.array([2**63], np.uint64), np.array([True])]
DTYPES = ["float64", "int8", np.float64, "q8", "no such", 5, Odd(), np.dtype("i4"), object]
