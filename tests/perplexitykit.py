"""The README's table of tools/perplexity.py, read back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

README = Path(__file__).resolve().parent.parent / "README.md"


class Published(NamedTuple):
    """``change`` and its standard error ``error``: per cent of the perplexity of float16."""

    bytes_per_value: float
    perplexity: float
    change: float
    error: float


def published() -> dict[str, Published]:
    """The rows of the table by their format."""
    table = README.read_text("utf-8").partition("<!-- perplexity -->")[2]
    table = table.partition("<!-- /perplexity -->")[0]
    number = r"([+\d.-]+)"
    row = rf"^\| `(\S+)` \| {number} \| {number} \| {number} ± {number} % \|$"
    found = re.findall(row, table, re.MULTILINE)
    return {name: Published(*map(float, figures)) for name, *figures in found}
