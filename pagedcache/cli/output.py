"""Small helpers for what the subcommands print."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable
from typing import Any


def print_json(value: Any) -> None:
    """One JSON value on stdout; NaN and infinities are a programming error."""
    print(json.dumps(value, indent=2, allow_nan=False))


def note(text: str) -> None:
    """A remark on stderr, apart from the data."""
    print(text, file=sys.stderr, flush=True)


def print_pairs(pairs: Iterable[tuple[str, object]]) -> None:
    """Aligned ``name  value`` lines."""
    rows = list(pairs)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")


def whole_number(least: int, most: int = 2**63 - 1) -> Any:
    """An argparse ``type`` for integers in ``least``…``most``; also ``10_000`` and ``10,000``."""

    def parse(text: str) -> int:
        try:
            value = int(text.replace(",", ""))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value} is outside {least}…{most}")
        return value

    return parse


def free_memory() -> int:
    """Bytes that can be taken without swapping; all of the memory where Linux does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            facts = dict(line.split(":", 1) for line in lines)
        return int(facts["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
