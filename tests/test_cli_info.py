"""``pagedcache info`` and what all subcommands share."""

from __future__ import annotations

import subprocess
import sys

import pytest
from cli_tools import run

import pagedcache
from pagedcache.cli import info

Capture = pytest.CaptureFixture[str]


def test_info_lines(capsys: Capture) -> None:
    done = run(capsys, "info")
    assert (done.code, done.err) == (0, "")
    facts = {line.split("  ")[0]: line.split("  ", 1)[1].strip() for line in done.lines}
    assert facts["pagedcache"] == pagedcache.__version__
    assert facts["device cpu"] == "available"
    assert facts["device cuda"].startswith("not available: ")
    assert "bytes_per_value 1.125" in facts["format q8"]
    assert facts["cache"].startswith("works")


def test_info_json(capsys: Capture) -> None:
    facts = run(capsys, "info", "--json").json()
    assert list(facts["format"]) == list(pagedcache.FORMATS)
    assert facts["format"]["q4"]["reduction_vs_float32"] == 6.4
    assert facts["device"]["cpu"] == "available"
    assert set(facts["native"]) == {"arithmetic", "rows", "hashing"}


def test_info_survives_probes_that_fail(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise OSError("no such device\nat all")

    def missing() -> None:
        raise ImportError("libfoo.so: cannot open shared object file")

    monkeypatch.setitem(info._PROBES, "memory", broken)
    monkeypatch.setitem(info._PROBES, "native", missing)
    done = run(capsys, "info")
    assert done.code == 0
    assert "not available: OSError: no such device at all" in done.out
    assert "not available: libfoo.so: cannot open shared object file" in done.out
    assert run(capsys, "info", "--json").json()["memory"].startswith("not available")


@pytest.mark.parametrize(
    "argv", [[], ["nonsense"], ["info", "--nonsense"], ["selftest", "--seed", "-1"]]
)
def test_usage_errors_exit_with_2(capsys: Capture, argv: list[str]) -> None:
    done = run(capsys, *argv)
    assert (done.code, done.out) == (2, "")
    assert "usage: pagedcache" in done.err


@pytest.mark.parametrize("command", ["info", "selftest", "bench", "replay"])
def test_help(capsys: Capture, command: str) -> None:
    done = run(capsys, command, "--help")
    assert done.code == 0
    assert f"usage: pagedcache {command}" in done.out
    assert command in run(capsys, "--help").out


def test_module_and_version() -> None:
    command = [sys.executable, "-m", "pagedcache", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"pagedcache {pagedcache.__version__}\n"


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    script = (
        "import os, sys\n"
        "read, write = os.pipe(); os.close(read); os.dup2(write, 1)\n"
        "from pagedcache.cli import main\n"
        "sys.exit(main(['info']))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
