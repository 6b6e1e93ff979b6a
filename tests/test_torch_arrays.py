"""Tensors of PyTorch at every public door, and what torch makes of the cache's arrays.

Values are judged by torch's own conversions and by plain lists. Tensors on a GPU are in
``tests/cuda`` (stand-ins where torch sees no GPU) and in ``test_foreign.py``.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cachekit import make_cache
from devicekit import cpu_memory, host

import pagedcache as pc

NO_TORCH = "torch is not installed"
HEADS, DIM, B, N = 2, 8, 4, 7
NAMES = ("float32", "float16", "bfloat16")
INTEGERS = ("uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")

on_cpu = cpu_memory("tensors over the cache's own memory")


@pytest.fixture(scope="module")
def torch() -> Any:
    module = pytest.importorskip("torch", reason=NO_TORCH)
    module.set_num_threads(1)
    return module


def small(**options: Any) -> pc.PagedKVCache:
    return make_cache(16, B=B, heads=HEADS, dim=DIM, **options)


def randn(torch: Any, *shape: int, name: str = "float32", seed: int = 0) -> Any:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=made).to(getattr(torch, name))


def floats(tensor: Any) -> np.ndarray:
    """The values of a tensor of any float dtype, exactly."""
    array: np.ndarray = tensor.detach().float().numpy()
    return array


# ---- rows in ------------------------------------------------------------------------------------

# What a caller may have in hand: a tensor with the values of rows [N, HEADS, DIM], laid out so.
LAYOUTS: dict[str, Callable[[Any, Any], Any]] = {
    "contiguous": lambda torch, x: x,
    "flat": lambda torch, x: x.reshape(N, HEADS * DIM),
    "heads first in memory": lambda torch, x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "values first in memory": lambda torch, x: x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    "every second": lambda torch, x: x.repeat_interleave(2, 2)[:, :, ::2],
    "part of a larger one": lambda torch, x: torch.cat([x, x, x])[N : 2 * N],
    "of a batch": lambda torch, x: torch.stack([x, -x]).transpose(1, 2).contiguous()[0].transpose(
        0, 1
    ),
    "needs a gradient": lambda torch, x: x.clone().requires_grad_(),
    "result of a graph": lambda torch, x: x.clone().requires_grad_() * 1,
    "parameter": lambda torch, x: torch.nn.Parameter(x),
    "negated lazily": lambda torch, x: torch._neg_view(-x),
    "subclass": lambda torch, x: x.as_subclass(type("Mine", (torch.Tensor,), {})),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_every_layout(torch: Any, name: str, layout: str) -> None:
    # SPEC F32, CASE C45
    k, v = (randn(torch, N, HEADS, DIM, name=name, seed=seed) for seed in (1, 2))
    given = [LAYOUTS[layout](torch, x) for x in (k, v)]
    with small(fmt="float32") as cache, cache.open() as seq:
        seq.append(0, *given)  # exact in float32
        for got, want in zip(seq.gather(0), (k, v), strict=True):
            np.testing.assert_array_equal(host(got), floats(want))
        other = cache.open()
        cache.store(0, *given, other.prepare(N))
        third = cache.open()
        third.append_kv(0, *given, 0)
        for one in (other, third):
            for got, want in zip(one.gather(0, 0, N), (k, v), strict=True):
                np.testing.assert_array_equal(host(got), floats(want))


@pytest.mark.parametrize("fmt", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_rows_are_rounded_as_torch_rounds(torch: Any, name: str, fmt: str) -> None:
    # CASE C43: converted; never reinterpreted
    given = randn(torch, N, HEADS, DIM, name=name)
    want = floats(given.float().to(getattr(torch, fmt)))
    with small(fmt=fmt) as cache, cache.open() as seq:
        seq.append(0, given, given)
        for got in seq.gather(0):
            np.testing.assert_array_equal(host(got).astype(np.float32), want)


@pytest.mark.parametrize("fmt", ["q8", "q4", "q8_0", "q4_1"])
@pytest.mark.parametrize("name", NAMES)
def test_rows_are_quantised_as_arrays_are(torch: Any, name: str, fmt: str) -> None:
    given = randn(torch, N, HEADS, DIM, name=name)
    dtype = ml_dtypes.bfloat16 if name == "bfloat16" else name
    with small(fmt=fmt) as cache, cache.open() as seq, cache.open() as twin:
        seq.append(0, given, -given)
        twin.append(0, floats(given).astype(dtype), floats(-given).astype(dtype))
        for got, want in zip(seq.gather(0), twin.gather(0), strict=True):
            np.testing.assert_array_equal(host(got), host(want))


def test_one_row_for_all_tokens(torch: Any) -> None:
    # CASE C45: strides of 0
    row = randn(torch, 1, HEADS, DIM, name="bfloat16")
    with small() as cache, cache.open() as seq:
        seq.append(0, row.expand(N, -1, -1), row.expand(N, HEADS, DIM))
        np.testing.assert_array_equal(host(seq.gather(0)[1]), floats(row).repeat(N, 0))


def test_no_rows(torch: Any) -> None:
    with small() as cache, cache.open() as seq:
        for name in NAMES:
            empty = torch.empty(0, HEADS, DIM, dtype=getattr(torch, name))
            assert seq.append(0, empty, empty.reshape(0, HEADS * DIM)).start == 0
        assert seq.num_written == 0


def odd_tensors(torch: Any) -> dict[str, tuple[Any, Any, str]]:
    """Tensors of the right shape that are no rows: (tensor, error, what its message says)."""
    shape = (N, HEADS, DIM)
    found = {}
    for name in ("float64", "int8", "uint8", "int16", "int32", "int64", "bool", "complex64"):
        found[name] = torch.zeros(shape, dtype=getattr(torch, name)), pc.FormatError, name
    for name in ("float8_e4m3fn", "float8_e5m2"):
        odd = torch.zeros(shape, dtype=getattr(torch, name))
        found[name] = odd, pc.FormatError, rf"torch\.{name}; convert it with x\.to"
    for name in ("float32", "bfloat16"):
        x = torch.zeros(shape, dtype=getattr(torch, name))
        found[f"meta {name}"] = x.to("meta"), pc.DeviceError, "tensor on cpu, got one on meta"
        found[f"sparse {name}"] = x.to_sparse(), pc.FormatError, r"x\.to_dense\(\).*sparse"
        found[f"zero {name}"] = (
            torch._efficientzerotensor(shape, dtype=x.dtype), pc.FormatError, "ZeroTensor"
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a prototype, it says
            nested = torch.nested.nested_tensor([x[0], x[1]])
        found[f"nested {name}"] = nested, pc.FormatError, r"x\.to_dense\(\).*nested"
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            fake = torch.zeros(shape, dtype=x.dtype)
        found[f"fake {name}"] = fake, pc.FormatError, "subclasses"
    return found


def test_tensors_that_are_no_rows(torch: Any) -> None:
    # SPEC 7, CASE C44, CASE C49: nothing is written
    good = randn(torch, N, HEADS, DIM)
    with small() as cache, cache.open() as seq:
        slots = seq.prepare(N)
        for what, (bad, error, words) in odd_tensors(torch).items():
            for pair in ((bad, good), (good, bad)):
                for call in (
                    lambda k, v: seq.append(0, k, v),
                    lambda k, v: seq.append_kv(0, k, v, 0),
                    lambda k, v: cache.store(0, k, v, slots),
                ):
                    with pytest.raises(error, match=words):
                        call(*pair)
                        pytest.fail(what)
        assert (seq.num_written, seq.seq_len) == (0, 0)
        for bad in (good[:-1], good[..., :-1], good[None], good[0]):
            with pytest.raises(pc.ShapeError):
                seq.append(0, bad, good)
        inside = []

        def mapped(x: Any) -> Any:
            with pytest.raises(pc.FormatError, match="storage"):
                seq.append(0, x, x)
            inside.append(True)
            return x

        torch.func.vmap(mapped)(good[None])
        assert inside == [True] and seq.num_written == 0
        cache.check()


# ---- integers -----------------------------------------------------------------------------------


def integers_like(torch: Any, values: list[int], name: str) -> list[Any]:
    """The values as tensors of a dtype, laid out in different ways, and as a list of tensors."""
    flat = torch.tensor(values, dtype=torch.int64).to(getattr(torch, name))
    wide = torch.stack([flat, flat], 1).reshape(-1)
    return [flat, wide[::2], torch.stack([flat, flat])[1], list(flat), tuple(flat)]


# Calls that take tokens: with a list they are the judge of themselves with a tensor.
TOKEN_CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "open": lambda cache, x: cache.open(x).tokens.tolist(),
    "probe": lambda cache, x: cache.probe(x),
    "blocks_needed": lambda cache, x: cache.blocks_needed(x),
    "append_tokens": lambda cache, x: (s := cache.open([1]), s.append_tokens(x), s.tokens.tolist())[
        2
    ],
    "allocate_for_tokens": lambda cache, x: (s := cache.open(), s.allocate_for_tokens(x),
                                             s.tokens.tolist())[2],
    "cache.append_tokens": lambda cache, x: (
        s := [cache.open([1]), cache.open([2])],
        cache.append_tokens(s, x, [2, 5]),
        [one.tokens.tolist() for one in s],
    )[2],
    "compute_prefix_hash": lambda cache, x: pc.compute_prefix_hash(x),
    "compute_block_hash": lambda cache, x: pc.compute_block_hash(x),
    "compute_block_hashes": lambda cache, x: pc.compute_block_hashes(x, 3),
    "PrefixCache": lambda cache, x: prefix_cache_calls(x),
}  # fmt: skip


def prefix_cache_calls(tokens: Any) -> Any:
    entries: pc.PrefixCache[str] = pc.PrefixCache(4)
    assert entries.insert(tokens, "value")
    number, length = entries.find_longest_prefix(tokens) or (0, 0)
    return (
        entries.lookup(tokens), tokens in entries, entries.add_ref(tokens), number, length,
        entries.lookup_hash(number, tokens), entries.ref_count(number, tokens),
        entries.remove_ref(tokens),
    )  # fmt: skip


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("call", TOKEN_CALLS)
def test_tokens(torch: Any, call: str, name: str) -> None:
    # SPEC 7
    tokens = [3, 1, 4, 1, 5, 9, 2]
    with small() as cache, cache.open(tokens) as seq:
        seq.append(0, np.ones((7, 2, 8), "f4"), np.ones((7, 2, 8), "f4"))
        seq.commit(7)
        seq.free()
        want = TOKEN_CALLS[call](cache, tokens)
        for given in integers_like(torch, tokens, name):
            assert TOKEN_CALLS[call](cache, given) == want


def test_large_tokens(torch: Any) -> None:
    with small() as cache:
        for name in ("int64", "uint32", "uint64"):
            given = torch.tensor([2**32 - 1, 0]).to(getattr(torch, name))
            assert cache.open(given).tokens.tolist() == [2**32 - 1, 0]
        with pytest.raises(pc.InvalidArgumentError, match="value 4294967296 at index 1"):
            cache.open(torch.tensor([0, 2**32]))
        with pytest.raises(pc.InvalidArgumentError, match="value -1 at index 0"):
            cache.open([torch.tensor(-1)])


def odd_integers(torch: Any) -> dict[str, tuple[Any, Any, str]]:
    """Tensors that are no list of integers: (tensor, error, what its message says)."""
    one = torch.ones(3, dtype=torch.int64)
    argument = pc.InvalidArgumentError
    return {
        "bool": (one.bool(), argument, "dtype bool"),
        "float": (one.float(), argument, "dtype float32"),
        "bfloat16": (one.bfloat16(), argument, "dtype bfloat16"),
        "no axes": (one[0], argument, r"shape \(\)"),
        "a batch": (one[None], argument, r"x\[0\] or x\.ravel\(\).*shape \(1, 3\)"),
        "meta": (one.to("meta"), pc.DeviceError, "tensor on cpu, got one on meta"),
        "sparse": (one.to_sparse(), pc.FormatError, r"x\.to_dense\(\)"),
        "bools": (list(one.bool()), argument, "integer"),
        "floats": (list(one.float()), argument, "integer"),
        "rows": ([one, one], argument, "integer"),
        "metas": (list(one.to("meta")), argument, "integer"),
    }


def test_tensors_that_are_no_tokens(torch: Any) -> None:
    # SPEC 7: typed, and nothing has changed
    with small() as cache:
        live, free = cache.live_sequences(), cache.num_free_blocks
        for what, (bad, error, words) in odd_integers(torch).items():
            for name in ("open", "probe", "blocks_needed", "compute_prefix_hash",
                         "compute_block_hash", "compute_block_hashes", "PrefixCache"):  # fmt: skip
                with pytest.raises(error, match=words):
                    TOKEN_CALLS[name](cache, bad)
                    pytest.fail(what)
        assert (cache.live_sequences(), cache.num_free_blocks) == (live, free)
        with cache.open([1, 2]) as seq:
            for bad, error, words in odd_integers(torch).values():
                with pytest.raises(error, match=words):
                    seq.append_tokens(bad)
            assert seq.tokens.tolist() == [1, 2]


@pytest.mark.parametrize("name", INTEGERS)
def test_counts_lengths_and_slots(torch: Any, name: str) -> None:
    # SPEC F33
    rows = randn(torch, 5, HEADS, DIM)
    for given in integers_like(torch, [2, 0, 3], name):
        with small() as cache:
            seqs = [cache.open() for _ in range(3)]
            mapping = cache.prepare(seqs, given)
            assert len(mapping.slots) == 5
            slots = torch.from_numpy(mapping.slots.copy()).to(getattr(torch, name))
            cache.store(0, rows, -rows, slots)
            cache.commit(seqs, given)
            assert [seq.seq_len for seq in seqs] == [2, 0, 3]
            np.testing.assert_array_equal(host(seqs[2].gather(0)[1]), floats(-rows[2:]))
            tables = cache.block_tables(seqs, given)
            assert (tables == cache.block_tables(seqs, [2, 0, 3])).all()
            table = cache.page_table(seqs, given, allow_empty=True)
            assert table.kv_last_page_len.tolist() == [2, 0, 3]
            named = [cache.open() for _ in range(3)]
            cache.append_tokens(named, torch.arange(5), given)
            assert [seq.tokens.tolist() for seq in named] == [[0, 1], [], [2, 3, 4]]


def test_tensors_that_are_no_counts_or_slots(torch: Any) -> None:
    # SPEC 7
    rows = randn(torch, 3, HEADS, DIM)
    with small() as cache:
        seqs = [cache.open() for _ in range(3)]
        cache.prepare(seqs, [1, 1, 1])
        before = cache.num_free_blocks
        for what, (bad, error, words) in odd_integers(torch).items():
            for call in (
                lambda x: cache.prepare(seqs, x),
                lambda x: cache.commit(seqs, x),
                lambda x: cache.block_tables(seqs, x),
                lambda x: cache.page_table(seqs, x),
                lambda x: cache.append_tokens(seqs, [1, 2, 3], x),
                lambda x: cache.store(0, rows, rows, x),
            ):
                with pytest.raises(error) as caught:
                    call(bad)
                    pytest.fail(what)
                assert what == "rows" or caught.match(words)
        assert cache.num_free_blocks == before and [seq.seq_len for seq in seqs] == [0, 0, 0]
        with pytest.raises(pc.InvalidArgumentError, match="one per sequence"):
            cache.prepare(seqs, torch.tensor([1, 1]))
        # An empty batch has no values of any dtype, as a list has none.
        assert cache.block_tables([], torch.tensor([])).shape == (0, 0)
        cache.commit([], np.array([]))


def test_negative_slots_skip(torch: Any) -> None:
    rows = randn(torch, 3, HEADS, DIM)
    with small() as cache, cache.open() as seq:
        slots = torch.from_numpy(seq.prepare(3).slots.copy())
        cache.store(0, rows, rows, slots)
        slots[1] = -1
        cache.store(0, -rows, -rows, slots)
        want = floats(-rows)
        want[1] = floats(rows)[1]
        np.testing.assert_array_equal(host(seq.gather(0, 0, 3)[0]), want)


SCALARS: dict[str, Callable[[Any, Any], Any]] = {
    "append_token": lambda seq, x: (seq.append_token(x), seq.tokens.tolist())[1],
    "prepare": lambda seq, x: len(seq.prepare(x)),
    "blocks_needed": lambda seq, x: seq.blocks_needed(x),
    "truncate": lambda seq, x: (seq.truncate(x), seq.seq_len)[1],
    "gather": lambda seq, x: seq.gather(0, x, x)[0].shape,
    "views": lambda seq, x: len(seq.views(0, 0, x)),
    "layer": lambda seq, x: seq.written(x),
    "slot_mapping": lambda seq, x: len(seq.slot_mapping(0, x)),
    "block_for_position": lambda seq, x: seq.block_for_position(x) >= 0,
    "append_kv": lambda seq, x: seq.append_kv(0, *np.ones((2, 1, 2, 8), "f4"), x).start,
    "commit": lambda seq, x: (seq.commit(x), seq.seq_len)[1],
    "open": lambda seq, x: seq._cache.open(range(9), allocate_upto=x).num_blocks,
    "extra_keys": lambda seq, x: seq._cache.probe([1, 2], extra_keys=[(0, x, b"k")]),
    "block_size": lambda seq, x: pc.compute_block_hashes(range(9), x),
    "id style": lambda seq, x: seq._cache.extend(seq.seq_id, x),
    "spec": lambda seq, x: pc.CacheSpec(x, x, 8).num_kv_heads,
    "pool": lambda seq, x: pc.BlockPool(x, 4).num_blocks,
    "flat": lambda seq, x: pc.FlatQuantized("q8", 40).read(x, x).tolist(),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALARS)
def test_single_integers(torch: Any, name: str) -> None:
    # SPEC 7: a tensor of one integer is that integer; everything else is refused
    def world() -> Any:
        seq = small(layers=4).open(range(6))
        for layer in range(4):
            seq.append(layer, *np.ones((2, 6, HEADS, DIM), np.float32))
        return seq

    want = SCALARS[name](world(), 3)
    for given in (torch.tensor(3), torch.tensor([3], dtype=torch.int32)):
        assert SCALARS[name](world(), given) == want
    seq = world()
    for bad in (
        torch.tensor(3.0), torch.tensor(True), torch.tensor([3, 4]),
        torch.tensor(3, device="meta"), torch.tensor([], dtype=torch.int64),
    ):  # fmt: skip
        with pytest.raises(pc.InvalidArgumentError):
            SCALARS[name](seq, bad)
    assert seq.tokens.tolist() == [0, 1, 2, 3, 4, 5]
    assert (seq.num_written, seq.seq_len, seq.num_blocks) == (6, 0, 2)


def test_flags_and_block_ids(torch: Any) -> None:
    # SPEC 7
    with small() as cache, cache.open([1]) as seq:
        seq.prepare(1)
        assert cache.page_table([seq], allow_empty=torch.tensor(True)).kv_indptr.tolist() == [0, 0]
        for bad in (torch.tensor([True, False]), torch.tensor(True, device="meta")):
            with pytest.raises(pc.InvalidArgumentError, match="allow_empty must be true or false"):
                cache.page_table([seq], allow_empty=bad)
    pool = pc.BlockPool(8, 4)
    ids = torch.from_numpy(pool.allocate(torch.tensor(4)))
    pool.touch(ids[:2])
    pool.free(ids.to(torch.int64))
    assert pool.num_free_blocks == 6
    for bad in (ids.float(), ids.to("meta"), ids[None], ids.bool()):
        with pytest.raises(pc.PagedCacheError):
            pool.free(bad)
    pool.free(list(ids[:2]))
    assert pool.num_free_blocks == 8


# ---- dtypes and formats -------------------------------------------------------------------------


def test_dtypes_of_torch(torch: Any) -> None:
    with small(fmt="q8") as cache, cache.open() as seq:
        seq.append(0, *torch.ones(2, 6, HEADS, DIM))
        for name in NAMES:
            dtype = getattr(torch, name)
            want = ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)
            assert seq.gather(0, dtype=dtype)[0].dtype == want
            assert seq.views(0, dtype=dtype)[0].k.dtype == want
            assert seq.packed_views(0, dtype=dtype)[0].v.dtype == want
            spec = pc.CacheSpec(1, HEADS, DIM, kv_format=dtype)
            assert spec == pc.CacheSpec(1, HEADS, DIM, kv_format=name)
        for name in ("float64", "int8", "complex64", "float8_e4m3fn"):
            with pytest.raises(pc.FormatError, match=name):
                seq.gather(0, dtype=getattr(torch, name))
            with pytest.raises(pc.FormatError, match=name):
                pc.CacheSpec(1, HEADS, DIM, kv_format=getattr(torch, name))


# ---- slabs that are the caller's ----------------------------------------------------------------


@on_cpu
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("name", NAMES)
def test_one_tensor_for_all_layers(torch: Any, name: str, layout: str) -> None:
    # SPEC F48: [layers, blocks, 2, …] as vLLM and SGLang have it
    block = (HEADS, B, DIM) if layout == "HND" else (B, HEADS, DIM)
    dtype = getattr(torch, name)
    pool = torch.full((2, 16, 2, *block), float("nan"), dtype=dtype)
    rows = randn(torch, 2, N, HEADS, DIM, name=name)
    storage = pool[:, :, 0], pool[:, :, 1]
    with small(layers=2, fmt=name, layout=layout, storage=storage) as cache, cache.open() as seq:
        for layer in range(2):
            seq.append(layer, *rows)
        for layer in range(2):
            for half in range(2):
                shown = pool[layer, seq.block_table.tolist(), half]
                shown = shown.transpose(1, 2) if layout == "HND" else shown
                got = shown.reshape(-1, HEADS, DIM)[:N]
                assert torch.equal(got, rows[half])
        lent = torch.from_dlpack(cache.slabs(1)[1])
        assert lent.data_ptr() == pool[1, 0, 1].data_ptr() and lent.dtype == dtype
        assert lent.stride() == pool[1, :, 1].stride()


@on_cpu
def test_raw_bytes_of_quantised_slabs(torch: Any) -> None:
    # SPEC F48
    with small(fmt="q8") as own, own.open() as seq:
        rows = np.random.default_rng(0).standard_normal((2, N, HEADS, DIM), np.float32)
        seq.append(0, *rows)
        nbytes = own.spec.layer_block_nbytes("k")
        mine = [torch.zeros(16, nbytes, dtype=torch.uint8) for _ in "kv"]
        with small(fmt="q8", storage=([mine[0]], [mine[1]])) as cache, cache.open() as twin:
            twin.append(0, *rows)
            for slab, theirs in zip(mine, own.slabs(0), strict=True):
                got = slab[twin.block_table.tolist()].numpy()
                np.testing.assert_array_equal(got, theirs[seq.block_table])


@on_cpu
def test_tensors_that_are_no_slabs(torch: Any) -> None:
    # SPEC 7, SPEC F48
    shape = (16, HEADS, B, DIM)
    good = torch.zeros(shape, dtype=torch.bfloat16)
    for bad, error in (
        (torch.zeros(shape), pc.FormatError),
        (torch.zeros(shape, dtype=torch.int16), pc.FormatError),
        (torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True), pc.FormatError),
        (torch.nn.Parameter(good.clone()), pc.FormatError),
        (torch._neg_view(good.clone()), pc.FormatError),
        (good.clone().to_sparse(), pc.FormatError),
        (good.to("meta"), pc.DeviceError),
        (torch.zeros(1, *shape[1:], dtype=torch.bfloat16).expand(shape), pc.ShapeError),
        (torch.zeros(16, B, HEADS, DIM, dtype=torch.bfloat16).transpose(1, 2), pc.ShapeError),
        (good[:15], pc.ShapeError),
        (good, pc.ShapeError),  # the same memory twice
    ):
        for storage in (([good], [bad]), ([bad], [good])):
            with pytest.raises(error):
                small(fmt="bfloat16", storage=storage)
    with pytest.raises(pc.ShapeError, match="one per layer"):
        small(fmt="bfloat16", storage=(torch.zeros(2, *shape), torch.zeros(2, *shape)))


# ---- rows out -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_tensors_to_fill(torch: Any, name: str) -> None:
    # SPEC F32: of every layout, and bfloat16 too
    dtype = getattr(torch, name)
    rows = randn(torch, 2, N, HEADS, DIM)
    with small(fmt="float32") as cache, cache.open() as seq:
        seq.append(0, *rows)
        want = rows.to(dtype)
        wide = torch.zeros(2, HEADS, DIM, 2 * N, dtype=dtype)
        for pair in (
            torch.zeros(2, N, HEADS, DIM, dtype=dtype),
            torch.zeros(2, DIM, HEADS, N, dtype=dtype).transpose(1, 3),
            wide.permute(0, 3, 1, 2)[:, ::2],
        ):
            out = tuple(pair)
            got = seq.gather(0, out=out)
            assert got[0] is out[0] and got[1] is out[1]
            assert torch.equal(pair, want)
        assert not wide[..., 1::2].any()
        if name != "bfloat16":
            mixed = torch.zeros(N, HEADS, DIM, dtype=dtype), np.zeros((N, HEADS, DIM), name)
            seq.gather(0, out=mixed)
            assert torch.equal(mixed[0], want[0])
            np.testing.assert_array_equal(mixed[1], want[1].numpy())


def test_tensors_that_cannot_be_filled(torch: Any) -> None:
    # SPEC 7
    rows = randn(torch, 2, N, HEADS, DIM)
    good = torch.full((N, HEADS, DIM), 5.0)
    with small() as cache, cache.open() as seq:
        seq.append(0, *rows)
        for bad, error in (
            (torch.zeros(N, HEADS, DIM, dtype=torch.float64), pc.FormatError),
            (torch.zeros(N, HEADS, DIM, dtype=torch.float16), pc.FormatError),
            (torch.zeros(N, HEADS, DIM, requires_grad=True), pc.FormatError),
            (torch._neg_view(torch.zeros(N, HEADS, DIM)), pc.FormatError),
            (torch.zeros(N, HEADS, DIM).to_sparse(), pc.FormatError),
            (torch.zeros(N, HEADS, DIM, device="meta"), pc.DeviceError),
            (torch.zeros(1, HEADS, DIM).expand(N, -1, -1), pc.ShapeError),
            (torch.zeros(N + 1, HEADS, DIM), pc.ShapeError),
            (torch.zeros(N, HEADS * DIM), pc.ShapeError),
            (good, pc.ShapeError),  # twice
        ):
            with pytest.raises(error):
                seq.gather(0, out=(good, bad), dtype="float32")
        assert (good == 5).all()


# ---- DLPack -------------------------------------------------------------------------------------


@on_cpu
@pytest.mark.parametrize("name", NAMES)
def test_torch_takes_gathered_arrays(torch: Any, name: str) -> None:
    # SPEC F32, F47: no copy, no view as another dtype
    rows = randn(torch, 2, N, HEADS, DIM, name=name)
    with small(fmt=name) as cache, cache.open() as seq:
        seq.append(0, *rows)
        pair = seq.gather(0)
        for array, want in zip(pair, rows, strict=True):
            got = torch.from_dlpack(array)
            assert got.dtype == getattr(torch, name) and torch.equal(got, want)
            assert got.data_ptr() == array.__array_interface__["data"][0]
            assert got.data_ptr() % 64 == 0 and got.is_contiguous()
            got[0] = 3
            assert (array[0] == 3).all()
            part = torch.from_dlpack(array[1:, 1, ::2])
            assert torch.equal(part, want[1:, 1, ::2])
            apart = torch.from_dlpack(array, copy=True)
            assert torch.equal(apart, got) and apart.data_ptr() != got.data_ptr()
        kept = torch.from_dlpack(pair[1])
        del pair, array, got, part
        gc.collect()
        assert torch.equal(kept[1:], rows[1, 1:])


@on_cpu
@pytest.mark.parametrize("name", NAMES)
def test_torch_takes_slabs_and_views(torch: Any, name: str) -> None:
    # SPEC F30, F47
    rows = randn(torch, 2, N, HEADS, DIM, name=name)
    with small(fmt=name) as cache:
        seq = cache.open()
        seq.append(0, *rows)
        slab = torch.from_dlpack(cache.slabs(0)[1])
        first, second = seq.block_table.tolist()
        assert tuple(slab.shape) == (16, HEADS, B, DIM)
        assert torch.equal(slab[first].transpose(0, 1), rows[1, :B])
        slab[second, :, 0] = 9  # a kernel of the engine's own writes
        assert (host(seq.gather(0)[1][B]) == 9).all()
        view = torch.from_dlpack(seq.views(0)[1].k)
        assert torch.equal(view.transpose(0, 1), rows[0, B:])
        seq.free()
        gc.collect()
        assert cache.stats().pinned == 1
        del view
        gc.collect()
        assert cache.stats().pinned == 0


@on_cpu
def test_there_and_back(torch: Any) -> None:
    """What torch took from the cache goes into it again."""
    rows = randn(torch, 2, N, HEADS, DIM, name="bfloat16")
    with small(fmt="bfloat16") as cache, cache.open() as seq, cache.open() as twin:
        seq.append(0, *rows)
        twin.append(0, *(torch.from_dlpack(x) for x in seq.gather(0)))
        own = torch.from_dlpack(seq.views(0)[0].v).transpose(0, 1)  # over the slabs themselves
        twin.append(0, own, own)
        for got, want in zip(twin.gather(0), rows, strict=True):
            assert torch.equal(torch.from_dlpack(got)[:N], want)
        assert torch.equal(torch.from_dlpack(twin.gather(0)[0])[N:], rows[1, :B])


# ---- arithmetic ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_quantising_tensors(torch: Any, name: str) -> None:
    x = randn(torch, 3, 40, name=name).t()
    dtype = ml_dtypes.bfloat16 if name == "bfloat16" else name
    twin = floats(x).astype(dtype)
    for fmt in ("q8", "q4", "q4_1"):
        got, want = pc.quantize(x.requires_grad_(), fmt), pc.quantize(twin, fmt)
        assert got.shape == (40, 3)
        np.testing.assert_array_equal(got.data, want.data)
        data = torch.from_numpy(want.data.copy())
        buffer = pc.FlatQuantized(fmt, 120, data=data)
        np.testing.assert_array_equal(buffer.read(7, 50), want.read(7, 50))
        buffer.write(0, x[:2].detach())
        want.write(0, twin[:2])
        np.testing.assert_array_equal(data.numpy(), want.data)


def test_bits_of_tensors(torch: Any) -> None:
    # SPEC F1, F2, F3
    x = randn(torch, 50).requires_grad_()
    half, brain = x.detach().half(), x.detach().bfloat16()
    bits = pc.float32_to_float16_bits(x)
    np.testing.assert_array_equal(bits, half.view(torch.uint16).numpy())
    np.testing.assert_array_equal(
        pc.float32_to_bfloat16_bits(x), brain.view(torch.uint16).numpy()
    )
    np.testing.assert_array_equal(
        pc.float16_bits_to_float32(half.view(torch.uint16)), half.float().numpy()
    )
    np.testing.assert_array_equal(
        pc.bfloat16_bits_to_float32(brain.view(torch.uint16)[::2]), brain.float().numpy()[::2]
    )


def test_tensors_that_arithmetic_refuses(torch: Any) -> None:
    # SPEC 7, CASE C44
    flat = pc.FlatQuantized("q8", 64)
    good = flat.data.copy()
    for bad, error, _ in odd_tensors(torch).values():
        with pytest.raises(error):
            pc.quantize(bad, "q8")
        with pytest.raises(error):
            pc.float32_to_bfloat16_bits(bad)
        with pytest.raises(error):
            flat.write(0, bad)
        with pytest.raises(error):
            pc.float16_bits_to_float32(bad)
        with pytest.raises(pc.PagedCacheError):
            pc.FlatQuantized("q8", 64, data=bad)
    np.testing.assert_array_equal(flat.data, good)
    with pytest.raises(pc.FormatError, match="uint16.*float32"):
        pc.float16_bits_to_float32(torch.zeros(3, requires_grad=True))
    with pytest.raises(pc.ShapeError):
        pc.FlatQuantized("q8", 64, data=torch.zeros(145, dtype=torch.uint8)[::2])


# ---- without torch ------------------------------------------------------------------------------

USED = """
import importlib.util, sys
import ml_dtypes, numpy as np
import pagedcache as pc

k = np.ones((6, 2, 8), ml_dtypes.bfloat16)
spec = pc.CacheSpec(1, 2, 8, 4, "bfloat16")
with pc.PagedKVCache(spec, 8) as cache:
    seq = cache.open(np.arange(6))
    seq.append(0, k, k)
    seq.commit(6)
    capsule = seq.gather(0)[0].__dlpack__(max_version=(1, 0))
    capsule = [view.k.__dlpack__(max_version=(1, 0)) for view in seq.views(0)]
    cache.store(0, k[:1], k[:1], cache.prepare([seq], np.array([1])))
    for bad in (object(), "x", None, [np.float32(1)]):
        for call in (cache.open, lambda x: seq.append(0, x, x), cache.blocks_needed,
                     lambda x: seq.gather(0, dtype=x, out=x), pc.BlockPool(4, 4).free):
            try:
                call(bad)
            except pc.PagedCacheError:
                pass
    pc.dequantize(pc.quantize(k, "q8"))
    cache.slabs(0)
    pc.get_format("bf16")
found = importlib.util.find_spec("torch") is not None
print(found, sorted(name for name in sys.modules if name.partition(".")[0] == "torch"))
"""


def test_torch_is_not_imported() -> None:
    """Where torch is installed, this says something; elsewhere it passes."""
    done = subprocess.run(
        [sys.executable, "-c", USED], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.stderr == "" and done.stdout in ("True []\n", "False []\n")


def test_a_module_that_is_called_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-loaded, or another thing altogether: it has no tensors."""
    for module in (types.ModuleType("torch"), types.SimpleNamespace(Tensor=7, dtype="x"), None):
        monkeypatch.setitem(sys.modules, "torch", module)
        with small(fmt="bfloat16") as cache, cache.open([1, 2]) as seq:
            seq.append(0, *np.ones((2, 2, HEADS, DIM), np.float32))
            assert seq.gather(0, dtype="float16")[0].dtype == np.float16
