"""Fair timing: contenders take turns (A B A B …) and the median of each is kept."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping

Timer = Callable[[], float]
"""Runs one measurement of its own and returns the seconds per call."""

MIN_RUNS = 7
_SAMPLE_SECONDS = 2e-3  # a sample shorter than this is repeated inside the timer


def timed(function: Callable[[], object]) -> Timer:
    """A timer of a function that can be called again and again with the same cost."""
    repeats = 0

    def measure() -> float:
        nonlocal repeats
        if not repeats:
            function()  # the first call may fault pages in: it says nothing about the others
            began = time.perf_counter()
            function()
            once = time.perf_counter() - began
            repeats = max(1, min(10_000, round(_SAMPLE_SECONDS / max(once, 1e-7))))
        began = time.perf_counter()
        for _ in range(repeats):
            function()
        return (time.perf_counter() - began) / repeats

    return measure


def staged(
    prepare: Callable[[], object],
    function: Callable[[], object],
    restore: Callable[[], object] = lambda: None,
    repeats: int = 1,
) -> Timer:
    """A timer of a function that changes state: only ``function`` is on the clock."""

    def measure() -> float:
        total = 0.0
        for _ in range(repeats):
            prepare()
            began = time.perf_counter()
            function()
            total += time.perf_counter() - began
            restore()
        return total / repeats

    return measure


def medians(timers: Mapping[str, Timer], runs: int = MIN_RUNS) -> dict[str, float]:
    """Median seconds per call of every timer, over ``runs`` interleaved rounds after a warm-up.

    The collector is off while the clock runs, for all contenders alike.
    """
    samples: dict[str, list[float]] = {name: [] for name in timers}
    for timer in timers.values():
        timer()
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for _ in range(runs):
            for name, timer in timers.items():
                samples[name].append(timer())
    finally:
        if collecting:
            gc.enable()
    return {name: statistics.median(values) for name, values in samples.items()}
