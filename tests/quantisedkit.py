"""A cache of transformers whose keys and values go through the slow models of the formats."""

from __future__ import annotations

from typing import Any

import numpy as np
import reference_formats as reference
import torch
from transformers import DynamicCache

# What ``kv_format`` means where it means two formats.
V_FORMATS = {"q4k": "q4_1"}


class Quantised(DynamicCache):
    """K and V as tests/reference_formats.py would give them back.

    With a format by channel each pass must fill whole blocks.
    """

    def __init__(self, kv_format: str, block_size: int) -> None:
        super().__init__()
        self.formats = kv_format, V_FORMATS.get(kv_format, kv_format)
        self.block = block_size

    def update(self, k: Any, v: Any, *args: Any, **options: Any) -> Any:
        k, v = (
            read_back(x, name, self.block) for x, name in zip((k, v), self.formats, strict=True)
        )
        return super().update(k, v, *args, **options)


def read_back(x: Any, name: str, block_size: int) -> Any:
    """``[1, heads, tokens, dim]`` stored and read by the reference."""
    heads, tokens, dim = x.shape[1:]
    rows = x[0].transpose(0, 1).contiguous().numpy()  # [tokens, heads, dim]
    if name in reference.BY_CHANNEL:
        blocks = rows.reshape(tokens // block_size, block_size, heads, dim)
        back = np.stack([reference.round_trip_channels(block) for block in blocks])
    else:
        back = reference.round_trip(name, rows.reshape(-1, dim))
    return torch.from_numpy(back.reshape(rows.shape)).transpose(0, 1)[None]
