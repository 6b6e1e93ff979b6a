"""``tools/gpu_check.sh``: what it refuses, and how it counts; the parts themselves need a GPU."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "tools" / "gpu_check.sh"


def run(*argv: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *map(str, argv)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_help_is_the_head_of_the_script(tmp_path: Path) -> None:
    done = run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Checks pagedcache on a machine with a GPU and nvcc")
    assert "--pycuda FILE" in done.stdout and done.stdout.count("#") == 0


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["nonsense"], "no part or option nonsense: see --help\n"),
        (["--limit"], "--limit needs a value\n"),
        (["--limit", "soon"], "--limit: soon is no number of seconds\n"),
        (["--wheels", "/no/such/folder"], "WHEELS: there is no /no/such/folder\n"),
        (["--pycuda", "/no/such.whl"], "PYCUDA_WHEEL: there is no /no/such.whl\n"),
    ],
)
def test_usage(argv: list[str], said: str) -> None:
    done = run(*argv)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_a_python_that_is_not_there_is_named() -> None:
    done = run(PYTHON="no-such-python")
    assert (done.returncode, done.stderr) == (2, "PYTHON: there is no no-such-python\n")


def test_without_time_every_part_is_skipped_and_nothing_failed(tmp_path: Path) -> None:
    """Also: a copy of the checkout is made, the table comes last, the work folder is kept."""
    done = run("--limit", 0, "--keep", tmp_path / "work", "selftest", "bench")
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout[done.stdout.rindex("part "):].splitlines()
    assert [line.split() for line in table[1:-1]] == [
        [name, "skipped", "0", "no", "time", "is", "left"]
        for name in ("pycuda", "library", "modules", "selftest", "bench")
    ]
    assert table[-1].endswith(" s in all")
    assert (tmp_path / "work" / "tree" / "tools" / "gpu_check.sh").is_file()
    assert not list((tmp_path / "work" / "tree").rglob("*.so"))
