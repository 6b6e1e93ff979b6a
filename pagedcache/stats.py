"""What a cache counts: frozen snapshots, each of one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

_Record = TypeVar("_Record", bound="_Snapshot")


class _Snapshot:
    """Shared by the frozen dataclasses below: counted fields, derived properties, one dict."""

    __slots__ = ()
    _DERIVED: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls: type[_Record], counted: Mapping[str, Any]) -> _Record:
        """Build from a mapping with every counted field; derived figures in it are ignored.

        Raises ``TypeError`` for a missing or unknown field: a counter that is not carried over
        must not go unnoticed.
        """
        return cls(**{k: v for k, v in counted.items() if k not in cls._DERIVED})

    def to_dict(self) -> dict[str, int | float]:
        """Counted and derived figures under their names, ready for JSON."""
        names = [f.name for f in fields(self)]  # type: ignore[arg-type]
        return {name: getattr(self, name) for name in (*names, *self._DERIVED)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats(_Snapshot):
    """Counters of one cache since it was made, all from one moment.

    A *query* is an ``open`` that was admitted; a refused or repeated attempt counts once, when
    it succeeds. Queries opened with ``resumed=True`` (a preempted request coming back) count in
    the ``resumed_`` fields only, so that they cannot flatter the hit rate of the prompts.
    """

    sequences_allocated: int
    """Sequences ever opened or forked."""
    sequences_freed: int
    """Sequences ever freed."""
    sequences_active: int
    """Sequences now live."""
    blocks_allocated: int
    """Blocks ever taken from the pool."""
    blocks_freed: int
    """Blocks ever given back to the pool (the last reference went)."""
    blocks_used: int
    """Blocks now referenced."""
    pinned: int
    """Blocks that now stay where they are: held by views, copies or device work."""
    cow_copies: int
    """Blocks copied because a shared or cached block was about to be written."""
    partial_copies: int
    """Blocks whose matched head rows were copied into a fresh block (partial-block hits)."""
    defragmentations: int
    """Calls of ``defragment``."""
    blocks_moved: int
    """Blocks moved by ``defragment`` and ``compact_sequence``."""
    prefix_queries: int
    """Requests looked up."""
    prefix_hits: int
    """Requests with at least one token hit."""
    query_tokens: int
    """Tokens looked up."""
    hit_tokens: int
    """Tokens that needed no compute."""
    query_blocks: int
    """Blocks of the tokens looked up, a part-filled last one included."""
    hit_blocks: int
    """Blocks found whole and shared; one whose head was copied is in ``partial_copies``."""
    resumed_queries: int
    """Requests looked up with ``resumed=True``."""
    resumed_hit_tokens: int
    """Tokens that needed no compute in them."""
    evicted_blocks: int
    """Cached blocks that lost their identity because their storage was needed."""
    evicted_tokens: int
    """Tokens in those blocks."""
    blocks_sealed: int
    """Open blocks that were quantised once they were full (``CacheSpec.open_blocks``)."""
    blocks_reopened: int
    """Quantised blocks that were read back into an open one, as some of their tokens were
    rewritten (after ``truncate``, or in a fork)."""
    open_blocks: int
    """Blocks now open."""
    steps: int
    """Elementary bookkeeping steps (work, not time): what tests of O(1) compare."""

    _DERIVED = (
        "prefix_misses",
        "miss_tokens",
        "miss_blocks",
        "tokens_saved",
        "hit_rate",
    )

    @property
    def prefix_misses(self) -> int:
        """Requests without a single token hit."""
        return self.prefix_queries - self.prefix_hits

    @property
    def miss_tokens(self) -> int:
        """Tokens looked up and not found."""
        return self.query_tokens - self.hit_tokens

    @property
    def miss_blocks(self) -> int:
        """Blocks looked up and not shared."""
        return self.query_blocks - self.hit_blocks

    @property
    def tokens_saved(self) -> int:
        """Tokens that needed no compute, resumed requests included."""
        return self.hit_tokens + self.resumed_hit_tokens

    @property
    def hit_rate(self) -> float:
        """``hit_tokens / query_tokens``, 0…1, resumed requests left out; 0.0 without queries."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragmentation(_Snapshot):
    """How scattered the used blocks lie in the pool, and how much of them is empty."""

    holes: int
    """Maximal runs of ids that are not used, below the highest used id."""
    wasted_slots: int
    """Token slots of used blocks that hold no token."""
    ratio: float
    """``min(1, holes / used_blocks)``; 0.0 when nothing is used."""
    largest_free_run: int
    """Longest run of neighbouring ids that are not used, in blocks, the pool's end included."""
    mean_tokens_per_block: float
    """Tokens per block, over the blocks that hold tokens; 0.0 for none."""
    used_blocks: int
    """Blocks referenced."""
    free_blocks: int
    """Blocks not referenced, cached ones included."""
    block_size: int
    """Token slots per block."""

    def should_defragment(self, threshold: float = 0.3) -> bool:
        """Whether ``defragment()`` is worth its copies.

        True when ``ratio`` is above ``threshold``; or more than 25 % of the used slots are
        wasted and there are more than 2 holes; or less than 10 % of the pool is free with at
        least one hole.
        """
        used_slots = self.used_blocks * self.block_size
        total = self.used_blocks + self.free_blocks
        # Integers on both sides: 25 % and 10 % are met exactly, not to a rounding error.
        return (
            self.ratio > threshold
            or (4 * self.wasted_slots > used_slots and self.holes > 2)
            or (10 * self.free_blocks < total and self.holes >= 1)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheStats(_Snapshot):
    """Counters of one ``PrefixCache`` since it was made."""

    lookups: int
    """Calls of ``lookup`` and ``lookup_hash``."""
    hits: int
    """Those that found an entry."""
    misses: int
    """Those that found none."""
    insertions: int
    """Entries added; replacing a value and a refused insert are not counted."""
    evictions: int
    """Entries dropped to make room."""

    _DERIVED = ("hit_rate",)

    @property
    def hit_rate(self) -> float:
        """``hits / lookups``, 0…1; 0.0 without lookups."""
        return self.hits / self.lookups if self.lookups else 0.0
