"""Rows into blocks by slot mapping: a prefill, and one token for each of many sequences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

import pagedcache

from ..output import note
from . import peers
from .copies import copy_of, stream_timers
from .counts import each_count
from .rows import Options, Row, label, measure
from .timing import Timer, timed

HEADS, HEAD_DIM, BLOCK_SIZE = 8, 128, 16
PREFILL, BATCH = 2048, 256
CALL = "one token of 32 values: the call"
SOURCES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


def make_cache(
    name: str, layout: str, num_tokens: int, device: str = "cpu", num_layers: int = 1
) -> pagedcache.PagedKVCache:
    """A cache with twice the blocks that ``num_tokens`` need, all of which may be open at once."""
    spec = pagedcache.CacheSpec(
        num_layers=num_layers, num_kv_heads=HEADS, head_dim=HEAD_DIM, block_size=BLOCK_SIZE,
        kv_format=name, layout=layout, on_nonfinite="saturate",
    )
    num_blocks = 2 * -(-num_tokens // BLOCK_SIZE)
    return pagedcache.PagedKVCache(
        spec, num_blocks, device=device, partial_block_reuse=0,
        num_open_blocks=num_blocks if spec.has_open_blocks else None,
    )  # fmt: skip


def scattered(cache: pagedcache.PagedKVCache, num_seqs: int, tokens_each: int) -> list[Any]:
    """Sequences whose blocks do not follow one another in the pool."""
    rng = np.random.default_rng(1)
    fillers = [cache.open() for _ in range(cache.num_blocks)]
    for seq in fillers:
        cache.prepare([seq], [cache.spec.block_size])  # a block that takes no open slot
    for i in rng.permutation(len(fillers)):
        fillers[i].free()
    return [
        cache.open(rng.integers(0, 2**32, tokens_each, dtype=np.uint32)) for _ in range(num_seqs)
    ]


def stored_nbytes(cache: pagedcache.PagedKVCache, count: int) -> int:
    """Bytes that ``count`` tokens of one layer take where they are: all in open blocks (a decode
    step) or all in quantised ones (a prefill of whole blocks)."""
    spec = cache.spec
    if cache.stats().open_blocks:
        block = spec.layer_open_block_nbytes("k") + spec.layer_open_block_nbytes("v")
    else:
        block = spec.layer_block_nbytes("k") + spec.layer_block_nbytes("v")
    return count * block // BLOCK_SIZE


def make_rows(count: int, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Random K and V ``[count, HEADS, HEAD_DIM]``."""
    k, v = np.random.default_rng(2).standard_normal((2, count, HEADS, HEAD_DIM), np.float32)
    return k.astype(dtype), v.astype(dtype)


def rows(options: Options) -> Iterator[Row]:
    """Every source dtype into every format and layout, and what a call costs by itself; peers: a
    NumPy scatter, vLLM's CPU op."""
    for name in options.formats:
        for layout in ("HND", "NHD"):
            for source in SOURCES:
                for what, num_seqs, each in (("prefill", 1, PREFILL), ("decode", BATCH, 1)):
                    yield from _one(options, name, layout, source, what, num_seqs, each)
    yield from _call(options)


def _one(
    options: Options, name: str, layout: str, source: Any, what: str, num_seqs: int, each: int
) -> Iterator[Row]:
    # One sequence per decode token, each with a block of its own.
    count = num_seqs * each
    with make_cache(name, layout, num_seqs * max(each, BLOCK_SIZE)) as cache:
        seqs = scattered(cache, num_seqs, each)
        slots = cache.prepare(seqs, [each] * num_seqs)
        k, v = make_rows(count, source)
        cache.store(0, k, v, slots)
        got, _ = seqs[0].gather(0, 0, each, dtype=np.float32)
        error = np.abs(got - k[:each].astype(np.float32)).max()
        if not error < 0.8:  # one step of a 4-bit format for values up to 5
            raise AssertionError(f"store of {name} reads back wrong by {error}: not timed")
        given = k.nbytes + v.nbytes
        moved = given + stored_nbytes(cache, count)
        variant = f"{source.name}, {layout}, {what} {count}"
        for threads in each_count(options.threads):
            timers: dict[str, Timer] = {
                "ours": timed(lambda: cache.store(0, k, v, slots)),
                "copy": copy_of(given, threads),
            }
            if threads == 1 and not cache.spec.k_format.is_quantized:
                timers["numpy"] = _numpy(cache, layout, k, v, np.asarray(slots))
            timers |= _vllm(name, layout, k, v, np.asarray(slots), cache.num_blocks)
            if what == "prefill":
                timers |= stream_timers(moved, threads)
            yield from measure(
                "store", label(variant, threads), name, given, count, timers, options.runs, moved
            )


def _call(options: Options) -> Iterator[Row]:
    """One token of one head of 32 channels: next to nothing but the call itself."""
    spec = pagedcache.CacheSpec(
        num_layers=1, num_kv_heads=1, head_dim=32, block_size=BLOCK_SIZE, kv_format="float32"
    )
    with pagedcache.PagedKVCache(spec, 4) as cache, cache.open() as seq:
        slots = seq.prepare(1)
        k, v = np.random.default_rng(2).standard_normal((2, 1, 1, 32), np.float32)
        cache.store(0, k, v, slots)
        seq.commit(1)
        if not np.array_equal(seq.gather(0, 0, 1)[0], k):
            raise AssertionError("store of one token reads back wrong: not timed")
        timers = {"ours": timed(lambda: cache.store(0, k, v, slots))}
        yield from measure(
            "store", CALL, "float32", k.nbytes + v.nbytes, 1, timers, options.runs
        )


def _numpy(
    cache: pagedcache.PagedKVCache, layout: str, k: np.ndarray, v: np.ndarray, slots: np.ndarray
) -> Timer:
    inner = (HEADS, BLOCK_SIZE) if layout == "HND" else (BLOCK_SIZE, HEADS)
    dtype = cache.spec.k_format.dtype
    slabs = [np.zeros((cache.num_blocks, *inner, HEAD_DIM), dtype) for _ in range(2)]
    blocks, offsets = slots // BLOCK_SIZE, slots % BLOCK_SIZE

    def scatter() -> None:
        for slab, given in zip(slabs, (k, v), strict=True):
            if layout == "HND":
                slab[blocks, :, offsets] = given.astype(dtype, copy=False)
            else:
                slab[blocks, offsets] = given.astype(dtype, copy=False)

    return timed(scatter)


def _vllm(
    name: str, layout: str, k: np.ndarray, v: np.ndarray, slots: np.ndarray, num_blocks: int
) -> dict[str, Timer]:
    """vLLM's CPU cache write; it stores bfloat16 only, and converts other sources first."""
    torch = peers.torch()
    if name != "bfloat16" or layout != "HND" or torch is None or peers.vllm() is None:
        return {}
    from vllm import _custom_ops as ops

    shape = (num_blocks, HEADS, 2 * BLOCK_SIZE, HEAD_DIM)
    slab = torch.zeros(shape, dtype=torch.bfloat16)
    key_cache, value_cache = slab.chunk(2, dim=2)
    given = [_tensor(torch, array) for array in (k, v)]
    where = torch.from_numpy(np.array(slots))

    def write() -> None:
        key, value = (x.to(torch.bfloat16) for x in given)
        ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, where, "vec")

    try:
        write()
    except Exception as error:  # a build without this op
        note(f"peer vllm: its cache write is not used ({type(error).__name__}: {error})")
        return {}
    return {"vllm": timed(write)}


def _tensor(torch: Any, array: np.ndarray) -> Any:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)
