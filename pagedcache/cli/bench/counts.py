"""Counts of threads: each in turn for the library and for torch, and then as it was before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pagedcache

from . import peers


def each_count(counts: Iterable[int]) -> Iterator[int]:
    """Every count, in force while the loop's body runs."""
    before = pagedcache.get_num_threads()
    try:
        for count in counts:
            pagedcache.set_num_threads(count)
            peers.use_threads(count)
            yield count
    finally:
        pagedcache.set_num_threads(before)
        peers.use_threads(1)
