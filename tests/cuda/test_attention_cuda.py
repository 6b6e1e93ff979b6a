"""``cache.attend`` on a GPU: arrays there and on the host, streams, tables that are kept, refusals.

What it computes is judged by tests/test_attention.py on this device, and by the kernel's tests.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from attendkit import Shape, assert_attends, fill, scattered
from attentionkit import Options
from cachekit import refused
from devicekit import host
from gpukit import Calls, Capture, finish, on_gpu, streams_of
from kernelattention import items_of
from torch_stand_in import TorchStandIn

import pagedcache as pc
from pagedcache._cuda.arrays import DeviceArray
from pagedcache._cuda.attention import Call, Slab
from pagedcache.checks.devices import upload
from pagedcache.errors import CudaCallError, DeviceError
from pagedcache.formats import get_format

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SHAPE = Shape("q8", heads=2, group=3, dim=64, layers=2)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def gpu_cache(shape: Shape, num_tokens: int = 400) -> pc.PagedKVCache:
    return on_gpu(
        num_tokens // shape.block_size + 16, B=shape.block_size, layers=shape.layers,
        heads=shape.heads, dim=shape.dim, fmt=shape.fmt, layout=shape.layout,
        open_blocks=shape.open_blocks,
    )  # fmt: skip


@pytest.fixture
def cache(cuda: Any) -> Iterator[pc.PagedKVCache]:
    with gpu_cache(SHAPE) as made:
        yield made


def on_device(array: np.ndarray) -> DeviceArray:
    return upload(array, "cuda:0")


def check(seq: pc.Sequence, layer: int, q: np.ndarray, out: Any, lse: Any = None) -> None:
    k, v = (host(x) for x in seq.gather(layer, dtype=np.float32))
    assert_attends(host(out), None if lse is None else host(lse), q, k, v, Options(), layer)


# ---- arrays --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (np.float32, np.float16, BFLOAT16), ids=str)
def test_queries_and_results_on_the_device(cache: Any, rng: Any, dtype: Any) -> None:
    (seq,) = scattered(cache, SHAPE, rng, [150])
    q = SHAPE.queries(rng, 3, dtype)
    out, lse = cache.attend(1, on_device(q), seq, return_lse=True)
    for array, want in ((out, np.dtype(dtype)), (lse, np.dtype(np.float32))):
        assert isinstance(array, DeviceArray)
        assert (array.device, array.dtype) == ("cuda:0", want)
    assert lse.shape == (3, 6)
    check(seq, 1, q, out, lse)
    flat = cache.attend(1, on_device(q.reshape(3, -1)), seq)
    assert flat.shape == (3, 6 * 64)
    assert host(flat).tobytes() == host(out).tobytes()


def test_queries_and_results_of_any_strides(cache: Any, rng: Any) -> None:
    # CASE C45
    (seq,) = scattered(cache, SHAPE, rng, [90])
    q = SHAPE.queries(rng, 4)
    want = host(cache.attend(0, on_device(q), seq))
    wide = np.zeros((8, 12, 128), np.float32)
    for view in (np.s_[::2, ::2, ::2], np.s_[::-2, ::-2, 1::2], np.s_[4:, 6:, :64]):
        given, target = wide.copy(), wide.copy()
        given[view] = q
        source, goal = on_device(given)[view], on_device(target)[view]
        assert cache.attend(0, source, seq, out=goal) is goal
        np.testing.assert_array_equal(host(goal), want)


def test_queries_of_the_host_wait_for_the_result(cache: Any, emulated: Any, rng: Any) -> None:
    emulated.set("async", 1)
    (seq,) = scattered(cache, SHAPE, rng, [70])
    q = SHAPE.queries(rng, 2)
    out, lse = cache.attend(0, q, seq, return_lse=True)
    assert type(out) is type(lse) is np.ndarray
    check(seq, 0, q, out, lse)
    wide = np.full((4, 6, 128), -1, np.float32)
    target = wide[::2, :, ::2]
    assert cache.attend(0, q, seq, out=target) is target
    np.testing.assert_array_equal(target, out)
    assert (wide[1::2] == -1).all() and (wide[:, :, 1::2] == -1).all()


def test_sinks_on_the_device_and_on_the_host(cache: Any, rng: Any) -> None:
    (seq,) = scattered(cache, SHAPE, rng, [70])
    q, sinks = SHAPE.queries(rng, 2), np.linspace(-3, 3, 6).astype(np.float32)
    k, v = (host(x) for x in seq.gather(0, dtype=np.float32))
    for queries in (q, on_device(q)):
        for given in (sinks, on_device(sinks), sinks.astype(np.float16)):
            out, lse = cache.attend(0, queries, seq, sinks=given, return_lse=True)
            here = np.asarray(given, np.float32)
            assert_attends(host(out), host(lse), q, k, v, Options(sinks=here), "sinks")


def test_tensors_of_torch(
    cuda: Any, cache: Any, rng: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor of the GPU as q makes tensors of the results."""
    torch = TorchStandIn(cuda)
    monkeypatch.setitem(sys.modules, "torch", torch)
    (seq,) = scattered(cache, SHAPE, rng, [70])
    q = SHAPE.queries(rng, 2, BFLOAT16)
    tensor = torch.Tensor(on_device(q))
    out, lse = cache.attend(0, tensor, seq, return_lse=True)
    assert type(out) is type(lse) is torch.Tensor
    assert (out.dtype, lse.dtype) == ("torch.bfloat16", "torch.float32")
    check(seq, 0, q, out.numpy(), lse.numpy())
    target = torch.Tensor(on_device(np.zeros_like(q)))
    assert cache.attend(0, tensor, seq, out=target) is target
    assert target.numpy().tobytes() == out.numpy().tobytes()


# ---- refusals ------------------------------------------------------------------------------------


def test_what_is_refused_changes_nothing(cuda: Any, emulated: Any, cache: Any, rng: Any) -> None:
    # CASE C49: typed errors that name both places
    emulated.set("devices", 2)
    (seq,) = scattered(cache, SHAPE, rng, [50])
    q = SHAPE.queries(rng, 2)
    here, out = on_device(q), on_device(np.full_like(q, -7))
    there, read_only = upload(q, "cuda:1"), out.with_owner(out, readonly=True)
    other_sinks = on_device(np.zeros(6, np.float16))
    wrong: list[tuple[dict[str, Any], Any, str]] = [
        ({"q": here, "out": np.zeros_like(q)}, DeviceError, "the host"),
        ({"q": q, "out": out}, DeviceError, "the host"),
        ({"q": there}, DeviceError, "cuda:1"),
        ({"q": here, "out": upload(q, "cuda:1")}, DeviceError, "cuda:1"),
        ({"q": on_device(q.astype(np.float64))}, pc.FormatError, "float64"),
        ({"q": on_device(q[:, :5].copy())}, pc.ShapeError, "num_q_heads"),
        ({"q": on_device(q[0, 0].copy())}, pc.ShapeError, "num_q_heads"),
        ({"q": here, "out": on_device(q[:1].copy())}, pc.ShapeError, "out"),
        ({"q": here, "out": on_device(q.astype(np.float16))}, pc.FormatError, "out"),
        ({"q": here, "out": read_only}, pc.FormatError, "read-only"),
        ({"q": here, "out": here}, pc.ShapeError, "shares no memory"),
        ({"q": here, "out": out.with_layout(q.shape, (0, 256, 4))}, pc.ShapeError, "strides"),
        ({"q": here, "sinks": other_sinks}, pc.FormatError, "sinks"),
        ({"q": here, "sinks": on_device(np.zeros(5, np.float32))}, pc.ShapeError, "sinks"),
        ({"q": here, "sinks": upload(np.zeros(6, np.float32), "cuda:1")}, DeviceError, "cuda:1"),
        ({"q": here, "sinks": np.full(6, np.nan)}, pc.FormatError, "sinks"),
        ({"q": here, "sinks": np.full(6, np.nan, np.float32)}, pc.InvalidArgumentError, "NaN"),
        ({"q": here, "lengths": [51]}, pc.InvalidPositionError, "lengths"),
    ]
    for options, kind, words in wrong:
        options = {"out": out} | options
        given = options.pop("q")
        refused(cache, lambda g=given, o=options: cache.attend(0, g, [seq], **o), kind, seq)
        with pytest.raises(kind, match=words):
            cache.attend(0, given, [seq], **options)
    assert (host(out) == -7).all()
    check(seq, 0, q, cache.attend(0, here, seq))


def test_an_out_over_the_slabs(cuda: Any, rng: Any) -> None:
    shape = Shape("float32", "NHD", heads=2, group=1, dim=64)
    with gpu_cache(shape) as cache:
        (seq,) = scattered(cache, shape, rng, [50])
        slab = cache.slabs(0)[1]
        over = slab.with_layout((16, 2, 64), slab[0].strides).with_owner(slab, readonly=False)
        q = on_device(shape.queries(rng, 16))
        before = host(slab).tobytes()
        with pytest.raises(pc.ShapeError, match="slabs"):
            cache.attend(0, q, seq, out=over)
        assert host(slab).tobytes() == before


def test_head_dims_that_no_kernel_takes(cuda: Any) -> None:
    with on_gpu(4, B=4, dim=257) as cache, cache.open() as seq:
        with pytest.raises(pc.ShapeError, match="at most 256"):
            cache.attend(0, np.zeros((0, 1, 257), np.float32), [seq], q_lens=[0])


def test_captured_streams_are_refused(cuda: Any, cache: Any, rng: Any) -> None:
    # SPEC F49
    with streams_of(cuda, 1) as (stream,):
        (seq,) = scattered(cache, SHAPE, rng, [50])
        q = on_device(SHAPE.queries(rng, 2))
        cache.synchronize()
        with Capture(cuda, stream) as graph:
            with pytest.raises(DeviceError, match="attention"):
                cache.attend(0, q, seq, stream=stream)
        graph.close()
        check(seq, 0, host(q), cache.attend(0, q, seq, stream=stream))


# ---- launches, tables, streams -------------------------------------------------------------------


def test_layers_of_one_step_share_their_tables(emulated: Any, cache: Any, rng: Any) -> None:
    """The second layer uploads nothing and takes no memory; another batch does."""
    seqs = scattered(cache, SHAPE, rng, [150, 90])
    q = SHAPE.queries(rng, 2)
    queries, out = on_device(q), [on_device(np.zeros_like(q)) for _ in range(2)]
    with Calls(emulated) as first:
        cache.attend(0, queries, seqs, out=out[0])
    assert first["cuMemcpyAsync"] == 1 and first["pc_stub_enqueue"] == 1
    with Calls(emulated) as second:
        cache.attend(1, queries, seqs, out=out[1])
    assert second["pc_stub_enqueue"] == 1
    for name in ("cuMemcpyAsync", "cuMemAlloc", "cuEventRecord", "cuStreamWaitEvent"):
        assert second[name] == 0, name
    assert second.waits == {}
    for layer in range(2):
        for i, seq in enumerate(seqs):
            check(seq, layer, q[i : i + 1], host(out[layer])[i : i + 1])
    for change in ({"seqs": seqs[::-1]}, {"window": 9}, {"causal": False}, {"starts": [1, 0]},
                   {"lengths": [149, 90]}, {"sinks": np.zeros(6, np.float32)}):  # fmt: skip
        options: dict[str, Any] = {"seqs": seqs, "out": out[0]} | change
        with Calls(emulated) as calls:
            cache.attend(0, queries, **options)
        assert calls["cuMemcpyAsync"] == 1, change


def test_split_and_whole_are_one_launch_each(
    emulated: Any, cache: Any, rng: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the keys are cut, results agree within their arithmetic; the tickets stay zero."""
    (seq,) = scattered(cache, SHAPE, rng, [390])
    q = SHAPE.queries(rng, 2)
    queries = on_device(q)
    tables = cache._storage._attention
    results = []
    for ctas in (1, 4, 8, 400):
        monkeypatch.setattr(tables, "_num_ctas", ctas)
        monkeypatch.setattr("pagedcache.storage.cuda_plan.LEAST_KEYS", 16)
        monkeypatch.setattr(tables, "_kept", None)
        for _ in range(2):
            with Calls(emulated) as calls:
                out, lse = cache.attend(0, queries, seq, return_lse=True)
            results.append(host(out))
            check(seq, 0, q, out, lse)
        assert calls["pc_stub_enqueue"] == 1
        np.testing.assert_array_equal(results[-1], results[-2])
        np.testing.assert_allclose(results[-1], results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fmt", ("q8", "q4k"))
def test_results_come_after_what_other_streams_write(
    fmt: str, cuda: Any, emulated: Any, rng: Any
) -> None:
    """Blocks written on one stream, attended to on another, freed, and written anew."""
    # SPEC F30: order on the device; deferred streams work when something waits for them
    shape = Shape(fmt, heads=1, group=2, dim=32)
    emulated.set("async", 1)
    with streams_of(cuda, 2) as (one, two), gpu_cache(shape, 64) as cache:
        q = shape.queries(rng, 1)
        queries = on_device(q)
        for turn in range(4):
            writer, reader = (one, two) if turn % 2 else (two, one)
            seq = cache.open()
            rows = [on_device(x) for x in shape.rows(rng, 40)]
            seq.append(0, *rows, stream=writer)
            out = cache.attend(0, queries, seq, stream=reader)
            k, v = seq.gather(0, dtype=np.float32, stream=reader)
            seq.free()
            again = cache.open()  # takes the same blocks
            again.append(0, *[on_device(x) for x in shape.rows(rng, 60)], stream=writer)
            finish(reader, cuda)
            assert_attends(host(out), None, q, host(k), host(v), Options(), turn)
            again.free()


def test_tables_are_used_on_several_streams(cuda: Any, emulated: Any, rng: Any) -> None:
    """The same batch on two streams in turn, then another one: none reads the other's tables."""
    emulated.set("async", 1)
    shape = Shape("bfloat16", heads=1, group=1, dim=32)
    with streams_of(cuda, 2) as streams, gpu_cache(shape) as cache:
        seqs = scattered(cache, shape, rng, [300, 200])
        cache.synchronize()
        q = shape.queries(rng, 1)
        queries = on_device(q)
        results = []
        for turn in range(8):
            seq = seqs[turn // 2 % 2]
            out = cache.attend(0, queries, seq, stream=streams[turn % 2])
            results.append((seq, out))
        for stream in streams:
            finish(stream, cuda)
        for seq, out in results:
            check(seq, 0, q, out)


def test_memory_of_streams_that_are_gone_comes_back(cuda: Any, emulated: Any, rng: Any) -> None:
    shape = Shape("bfloat16", heads=1, group=1, dim=32)
    with gpu_cache(shape) as cache:
        (seq,) = scattered(cache, shape, rng, [390])
        q = on_device(shape.queries(rng, 1))
        for _ in range(70):  # more than are tracked
            with streams_of(cuda, 1) as (stream,):
                cache.attend(0, q, seq, stream=stream)
                cache.synchronize()
        assert len(cache._storage._attention._tickets) < 70


def test_after_moves_and_copies_on_write(cuda: Any, rng: Any) -> None:
    """Tables that were kept are not used for blocks that have moved."""
    shape = Shape("q4_1", heads=1, group=4, dim=64)
    with gpu_cache(shape) as cache:
        first, second = scattered(cache, shape, rng, [100, 90])
        q = shape.queries(rng, 1)
        queries = on_device(q)
        before = host(cache.attend(0, queries, second))
        first.free()
        cache.defragment()
        np.testing.assert_array_equal(host(cache.attend(0, queries, second)), before)
        child = second.fork()
        fill(cache, child, shape, rng, 1)
        check(child, 0, q, cache.attend(0, queries, child))
        np.testing.assert_array_equal(host(cache.attend(0, queries, second)), before)


def test_layers_on_two_devices_and_the_cpu(cuda: Any, emulated: Any, rng: Any) -> None:
    # SPEC F15
    emulated.set("devices", 2)
    shape = Shape("q8", heads=1, group=2, dim=32, layers=3)
    names = ["cuda:0", "cpu", "cuda:1"]
    with on_gpu(8, B=16, layers=3, heads=1, dim=32, fmt="q8", device=names) as cache:
        (seq,) = scattered(cache, shape, rng, [70])
        q = shape.queries(rng, 1)
        for layer, name in enumerate(names):
            check(seq, layer, q, cache.attend(layer, q, seq))
            if name != "cpu":
                check(seq, layer, q, cache.attend(layer, upload(q, name), seq))
        with pytest.raises(DeviceError):
            cache.attend(1, on_device(q), seq)


# ---- pointer tables ------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ("bfloat16", "q8", "q4_1"))
def test_by_the_pointer_tables_of_a_sequence(fmt: str, cuda: Any, rng: Any) -> None:
    """The C function over ``layer_device_ptr_tables`` gives the bits that places give."""
    # SPEC F45
    shape = Shape(fmt, heads=2, group=4, dim=64, layers=2)
    with gpu_cache(shape) as cache:
        (seq,) = scattered(cache, shape, rng, [120])
        q = shape.queries(rng, 1)
        queries, out = on_device(q), on_device(np.zeros_like(q))
        storage = cache._storage
        for layer in range(2):
            want = host(cache.attend(layer, queries, seq))
            tables = seq.layer_device_ptr_tables(layer)
            table = type("Table", (), {"q": q, "length": 120, "start": 0,
                                       "block_ids": seq.block_table})  # fmt: skip
            items, _, _ = items_of([table], Options(), 4, 16, 0)
            sent = on_device(items.view(np.uint8))
            call = Call()
            for kind, pointers in zip("kv", (tables.k, tables.v), strict=True):
                side, base, stride = storage.located(kind, layer, 0)
                setattr(call, kind, Slab(ctypes.addressof(side.geometry), base, stride))
                setattr(call, f"{kind}_pointers", pointers.address)
            call.num_blocks, call.group, call.causal = cache.num_blocks, 4, 1
            call.items, call.num_items = sent.address, len(items)
            call.q, call.out = queries.address, out.address
            call.q_strides[:], call.out_strides[:] = queries.strides, out.strides
            call.scale, call.dtype = 1 / 8, get_format("float32").code
            cuda.call("pc_cuda_attend", ctypes.byref(call), None)
            np.testing.assert_array_equal(host(out), want)


# ---- failures ------------------------------------------------------------------------------------


def test_a_launch_that_fails_leaves_all_as_it_was(
    cuda: Any, emulated: Any, cache: Any, rng: Any
) -> None:
    """Whatever fails once: a typed error, then the same call works, with the same bits."""
    # SPEC F46
    (seq,) = scattered(cache, SHAPE, rng, [390])
    q = on_device(SHAPE.queries(rng, 1))
    want = host(cache.attend(0, q, seq))
    failed = []
    for name, code in (("pc_stub_enqueue", 9), ("cuMemcpyAsync", 1), ("cuMemAlloc", 2),
                       ("cuMemsetD8Async", 1), ("cuStreamIsCapturing", 999)):  # fmt: skip
        cache._storage._attention.close()
        cache._storage._scratch.trim()
        emulated.fail(name, 1, code, 1)
        try:
            got = host(cache.attend(0, q, seq))
        except (CudaCallError, pc.StorageMemoryError):
            failed.append(name)
            emulated.fail(name, 0)
            got = host(cache.attend(0, q, seq))
        np.testing.assert_array_equal(got, want, err_msg=name)
    assert len(failed) >= 4  # memory may be found after all
    assert cache.stats().pinned == 0
