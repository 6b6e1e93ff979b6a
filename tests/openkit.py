"""Tools of the tests of open slots."""

from __future__ import annotations

from typing import Any

import numpy as np
from storagekit import Pair


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


def rows(rng: np.random.Generator, pair: Pair, count: int, dtype: Any = np.float32) -> Any:
    shape = (2, count, pair.spec.num_kv_heads, pair.spec.head_dim)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 7, (*shape[:-1], 1)))
    return x.astype(np.float32).astype(dtype)


def fill_all(pair: Pair, rng: np.random.Generator) -> None:
    """Random rows in every place: sealed blocks whole, open slots in any order."""
    size, count = pair.spec.block_size, pair.storage.num_blocks
    for layer in range(pair.spec.num_layers):
        pair.store_at(layer, *rows(rng, pair, count * size), np.arange(count * size))
        order = rng.permutation(count * size) + count * size
        pair.store_at(layer, *rows(rng, pair, len(order)), order)
