"""Comparisons that say where two arrays first differ."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .registry import CheckFailed


def require(condition: bool, message: str) -> None:
    """Raise :class:`CheckFailed` unless ``condition`` holds (``assert`` may be optimised away)."""
    if not condition:
        raise CheckFailed(message)


def equal(actual: Any, expected: Any, what: str) -> None:
    """Two plain values (ints, floats, tuples, lists) are equal."""
    require(actual == expected, f"{what}: expected {expected!r}, got {actual!r}")


def same_bits(actual: Any, expected: Any, what: str) -> None:
    """Two arrays have the same dtype, shape and bytes (so that NaN and -0.0 count)."""
    got, want = np.ascontiguousarray(actual), np.ascontiguousarray(expected)
    equal(got.dtype, want.dtype, f"{what}: dtype")
    equal(got.shape, want.shape, f"{what}: shape")
    width = got.dtype.itemsize
    got_bytes, want_bytes = (a.reshape(-1).view(np.uint8).reshape(-1, width) for a in (got, want))
    different = np.flatnonzero((got_bytes != want_bytes).any(axis=1))
    if different.size:
        at = tuple(int(i) for i in np.unravel_index(different[0], got.shape))
        raise CheckFailed(
            f"{what}: {different.size} of {got.size} values differ, first at {at}: "
            f"expected {want[at]!r}, got {got[at]!r}"
        )


def same_values(actual: NDArray[Any], expected: NDArray[Any]) -> bool:
    """Whether two arrays have the same dtype, shape and bytes."""
    return (
        actual.dtype == expected.dtype
        and actual.shape == expected.shape
        and actual.tobytes() == expected.tobytes()
    )


def raises(error: type[BaseException], call: Any, what: str) -> BaseException:
    """``call()`` raises exactly this kind of error; returns it."""
    try:
        call()
    except error as caught:
        return caught
    except Exception as other:
        name = type(other).__name__
        raise CheckFailed(f"{what}: expected {error.__name__}, got {name}: {other}") from other
    raise CheckFailed(f"{what}: expected {error.__name__}, nothing was raised")
