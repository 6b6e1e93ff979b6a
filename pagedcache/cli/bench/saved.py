"""Runs in files: rows as ``-o json`` prints them, or with the facts that ``--report`` saves."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .rows import Row


@dataclass(frozen=True)
class Run:
    """One run: its rows, and when and where they were measured (``facts.collect``)."""

    facts: dict[str, Any]
    rows: tuple[Row, ...]


def save(path: Path, run: Run) -> None:
    """Write facts and rows as JSON. Raises ``OSError``."""
    value = {"facts": run.facts, "rows": [asdict(row) for row in run.rows]}
    path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def load(path: Path) -> Run:
    """Read what :func:`save` or ``pagedcache bench -o json`` wrote.

    A bare list has only the date of its file. Raises ``OSError``, and ``ValueError`` for anything
    else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    written = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC)
    facts: Any = {"date": f"file of {written:%Y-%m-%d %H:%M} UTC", "device": "cpu"}
    if isinstance(value, dict):
        facts, value = value.get("facts"), value.get("rows")
    if not isinstance(value, list) or not isinstance(facts, dict) or "date" not in facts:
        raise ValueError(f"{path} holds no rows of pagedcache bench")
    return Run(facts, tuple(_rows(path, value)))


def _rows(path: Path, values: list[Any]) -> Iterable[Row]:
    for value in values:
        try:
            row = Row(**value)
            numbers = (row.size, row.ns_per_item, row.runs, row.gbps_moved or 0.0,
                       row.pct_of_copy or 0.0, row.peer_ratio or 0.0)  # fmt: skip
            texts = (row.op, row.variant, row.format or "", row.peer or "")
        except TypeError:
            raise ValueError(f"{path} holds no row of pagedcache bench in {value!r:.80}") from None
        if not all(isinstance(x, int | float) for x in numbers) or not all(
            isinstance(text, str) for text in texts
        ) or (row.peer is None) != (row.peer_ratio is None):  # fmt: skip
            raise ValueError(f"{path} holds no row of pagedcache bench in {value!r:.80}")
        yield row
