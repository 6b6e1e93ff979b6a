"""The internal hash of ``PrefixCache``: keyed, and of every prefix in one pass."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from pagedcache._native.hashing import keyed_hash, keyed_prefix_hashes

_PRIME = 2**61 - 1


class PrefixHasher(Protocol):
    """Internal hash of token arrays; need not be free of collisions to be right."""

    def hash(self, tokens: np.ndarray[Any, Any]) -> int:
        """Hash of all ``tokens`` (uint32)."""

    def prefixes(self, tokens: np.ndarray[Any, Any]) -> Sequence[int] | np.ndarray[Any, Any]:
        """``len(tokens) + 1`` hashes: element n is ``hash(tokens[:n])``."""


class KeyedHasher:
    """The default ``PrefixHasher``: a polynomial with secrets of its own.

    ``h_n = (h_{n-1} + token_n + 1) * r`` modulo the prime 2^61 - 1, with secret ``h_0`` and ``r``.
    Two prompts of up to n tokens chosen without knowing them collide with a chance below n / 2^60
    (their difference is a polynomial in ``r`` with at most n + 1 roots), so nobody can choose
    prompts that fill one bucket, as is easy with an unkeyed hash such as FNV.
    """

    def __init__(self) -> None:
        r, start = struct.unpack("<QQ", os.urandom(16))
        self._multiplier = r % (_PRIME - 2) + 2
        self._start = start % _PRIME

    def hash(self, tokens: np.ndarray[Any, Any]) -> int:
        return keyed_hash(tokens, self._multiplier, self._start)

    def prefixes(self, tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        out = np.empty(len(tokens) + 1, np.uint64)
        keyed_prefix_hashes(tokens, self._multiplier, self._start, out)
        return out
