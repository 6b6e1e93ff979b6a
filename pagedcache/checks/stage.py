"""The stage of a check: a small cache of random shape, and what its rows must read back as."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import pagedcache

from .bounds import block_bound, error_bound
from .channels import readings
from .compare import equal, same_bits, same_values
from .devices import host, upload
from .reference import Floats, read_back
from .registry import DEVICE, CheckFailed, Context

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
        if self.spec.has_open_blocks:
            options.setdefault("num_open_blocks", num_blocks)
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
        """What rows of K ("k") or V ("v") read back as where no block is ever open."""
        return read_back(self.formats[kind], rows)

    def same(
        self, kind: str, got: NDArray[Any], rows: Floats, start: int, what: str
    ) -> None:
        """What was read from position ``start`` on, of any float dtype, is what ``rows``, the
        sequence's from its beginning, are stored as.

        With open blocks that is one of few things, block by block: the rows as the open block's
        format has them, or what they were quantised to; which of them is judged elsewhere.
        """
        stop = start + len(got)
        if not self.spec.has_open_blocks:
            same_bits(got, self.stored(kind, rows[start:stop]).astype(got.dtype), what)
            return
        held, size = str(self.spec.open_blocks), self.block_size
        for block in range(start // size * size, stop, size):
            part = slice(max(start, block), min(stop, block + size))
            inside = slice(part.start - block, part.stop - block)
            read = got[part.start - start : part.stop - start]
            choices = readings(self.formats[kind], held, rows[block : block + size], size)
            for choice in choices[1:]:
                if same_values(read, choice[inside].astype(got.dtype)):
                    break
            else:
                want = choices[0][inside].astype(got.dtype)
                same_bits(read, want, f"{what}, block {block // size}")

    def bound(self, kind: str, rows: Floats) -> Floats:
        """Largest error of each value of a sequence's rows ``[tokens, heads, head_dim]``."""
        if not self.spec.has_open_blocks:
            return error_bound(self.formats[kind], rows)
        return block_bound(self.formats[kind], str(self.spec.open_blocks), rows, self.block_size)

    def reread(self, seq: Any, k: Floats, v: Floats, first: int) -> tuple[Floats, Floats]:
        """K and V of the sequence's tokens, those from ``first`` on as they read now.

        To be given for tokens that were read back into an open block, before others join them.
        """
        if not self.spec.has_open_blocks:
            return k, v
        n = k.shape[1]
        read = [
            self.gather(seq, layer, first, n, dtype=np.float32)
            for layer in range(self.num_layers)
        ]
        now = [np.stack([pair[index] for pair in read]) for index in (0, 1)]
        return (
            np.concatenate((k[:, :first], now[0]), axis=1),
            np.concatenate((v[:, :first], now[1]), axis=1),
        )

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
            equal((len(got_k), len(got_v)), (stop - start,) * 2, "tokens read")
            self.same("k", got_k, k[layer], start, f"layer {layer} K")
            self.same("v", got_v, v[layer], start, f"layer {layer} V")

    def reads_as(self, seq: Any, k: Floats, v: Floats, start: int, stop: int) -> bool:
        """Whether :meth:`expect` is content."""
        try:
            self.expect(seq, k, v, start, stop)
        except CheckFailed:
            return False
        return True

    def whole(self) -> None:
        """The bookkeeping agrees with itself."""
        self.cache.check()

    def unused(self) -> None:
        """Every block has come back."""
        self.whole()
        equal(self.cache.num_free_blocks, self.cache.num_blocks, "free blocks at the end")
