"""Pictures of a report: per area the shares of a copy, and the ratios to peers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from .figures import Figure, size_text

_MET = {None: "tab:gray", True: "tab:blue", False: "tab:red"}
_UNITS = {"share": "% of copy", "ratio": "times as fast as the peer"}


def load_pyplot() -> ModuleType:
    """matplotlib's pyplot without a display; raises ``ImportError`` with the cure."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            f"matplotlib is not there ({error}): pip install 'pagedcache[plot]'"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw(pyplot: ModuleType, figures: Sequence[Figure], folder: Path) -> dict[str, str]:
    """One PNG per area that has anything to compare with; returns file names by area.

    Blue met its target, red missed it, gray has none; a mark on a bar is the target.
    """
    folder.mkdir(exist_ok=True)
    names = {}
    for area in dict.fromkeys(figure.op for figure in figures):
        panels = {
            metric: chosen for metric in _UNITS
            if (chosen := [f for f in figures if f.op == area and f.metric == metric])
        }
        if panels:
            names[area] = f"{area}.png"
            _picture(pyplot, area, panels, folder / names[area])
    return names


def _picture(pyplot: ModuleType, area: str, panels: dict[str, list[Figure]], path: Path) -> None:
    rows = sum(map(len, panels.values()))
    picture, axes = pyplot.subplots(
        len(panels), figsize=(9, 1.2 * len(panels) + 0.17 * rows), layout="constrained",
        squeeze=False, height_ratios=[len(figures) + 2 for figures in panels.values()],
    )
    try:
        for axis, (metric, figures) in zip(axes[:, 0], panels.items(), strict=True):
            _panel(axis, metric, figures)
        axes[0, 0].set_title(f"pagedcache bench: {area}")
        picture.savefig(path, dpi=90)
    finally:
        pyplot.close(picture)


def _panel(axis: Any, metric: str, figures: Sequence[Figure]) -> None:
    places = range(len(figures))
    values = [statistics.median(figure.values) for figure in figures]
    axis.barh(places, values, color=[_MET[figure.met] for figure in figures], height=0.8)
    for place, figure in zip(places, figures, strict=True):
        for target in figure.targets:
            axis.plot([target.bound] * 2, [place - 0.4, place + 0.4], color="black", linewidth=1)
    axis.set_yticks(places, [_label(figure, metric) for figure in figures], fontsize=6)
    axis.set_ylim(len(figures) - 0.5, -0.5)
    axis.axvline(100 if metric == "share" else 1, color="black", linewidth=0.5, linestyle=":")
    axis.set_xlabel(_UNITS[metric].replace("copy", figures[0].against))
    if metric == "ratio":
        axis.set_xscale("log")


def _label(figure: Figure, metric: str) -> str:
    _, variant, format, _ = figure.key
    parts = [variant, size_text(figure)]
    if format and format not in variant:
        parts.insert(1, format)
    if metric == "ratio":
        parts.append(f"against {figure.against}")
    return ", ".join(parts)
