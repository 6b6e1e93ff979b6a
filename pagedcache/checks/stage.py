"""The stage of a check: a small cache of random shape, and what its rows must read back as."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import pagedcache

from .compare import equal, same_bits
from .devices import host, upload
from .reference import Floats, read_back
from .registry import DEVICE, Context

# (num_kv_heads, head_dim): whole groups, padded last groups, one head, many heads.
_SHAPES = ((3, 64), (2, 80), (1, 33), (8, 32), (2, 96), (5, 16))
_BLOCK_SIZES = (4, 8, 16)


class Stage:
    """A cache of 2 layers with a shape drawn from the context's random numbers."""

    def __init__(self, context: Context, num_blocks: int = 32, **options: Any) -> None:
        rng = context.rng
        self.rng = rng
        self.device, self.arrays = context.device, context.arrays
        self.formats = {"k": context.k_format, "v": context.v_format}
        self.num_layers = 2
        self.num_kv_heads, self.head_dim = _SHAPES[int(rng.integers(len(_SHAPES)))]
        self.block_size = int(rng.choice(_BLOCK_SIZES))
        self.spec = pagedcache.CacheSpec(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            k_format=context.k_format,
            v_format=context.v_format,
            layout=context.layout,
        )
        options.setdefault("partial_block_reuse", 0)
        self.cache = pagedcache.PagedKVCache(
            self.spec, num_blocks, device=context.device, **options
        )

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cache.close()

    def tokens(self, count: int) -> NDArray[np.uint32]:
        """Random token ids."""
        return self.rng.integers(0, 2**32, count, dtype=np.uint32)

    def rows(self, count: int) -> tuple[Floats, Floats]:
        """Random K and V, float32 ``[num_layers, count, num_kv_heads, head_dim]``.

        Amplitudes differ by token, so that a row that is read with a neighbour's scale shows.
        """
        shape = (self.num_layers, count, self.num_kv_heads, self.head_dim)
        amplitude = np.exp2(self.rng.integers(-6, 7, (2, 1, count, 1, 1))).astype(np.float32)
        k, v = self.rng.standard_normal((2, *shape), dtype=np.float32) * amplitude
        return k, v

    def given(self, rows: NDArray[Any]) -> Any:
        """Rows as they are handed to the cache: themselves, or copied to the device's memory."""
        return upload(rows, self.device) if self.arrays == DEVICE else rows

    def append(self, seq: Any, k: Floats, v: Floats) -> None:
        """Append the rows at every layer."""
        for layer in range(self.num_layers):
            seq.append(layer, self.given(k[layer]), self.given(v[layer]))

    def fill(self, seq: Any) -> tuple[Floats, Floats]:
        """Append random rows for all opened tokens that are not computed yet, and commit them."""
        count = seq.num_tokens - seq.seq_len
        k, v = self.rows(count)
        self.append(seq, k, v)
        seq.commit(count)
        return k, v

    def stored(self, kind: str, rows: Floats) -> Floats:
        """What rows of K ("k") or V ("v") read back as."""
        return read_back(self.formats[kind], rows)

    def gather(self, seq: Any, layer: int, *args: Any, **options: Any) -> list[NDArray[Any]]:
        """``seq.gather`` of the same arguments, in the CPU's memory."""
        return [host(part) for part in seq.gather(layer, *args, **options)]

    def expect(
        self, seq: Any, k: Floats, v: Floats, start: int = 0, stop: int | None = None
    ) -> None:
        """Every layer of a sequence gathers exactly what rows ``start`` to ``stop`` store as."""
        stop = k.shape[1] if stop is None else stop
        for layer in range(self.num_layers):
            got_k, got_v = self.gather(seq, layer, start, stop, dtype=np.float32)
            same_bits(got_k, self.stored("k", k[layer, start:stop]), f"layer {layer} K")
            same_bits(got_v, self.stored("v", v[layer, start:stop]), f"layer {layer} V")

    def whole(self) -> None:
        """The bookkeeping agrees with itself."""
        self.cache.check()

    def unused(self) -> None:
        """Every block has come back."""
        self.whole()
        equal(self.cache.num_free_blocks, self.cache.num_blocks, "free blocks at the end")
