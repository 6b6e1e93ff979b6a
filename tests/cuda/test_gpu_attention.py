"""Attention where emulation shows nothing: tensor cores, copies that are truly under way, CTAs that
run at the same time, contexts as long as they get. Everything here needs a GPU."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from attendkit import FORMATS, Shape
from attentionkit import Options, assert_close
from devicekit import host
from gpukit import on_gpu, streams_of
from profiles import SHORT
from storagekit import BFLOAT16

import pagedcache as pc
from pagedcache.checks.devices import upload

pytestmark = pytest.mark.skipif(
    bool(os.environ.get("PAGEDCACHE_CUDA_EMULATION")),
    reason="only a GPU shows this, and here is its emulation",
)


def filled(shape: Shape, length: int, seed: int = 0) -> tuple[pc.PagedKVCache, pc.Sequence]:
    """A cache with one sequence of random rows, stored from the device."""
    rng = np.random.default_rng(seed)
    cache = on_gpu(
        length // shape.block_size + 16, B=shape.block_size, layers=1, heads=shape.heads,
        dim=shape.dim, fmt=shape.fmt, layout=shape.layout,
    )  # fmt: skip
    seq = cache.open()
    for first in range(0, length, 4096):
        rows = shape.rows(rng, min(4096, length - first))
        seq.append(0, *(upload(part, "cuda:0") for part in rows))
        seq.commit(len(rows[0]))
    return cache, seq


@pytest.mark.parametrize("layout", ("HND", "NHD"))
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_format_on_tensor_cores(cuda: Any, fmt: str, layout: str) -> None:
    """Fragments, rounding and copies as they are emulated: float64 gives the same."""
    rng = np.random.default_rng(1)
    shapes = ((128, 4, 1025), (256, 2, 517), (80, 3, 300), (64, 8, 1000), (96, 1, 65), (33, 5, 130))
    for dim, group, length in shapes[: 3 if SHORT else None]:
        shape = Shape(fmt, layout, heads=2, group=group, dim=dim)
        cache, seq = filled(shape, length)
        with cache:
            k, v = (host(x) for x in seq.gather(0, dtype=np.float32))
            for n, dtype in ((1, np.float32), (3, np.float16), (9, BFLOAT16)):
                q = shape.queries(rng, n, dtype)
                out, lse = cache.attend(0, upload(q, "cuda:0"), seq, return_lse=True)
                assert_close(host(out), host(lse), q, k, v, Options(), (fmt, layout, dim, n))


@pytest.mark.parametrize("fmt", ("bfloat16", "q8_0", "q4k"))
def test_a_context_that_takes_every_cta(cuda: Any, fmt: str) -> None:
    length = 40_000 if SHORT else 300_001
    shape = Shape(fmt, heads=8, group=4, dim=128)
    cache, seq = filled(shape, length)
    with cache:
        q = shape.queries(np.random.default_rng(2), 1)
        out, lse = cache.attend(0, upload(q, "cuda:0"), seq, return_lse=True)
        k, v = (host(x) for x in seq.gather(0, dtype=np.float32))
        assert_close(host(out), host(lse), q, k, v, Options(), fmt)


@pytest.mark.parametrize("fmt", ("float16", "q4_1"))
def test_the_same_bits_again_and_again(cuda: Any, fmt: str) -> None:
    """Parts are added up in their order, whichever CTA is last; nothing is read too early."""
    shape = Shape(fmt, heads=8, group=4, dim=128)
    cache, seq = filled(shape, 10_000)
    with cache:
        q = upload(shape.queries(np.random.default_rng(3), 2), "cuda:0")
        outs = [cache.attend(0, q, seq) for _ in range(200)]
        first = host(outs[0]).tobytes()
        assert all(host(out).tobytes() == first for out in outs[1:])


def test_batches_on_two_streams_at_once(cuda: Any) -> None:
    shape = Shape("q8", heads=4, group=4, dim=64)
    cache, first = filled(shape, 9_000)
    with cache, streams_of(cuda, 2) as streams:
        second = first.fork()
        second.truncate(5_000)
        q = upload(shape.queries(np.random.default_rng(4), 1), "cuda:0")
        want = [host(cache.attend(0, q, seq)).tobytes() for seq in (first, second)]
        outs = [
            (i % 2, cache.attend(0, q, (first, second)[i % 2], stream=streams[i % 2]))
            for i in range(200)
        ]
        cache.synchronize()
        for which, out in outs:
            assert host(out).tobytes() == want[which]


def test_a_batch_of_prompts_and_decode_steps(cuda: Any) -> None:
    shape = Shape("bfloat16", heads=2, group=4, dim=128)
    cache, first = filled(shape, 3_000)
    with cache:
        seqs = [first, first.fork(), first.fork()]
        seqs[1].truncate(700)
        counts = [1, 700, 300]
        rng = np.random.default_rng(5)
        q = shape.queries(rng, sum(counts))
        out, lse = (
            host(x)
            for x in cache.attend(
                0, upload(q, "cuda:0"), seqs, q_lens=counts, window=1000, return_lse=True
            )
        )
        at = 0
        for seq, count in zip(seqs, counts, strict=True):
            k, v = (host(x) for x in seq.gather(0, dtype=np.float32))
            mine = slice(at, at + count)
            at += count
            options = Options(window=1000)
            assert_close(out[mine], lse[mine], q[mine], k, v, options, count)
