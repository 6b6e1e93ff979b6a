"""``mypy --strict`` on a file of ordinary use, against the package under test and its stubs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pagedcache

ROOT = Path(__file__).resolve().parent.parent
USAGE = ROOT / "tests" / "typing" / "usage.py"


def mypy(file: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("mypy", reason="mypy is not installed")
    # mypy finds an installed package by itself (and refuses site-packages on MYPYPATH).
    home = Path(pagedcache.__file__).resolve().parent.parent
    environment = {**os.environ, "MYPYPATH": str(home) if home == ROOT else ""}
    return subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", str(cwd / "c"),
         str(file)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )  # fmt: skip


def test_ordinary_use_is_typed(tmp_path: Path) -> None:
    done = mypy(USAGE, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_wrong_use_is_seen(tmp_path: Path) -> None:
    """The types say something: these mistakes must not pass."""
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "import pagedcache as pc\n"
        "pc.CacheSpec(num_layers='2', num_kv_heads=3, head_dim=64)\n"
        "pc.PagedKVCache(pc.CacheSpec(num_layers=2, num_kv_heads=3, head_dim=64)).open().nothing\n"
        "pc.no_such_name\n",
        encoding="utf-8",
    )
    done = mypy(wrong, tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    for line in (2, 3, 4):
        assert f"wrong.py:{line}: error:" in done.stdout, done.stdout
