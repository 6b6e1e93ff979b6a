"""A report in Markdown: targets and whether they are met, misses, and every figure by area."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

from .facts import describe, in_short
from .figures import Figure, figures_of, size_text
from .saved import Run
from .targets import Target, targets_of

_COLUMNS = ("what", "format", "size", "ours", "against", "figure", "target", "met")
_NOTES = """\
A figure is a ratio taken in one process: ours and what it is held against take turns, and the
median of the runs counts. Against a copy (`memcpy`, by as many threads; for attention a plain
read) it is the share of the bytes per second, read and written; against a peer the peer's time over
ours, above 1 when we are faster; against the non-temporal copy the time of one that moves as many
bytes. One thread where nothing else is said. Absolute figures are not promised.
"""


def markdown(
    runs: Sequence[Run], plots: Mapping[str, str] | None = None, why_no_plots: str = ""
) -> str:
    """The report. ``plots``: paths by area; None: there are none, which it says with the reason."""
    device = runs[0].facts.get("device", "cpu")
    figures = figures_of([run.rows for run in runs], device)
    parts = ["# pagedcache bench", "", *_heads(runs), "", _NOTES.rstrip()]
    if len(runs) > 1:
        parts += ["", f"From {len(runs)} runs: least / median / greatest. A target is met where "
                  "every run meets it."]
    if plots is None:
        parts += ["", f"No plots: {why_no_plots or 'not asked for'}."]
    parts += ["", "## Targets", "", summary(figures, device), "## Misses", "", _misses(figures)]
    for area in dict.fromkeys(figure.op for figure in figures):
        parts += [f"## {area}", ""]
        if plots and area in plots:
            parts += [f"![{area}]({plots[area]})", ""]
        parts.append(_table(_COLUMNS, _lines([f for f in figures if f.op == area])))
    return "\n".join(parts)


def compact(runs: Sequence[Run]) -> str:
    """What goes into README.md: the targets, and when, where and how they were measured."""
    device = runs[0].facts.get("device", "cpu")
    heads = [f"Measured {in_short(run.facts)}." for run in runs]
    figures = figures_of([run.rows for run in runs], device)
    return "\n".join(["", *heads, "", summary(figures, device)])


def summary(figures: Sequence[Figure], device: str) -> str:
    """One line per target: the worst and the best figure, and how many rows meet it."""
    lines = []
    for target in targets_of(device):
        judged = [figure for figure in figures if target in figure.targets]
        if not judged:
            lines.append((target.what, _bound(target), "not measured", "–"))
            continue
        values = sorted(value for figure in judged for value in figure.values)
        ends = values if target.metric != "ns" else values[::-1]
        written = list(dict.fromkeys(judged[0].written(value) for value in (ends[0], ends[-1])))
        if len(values) > 2:
            written[-1] += f", median {judged[0].written(median(values))}"
        met = sum(all(map(target.met, figure.values)) for figure in judged)
        text = "yes" if met == len(judged) else "**no**"
        count = "" if len(judged) == 1 else f", {met} of {len(judged)}"
        lines.append((target.what, _bound(target), " … ".join(written), f"{text}{count}"))
    return _table(("what", "target", "measured", "met"), lines)


def _bound(target: Target) -> str:
    if target.metric == "share":
        return f"{target.text} of {'a plain read' if target.op == 'attend' else 'copy'}"
    return f"{target.text} {target.peer}".rstrip()


def _heads(runs: Sequence[Run]) -> list[str]:
    lines = []
    for number, run in enumerate(runs, 1):
        if len(runs) > 1:
            lines += [""] * (number > 1) + [f"Run {number}:", ""]
        lines += [f"- {name}: {text}" for name, text in describe(run.facts)]
    return lines


def _misses(figures: Iterable[Figure]) -> str:
    lines = [line for figure in figures if figure.met is False for line in _lines([figure])]
    if not lines:
        return "None.\n"
    return _table(_COLUMNS[:-1], [(line[0], *line[1:-1]) for line in lines])


def _lines(figures: Iterable[Figure]) -> list[tuple[str, ...]]:
    """The cells of a table; what a row shares with the one above is not said again."""
    lines: list[tuple[str, ...]] = []
    before = None
    for figure in figures:
        _, variant, format, _ = figure.key
        head = (variant, format or "", size_text(figure), figure.ours)
        shown = head if head != before else ("",) * len(head)
        before = head
        met = {None: "", True: "yes", False: "**no**"}[figure.met]
        bounds = ", ".join(target.text for target in figure.targets)
        lines.append((*shown, figure.against, figure.text, bounds, met))
    return lines


def _table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [columns, ["---"] * len(columns), *lines]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n"
                   for row in rows)  # fmt: skip


def write(path: Path, runs: Sequence[Run]) -> str | None:
    """Write the report, and its plots into a folder beside it; returns why there are no plots.

    Raises ``OSError``.
    """
    from .plots import draw, load_pyplot

    device = runs[0].facts.get("device", "cpu")
    try:
        pyplot = load_pyplot()
    except ImportError as error:
        path.write_text(markdown(runs, None, str(error)), encoding="utf-8")
        return str(error)
    folder = path.with_name(f"{path.stem}_plots")
    names = draw(pyplot, figures_of([run.rows for run in runs], device), folder)
    plots = {area: f"{folder.name}/{name}" for area, name in names.items()}
    path.write_text(markdown(runs, plots), encoding="utf-8")
    return None
