"""Programs in processes of their own, for what cannot be undone: imports, forks, exits."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import Any


def run_program(
    text: str, *, without: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program; ``without``: variables of the environment that it does not get."""
    variables = {name: value for name, value in os.environ.items() if name not in without}
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=120,
        env=variables | environment,
    )


def assert_clean(done: Any, output: str) -> None:
    """The program printed ``output``, nothing on stderr, and ended by itself."""
    assert (done.stdout.strip(), done.stderr.strip(), done.returncode) == (output, "", 0)
