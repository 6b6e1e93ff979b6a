"""``pagedcache info`` and what all subcommands share."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

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
    assert set(facts["native"]) == {"arithmetic", "rows", "attention", "hashing"}
    assert facts["attention"]["instruction_set"] in facts["attention"]["usable"]
    assert facts["attention"]["threads"] == pagedcache.get_num_threads()


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
    assert (done.returncode, done.stderr) == (0, "")  # info always exits 0
    script = script.replace("'info'", "'selftest', '-k', 'prefix_hash'")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")


def shell(text: str) -> subprocess.CompletedProcess[str]:
    command = f"{shlex.quote(sys.executable)} -m pagedcache"
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {text.replace('PAGEDCACHE', command)}"],
        capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("text", "code"),
    [("PAGEDCACHE info | head -1", 0), ("PAGEDCACHE info | true", 0), ("PAGEDCACHE info >&-", 0),
     ("PAGEDCACHE info 2>&-", 0), ("PAGEDCACHE info >&- 2>&-", 0),
     ("PAGEDCACHE bench nonsense >&- 2>&-", 2), ("PAGEDCACHE --help >&-", 0),
     ("PAGEDCACHE selftest -k prefix_hash >&-", 0)],
)  # fmt: skip
def test_output_that_goes_nowhere(text: str, code: int) -> None:
    done = shell(text)
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("command", ["info", "info --json", "bench convert --sizes 4KiB"])
def test_a_full_disk_is_one_line(command: str) -> None:
    done = shell(f"PAGEDCACHE {command} >/dev/full")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    lines = [text for text in done.stderr.splitlines() if not text.startswith("peer ")]
    assert len(lines) == 1 and "No space left" in lines[0]


def test_a_terminal_without_unicode() -> None:
    script = "import sys; from pagedcache.cli import main; sys.exit(main(['bench', '--help']))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, env={"PYTHONIOENCODING": "ascii",
        "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    script = script.replace("'bench', '--help'", "'info', '\N{GREEK SMALL LETTER MU}'")
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, env={"PYTHONIOENCODING": "ascii",
        "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 2 and b"\\u03bc" in done.stderr and b"Traceback" not in done.stderr


def test_memory_that_is_not_there(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(args: object) -> int:
        raise MemoryError("Unable to allocate 9 EiB\nfor an array")

    monkeypatch.setattr(info, "run", greedy)
    done = run(capsys, "info")
    assert (done.code, done.out) == (2, "")
    assert done.err == "pagedcache info: not enough memory: Unable to allocate 9 EiB for an array\n"
