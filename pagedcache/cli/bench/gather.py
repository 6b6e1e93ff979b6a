"""Rows out of scattered blocks, contiguous and in token order."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from . import peers
from .copies import copy_of, stream_timers
from .counts import each_count
from .rows import Options, Row, label, measure
from .store import BLOCK_SIZE, HEAD_DIM, HEADS, make_cache, make_rows, scattered
from .timing import Timer, timed

TOKENS = 2048


def rows(options: Options) -> Iterator[Row]:
    """Every format and layout into float32 (and float16 as it is); peers: NumPy and torch."""
    for name in options.formats:
        for layout in ("HND", "NHD"):
            yield from _one(options, name, layout)


def _one(options: Options, name: str, layout: str) -> Iterator[Row]:
    with make_cache(name, layout, TOKENS) as cache:
        (seq,) = scattered(cache, 1, TOKENS)
        k, v = make_rows(TOKENS, np.float32)
        seq.append(0, k, v)
        seq.commit(TOKENS)
        outputs = [np.dtype(np.float32)]
        if not cache.spec.k_format.is_quantized and name != "float32":
            outputs.append(cache.spec.k_format.dtype)
        for dtype in outputs:
            out = np.empty_like(k, dtype), np.empty_like(v, dtype)
            seq.gather(0, out=out)
            error = np.abs(out[0].astype(np.float32) - k).max()
            if not error < 0.8:  # one step of a 4-bit format for values up to 5
                raise AssertionError(f"gather of {name} is wrong by {error}: not timed")
            size = 2 * k.nbytes
            given = int(2 * k.size * cache.spec.k_format.bytes_per_value)
            moved = given + out[0].nbytes + out[1].nbytes
            variant = f"{layout}→{dtype.name}, {TOKENS} tokens"
            for threads in each_count(options.threads):
                timers: dict[str, Timer] = {
                    "ours": timed(partial(seq.gather, 0, out=out)),
                    "copy": copy_of(size, threads),
                }
                if not cache.spec.k_format.is_quantized:
                    table = np.array(seq.block_table)
                    others = _peers(name, layout, out, table, cache.num_blocks)
                    if threads > 1:
                        del others["numpy"]
                    timers |= others
                timers |= stream_timers(moved, threads)
                yield from measure(
                    "gather", label(variant, threads), name, size, TOKENS, timers, options.runs,
                    moved,
                )


def _peers(
    name: str, layout: str, out: tuple[np.ndarray, np.ndarray], table: np.ndarray, num_blocks: int
) -> dict[str, Timer]:
    import ml_dtypes

    inner = (HEADS, BLOCK_SIZE) if layout == "HND" else (BLOCK_SIZE, HEADS)
    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    slabs = [np.ones((num_blocks, *inner, HEAD_DIM), dtype) for _ in range(2)]

    def take() -> None:
        for slab, target in zip(slabs, out, strict=True):
            blocks = slab[table]
            ordered = blocks.swapaxes(1, 2) if layout == "HND" else blocks
            np.copyto(target.reshape(ordered.shape), ordered, casting="unsafe")

    timers = {"numpy": timed(take)}
    torch = peers.torch()
    if torch is None:
        return timers
    kind = getattr(torch, name)
    tensors = [torch.ones((num_blocks, *inner, HEAD_DIM), dtype=kind) for _ in range(2)]
    ids = torch.from_numpy(table.astype(np.int64))
    narrow = out[0].dtype != np.float32
    results = [torch.empty(o.shape, dtype=kind if narrow else torch.float32) for o in out]

    def select() -> None:
        for tensor, result in zip(tensors, results, strict=True):
            blocks = tensor.index_select(0, ids)
            ordered = blocks.transpose(1, 2) if layout == "HND" else blocks
            result.view(ordered.shape).copy_(ordered)

    return {**timers, "torch": timed(select)}
