"""Public hashes: golden values, one answer for every container and process, kept-apart fields."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
from array import array
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pagedcache.hashing
from pagedcache.errors import InvalidArgumentError
from pagedcache.hashing import (
    compute_block_hash,
    compute_block_hashes,
    compute_prefix_hash,
    compute_root_key,
    encode_extra,
    encode_root,
    validate_extra_keys,
)

TOKENS = [1, 2, 3, 2**31, 2**32 - 1, 0, 7, 8, 9]

# SHA-256 of the bytes of the documented chain, written out by hand with hashlib and struct.
GOLDEN_ROOT = "9e0a9403605878c0091f9355a3adcf9dc3c1a33d85985acf41e58893aa298209"
GOLDEN_KEYS = [
    "551588b830e6455e33004dfe8959e1f5f02d112358c884da4fabf46363bb8c5d",
    "0b20a8cd8207111a9cf0a1fff03b61c311f95c7f7eab952975a16194be37d964",
]
GOLDEN_SALTED = [
    "0b1421ebb91392eeb2fbf66b8efb09594524b9366b47e715d6e4b8268295eb3b",
    "24c66a0ba5150a85a84c39507056c08d7474b3b5826eab8b0672aacea9829416",
]


def sha(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def field(tag: int, payload: bytes) -> bytes:
    return bytes([tag]) + struct.pack("<I", len(payload)) + payload


def as_containers(tokens: list[int]) -> dict[str, object]:
    """The same small tokens in every container and dtype that can hold them."""
    forms: dict[str, object] = {
        "list": list(tokens),
        "tuple": tuple(tokens),
        "array.array": array("Q", tokens),
        "strided": np.repeat(np.array(tokens, np.uint32), 2)[::2],
        "big-endian": np.array(tokens, ">u4"),
        "numpy scalars": [np.int64(t) for t in tokens],
    }
    dtypes = [np.uint32, np.int64, np.uint64] + [np.int32] * (max(tokens) < 2**31)
    return forms | {np.dtype(d).name: np.array(tokens, d) for d in dtypes}


# --- 64-bit prefix hash ---------------------------------------------------------------------


def fnv(tokens: list[int]) -> int:
    state = 0xCBF29CE484222325
    for token in tokens:
        state = ((state ^ token) * 0x100000001B3) % 2**64
    return state


@pytest.mark.parametrize(
    ("tokens", "value"),
    [
        ([], 0xCBF29CE484222325),
        ([0], 0xAF63BD4C8601B7DF),
        ([1], 0xAF63BC4C8601B62C),
        ([1, 2, 3], 0xD0AA6218672CF5AB),
        ([2**32 - 1], 0x6B1D723E79FE466E),
    ],
)
def test_prefix_hash_golden(tokens: list[int], value: int) -> None:  # SPEC F37
    assert compute_prefix_hash(tokens) == value == fnv(tokens)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_prefix_hash_is_fnv_over_whole_tokens(tokens: list[int]) -> None:  # SPEC F37
    assert compute_prefix_hash(tokens) == fnv(tokens)


def test_prefix_hash_of_long_arrays() -> None:  # SPEC F37
    """Long enough for the path that gives the GIL away."""
    for length in (4095, 4096, 4097, 20_000):
        tokens = np.random.default_rng(length).integers(0, 2**32, length, np.uint32)
        assert compute_prefix_hash(tokens) == fnv(tokens.tolist())


@pytest.mark.parametrize("tokens", [TOKENS, [5, 6, 7]])
def test_prefix_hash_of_every_container(tokens: list[int]) -> None:  # CASE C19
    found = {name: compute_prefix_hash(form) for name, form in as_containers(tokens).items()}
    assert found == dict.fromkeys(found, fnv(tokens))


# --- block keys -----------------------------------------------------------------------------


def test_block_keys_golden() -> None:  # SPEC F37, CASE C19
    key0 = sha(b"pagedcache/1")
    key1 = sha(key0, struct.pack("<4I", *TOKENS[:4]))
    key2 = sha(key1, struct.pack("<4I", *TOKENS[4:8]))
    assert key0.hex() == GOLDEN_ROOT
    assert [key1.hex(), key2.hex()] == GOLDEN_KEYS
    assert compute_root_key() == key0
    assert compute_block_hashes(TOKENS, 4) == [key1, key2]
    assert compute_block_hash(TOKENS[:4]) == key1
    assert compute_block_hash(TOKENS[4:8], key1) == key2


def test_salted_block_keys_golden() -> None:  # SPEC F36, SPEC F37
    root = b"\x01\x08\x00\x00\x00tenant-a" + b"\x02\x03\x00\x00\x00sql"
    key0 = sha(b"pagedcache/1", root)
    # An image over tokens 2…4 (start 2, stop 5): (2, 4) of block 0, (0, 1) of block 1.
    image = b"\xff\xd8\xff"
    extra0 = b"\x03\x0b\x00\x00\x00" + struct.pack("<II", 2, 4) + image
    extra1 = b"\x03\x0b\x00\x00\x00" + struct.pack("<II", 0, 1) + image
    key1 = sha(key0, struct.pack("<4I", *TOKENS[:4]), extra0)
    key2 = sha(key1, struct.pack("<4I", *TOKENS[4:8]), extra1)
    assert [key1.hex(), key2.hex()] == GOLDEN_SALTED
    keys = [(2, 5, image)]
    found = compute_block_hashes(TOKENS, 4, "tenant-a", adapter="sql", extra_keys=keys)
    assert found == [key1, key2]
    first = compute_block_hash(TOKENS[:4], None, b"tenant-a", adapter=b"sql", extra=extra0)
    assert first == key1
    assert compute_block_hash(TOKENS[4:8], first, b"tenant-a", extra=extra1) == key2


@pytest.mark.parametrize("tokens", [TOKENS, list(range(1, 10))])
def test_block_keys_of_every_container(tokens: list[int]) -> None:  # CASE C19
    expected = compute_block_hashes(tokens, 4, b"s")
    for name, form in as_containers(tokens).items():
        assert compute_block_hashes(form, 4, b"s") == expected, name


def test_block_keys_in_processes_with_other_hash_seeds() -> None:  # CASE C19
    code = (
        "from pagedcache.hashing import compute_block_hashes as f, compute_prefix_hash as g\n"
        f"t = {TOKENS}\n"
        "print(g(t), *[k.hex() for k in f(t, 4, 'tenant-a', adapter='sql',"
        " extra_keys=[(2, 5, bytes([255, 216, 255]))])])"
    )
    home = str(Path(pagedcache.hashing.__file__).parents[1])
    for seed in ("0", "1", "4294967295"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": home}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.split() == [str(fnv(TOKENS)), *GOLDEN_SALTED]


def test_only_full_blocks_have_keys() -> None:  # SPEC F37
    for length, num_keys in ((0, 0), (1, 0), (3, 0), (4, 1), (7, 1), (8, 2), (9, 2)):
        keys = compute_block_hashes(range(length), 4)
        assert len(keys) == num_keys
        assert keys == compute_block_hashes(range(9), 4)[:num_keys]  # a prefix has the same keys
    assert len(compute_block_hashes(range(9), 1)) == 9


def test_a_key_depends_on_all_tokens_before_it() -> None:  # SPEC F35, SPEC F37
    base = compute_block_hashes(range(12), 4)
    changed = compute_block_hashes([0, 1, 2, 99, *range(4, 12)], 4)
    assert all(a != b for a, b in zip(base, changed, strict=True))
    assert len(set(base + changed)) == 6


# --- salt, adapter, extra keys ----------------------------------------------------------------


def test_salts_are_kept_apart_at_every_block() -> None:  # CASE C17, SPEC F36
    salts: list[bytes | str | None] = ["a", "b", b"", None, "ä", b"a\x00"]
    keys = {repr(salt): compute_block_hashes(range(12), 4, salt) for salt in salts}
    assert keys["None"] == keys["b''"]
    del keys["None"]
    for i in range(3):
        assert len({chain[i] for chain in keys.values()}) == len(keys)
    assert compute_block_hashes(range(12), 4, b"a") == keys["'a'"]
    assert compute_block_hashes(range(12), 4, "ä".encode()) == keys["'ä'"]
    assert compute_block_hashes(range(12), 4, bytearray(b"a")) == keys["'a'"]


def test_fields_are_tagged_and_length_prefixed() -> None:  # CASE C18
    roots = [("x", None), (None, "x"), ("ab", "c"), ("a", "bc"), ("abc", None), (None, None)]
    encoded = [encode_root(salt, adapter) for salt, adapter in roots]
    assert len(set(encoded)) == len(roots)
    assert encoded == [
        field(1, b"x"),
        field(2, b"x"),
        field(1, b"ab") + field(2, b"c"),
        field(1, b"a") + field(2, b"bc"),
        field(1, b"abc"),
        b"",
    ]
    # A salt that spells out an adapter field is still only a salt.
    assert encode_root(b"a" + field(2, b"bc")) != encode_root("a", "bc")
    assert encode_root(b"", "") == b""


@given(*[st.tuples(st.binary(max_size=6), st.binary(max_size=6))] * 2)
def test_roots_are_equal_only_for_equal_fields(
    one: tuple[bytes, bytes], two: tuple[bytes, bytes]
) -> None:  # CASE C18
    assert (encode_root(*one) == encode_root(*two)) == (one == two)


def test_extra_keys_enter_the_blocks_they_overlap_and_those_behind() -> None:  # SPEC F36
    plain = compute_block_hashes(range(20), 4)
    for start, stop, first_block in ((4, 8, 1), (7, 9, 1), (8, 12, 2), (19, 20, 4), (20, 24, 5)):
        keys = compute_block_hashes(range(20), 4, extra_keys=[(start, stop, b"img")])
        same = [a == b for a, b in zip(plain, keys, strict=True)]
        assert same == [i < first_block for i in range(5)]


def test_extra_encoding_is_clipped_to_the_block() -> None:  # SPEC F36, SPEC F37
    keys = validate_extra_keys([(10, 40, b"img")])
    ranges = {(0, 16): (10, 16), (16, 32): (0, 16), (32, 48): (0, 8)}
    for (start, stop), (a, b) in ranges.items():
        assert encode_extra(keys, start, stop) == field(3, struct.pack("<II", a, b) + b"img")
    assert encode_extra(keys, 0, 10) == b""
    assert encode_extra(keys, 40, 56) == b""
    assert encode_extra([], 0, 16) == b""
    # Content or place differs -> bytes differ, also when key bytes look like another range.
    different = [
        [(0, 4, b"a")],
        [(0, 4, b"b")],
        [(0, 5, b"a")],
        [(1, 4, b"a")],
        [(0, 4, b"a"), (0, 4, b"a")],
        [(0, 4, b"")],
        [(0, 2, b"a"), (2, 4, b"a")],
    ]
    encoded = {encode_extra(validate_extra_keys(keys), 0, 16) for keys in different}
    assert len(encoded) == len(different)


def test_extra_keys_are_validated_and_sorted() -> None:  # SPEC F36
    given_keys = [(8, 9, "z"), [np.int64(3), 5, bytearray(b"b")], (3, 5, memoryview(b"a"))]
    assert validate_extra_keys(given_keys) == [(3, 5, b"a"), (3, 5, b"b"), (8, 9, b"z")]
    assert validate_extra_keys(()) == []
    assert validate_extra_keys(iter([(0, 1, b"")])) == [(0, 1, b"")]
    forward = compute_block_hashes(range(16), 4, extra_keys=given_keys)
    assert compute_block_hashes(range(16), 4, extra_keys=given_keys[::-1]) == forward


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 25), st.integers(1, 30), st.binary(max_size=3)), max_size=6),
    st.integers(1, 7),
)
def test_chain_equals_block_by_block(
    spans: list[tuple[int, int, bytes]], block_size: int
) -> None:  # SPEC F37
    """Whole chains against ``encode_extra`` block by block and against hashlib."""
    extra_keys = [(start, start + length, key) for start, length, key in spans]
    tokens = list(range(100, 124))
    key = sha(b"pagedcache/1", field(1, b"s"))
    expected = []
    for i in range(len(tokens) // block_size):
        first, last = i * block_size, (i + 1) * block_size
        extra = b"".join(
            field(3, struct.pack("<II", max(a, first) - first, min(b, last) - first) + content)
            for a, b, content in sorted(extra_keys)
            if max(a, first) < min(b, last)
        )
        assert encode_extra(validate_extra_keys(extra_keys), first, last) == extra
        key = sha(key, struct.pack(f"<{block_size}I", *tokens[first:last]), extra)
        expected.append(key)
    assert compute_block_hashes(tokens, block_size, b"s", extra_keys=extra_keys) == expected


def test_a_range_without_end_costs_only_the_known_blocks() -> None:  # SPEC 7
    keys = compute_block_hashes(range(8), 4, extra_keys=[(0, 2**47, b"all")])
    assert keys == compute_block_hashes(range(8), 4, extra_keys=[(0, 8, b"all")])


# --- refused arguments ------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.5], [True], "12", None, [[1, 2]], {1, 2}])
def test_bad_tokens(tokens: object) -> None:  # SPEC 7
    for call in (compute_prefix_hash, compute_block_hash, lambda t: compute_block_hashes(t, 4)):
        with pytest.raises(InvalidArgumentError):
            call(tokens)


@pytest.mark.parametrize("block_size", [0, -1, 2**60, 1.0, True, None, "4"])
def test_bad_block_size(block_size: object) -> None:  # SPEC 7
    with pytest.raises(InvalidArgumentError, match="block_size"):
        compute_block_hashes([1, 2], block_size)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [1, 1.5, ["a"], object(), "\ud800"])
def test_bad_salt_and_adapter(value: object) -> None:  # SPEC 7
    with pytest.raises(InvalidArgumentError, match="salt"):
        encode_root(value)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="adapter"):
        encode_root(b"", value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "extra_keys",
    [
        None,
        5,
        [5],
        [(0, 1)],
        [(0, 1, b"a", 2)],
        [(1, 1, b"a")],
        [(2, 1, b"a")],
        [(-1, 1, b"a")],
        [(0, 2**70, b"a")],
        [(0.0, 1, b"a")],
        [(False, 1, b"a")],
        [(0, 1, None)],
        [(0, 1, 7)],
        [(0, 1, "\ud800")],
    ],
)
def test_bad_extra_keys(extra_keys: object) -> None:  # SPEC 7
    with pytest.raises(InvalidArgumentError, match="extra_keys"):
        validate_extra_keys(extra_keys)  # type: ignore[arg-type]


def test_the_bad_extra_key_is_named() -> None:  # SPEC 7
    with pytest.raises(InvalidArgumentError, match=r"extra_keys\[1\]"):
        validate_extra_keys([(0, 1, b"a"), (3, 3, b"b")])


@pytest.mark.parametrize("parent", [b"", b"x" * 31, b"x" * 33, "x" * 32, 5])
def test_bad_parent(parent: object) -> None:  # SPEC 7
    with pytest.raises(InvalidArgumentError, match="parent"):
        compute_block_hash([1], parent)  # type: ignore[arg-type]


def test_a_block_hash_needs_tokens() -> None:  # SPEC 7
    with pytest.raises(InvalidArgumentError, match="at least one token"):
        compute_block_hash([])
