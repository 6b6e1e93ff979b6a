"""Keys and values made up from tokens, so that any row can be made again and compared."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_PATTERNS = 509  # rows of the pattern table: prime, and small enough for the second-level cache
_TOKEN, _POSITION, _PLANE, _MIX = (
    np.uint32(c) for c in (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)
)


class ValueMaker:
    """Rows that depend on nothing but (token, position, layer, K or V).

    A row is one of 509 random patterns times a factor in 0.5…1.5; which pattern and which factor
    follow from a 32-bit mix of the four. Equal tokens at equal positions give equal rows, in
    whatever request they come, which is what a prefix hit promises.
    """

    def __init__(self, num_kv_heads: int, head_dim: int) -> None:
        rng = np.random.default_rng(0)
        shape = (_PATTERNS, num_kv_heads, head_dim)
        self._patterns = rng.standard_normal(shape, dtype=np.float32)

    def rows(
        self, tokens: NDArray[np.uint32], start: int, layer: int, kind: str
    ) -> NDArray[np.float32]:
        """float32 ``[len(tokens), num_kv_heads, head_dim]`` for tokens from position ``start``.

        ``kind`` is "k" or "v".
        """
        positions = np.arange(start, start + len(tokens), dtype=np.uint32)
        mix = tokens * _TOKEN + positions * _POSITION
        mix += np.uint32((2 * layer + "kv".index(kind)) * int(_PLANE) % 2**32)
        mix ^= mix >> np.uint32(15)
        mix *= _MIX
        mix ^= mix >> np.uint32(13)
        rows = self._patterns.take(mix % np.uint32(_PATTERNS), axis=0)
        factor = np.float32(0.5) + (mix >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)
        rows *= factor[:, None, None]
        return rows
