"""The picture of a replay: the share of prompt tokens that hit, request by request."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np

from .replay_run import Replay


def load_pyplot() -> ModuleType:
    """matplotlib's pyplot without a display; raises ``ImportError`` with the cure."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            f"--plot needs matplotlib ({error}): pip install 'pagedcache[plot]'"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot(pyplot: ModuleType, result: Replay, title: str, path: Path) -> None:
    """Write the picture; the file's ending chooses its kind. Raises ``OSError``/``ValueError``."""
    tokens, hits, blocks = np.array(result.hit_history, dtype=np.float64).T
    requests = np.arange(1, len(tokens) + 1)
    figure, left = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    try:
        left.plot(requests, 100 * hits / np.maximum(tokens, 1), color="tab:blue")
        left.set_xlabel("requests")
        left.set_ylabel("prompt tokens hit so far, %", color="tab:blue")
        left.set_ylim(bottom=0)
        right = left.twinx()
        right.plot(requests, blocks, color="tab:gray", linestyle=":")
        right.set_ylabel("blocks that hold tokens", color="tab:gray")
        right.set_ylim(bottom=0)
        left.set_title(title)
        figure.savefig(path, dpi=120)
    finally:
        pyplot.close(figure)
