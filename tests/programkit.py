"""The C programs of tests/programs, which use the headers alone, compiled and run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
INCLUDE = HERE.parent / "include"
#: As setup.py compiles; the programs start threads or take roots, so they get the libraries.
FLAGS = ["-std=gnu11", "-pthread", "-ffp-contract=off", "-fno-strict-aliasing", f"-I{INCLUDE}"]


def tool(*names: str) -> str:
    """The path of the first of these programs that is there; skips where none is."""
    for name in names:
        found = shutil.which(name)
        if found is not None:
            return found
    pytest.skip(f"no {' or '.join(names)} on this machine")


def compiled(compiler: str, name: str, folder: Path, *flags: str) -> tuple[Path, str]:
    """``tests/programs/<name>.c`` compiled into ``folder``: where it is, and "" or the errors."""
    program = folder / name
    done = subprocess.run(
        [compiler, *FLAGS, *flags, str(HERE / "programs" / f"{name}.c"), "-o", str(program), "-lm"],
        capture_output=True, text=True,
    )  # fmt: skip
    return program, done.stderr or "failed without a word" if done.returncode else ""


def run(*command: str | Path, env: dict[str, str] | None = None) -> tuple[int, str]:
    """The exit status of a program and what it printed; errors behind the rest.

    A sanitizer that Python was started with is none of its own, and may be of another machine.
    """
    env = {**os.environ, "LD_PRELOAD": ""} if env is None else env
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=300, env=env
    )
    return done.returncode, done.stdout + done.stderr[-4000:]
