"""Runs the command line inside the test's process and keeps what it printed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from pagedcache.cli import main


@dataclass(frozen=True)
class Run:
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    def json(self) -> Any:
        return json.loads(self.out)


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> Run:
    """``main`` with these arguments: exit code, stdout, stderr."""
    capsys.readouterr()
    code = main([str(arg) for arg in argv])
    printed = capsys.readouterr()
    return Run(code, printed.out, printed.err)
