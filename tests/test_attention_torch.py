"""``attend`` beside PyTorch: its own attention over gathered K and V, its tensors in and out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from attendkit import FORMATS, Shape, bound, scattered
from attentionkit import Options, attend
from devicekit import cpu_memory, host

torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = cpu_memory("tensors of the CPU")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def sdpa(q: Any, k: Any, v: Any, **options: Any) -> np.ndarray:
    """torch's attention of [tokens, heads, dim] arrays, as float32 [tokens, heads, dim]."""
    group = q.shape[1] // k.shape[1]
    heads_first = [torch.from_numpy(np.ascontiguousarray(x, np.float32)).transpose(0, 1)[None]
                   for x in (q, np.repeat(k, group, 1), np.repeat(v, group, 1))]  # fmt: skip
    out = torch.nn.functional.scaled_dot_product_attention(*heads_first, **options)
    return out[0].transpose(0, 1).numpy()


@pytest.mark.parametrize("fmt", FORMATS)
def test_against_scaled_dot_product_attention(fmt: str) -> None:
    """Both may be off by the bound, so together by twice that."""
    rng = np.random.default_rng(0)
    for dim, group, layout in ((64, 4, "HND"), (80, 3, "NHD"), (128, 1, "HND")):
        shape = Shape(fmt, layout, heads=2, group=group, dim=dim)
        with shape.cache(700) as cache:
            (seq,) = scattered(cache, shape, rng, [600])
            k, v = (host(x) for x in seq.gather(0, dtype=np.float32))
            for n in (1, 30):
                q = shape.queries(rng, n)
                causal = torch.ones(n, 600, dtype=torch.bool).tril(600 - n)
                want = sdpa(q, k, v, attn_mask=causal)
                off = np.abs(host(cache.attend(0, q, seq)) - want)
                exact, _ = attend(q, k, v, Options())
                assert (off <= 2 * bound(q, k, v, exact, Options())).all(), off.max()
                full = host(cache.attend(0, q, seq, causal=False, scale=0.2))
                exact, _ = attend(q, k, v, Options(causal=False, scale=0.2))
                off = np.abs(full - sdpa(q, k, v, scale=0.2))
                limits = bound(q, k, v, exact, Options(causal=False, scale=0.2))
                assert (off <= 2 * limits).all(), off.max()


@pytest.mark.parametrize("name", ("float32", "float16", "bfloat16"))
def test_tensors_in_and_out(name: str) -> None:
    """A tensor gives tensors, with the bits that an array gives."""
    rng = np.random.default_rng(1)
    shape = Shape("q8", heads=2, group=2, dim=64)
    dtype = getattr(torch, name)
    with shape.cache(60) as cache:
        (seq,) = scattered(cache, shape, rng, [50])
        q = torch.from_numpy(shape.queries(rng, 3)).to(dtype)
        bits = torch.int32 if name == "float32" else torch.int16
        as_array = np.asarray(q.view(bits))
        import ml_dtypes

        kind = ml_dtypes.bfloat16 if name == "bfloat16" else name
        want, want_lse = cache.attend(0, as_array.view(kind), seq, return_lse=True)
        out, lse = cache.attend(0, q, seq, return_lse=True)
        assert out.dtype == dtype and out.shape == q.shape and lse.dtype == torch.float32
        assert np.asarray(out.view(bits)).tobytes() == want.tobytes()
        assert lse.numpy().tobytes() == want_lse.tobytes()

        turned = q.transpose(0, 1).contiguous().transpose(0, 1)  # another order in memory
        assert torch.equal(cache.attend(0, turned, seq), out)
        flat = cache.attend(0, q.reshape(3, -1), seq)
        assert flat.shape == (3, 4 * 64) and torch.equal(flat.view(3, 4, 64), out)
        gradient = q.float().requires_grad_().to(dtype)
        assert torch.equal(cache.attend(0, gradient, seq), out)

        target = torch.zeros(3, 4, 128, dtype=dtype)[..., ::2]
        assert cache.attend(0, q, seq, out=target) is target
        assert torch.equal(target, out)
        array = np.empty_like(want)
        assert cache.attend(0, q, seq, out=array) is array
        assert array.tobytes() == want.tobytes()


def test_sinks_and_integers_as_tensors() -> None:
    rng = np.random.default_rng(2)
    shape = Shape("float32", heads=1, group=2, dim=32)
    with shape.cache(60) as cache:
        seqs = scattered(cache, shape, rng, [20, 30])
        q = torch.from_numpy(shape.queries(rng, 3))
        sinks = np.array([0.5, -1.0], np.float32)
        want = cache.attend(0, q, seqs, q_lens=[1, 2], lengths=[18, 30], starts=[0, 4],
                            sinks=sinks, scale=1 / math.sqrt(32), window=9)  # fmt: skip
        got = cache.attend(
            0, q, seqs, q_lens=torch.tensor([1, 2]), lengths=torch.tensor([18, 30]),
            starts=torch.tensor([0, 4]), sinks=torch.from_numpy(sinks),
            scale=torch.tensor(1 / math.sqrt(32)), window=torch.tensor(9),
        )  # fmt: skip
        assert torch.equal(got, want)


def test_refused_tensors() -> None:
    import pagedcache as pc

    shape = Shape("float32", heads=1, group=1, dim=32)
    with shape.cache(60) as cache:
        (seq,) = scattered(cache, shape, np.random.default_rng(3), [20])
        q = torch.ones(1, 1, 32)
        for bad in (q.double(), q.int(), q.to_sparse()):
            with pytest.raises(pc.FormatError):
                cache.attend(0, bad, seq)
        with pytest.raises(pc.DeviceError):
            cache.attend(0, q.to("meta"), seq)
        with pytest.raises(pc.ShapeError):
            cache.attend(0, q, seq, out=q)
        with pytest.raises(pc.FormatError):
            cache.attend(0, q, seq, out=torch.ones(1, 1, 32, requires_grad=True))
