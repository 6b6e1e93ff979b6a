"""Tensors of torch: rows in, slabs adopted, rows out; and devices that are not the CPU."""

from __future__ import annotations

import sys
import types
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cachekit import make_cache
from devicekit import host

import pagedcache as pc
from pagedcache.foreign import as_ndarray, is_tensor

K = np.arange(6 * 4, dtype=np.float32).reshape(6, 1, 4) / 8 - 1  # exact in bfloat16
V = -K - 3


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed")


def tensor(torch: Any, array: np.ndarray, name: str = "bfloat16") -> Any:
    return torch.from_numpy(array.copy()).to(getattr(torch, name))


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("fmt", ["float32", "bfloat16", "q8"])
def test_rows_in(torch: Any, name: str, fmt: str) -> None:
    given = tensor(torch, K, name), tensor(torch, V, name)
    alike = [x.astype(ml_dtypes.bfloat16 if name == "bfloat16" else name) for x in (K, V)]
    with make_cache(8, fmt=fmt) as cache, cache.open() as seq, cache.open() as other:
        seq.append(0, *given)
        other.append(0, *alike)
        for ours, theirs in zip(seq.gather(0), other.gather(0), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        # strided, part of a larger tensor, in need of a gradient, and flat [n, heads * head_dim]
        wide = torch.zeros(6, 2, 8, dtype=given[0].dtype)
        wide[:, 1:, ::2] = given[0]
        third = cache.open()
        graded = given[1].clone().requires_grad_().reshape(6, 4)
        cache.store(0, wide[:, 1:, ::2], graded, third.prepare(6))
        for ours, theirs in zip(third.gather(0, 0, 6), other.gather(0), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert wide[:, 1:, ::2].equal(given[0])


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_slabs_adopted(torch: Any, layout: str) -> None:
    shape = (4, 1, 4, 4) if layout == "HND" else (4, 4, 1, 4)
    both = torch.zeros(4, 2, *shape[1:], dtype=torch.bfloat16)
    slabs = both[:, 0], both[:, 1]
    with make_cache(4, fmt="bfloat16", layout=layout, storage=([slabs[0]], [slabs[1]])) as cache:
        seq = cache.open()
        seq.append(0, tensor(torch, K), tensor(torch, V))
        table = seq.block_table.tolist()
        rows = slabs[1][table].float().numpy()
        rows = rows.swapaxes(1, 2) if layout == "HND" else rows
        np.testing.assert_array_equal(rows.reshape(-1, 1, 4)[:6], V)
        np.testing.assert_array_equal(seq.gather(0)[0].astype(np.float32), K)
        # the engine's own kernel writes; the cache reads it
        slabs[0][table[0]] = 7
        assert (seq.gather(0, 0, 4)[0].astype(np.float32) == 7).all()


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_rows_out(torch: Any, name: str) -> None:
    with make_cache(8, fmt="q8_0") as cache, cache.open() as seq:
        seq.append(0, K, V)
        out = tuple(torch.empty(6, 1, 4, dtype=getattr(torch, name)) for _ in range(2))
        got = seq.gather(0, out=out)
        assert got[0] is out[0] and got[1] is out[1]
        want = seq.gather(0, dtype=name)
        for ours, theirs in zip(out, want, strict=True):
            np.testing.assert_array_equal(ours.float().numpy(), host(theirs).astype(np.float32))
        wrong = torch.empty(6, 1, 4, dtype=torch.float64)
        with pytest.raises(pc.FormatError):
            seq.gather(0, out=(wrong, wrong.clone()))
        with pytest.raises(pc.ShapeError):
            seq.gather(0, out=(out[0][:5], out[1]))


def test_tensors_that_must_not_be_written(torch: Any) -> None:
    graded = [torch.zeros(4, 1, 4, 4, dtype=torch.bfloat16, requires_grad=True) for _ in "kv"]
    with pytest.raises(pc.FormatError, match=r"detach\(\)"):
        make_cache(4, fmt="bfloat16", storage=(graded[:1], graded[1:]))
    with make_cache(8, fmt="bfloat16") as cache, cache.open() as seq:
        seq.append(0, K, V)
        with pytest.raises(pc.FormatError, match=r"detach\(\)"):
            seq.gather(0, 0, 4, out=(graded[0][0], graded[1][0].clone()))


def test_tensors_that_are_no_rows(torch: Any) -> None:
    for bad in (
        torch.zeros(6, 1, 4, dtype=torch.float64),
        torch.zeros(6, 1, 4, dtype=torch.int16),
        torch.zeros(6, 1, 4, dtype=torch.complex64),
        torch.eye(4).to_sparse(),
    ):
        with make_cache(8) as cache, cache.open() as seq, pytest.raises(pc.FormatError):
            seq.append(0, bad, K)
    with make_cache(8) as cache:
        with cache.open() as seq, pytest.raises(pc.DeviceError, match="(?i)cpu.*meta"):
            seq.append(0, torch.zeros(6, 1, 4, device="meta"), K)
        with pytest.raises(pc.DeviceError, match="(?i)cpu.*meta"):
            cache.open(torch.zeros(6, dtype=torch.int64, device="meta"))
        assert cache.open(torch.arange(6)).tokens.tolist() == list(range(6))
        with pytest.raises(pc.InvalidArgumentError):
            cache.open(torch.zeros(6, dtype=torch.bfloat16))


class Device:
    type = "cuda"

    def __str__(self) -> str:
        return "cuda:0"


class FakeTensor:
    """What a torch tensor on a GPU shows; its memory must not be asked for."""

    device, requires_grad = Device(), False

    def __len__(self) -> int:
        return 6

    def __array__(self, *args: object, **kwargs: object) -> np.ndarray:
        raise AssertionError("the memory of a GPU was asked for")


# SPEC 7
def test_tensors_of_a_gpu_are_refused_by_both_names(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTensor()
    assert not is_tensor(fake)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(Tensor=FakeTensor))
    assert is_tensor(fake) and not is_tensor(K)
    with make_cache(8, device="cpu") as cache, cache.open() as seq:
        seq.append(0, K, V)
        for call in (
            lambda: seq.append(0, fake, V),
            lambda: seq.append(0, K, fake),
            lambda: cache.store(0, fake, fake, np.zeros(6, np.int64)),
            lambda: seq.gather(0, out=(fake, fake)),
            lambda: cache.open(fake),
            lambda: make_cache(4, storage=([fake], [fake])),
            lambda: as_ndarray(fake, "x"),
        ):
            with pytest.raises(pc.DeviceError, match="cpu.*cuda:0"):
                call()
        assert seq.num_written == 6


def test_other_memory_of_a_gpu() -> None:
    class OnGpu:
        __cuda_array_interface__ = {"version": 3}

    with make_cache(8, device="cpu") as cache, cache.open() as seq:
        seq.append(0, K, V)
        for call in (
            lambda: seq.append(0, OnGpu(), V),
            lambda: seq.gather(0, out=(OnGpu(), OnGpu())),
            lambda: make_cache(4, storage=([OnGpu()], [OnGpu()])),
        ):
            with pytest.raises(pc.DeviceError, match="CUDA"):
                call()
