"""Snapshots of counters: derived figures, the defragmentation rule, plain dicts."""

from __future__ import annotations

import dataclasses
import inspect
import json
import pickle

import pytest

from pagedcache.stats import Fragmentation, Stats

COUNTED = {
    "sequences_allocated": 9,
    "sequences_freed": 4,
    "sequences_active": 5,
    "blocks_allocated": 60,
    "blocks_freed": 20,
    "blocks_used": 40,
    "pinned": 3,
    "cow_copies": 2,
    "partial_copies": 1,
    "defragmentations": 1,
    "blocks_moved": 7,
    "prefix_queries": 8,
    "prefix_hits": 6,
    "query_tokens": 800,
    "hit_tokens": 200,
    "query_blocks": 50,
    "hit_blocks": 12,
    "resumed_queries": 2,
    "resumed_hit_tokens": 48,
    "evicted_blocks": 5,
    "evicted_tokens": 80,
    "blocks_sealed": 6,
    "blocks_reopened": 1,
    "open_blocks": 2,
    "steps": 12345,
}


def test_stats_derive_what_follows_from_the_counters() -> None:  # SPEC F16, CASE C25
    stats = Stats.from_dict(COUNTED)
    assert stats.prefix_misses == 2
    assert stats.miss_tokens == 600
    assert stats.miss_blocks == 38
    assert stats.tokens_saved == 248
    assert stats.hit_rate == 0.25  # resumed tokens do not enter


def test_hit_rate_without_queries_is_zero() -> None:  # SPEC F16
    idle = Stats.from_dict(dict.fromkeys(COUNTED, 0))
    assert idle.hit_rate == 0.0
    only_resumed = dataclasses.replace(idle, resumed_queries=3, resumed_hit_tokens=30)
    assert (only_resumed.hit_rate, only_resumed.tokens_saved) == (0.0, 30)  # CASE C25


def test_stats_to_dict_holds_every_figure_and_is_json() -> None:  # SPEC F16
    derived = {
        "prefix_misses": 2,
        "miss_tokens": 600,
        "miss_blocks": 38,
        "tokens_saved": 248,
        "hit_rate": 0.25,
    }
    stats = Stats.from_dict(COUNTED)
    assert stats.to_dict() == COUNTED | derived
    assert json.loads(json.dumps(stats.to_dict())) == stats.to_dict()
    assert Stats.from_dict(stats.to_dict()) == stats


def test_snapshots_are_frozen_and_picklable() -> None:  # SPEC F16
    stats = Stats.from_dict(COUNTED)
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.blocks_used = 0  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(stats)) == stats


@pytest.mark.parametrize("name", sorted(COUNTED))
def test_a_missing_counter_is_an_error(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        Stats.from_dict({k: v for k, v in COUNTED.items() if k != name})


def test_an_unknown_counter_is_an_error() -> None:
    with pytest.raises(TypeError, match="no_such"):
        Stats.from_dict(COUNTED | {"no_such": 1})


def test_every_field_says_its_unit() -> None:
    for record in (Stats, Fragmentation):
        source = inspect.getsource(record)
        for field in dataclasses.fields(record):
            after = source.split(f"    {field.name}: ", 1)[1].split("\n", 2)[1]
            assert after.strip().startswith('"""'), field.name


def fragmentation(**changes: float) -> Fragmentation:
    values: dict[str, float] = {
        "holes": 0,
        "wasted_slots": 0,
        "ratio": 0.0,
        "largest_free_run": 50,
        "mean_tokens_per_block": 16.0,
        "used_blocks": 50,
        "free_blocks": 50,
        "block_size": 16,
    }
    return Fragmentation.from_dict(values | changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        # Ratio strictly above the threshold.
        ({"holes": 15, "ratio": 0.3}, False),
        ({"holes": 16, "ratio": 0.32}, True),
        # More than 25 % of 800 used slots wasted, with more than 2 holes.
        ({"holes": 3, "ratio": 0.06, "wasted_slots": 200}, False),
        ({"holes": 3, "ratio": 0.06, "wasted_slots": 201}, True),
        ({"holes": 2, "ratio": 0.04, "wasted_slots": 800}, False),
        # Less than 10 % of 100 blocks free, with at least one hole.
        ({"holes": 1, "ratio": 1 / 90, "used_blocks": 90, "free_blocks": 10}, False),
        ({"holes": 1, "ratio": 1 / 91, "used_blocks": 91, "free_blocks": 9}, True),
        ({"holes": 0, "used_blocks": 100, "free_blocks": 0}, False),
        # Nothing at all.
        ({"used_blocks": 0, "free_blocks": 0}, False),
    ],
)
def test_should_defragment(changes: dict[str, float], expected: bool) -> None:  # SPEC F18
    assert fragmentation(**changes).should_defragment() is expected


def test_should_defragment_takes_a_threshold() -> None:  # SPEC F18
    part = fragmentation(holes=10, ratio=0.2)
    assert part.should_defragment(0.19) is True
    assert part.should_defragment(0.2) is False


def test_fragmentation_to_dict_and_back() -> None:  # SPEC F18
    part = fragmentation(holes=10, ratio=0.2)
    assert Fragmentation.from_dict(part.to_dict()) == part
    assert part.to_dict()["ratio"] == 0.2
