"""vLLM's attention over pages on the CPU, called as its own backend calls it (written for 0.32).

Imported only when vLLM is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import ml_dtypes
import numpy as np
import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

BLOCK_SIZE = 32  # a multiple of this is what its vector kernel wants


class Pages:
    """One sequence in pages of ``num_layers`` layers, bfloat16."""

    def __init__(self, k: np.ndarray, v: np.ndarray, num_layers: int) -> None:
        self.length, self.heads, self.dim = k.shape
        self.isa: str = _get_attn_isa(torch.bfloat16, BLOCK_SIZE, self.dim)
        num_blocks = -(-self.length // BLOCK_SIZE)
        rows = [torch.from_numpy(x).to(torch.bfloat16) for x in (k, v)]
        slots = torch.arange(self.length, dtype=torch.int64)
        self.layers = []
        for _ in range(num_layers):
            pages = torch.zeros(
                num_blocks, self.heads, 2 * BLOCK_SIZE, self.dim, dtype=torch.bfloat16
            )
            halves = pages.chunk(2, dim=2)
            ops.cpu_attn_reshape_and_cache(*rows, *halves, slots, self.isa)
            self.layers.append(halves)
        self.table = torch.arange(num_blocks, dtype=torch.int32)[None]

    def decoder(self, q: np.ndarray, threads: int) -> Callable[[], np.ndarray]:
        """Attention of one query, bfloat16 ``[1, heads, dim]``, layer after layer."""
        torch.set_num_threads(threads)
        query = torch.from_numpy(q.view(np.int16)).view(torch.bfloat16)
        out = torch.empty_like(query)
        starts = torch.tensor([0, 1], dtype=torch.int32)
        lengths = torch.tensor([self.length], dtype=torch.int32)
        schedule = ops.cpu_attn_get_scheduler_metadata(
            1, q.shape[1], self.heads, self.dim, lengths, torch.bfloat16, starts, True, -1,
            self.isa, True,
        )
        turns = cycle(self.layers)
        result: Any = out.view(torch.int16).numpy().view(ml_dtypes.bfloat16)

        def run() -> np.ndarray:
            torch.set_num_threads(threads)
            ops.cpu_attention_with_kv_cache(
                query, *next(turns), out, starts, lengths, self.dim**-0.5, True, None, -1,
                self.table, 0.0, schedule, None,
            )
            return result

        return run
