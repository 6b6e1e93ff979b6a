"""``pagedcache selftest``: lines, counts, exit codes, and that it really finds faults."""

from __future__ import annotations

import re
import shlex
from typing import Any

import numpy as np
import pytest
from cli_tools import run

from pagedcache.checks import all_checks, reference, stage
from pagedcache.checks.devices import device_problem

Capture = pytest.CaptureFixture[str]
LAST = re.compile(r"(\d+) passed, (\d+) failed, (\d+) skipped")


def counts(line: str) -> tuple[int, ...]:
    match = LAST.fullmatch(line)
    assert match is not None, line
    return tuple(int(count) for count in match.groups())


def test_one_line_per_check_and_the_last_line(capsys: Capture) -> None:
    done = run(capsys, "selftest", "-k", "round_trip/")
    wanted = [check.name for check in all_checks() if "round_trip/" in check.name]
    assert done.code == 0 and done.err == ""
    assert [line.split()[:2] for line in done.lines[:-1]] == [["PASSED", name] for name in wanted]
    assert counts(done.lines[-1]) == (len(wanted), 0, 0)


def test_real_sample_shows_measured_error_beside_the_bound(capsys: Capture) -> None:
    # The published errors of the sample, to 3 digits.
    done = run(capsys, "selftest", "-k", "real_sample/")
    notes = {line.split("/")[1]: line for line in done.lines[:-1]}
    assert done.code == 0
    for name, k, v in (
        ("float16", 2.09e-4, 2.08e-4),
        ("q8", 8.000e-3, 5.443e-3),
        ("q4", 0.14578, 0.09863),
    ):
        found = re.findall(r"[KV] (\S+) \(bound (\S+)\)", notes[name])
        assert [float(f"{float(measured):.3g}") for measured, _ in found] == [
            float(f"{k:.3g}"), float(f"{v:.3g}")
        ]
        assert all(float(measured) <= float(bound) for measured, bound in found)


def test_format_selects(capsys: Capture) -> None:
    result = run(capsys, "selftest", "--format", "q4", "-k", "block_layout", "--json").json()
    names = {check["name"] for check in result["checks"]}
    assert names == {
        "block_layout/q4/HND", "block_layout/q4/NHD",
        "block_layout/q8+q4/HND", "block_layout/q8+q4/NHD",
    }
    assert (result["passed"], result["failed"], result["skipped"]) == (4, 0, 0)


@pytest.mark.parametrize("argv", [["--format", "q5"], ["-k", "no such check"], ["--device", "tpu"]])
def test_usage(capsys: Capture, argv: list[str]) -> None:
    done = run(capsys, "selftest", *argv)
    assert (done.code, done.out) == (2, "")
    assert done.err


@pytest.fixture
def no_cuda() -> None:
    if device_problem("cuda") is None:
        pytest.skip("CUDA can be used here")


def test_absent_device_asked_for_is_a_failure(capsys: Capture, no_cuda: None) -> None:
    # SPEC F42, CASE C48
    done = run(capsys, "selftest", "--device", "cuda")
    assert done.code == 1
    assert done.lines[0].startswith("FAILED  device/cuda: not available: ")
    assert counts(done.lines[-1]) == (0, 1, 0)


def test_absent_device_among_all_is_skipped_with_its_reason(
    capsys: Capture, no_cuda: None
) -> None:
    # SPEC F42, CASE C48
    done = run(capsys, "selftest", "--device", "all", "-k", "prefix_hash")
    assert done.code == 0
    assert done.lines[0] == "PASSED  [cpu] prefix_hash"
    assert done.lines[1].startswith("SKIPPED [cuda] device/cuda: not available: ")
    assert counts(done.lines[-1]) == (1, 0, 1)


def test_a_wrong_byte_is_found_and_the_command_repeats_it(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = reference.read_back

    def wrong(name: str, rows: Any) -> Any:
        values = right(name, rows)
        if values.size:
            values.reshape(-1)[-1] = np.nextafter(values.reshape(-1)[-1], np.float32(9))
        return values

    monkeypatch.setattr(stage, "read_back", wrong)
    done = run(capsys, "selftest", "-k", "defragment/q8/HND", "--seed", "3")
    assert done.code == 1
    assert done.lines[0].startswith("FAILED  defragment/q8/HND: CheckFailed: layer 0 K")
    assert counts(done.lines[-1]) == (0, 1, 0)
    assert "Traceback" in done.err
    command = shlex.split(done.lines[1].split("repeat with:")[1])
    assert command[:2] == ["pagedcache", "selftest"]
    again = run(capsys, *command[1:])
    assert again.lines == done.lines
    rows = run(capsys, *command[1:], "--json").json()["checks"]
    assert rows[0]["status"] == "failed" and shlex.split(rows[0]["repeat"]) == command
    monkeypatch.setattr(stage, "read_back", right)
    assert run(capsys, *command[1:]).code == 0


@pytest.mark.parametrize(
    ("argv", "words"),
    [(["-k", "zzz"], "-k 'zzz'"), (["-k", "zzz", "--format", "q8"], "-k 'zzz' --format q8")],
)
def test_no_check_matches(capsys: Capture, argv: list[str], words: str) -> None:
    done = run(capsys, "selftest", *argv)
    assert (done.code, done.out) == (2, "")
    assert done.err == f"pagedcache selftest: no check matches {words}\n"
