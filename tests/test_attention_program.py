"""Attention as C programs: the headers alone, without Python.

One program is watched by ThreadSanitizer (addresses are watched in CI's instrumented build, by all
tests of attention), one compares values with float64, as they are and as if no format had kernels
of its own, which is how a new format begins.
"""

from __future__ import annotations

from pathlib import Path

import programkit
import pytest


@pytest.mark.parametrize(
    "flags",
    [(), ("-DPC_READ_ALL_AS_OTHERS",), ("-U__SSE2__",)],
    ids=["own", "others", "without vectors in the baseline"],
)
def test_values_by_every_way_of_reading(flags: tuple[str, ...], tmp_path: Path) -> None:
    gcc = programkit.tool("gcc")
    program, errors = programkit.compiled(gcc, "attention_values", tmp_path, "-O1", *flags)
    assert errors == ""
    assert programkit.run(program) == (0, "close\n")


def test_threads_do_not_race(tmp_path: Path) -> None:
    gcc = programkit.tool("gcc")
    program, errors = programkit.compiled(
        gcc, "attention_races", tmp_path, "-O1", "-g", "-fsanitize=thread"
    )
    if "cannot find" in errors:
        pytest.skip("no library of ThreadSanitizer on this machine")
    assert errors == ""
    assert programkit.run(program, env={}) == (0, "the same\n")
