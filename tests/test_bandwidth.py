"""The copies and the read that benchmarks compare with: every byte, every alignment and length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagedcache import InvalidArgumentError, ShapeError
from pagedcache._native import bandwidth

LENGTHS = [0, 1, 7, 8, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200, 1000, 4096, 70_001]


def random_bytes(count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(count).integers(0, 256, count, dtype=np.uint8)


@pytest.mark.parametrize("copy", [bandwidth.copy, bandwidth.stream])
def test_a_copy_writes_these_bytes_and_no_others(copy: Callable[..., None]) -> None:
    for length in LENGTHS:
        for source_start, target_start in ((0, 0), (1, 0), (0, 1), (3, 13), (16, 48), (5, 5)):
            for threads in (1, 2, 3, 7, 64):
                source = random_bytes(length + source_start)[source_start:]
                room = np.full(length + target_start + 40, 0xA5, np.uint8)
                copy(source, room[target_start : target_start + length], threads)
                want = np.full_like(room, 0xA5)
                want[target_start : target_start + length] = source
                assert np.array_equal(room, want), (length, source_start, target_start, threads)


def test_a_read_is_the_sum_of_all_words() -> None:
    for length in LENGTHS:
        for start in (0, 1, 8, 13):
            data = random_bytes(length + start)[start:]
            padded = np.zeros(-(-length // 8) * 8, np.uint8)
            padded[:length] = data
            want = sum(padded.view("<u8" if np.little_endian else ">u8").tolist()) % 2**64
            for threads in (1, 2, 3, 64, 1024):
                assert bandwidth.read(data, threads) == want, (length, start, threads)


def test_one_thread_is_the_default() -> None:
    source, target = random_bytes(1000), np.zeros(1000, np.uint8)
    bandwidth.copy(source, target)
    assert np.array_equal(source, target)
    bandwidth.stream(source[::-1].copy(), target)
    assert np.array_equal(source[::-1], target)
    assert bandwidth.read(source) == sum(source.view(np.uint64).tolist()) % 2**64


def test_refusals_come_before_any_byte() -> None:
    source, target = random_bytes(100), np.zeros(100, np.uint8)
    for copy in (bandwidth.copy, bandwidth.stream):
        for threads in (0, -1, 1025):
            with pytest.raises(InvalidArgumentError, match="threads must be 1…1024"):
                copy(source, target, threads)
        with pytest.raises(ShapeError, match=r"target: expected \(100,\), got \(99,\)"):
            copy(source, target[:99])
        with pytest.raises(ValueError, match="contiguous"):
            copy(source[::2], target[:50])
    with pytest.raises(InvalidArgumentError, match="threads must be 1…1024"):
        bandwidth.read(source, 0)
    assert not target.any()
