"""The table of ``perplexity.py``: its rows, as Markdown, CSV or JSON, and its place in a file."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from pagedcache.cli.marked import put_between

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Row:
    """``change`` and its standard error ``error`` are in per cent of the baseline's perplexity."""

    format: str
    bytes_per_value: float
    perplexity: float
    change: float
    error: float

    @classmethod
    def of(cls, label: str, bytes_per_value: float, losses: Array, baseline: Array) -> Row:
        """From losses ``[windows, predictions]`` (nats), and the same windows' at the baseline.

        exp(a) / exp(b) - 1, with a - b the mean of the differences by window. The windows are
        taken as independent: standard error = deviation / sqrt(windows), carried through exp.
        """
        differences = (losses.astype(np.float64) - baseline).mean(axis=1)
        ratio = float(np.exp(differences.mean()))
        spread = differences.std(ddof=1) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
        mean = losses.mean(dtype=np.float64)
        return cls(
            label, bytes_per_value, float(np.exp(mean)), 100 * (ratio - 1), 100 * ratio * spread
        )

    def markdown(self) -> str:
        change = f"{self.change:+.2f} ± {self.error:.2f} %"
        return (
            f"| `{self.format}` | {self.bytes_per_value:.5g} | {self.perplexity:.3f} | {change} |"
        )


def as_markdown(rows: Sequence[Row]) -> str:
    head = "| stored | bytes per value | perplexity | against float16 |\n| --- | --- | --- | --- |"
    return "\n".join([head, *(row.markdown() for row in rows)]) + "\n"


def as_csv(rows: Sequence[Row]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([field.name for field in fields(Row)])
    writer.writerows(asdict(row).values() for row in rows)
    return out.getvalue()


def as_json(rows: Sequence[Row]) -> str:
    return json.dumps([asdict(row) for row in rows], indent=1) + "\n"


WRITERS: dict[str, Callable[[Sequence[Row]], str]] = {
    "md": as_markdown,
    "csv": as_csv,
    "json": as_json,
}


def put_into(path: Path, table: str) -> None:
    """Replace what stands between the markers. Raises ``SystemExit`` for a file without them."""
    try:
        put_between(path, "perplexity", table)
    except ValueError as error:
        raise SystemExit(str(error)) from None
