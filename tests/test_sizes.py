"""Sizes in bytes from text and back."""

from __future__ import annotations

import numpy as np
import pytest

from pagedcache.errors import InvalidArgumentError, PagedCacheError
from pagedcache.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        (0, 0),
        (12, 12),
        (np.int64(4096), 4096),
        (2**63 - 1, 2**63 - 1),
        ("7", 7),
        ("7B", 7),
        ("0.3B", 0),
        ("2GiB", 2_147_483_648),
        ("512 MiB", 536_870_912),
        ("1.5GB", 1_500_000_000),
        ("1.5KiB", 1536),
        (".5kib", 512),
        ("0.1 GiB", 107_374_182),  # 107,374,182.4: a budget is rounded down
        ("1kB", 1000),
        ("3tb", 3_000_000_000_000),
        ("2PiB", 2_251_799_813_685_248),
        (" 1 EiB\n", 1_152_921_504_606_846_976),
        ("8796093022207.999 MiB", 9_223_372_036_854_774_759),  # exact beyond 2^53
    ],
)
def test_parse_size_gives_bytes(size: int | str, nbytes: int) -> None:  # SPEC F11
    assert parse_size(size) == nbytes
    assert type(parse_size(size)) is int


@pytest.mark.parametrize(
    "size",
    [-1, pytest.param(-(10**5000), id="-10^5000"), 2**63, pytest.param(10**5000, id="10^5000")]
    + [True, 2.0, float("nan"), None, b"1GiB", [1], np.float32(1)],
)
def test_parse_size_refuses_other_values(size: object) -> None:  # SPEC 7
    with pytest.raises(InvalidArgumentError) as caught:
        parse_size(size)  # type: ignore[arg-type]
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, PagedCacheError)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "text",
    ["", " ", "-1", "+1", "1e3", "GiB", "1 Gi B", "1GiBx", "1,5GB", "1.", "0x10", "8EiB"]
    + ["9" * 100, pytest.param("9" * 5000, id="9*5000"), "١GiB", "1KM", "nan", "inf", "1 bit"],
)
def test_parse_size_refuses_other_texts(text: str) -> None:  # SPEC 7
    with pytest.raises(InvalidArgumentError):
        parse_size(text)


@pytest.mark.parametrize("text", ["2G", "2g", "512m", "1K"])
def test_parse_size_explains_the_ambiguous_letter(text: str) -> None:  # SPEC 7
    letter = text[-1].upper()
    with pytest.raises(InvalidArgumentError, match=f"write {letter}iB or {letter}B"):
        parse_size(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (36, "36 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1024**2 - 1, "1 MiB"),
        (10**12, "931.32 GiB"),
        (2**62, "4 EiB"),
        (2**80, "1048576 EiB"),
        (-1536, "-1.5 KiB"),
    ],
)
def test_format_size(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@pytest.mark.parametrize("power", range(7))
def test_format_size_round_trips_whole_units(power: int) -> None:
    for count in (1, 7, 100, 1000):
        nbytes = count * 1024**power
        if nbytes < 2**63:
            assert parse_size(format_size(nbytes)) == nbytes
