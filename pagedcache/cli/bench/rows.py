"""The rows of a benchmark and how they are printed."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields

from .timing import Timer, medians


@dataclass(frozen=True)
class Options:
    """What the command line asked for. Sizes are bytes of float32; ``tokens`` are for GPUs."""

    runs: int
    sizes: tuple[int, ...]
    formats: tuple[str, ...]
    device: str = "cpu"
    tokens: int = 0
    threads: tuple[int, ...] = (1,)


@dataclass(frozen=True)
class Row:
    """One figure. ``size``: bytes of float32 where bytes move, else items.

    ``gbps_moved``: bytes read plus bytes written, per second. ``pct_of_copy``: that, as a share
    of what a plain copy of ``size`` bytes (on a GPU: of as many as ours moves) moves in the same
    run. ``peer_ratio``: the peer's time over ours, above 1 when we are faster; a missing peer is
    ``None``.
    """

    op: str
    variant: str
    format: str | None
    size: int
    gbps_moved: float | None
    pct_of_copy: float | None
    ns_per_item: float
    peer: str | None
    peer_ratio: float | None
    runs: int


def label(variant: str, threads: int) -> str:
    """The variant with the number of threads, which is 1 unless it says so."""
    return variant if threads == 1 else f"{variant}, {threads} threads"


def measure(
    op: str,
    variant: str,
    format: str | None,
    size: int,
    items: int,
    timers: Mapping[str, Timer],
    runs: int,
    moved: int | None = None,
    copied: int | None = None,
) -> Iterator[Row]:
    """Time ``ours`` against ``copy`` (optional) and every other timer, which are the peers.

    ``moved``: bytes that ours reads and writes. ``copied``: bytes that ``copy`` reads and writes
    again, by default ``size``. One row per peer, or one with none.
    """
    times = medians(timers, runs)
    ours = times.pop("ours")
    copy = times.pop("copy", None)
    gbps = None if moved is None else moved / ours / 1e9
    share = None
    if copy is not None and gbps is not None:
        share = 100 * gbps / (2 * (size if copied is None else copied) / copy / 1e9)
    for peer, peer_time in times.items() or [(None, None)]:
        ratio = None if peer_time is None else peer_time / ours
        yield Row(
            op, variant, format, size, _round(gbps), _round(share), _round(ours / items * 1e9) or 0,
            peer, _round(ratio), runs,
        )


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


_NAMES = [field.name for field in fields(Row)]


def print_rows(rows: Iterable[Row], kind: str) -> None:
    """Print rows on stdout as "md" and "csv" (each as soon as it is there) or "json" (one list)."""
    if kind == "json":
        print(json.dumps([asdict(row) for row in rows], indent=1, allow_nan=False))
    elif kind == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(_NAMES)
        for row in rows:
            writer.writerow(asdict(row).values())
            sys.stdout.flush()
    else:
        widths = [max(len(name), least) for name, least in zip(_NAMES, _WIDTHS, strict=True)]
        print(_md_line(_NAMES, widths))
        print(_md_line(["-" * width for width in widths], widths))
        for row in rows:
            cells = ["" if value is None else str(value) for value in asdict(row).values()]
            print(_md_line(cells, widths), flush=True)


_WIDTHS = (12, 30, 9, 10, 10, 11, 11, 22, 10, 4)


def _md_line(cells: Iterable[str], widths: Iterable[int]) -> str:
    padded = (f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True))
    return f"| {' | '.join(padded)} |"
