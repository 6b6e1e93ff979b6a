"""Rows of one or several runs as figures: ours against one thing each, judged by the targets."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from pagedcache.sizes import format_size

from .rows import Row
from .targets import Metric, Target, nanoseconds, targets_of

_ITEMS = ("pool", "prefix", "import", "blocks", "tables", "calls")  # areas that move no bytes

Key = tuple[str, str, str | None, int]


@dataclass(frozen=True)
class Figure:
    """Ours against the copy, a peer, or (``ns``) nothing; one value of each kind per run.

    ``targets``: those that judge it; none where nothing is asked for.
    """

    key: Key
    metric: Metric
    against: str
    values: tuple[float, ...]
    ours: str
    targets: tuple[Target, ...]

    @property
    def op(self) -> str:
        return self.key[0]

    @property
    def met(self) -> bool | None:
        """Whether every run meets every target; None without one."""
        if not self.targets:
            return None
        return all(target.met(value) for target in self.targets for value in self.values)

    @property
    def text(self) -> str:
        """The value, or the least, the median and the greatest of several runs."""
        if len(self.values) == 1:
            return self.written(self.values[0])
        spread = min(self.values), statistics.median(self.values), max(self.values)
        return " / ".join(self.written(value) for value in spread)

    def written(self, value: float) -> str:
        """A value of this figure with its unit; three digits, more where they would hide a miss."""
        if self.metric == "ns":
            return nanoseconds(value)
        text = f"{value:.3g}"
        if any(target.met(float(text)) != target.met(value) for target in self.targets):
            text = f"{value:.4g}"
        return f"{text} %" if self.metric == "share" else f"{text}×"


def figures_of(runs: Sequence[Sequence[Row]], device: str = "cpu") -> list[Figure]:
    """All figures, in the order of the rows; runs need not have the same rows."""
    groups: dict[Key, dict[int, list[Row]]] = {}
    for number, rows in enumerate(runs):
        for row in rows:
            key = (row.op, row.variant, row.format, row.size)
            groups.setdefault(key, {}).setdefault(number, []).append(row)
    return [
        figure for key, group in groups.items() for figure in _of_group(key, group, device)
    ]


def _of_group(key: Key, group: dict[int, list[Row]], device: str) -> Iterator[Figure]:
    ours = _ours([rows[0] for rows in group.values()])
    targets = targets_of(device)

    def figure(metric: Metric, against: str, rows: Sequence[Row]) -> Figure:
        judging = tuple(
            target for target in targets
            if target.metric == metric and target.judges(asdict(rows[0]))
        )
        column = {"share": "pct_of_copy", "ratio": "peer_ratio", "ns": "ns_per_item"}[metric]
        values = tuple(float(getattr(row, column)) for row in rows)
        return Figure(key, metric, against, values, ours, judging)

    firsts = [rows[0] for rows in group.values()]
    shares = [row for row in firsts if row.pct_of_copy is not None]
    peers: dict[str, list[Row]] = {}
    for rows in group.values():
        for row in rows:
            if row.peer is not None:
                peers.setdefault(row.peer, []).append(row)
    time = figure("ns", "–", firsts)
    if time.targets or not (shares or peers):
        yield time
    if shares:
        yield figure("share", "read" if key[0] == "attend" else "copy", shares)
    for peer, rows in peers.items():
        yield figure("ratio", peer, rows)


def _ours(rows: Sequence[Row]) -> str:
    """Median over the runs: bytes moved per second, or the time of an item."""
    rates = [row.gbps_moved for row in rows if row.gbps_moved is not None]
    if rates:
        return f"{statistics.median(rates):.3g} GB/s"
    return nanoseconds(statistics.median(row.ns_per_item for row in rows))


def size_text(figure: Figure) -> str:
    """The size of a row: bytes where it moves bytes, else items."""
    size = figure.key[3]
    return f"{size:,}" if figure.op in _ITEMS else format_size(size)
