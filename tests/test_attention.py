"""``cache.attend`` against float64 over gathered K and V: formats, shapes, batches, options.

The device is the tests' (see devicekit); bounds are derived in ``attendkit.bound``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attendkit import DTYPES, FORMATS, Shape, assert_attends, check_batch, fill, scattered
from attentionkit import Options, attend
from cachekit import by_profile
from devicekit import ON_CPU, host
from storagekit import ARRANGEMENTS

import pagedcache as pc

# Cycled through by steps without a common factor, so that few runs meet most pairs.
BLOCK_SIZES = (16, 1, 3, 32, 64)
DIMS = (64, 128, 33, 80, 32, 96, 256, 48, 160)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12)
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 64, 65, 100, 255, 300, 511, 512, 513, 700)
QUERIES = (1, 1, 2, 1, 5, 1, 17, 3, 70)


def run(shape: Shape, lengths: Any, q_lens: Any, dtype: Any, options: Options, seed: int) -> None:
    rng = np.random.default_rng(seed)
    q_lens = [min(n, length) for n, length in zip(q_lens, lengths, strict=True)]
    with shape.cache(sum(lengths)) as cache:
        seqs = scattered(cache, shape, rng, lengths)
        q = shape.queries(rng, sum(q_lens), dtype)
        check_batch(cache, seqs, q, q_lens, options, what=(shape, lengths, q_lens, dtype, options))


@pytest.mark.parametrize("layout", ("HND", "NHD"))
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_format_and_layout(fmt: str, layout: str) -> None:
    """Mixed batches of decode and prefill over many shapes."""
    start = FORMATS.index(fmt) * 7 + (layout == "NHD") * 3
    for turn in range(start, start + by_profile(4, 18)):
        shape = Shape(
            fmt,
            layout,
            BLOCK_SIZES[turn % len(BLOCK_SIZES)],
            heads=1 + turn % 3,
            group=GROUPS[turn * 2 % len(GROUPS)],
            dim=DIMS[turn * 4 % len(DIMS)],
        )
        lengths = [LENGTHS[(turn * 5 + 3 * i) % len(LENGTHS)] for i in range(3)]
        q_lens = [QUERIES[(turn + 2 * i) % len(QUERIES)] for i in range(3)]
        run(shape, lengths, q_lens, DTYPES[turn % 3], Options(), turn)


@pytest.mark.parametrize("k_format", FORMATS)
def test_k_and_v_in_different_formats(k_format: str) -> None:
    """Each format of V is read in the order of its own bytes, whatever K's is."""
    for v_format in FORMATS:
        shape = Shape((k_format, v_format), heads=2, group=4, dim=64, block_size=32)
        run(shape, [90, 40], [1, 12], DTYPES[0], Options(), 5)


@pytest.mark.parametrize("dim", (*range(1, 10), 16, 24, 31, 63, 65, 112, 192, 255, 257, 320))
def test_any_head_dim(dim: int) -> None:
    if dim > 256 and not ON_CPU:
        pytest.skip("a GPU's kernel keeps results in registers: 256 at most")
    for fmt in ("float32", "bfloat16", "q8", "q4", "q4_1", "q4k"):
        shape = Shape(fmt, heads=1, group=3, dim=dim, block_size=16)
        run(shape, [50, 20], [1, 9], DTYPES[0], Options(), dim)


@pytest.mark.parametrize("group", range(1, 17))
def test_any_group_of_query_heads(group: int) -> None:
    for fmt, q_lens in (("q8", [1, 1]), ("float16", [1, 3]), ("q4k", [7, 2])):
        run(Shape(fmt, heads=2, group=group), [40, 70], q_lens, DTYPES[0], Options(), group)


@pytest.mark.parametrize("length", (1, 511, 512, 513, 1000, 1024, 1025, 2047, 4096, 4097))
def test_long_contexts(length: int) -> None:
    """Around the sizes at which keys are cut into chunks and parts."""
    for fmt, dtype in (("float32", DTYPES[0]), ("q4_1", DTYPES[2]), ("q4k", DTYPES[1])):
        run(Shape(fmt, heads=1, group=2, dim=32), [length], [1], dtype, Options(), length)


@pytest.mark.parametrize("fmt", FORMATS)
def test_folded_scales_lose_no_digits(fmt: str) -> None:
    """Beyond the bound, which no error comes near: on ordinary rows a result is off by a few
    roundings, as float32 attention over dequantised rows would be."""
    rng = np.random.default_rng(10)
    shape = Shape(fmt, heads=2, group=4, dim=128)
    with shape.cache(1000) as cache:
        (seq,) = scattered(cache, shape, rng, [1000])
        for n in (1, 16):
            q = shape.queries(rng, n)
            k, v = (host(x) for x in seq.gather(0, dtype=np.float32))
            want, _ = attend(q, k, v, Options())
            off = np.abs(host(cache.attend(0, q, seq)) - want).max()
            assert off <= 2.0**-20 * np.abs(v).max(), (n, off)


def whole_numbers(fmt: str, rng: Any, n: int, heads: int, dim: int) -> tuple[Any, int]:
    """V of whole numbers that every format holds exactly, as each group's scale is 1."""
    low, high = {"q8": (-127, 127), "q8_0": (-127, 127), "q4": (-7, 7), "q4_0": (-8, 7),
                 "q4_1": (0, 15), "q4k": (0, 15)}.get(fmt, (-9, 9))  # fmt: skip
    v = rng.integers(low, high + 1, (n, heads, dim)).astype(np.float32)
    if fmt == "q4k":  # groups along the tokens
        v[::16] = low
        v[1::16] = high
    else:
        v[..., ::32] = low
        v[..., 1::32] = high
    return v, high


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_value_counts_once(fmt: str) -> None:
    """With equal weights a result is a mean: of whole numbers, known to the last bit."""
    rng = np.random.default_rng(8)
    shape = Shape((fmt, fmt), heads=2, group=2, dim=64, block_size=16)
    n = 4096 + 16
    v, _ = whole_numbers(fmt, rng, n, 2, 64)
    with shape.cache(n) as cache:
        seq = cache.open()
        seq.append(0, v, v)
        seq.commit(n)
        np.testing.assert_array_equal(host(seq.gather(0, dtype=np.float32)[1]), v)
        q = shape.queries(rng, 3)
        for length in (1, 2, 100, 511, 512, 513, 1024, 2050, 4096, n):
            options: dict[str, Any] = {"scale": 0.0, "causal": False, "lengths": [length]}
            out, lse = cache.attend(0, q[: min(3, length)], [seq], q_lens=[min(3, length)],
                                    return_lse=True, **options)  # fmt: skip
            total = v[:length].astype(np.float64).sum(0)
            mean = np.repeat(total / length, 2, 0).astype(np.float32)
            # one division, by its inverse: two roundings
            np.testing.assert_allclose(host(out), np.tile(mean, (len(out), 1, 1)), rtol=2.0**-23)
            np.testing.assert_allclose(host(lse), np.log(length), rtol=2.0**-22, atol=2.0**-24)


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_key_counts_once(fmt: str) -> None:
    """Each channel of the result is the sum of few weights: that of one key is seen."""
    rng = np.random.default_rng(9)
    shape = Shape((fmt, "float32"), heads=1, group=4, dim=64, block_size=32)
    n = by_profile(1040, 4097)
    with shape.cache(n) as cache:
        seq = cache.open()
        k, _ = shape.rows(rng, n)
        v = np.zeros((n, 1, 64), np.float32)
        v[np.arange(n), 0, np.arange(n) % 64] = 1.0
        seq.append(0, k, v)
        seq.commit(n)
        check_batch(cache, [seq, seq], shape.queries(rng, 21), [1, 20], what=fmt)


def test_more_parts_than_are_kept_apart() -> None:
    """A context so long that a part has several chunks (by design 32 parts of 512 keys)."""
    length = by_profile(17_000, 34_000, 34_000)
    shape = Shape("q8", heads=1, group=1, dim=32, block_size=64)
    for n in (1, 3):
        run(shape, [length], [n], DTYPES[0], Options(), n)


OPTIONS = (
    Options(causal=False),
    Options(window=1),
    Options(window=7),
    Options(window=100),
    Options(window=10**9),
    Options(causal=False, window=20),
    Options(scale=0.0),
    Options(scale=-0.3),
    Options(scale=4.0),
    Options(soft_cap=0.5),
    Options(soft_cap=30.0),
    Options(soft_cap=2.0, window=33, causal=False),
)


@pytest.mark.parametrize("options", OPTIONS, ids=repr)
def test_options(options: Options) -> None:
    for fmt, group, q_lens in (("float32", 1, [1, 40, 9]), ("q4_1", 4, [20, 1, 33])):
        shape = Shape(fmt, heads=2, group=group, dim=64)
        run(shape, [120, 40, 600], q_lens, DTYPES[0], options, 3)


@pytest.mark.parametrize("fmt", ("bfloat16", "q4k"))
def test_sinks_and_starts(fmt: str) -> None:
    rng = np.random.default_rng(0)
    shape = Shape(fmt, heads=2, group=3, dim=64)
    with shape.cache(300) as cache:
        seqs = scattered(cache, shape, rng, [130, 60, 9])
        sinks = rng.normal(0, 5, 6).astype(np.float32)
        sinks[2] = -np.inf  # takes no part
        sinks[3] = 80.0  # takes nearly all
        q = shape.queries(rng, 1 + 20 + 9)
        for starts in ([0, 0, 0], [100, 13, 4], [130, 45, 9]):
            for options in (Options(sinks=sinks), Options(sinks=sinks, window=30), Options()):
                check_batch(cache, seqs, q, [1, 20, 9], options, starts=starts)


def test_a_query_without_keys_gives_zeros() -> None:
    shape = Shape("q8", heads=1, group=2, dim=32)
    with shape.cache(64) as cache:
        (seq,) = scattered(cache, shape, np.random.default_rng(0), [20])
        q = np.ones((20, 2, 32), np.float32)
        out, lse = cache.attend(0, q, seq, starts=[15], return_lse=True)
        assert (host(out)[:15] == 0).all() and np.isneginf(host(lse)[:15]).all()
        assert (host(out)[15:] != 0).any((1, 2)).all() and np.isfinite(host(lse)[15:]).all()
        sinks = np.array([1.5, -2.0], np.float32)
        out, lse = cache.attend(0, q, seq, starts=[15], sinks=sinks, return_lse=True)
        assert (host(out)[:15] == 0).all()
        np.testing.assert_allclose(host(lse)[:15], np.tile(sinks, (15, 1)), rtol=1e-6)


@pytest.mark.parametrize("fmt", [name for name, row in pc.FORMATS.items() if row.is_quantized])
@pytest.mark.parametrize("open_blocks", ("float16", "bfloat16"))
def test_open_blocks(fmt: str, open_blocks: str) -> None:
    """Sealed and open blocks in one context, and contexts that are open altogether."""
    for layout, block_size in (("HND", 16), ("NHD", 32), ("HND", 3)):
        shape = Shape(fmt, layout, block_size, group=4, dim=80, open_blocks=open_blocks)
        run(shape, [200, 31, 2], [1, 9, 2], DTYPES[1], Options(), block_size)


def test_forks_and_shared_prefixes() -> None:
    """Sequences that share blocks, and copies on write behind them, in one batch."""
    rng = np.random.default_rng(1)
    shape = Shape("q4_1", heads=2, group=2, dim=64, layers=2)
    with shape.cache(400) as cache:
        first = cache.open(range(70))
        fill(cache, first, shape, rng, 70)
        second = cache.open([*range(70), 7, 8, 9])  # the prefix is cached
        assert second.num_cached_tokens >= 64
        fill(cache, second, shape, rng, 73 - second.num_cached_tokens)
        third = second.fork()
        for seq, n in ((second, 5), (third, 40)):
            seq.append_tokens(rng.integers(0, 100, n))
            fill(cache, seq, shape, rng, n)
        third.truncate(90)
        fill(cache, third, shape, rng, 2)
        q = shape.queries(rng, 4 + 2 + 9 + 1)
        for layer in range(2):
            check_batch(cache, [first, second, third, second], q, [4, 2, 9, 1], layer=layer)


@pytest.mark.parametrize("fmt", ("bfloat16", "q4_1", "q4k"))
def test_a_sequence_is_the_same_alone_and_in_a_batch(fmt: str) -> None:
    """To the last bit: how keys are cut does not depend on the neighbours."""
    if not ON_CPU:
        pytest.skip("keys are cut so that the batch fills the GPU")
    rng = np.random.default_rng(2)
    shape = Shape(fmt, heads=2, group=3, dim=64)
    lengths, q_lens = [1500, 3, 700, 64], [1, 3, 40, 1]
    with shape.cache(sum(lengths)) as cache:
        seqs = scattered(cache, shape, rng, lengths)
        q = shape.queries(rng, sum(q_lens))
        together, lse = (host(x) for x in cache.attend(0, q, seqs, q_lens=q_lens, return_lse=True))
        at = 0
        for seq, n in zip(seqs, q_lens, strict=True):
            alone, own = cache.attend(0, q[at : at + n], seq, return_lse=True)
            assert host(alone).tobytes() == together[at : at + n].tobytes()
            assert host(own).tobytes() == lse[at : at + n].tobytes()
            at += n


def test_lengths_shorter_than_what_is_written() -> None:
    rng = np.random.default_rng(3)
    shape = Shape("float16", group=2)
    with shape.cache(100) as cache:
        (seq,) = scattered(cache, shape, rng, [90])
        k, v = (host(x) for x in seq.gather(0, dtype=np.float32))
        for length, n in ((90, 4), (33, 1), (32, 32), (5, 2), (0, 0)):
            q = shape.queries(rng, n)
            out, lse = cache.attend(0, q, [seq], lengths=[length], q_lens=[n], return_lse=True)
            assert_attends(out, lse, q, k[:length], v[:length], Options(), length)


def test_tokens_that_were_stored_and_not_committed() -> None:
    """Engines prepare, store layer by layer, attend, and commit: lengths are theirs to say."""
    rng = np.random.default_rng(4)
    shape = Shape("q8", group=2, layers=2)
    with shape.cache(100) as cache:
        seqs = scattered(cache, shape, rng, [20, 7])
        slots = cache.prepare(seqs, [3, 1])
        rows = [shape.rows(rng, 4) for _ in range(2)]
        q = shape.queries(rng, 4)
        for layer in range(2):
            cache.store(layer, *rows[layer], slots)
            with pytest.raises(pc.InvalidArgumentError, match="not committed"):
                cache.attend(layer, q, seqs, q_lens=[3, 1])
            out, lse = cache.attend(
                layer, q, seqs, q_lens=[3, 1], lengths=[23, 8], return_lse=True
            )
            for i, part in enumerate((slice(0, 3), slice(3, 4))):
                k, v = (host(x) for x in seqs[i].gather(layer, 0, (23, 8)[i], dtype=np.float32))
                args = (host(out)[part], host(lse)[part], q[part], k, v, Options(), (layer, i))
                assert_attends(*args)
        cache.commit(seqs, [3, 1])
        check_batch(cache, seqs, q, [3, 1], layer=1)


def test_default_q_lens() -> None:
    rng = np.random.default_rng(5)
    shape = Shape("float32")
    with shape.cache(60) as cache:
        first, second = scattered(cache, shape, rng, [20, 30])
        q = shape.queries(rng, 2)
        both = host(cache.attend(0, q, [first, second]))
        given = host(cache.attend(0, q, (first, second), q_lens=np.array([1, 1])))
        assert both.tobytes() == given.tobytes()
        all_of_one = host(cache.attend(0, q, first))
        assert all_of_one.tobytes() == host(cache.attend(0, q, [first], q_lens=[2])).tobytes()
        nothing = host(cache.attend(0, q[:0], []))
        assert nothing.shape == (0, 2, 64)
        assert host(cache.attend(0, q[:0], [first], q_lens=[0])).shape == (0, 2, 64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays_of_any_strides(dtype: Any) -> None:
    """Queries and results that lie in memory in any way (CASE C45)."""
    rng = np.random.default_rng(6)
    shape = Shape("q8", heads=2, group=2, dim=32)
    with shape.cache(60) as cache:
        (seq,) = scattered(cache, shape, rng, [40])
        q = shape.queries(rng, 3, dtype)
        want = host(cache.attend(0, q, seq))
        for name, arrange in ARRANGEMENTS.items():
            got = host(cache.attend(0, arrange(q), seq))
            assert got.tobytes() == want.tobytes(), name
            assert got.shape == arrange(q).shape, name


def test_results_into_the_callers_array() -> None:
    rng = np.random.default_rng(7)
    shape = Shape("bfloat16", heads=2, group=2, dim=32)
    with shape.cache(60) as cache:
        (seq,) = scattered(cache, shape, rng, [40])
        q = shape.queries(rng, 3)
        want = host(cache.attend(0, q, seq))
        wide = np.full((6, 4, 64), -1.0, np.float32)
        targets = (np.empty_like(q), wide[::2, :, ::2], wide[::-2, ::-1, 1::2])
        for target in targets:
            assert cache.attend(0, q, seq, out=target) is target
            np.testing.assert_array_equal(target, want)
        flat = np.empty((3, 128), np.float32)
        result, lse = cache.attend(0, q.reshape(3, 128), seq, out=flat, return_lse=True)
        assert result is flat and lse.shape == (3, 4)
        assert flat.tobytes() == want.tobytes()
