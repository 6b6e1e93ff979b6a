"""CacheSpec: sizes from one source, bad values refused."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import reference_formats as ref
from hypothesis import given
from hypothesis import strategies as st

from pagedcache._native.arithmetic import block_geometry, row_address
from pagedcache.errors import FormatError, InvalidArgumentError
from pagedcache.formats import FORMATS
from pagedcache.spec import LAYOUTS, CacheSpec

GOOD: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 3, "head_dim": 64}


def spec(**changes: Any) -> CacheSpec:
    return CacheSpec(**(GOOD | changes))


def test_fields_and_defaults() -> None:
    s = CacheSpec(30, 3, 64)
    assert (s.num_layers, s.num_kv_heads, s.head_dim, s.block_size) == (30, 3, 64, 16)
    assert s.k_format is s.v_format is s.kv_format is FORMATS["float16"]
    assert (s.layout, s.max_seq_len, s.on_nonfinite) == ("HND", None, "raise")
    assert spec(block_size=np.int32(8)).block_size == 8


def test_formats_of_k_and_v() -> None:
    s = spec(k_format="q8", v_format="q4")
    assert (s.k_format.name, s.v_format.name, s.kv_format) == ("q8", "q4", None)
    assert spec(kv_format="q8").v_format.name == "q8"
    mixed = spec(kv_format="q8", v_format=FORMATS["q4"])
    assert (mixed.k_format.name, mixed.v_format.name) == ("q8", "q4")
    with pytest.raises(InvalidArgumentError, match="kv_format"):
        spec(kv_format="q8", k_format="q8", v_format="q4")


# q4k is for keys; V takes its partner.
def test_q4k_chooses_both_formats() -> None:
    s = spec(kv_format="q4k")
    assert (s.k_format.name, s.v_format.name) == ("q4k", "q4_1")
    assert s.kv_format is FORMATS["q4k"] and s == spec(k_format="q4k", v_format="q4_1")
    assert spec(kv_format="q4k", v_format="q8").v_format.name == "q8"
    assert spec(kv_format="q4k", k_format="q8").v_format.name == "q4_1"
    assert spec(k_format="q4k").v_format.name == "float16"
    assert spec(k_format="q4k", v_format="q4k").kv_format is None
    assert spec(kv_format="q4_1").kv_format is FORMATS["q4_1"]


def test_open_blocks() -> None:
    s = spec(kv_format="q4k")
    assert s.open_blocks is FORMATS["float16"] and s.has_open_blocks
    assert s.open_format("k") is s.open_format("v") is FORMATS["float16"]
    assert s.open_block_shape == (3, 16, 64) and spec(
        kv_format="q4k", layout="NHD").open_block_shape == (16, 3, 64)  # fmt: skip
    assert s.open_block_nbytes == 2 * 2 * 3 * 16 * 64 * 2
    assert s.layer_open_block_nbytes("v") == 3 * 16 * 64 * 2
    assert s.storage_nbytes(10, 3) == 10 * s.block_nbytes + 3 * s.open_block_nbytes
    # a kind that is not quantised keeps its own format in open blocks
    mixed = spec(k_format="q4k", v_format="float32", open_blocks="bf16")
    assert mixed.open_format("k").name == "bfloat16" and mixed.open_format("v").name == "float32"
    assert mixed.open_block_nbytes == 2 * 3 * 16 * 64 * (2 + 4)
    # any quantised format can have them, and none has to but q4k
    q4 = spec(kv_format="q4", open_blocks=FORMATS["float32"])
    assert q4.open_format("k").name == "float32" and q4 != spec(kv_format="q4")
    for plain in (spec(kv_format="q4"), spec(), spec(kv_format="float32")):
        assert plain.open_blocks is None and not plain.has_open_blocks
        assert plain.open_block_nbytes == plain.layer_open_block_nbytes("k") == 0
        with pytest.raises(InvalidArgumentError, match="no open blocks"):
            plain.open_format("k")
        with pytest.raises(InvalidArgumentError, match="num_open"):
            plain.storage_nbytes(10, 1)
    for quantised in ("q8", "q4k", "q8_0"):
        with pytest.raises(FormatError, match="open_blocks"):
            spec(kv_format="q4", open_blocks=quantised)
    with pytest.raises(FormatError, match="float64"):
        spec(kv_format="q4", open_blocks="float64")
    for dense in ("float16", "float32"):
        with pytest.raises(InvalidArgumentError, match="neither K nor V"):
            spec(kv_format=dense, open_blocks="float16")
    for bad in (-1, 1.5, None, "3"):
        with pytest.raises(InvalidArgumentError, match="num_open"):
            s.storage_nbytes(1, bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="kind"):
        s.open_format("x")  # type: ignore[arg-type]


# SPEC F9, CASE C40 C42
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize(("heads", "tokens", "dim"), [(3, 16, 64), (1, 1, 1), (5, 7, 33),
                                                      (8, 4, 80), (2, 3, 96)])  # fmt: skip
def test_sizes_are_those_of_real_blocks(
    layout: str, name: str, heads: int, tokens: int, dim: int
) -> None:
    s = spec(
        num_kv_heads=heads, block_size=tokens, head_dim=dim, k_format=name, v_format=name,
        layout=layout,
    )  # fmt: skip
    block = ref.pack_block(name, layout, np.ones((tokens, heads, dim), np.float32))
    assert s.layer_block_nbytes("k") == s.layer_block_nbytes("v") == block.size
    assert s.block_nbytes == 2 * 2 * block.size
    assert s.token_nbytes == s.block_nbytes / tokens
    assert s.bytes_per_value == block.size / (heads * tokens * dim)
    assert s.fp32_block_nbytes == 2 * 2 * heads * tokens * dim * 4
    assert s.storage_nbytes(10) == 10 * s.block_nbytes
    assert s.storage_nbytes(0) == 0
    dense = (heads, tokens, dim) if layout == "HND" else (tokens, heads, dim)
    assert s.k_block_shape == s.v_block_shape == (dense if name in ref.DENSE else (block.size,))


# SPEC F9
def test_known_sizes() -> None:
    assert spec(kv_format="q8").block_nbytes == 2 * 2 * 3 * 16 * 2 * 36
    assert spec(kv_format="q8").bytes_per_value == 1.125
    assert spec(kv_format="q4").bytes_per_value == 0.625
    mixed = spec(k_format="q8", v_format="q4")
    assert mixed.bytes_per_value == (1.125 + 0.625) / 2
    assert mixed.block_nbytes == 2 * (mixed.layer_block_nbytes("k") + mixed.layer_block_nbytes("v"))
    # CASE C40: 33 values take two groups, quants 16 * 64, scales 16 * 8
    assert spec(head_dim=33, kv_format="q8").layer_block_nbytes("k") == 3 * (1024 + 128)
    # 16 tokens of 64 channels: 32 bytes of nibbles a token, 4 bytes of scales a channel
    q4k = spec(kv_format="q4k")
    assert q4k.layer_block_nbytes("k") == 3 * (16 * 32 + 64 * 4)
    assert q4k.bytes_per_value == (0.75 + 0.625) / 2
    assert spec(kv_format="q4k", block_size=32).bytes_per_value == 0.625
    # one row of one group: the plane is padded to a multiple of 16
    one = spec(head_dim=1, num_kv_heads=1, block_size=1, kv_format="q4")
    assert one.layer_block_nbytes("k") == 32 and one.bytes_per_value == 32


# SPEC F11
def test_blocks_for() -> None:
    s = spec()
    assert s.block_nbytes == 2 * 2 * 3 * 16 * 64 * 2
    assert s.blocks_for(s.block_nbytes) == 1
    assert s.blocks_for(s.block_nbytes - 1) == 0
    assert s.blocks_for("2GiB") == 2**31 // s.block_nbytes
    assert s.blocks_for("0") == 0
    q4k = spec(kv_format="q4k")
    for num_blocks in (1, 5, 8, 9, 100, 1000):
        opened = q4k.default_open_blocks(num_blocks)
        assert opened == min(num_blocks, max(16, -(-num_blocks // 16)))
        whole = q4k.storage_nbytes(num_blocks, opened)
        assert (q4k.blocks_for(whole), q4k.blocks_for(whole - 1)) == (num_blocks, num_blocks - 1)
    assert s.default_open_blocks(100) == 0
    for bad in ("2G", "", -1, 1.5, None, "much", 2**70):
        with pytest.raises(InvalidArgumentError):
            s.blocks_for(bad)  # type: ignore[arg-type]


def flatten(spec_args: tuple[int, int, int, int, int], stride: int, block: int) -> np.ndarray:
    code, layout, heads, tokens, dim = spec_args
    return np.array([
        [row_address(code, layout, heads, tokens, dim, stride, block, head, token)
         for head in range(heads)]
        for token in range(tokens)
    ])  # fmt: skip


# SPEC F9a
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", list(FORMATS))
def test_addresses_name_the_rows_of_the_reference(name: str, layout: str) -> None:
    tokens, heads, dim = 5, 3, 40
    args = (FORMATS[name].code, LAYOUTS[layout], heads, tokens, dim)
    sizes = block_geometry(*args)
    x = np.random.default_rng(1).standard_normal((tokens, heads, dim)).astype(np.float32)
    block = ref.pack_block(name, layout, x)
    if name in ref.BY_CHANNEL:
        heads_of = [ref.encode_channels(x[:, head]) for head in range(heads)]
        data = np.stack([rows for rows, _ in heads_of], axis=1).reshape(tokens * heads, -1)
        scales = np.stack([s[0].reshape(-1) for _, s in heads_of])
        scales = np.tile(scales, (tokens, 1))
    else:
        data, scales = ref.encode_rows(name, x.reshape(-1, dim))
    if name not in ref.DENSE and name not in ref.PLANAR:
        rows = [ref.interleaved(name, d[None], s[None]) for d, s in zip(data, scales, strict=True)]
        data, scales = np.stack(rows), scales[:, :0]
    for at, address in enumerate(flatten(args, sizes["block_nbytes"], 0).reshape(-1, 2)):
        assert np.array_equal(block[address[0]:][: data.shape[1]], data[at])
        assert np.array_equal(block[address[1]:][: scales.shape[1]], scales[at])
    # another block is the same, one stride further
    moved = flatten(args, sizes["block_nbytes"] + 64, 3) - flatten(args, 0, 0)
    assert (moved == 3 * (sizes["block_nbytes"] + 64)).all()


# SPEC F9a
def test_planar_quants_and_scales_are_aligned() -> None:
    for name in ref.PLANAR:
        for layout in LAYOUTS.values():
            for dim in (1, 33, 64, 80):
                args = (FORMATS[name].code, layout, 3, 5, dim)
                sizes = block_geometry(*args)
                assert sizes["block_nbytes"] % 16 == sizes["scale_offset"] % 16 == 0
                if name in ref.BY_CHANNEL:  # rows are as short as their nibbles
                    assert sizes["row_data_nbytes"] == (dim + 1) // 2
                    continue
                assert (flatten(args, sizes["block_nbytes"], 1)[..., 0] % 16 == 0).all()


# TRAP 14, CASE C46
def test_addresses_are_64_bit() -> None:
    code = FORMATS["float16"].code
    nbytes = 2**20
    data, _ = row_address(code, 0, 8, 16, 128, nbytes, 5_000_000, 7, 15)
    assert data == 5_000_000 * nbytes + (7 * 16 + 15) * 256
    data, scales = row_address(FORMATS["q8"].code, 1, 8, 16, 128, nbytes, 2**31 - 1, 7, 15)
    assert data == (2**31 - 1) * nbytes + 127 * 128
    assert scales == (2**31 - 1) * nbytes + 128 * 128 + 127 * 16


# CASE C42
@given(
    name=st.sampled_from(list(FORMATS)), layout=st.sampled_from(list(LAYOUTS)),
    heads=st.integers(1, 6), tokens=st.integers(1, 70), dim=st.integers(1, 100),
)  # fmt: skip
def test_rows_of_a_block_never_overlap(
    name: str, layout: str, heads: int, tokens: int, dim: int
) -> None:
    args = (FORMATS[name].code, LAYOUTS[layout], heads, tokens, dim)
    sizes = block_geometry(*args)
    taken = np.zeros(sizes["block_nbytes"], np.int8)
    places = flatten(args, sizes["block_nbytes"], 0).reshape(-1, 2)
    for data, scales in places:
        taken[data : data + sizes["row_data_nbytes"]] += 1
        taken[scales : scales + sizes["row_scale_nbytes"]] += 1
    used = heads * tokens * (sizes["row_data_nbytes"] + sizes["row_scale_nbytes"])
    if name in ref.BY_CHANNEL:
        groups = set(places[:, 1].tolist())
        assert len(groups) == heads * -(-tokens // 32) == heads * sizes["token_groups"]
        for scales in groups:
            taken[scales : scales + sizes["channel_nbytes"]] += 1
        used += len(groups) * 4 * dim
    assert taken.max() == 1
    assert taken.sum() == used


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim", "block_size"])
@pytest.mark.parametrize("bad", [0, -1, 2**31, 2**200, 1.0, "4", None, True, [1]])
def test_bad_sizes(name: str, bad: object) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        spec(**{name: bad})


def test_other_bad_values() -> None:
    for layout in ("hnd", "", None, 0, [], "NDH"):
        with pytest.raises(InvalidArgumentError, match="layout"):
            spec(layout=layout)
    for policy in ("", None, 1):
        with pytest.raises(InvalidArgumentError, match="on_nonfinite"):
            spec(on_nonfinite=policy)
    for length in (0, -1, 1.5, "9", True, 2**60):
        with pytest.raises(InvalidArgumentError, match="max_seq_len"):
            spec(max_seq_len=length)
    for name in ("kv_format", "k_format", "v_format"):
        with pytest.raises(FormatError):
            spec(**{name: "q7"})
    for kind in ("K", "kv", None, 0, []):
        with pytest.raises(InvalidArgumentError, match="kind"):
            spec().layer_block_nbytes(kind)  # type: ignore[arg-type]


# SPEC 7: integer overflow of num_blocks * bytes
def test_sizes_that_overflow_are_refused() -> None:
    most = 2**31 - 1
    with pytest.raises(InvalidArgumentError, match="2\\^62"):
        CacheSpec(most, most, most, most)
    with pytest.raises(InvalidArgumentError, match="2\\^62"):
        CacheSpec(1, 2**20, 2**20, 2**21)
    large = CacheSpec(1, 2**10, 2**10, 2**31 - 1)
    assert large.block_nbytes == 2 * 2**20 * (2**31 - 1) * 2
    with pytest.raises(InvalidArgumentError, match="2\\^63"):
        large.storage_nbytes(2**20)
    for bad in (-1, 2**63, 1.0, None, "3"):
        with pytest.raises(InvalidArgumentError, match="num_blocks"):
            large.storage_nbytes(bad)  # type: ignore[arg-type]


def test_specs_are_values() -> None:
    s = spec(k_format="q8", v_format="q4", layout="NHD", max_seq_len=99, on_nonfinite="saturate")
    for again in (pickle.loads(pickle.dumps(s)), copy.copy(s), copy.deepcopy(s), s.replace()):
        assert again == s and hash(again) == hash(s)
        assert again.block_nbytes == s.block_nbytes
    assert s != spec() and s != "spec"
    assert repr(s) == (
        "CacheSpec(num_layers=2, num_kv_heads=3, head_dim=64, block_size=16, k_format='q8', "
        "v_format='q4', layout='NHD', max_seq_len=99, on_nonfinite='saturate')"
    )
    q4k = spec(kv_format="q4k")
    assert repr(q4k) == (
        "CacheSpec(num_layers=2, num_kv_heads=3, head_dim=64, block_size=16, kv_format='q4k', "
        "layout='HND')"
    )
    q4 = spec(kv_format="q4", open_blocks="float16")
    assert repr(q4).endswith("kv_format='q4', layout='HND', open_blocks='float16')")
    both = spec(k_format="q4k", v_format="q4k", open_blocks="bfloat16")
    for each in (s, spec(), spec(kv_format="bf16", block_size=1), q4k, q4, both):
        assert pickle.loads(pickle.dumps(each)) == each == copy.deepcopy(each)
        assert pickle.loads(pickle.dumps(each)).open_block_nbytes == each.open_block_nbytes
        assert eval(repr(each)) == each
    with pytest.raises(dataclasses.FrozenInstanceError):
        s.head_dim = 3  # type: ignore[misc]


def test_replace() -> None:
    s = spec(k_format="q8", v_format="q4")
    assert s.replace(head_dim=80) == spec(k_format="q8", v_format="q4", head_dim=80)
    assert s.replace(kv_format="float32") == spec(kv_format="float32")
    assert dataclasses.replace(s, head_dim=80).block_nbytes == s.replace(head_dim=80).block_nbytes
    q4k, q4 = spec(kv_format="q4k"), spec(kv_format="q4", open_blocks="float16")
    assert q4k.replace(kv_format="q8") == spec(kv_format="q8")
    assert q4k.replace(head_dim=80) == spec(kv_format="q4k", head_dim=80)
    assert spec().replace(kv_format="q4k") == q4k
    assert q4.replace(kv_format="q8") == spec(kv_format="q8", open_blocks="float16")
    assert q4.replace(open_blocks=None) == spec(kv_format="q4")
    assert q4k.replace(open_blocks="bf16").replace(open_blocks=None) == q4k
    assert dataclasses.replace(q4, num_layers=1) == q4.replace(num_layers=1)
    with pytest.raises(InvalidArgumentError, match="open_blocks=None"):
        q4.replace(kv_format="float32")
    with pytest.raises(InvalidArgumentError, match="colour"):
        s.replace(colour=1)
    with pytest.raises(InvalidArgumentError, match="head_dim"):
        s.replace(head_dim=0)
