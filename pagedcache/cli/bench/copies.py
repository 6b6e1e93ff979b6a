"""The limits to compare with: ``memcpy``, a non-temporal copy, and a plain read."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from pagedcache._native import bandwidth

from .timing import Timer, timed

Array = np.ndarray[Any, Any]

STREAM = "non-temporal copy"
"""What the non-temporal copy is called where it stands beside peers."""


def copy_timer(source: Array, target: Array, threads: int = 1) -> Timer:
    """``memcpy`` between two arrays of as many bytes."""
    return timed(partial(bandwidth.copy, as_bytes(source), as_bytes(target), threads))


def stream_timers(moved: int, threads: int = 1) -> dict[str, Timer]:
    """A non-temporal copy that reads and writes ``moved`` bytes in all; none where it cannot be."""
    if not bandwidth.STREAMS:
        return {}
    source, target = buffers(moved // 2)
    return {STREAM: timed(partial(bandwidth.stream, source, target, threads))}


def copy_of(nbytes: int, threads: int = 1) -> Timer:
    """``memcpy`` of ``nbytes`` bytes between buffers of its own."""
    return copy_timer(*buffers(nbytes), threads)


def buffers(nbytes: int) -> tuple[Array, Array]:
    """Bytes that are not zero, in memory that is there, and room for them."""
    source = np.resize(np.random.default_rng(5).integers(1, 256, 1 << 16, np.uint8), nbytes)
    return source, np.ones(nbytes, np.uint8)


def as_bytes(array: Array) -> Array:
    """The bytes of a contiguous array, in place."""
    return array.reshape(-1).view(np.uint8)
