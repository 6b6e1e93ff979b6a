"""Which package is tested, how much is tried, and what was skipped.

**The installed package is tested.** ``python -m pytest`` puts the current folder first on
``sys.path``, so that at the root of a checkout the source tree (whose modules may not be compiled)
would hide the wheel that was just installed. The root is taken off the path whenever
``pagedcache`` can be found without it; an editable install is found that way too. Only where
nothing is installed does the source tree serve. The header of the run says which one it was;
with ``PAGEDCACHE_TEST_INSTALLED=1`` the source tree stops the run.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent


def _without_root(entries: list[str]) -> list[str]:
    return [entry for entry in entries if Path(entry or os.curdir).resolve() != ROOT]


def _choose_package() -> None:
    if "pagedcache" in sys.modules:
        raise pytest.UsageError("pagedcache was imported before tests/conftest.py could choose it")
    before = list(sys.path)
    sys.path[:] = _without_root(before)
    importlib.invalidate_caches()
    inherited = [e for e in _without_root(os.environ.get("PYTHONPATH", "").split(os.pathsep)) if e]
    if importlib.util.find_spec("pagedcache") is None:
        sys.path[:] = before if len(before) > len(sys.path) else [*before, str(ROOT)]
        inherited.insert(0, str(ROOT))
    # Programs started by tests must find the same package, whatever their current folder is.
    os.environ["PYTHONSAFEPATH"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join(inherited)


_choose_package()

import devicekit  # noqa: E402
import profiles  # noqa: E402


def _package_dir() -> Path:
    spec = importlib.util.find_spec("pagedcache")
    if spec is None or spec.origin is None:
        raise pytest.UsageError("pagedcache is neither installed nor beside the tests")
    return Path(spec.origin).resolve().parent


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile(profiles.PROFILE)
    if os.environ.get("PAGEDCACHE_TEST_INSTALLED") == "1" and _package_dir().parent == ROOT:
        raise pytest.UsageError(
            "PAGEDCACHE_TEST_INSTALLED=1, but the package found is the source tree: "
            "install the wheel into this environment"
        )


def pytest_report_header(config: pytest.Config) -> str:
    where = "" if devicekit.ON_CPU else f", device: {devicekit.DEVICE}"
    return f"pagedcache: {_package_dir()}, profile: {profiles.PROFILE}{where}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Every skip, counted by its reason: nothing is left out silently."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        where = report.longrepr
        reasons[str(where[2] if isinstance(where, tuple) else where)] += 1
    if reasons:
        terminalreporter.section("skipped, by reason")
        for reason, count in sorted(reasons.items()):
            terminalreporter.line(f"{count:5d}  {reason}")
