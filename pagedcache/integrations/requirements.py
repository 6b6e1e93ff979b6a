"""Packages that an integration needs, asked for once, with an error that says what to install."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

from pagedcache.errors import MissingPackageError


def require(package: str, least: str, purpose: str) -> Any:
    """The imported module ``package``, of version ``least`` or newer.

    Raises ``MissingPackageError`` where it is absent, cannot be imported, or is older.
    """
    try:
        module = import_module(package)
    except ImportError as error:
        raise MissingPackageError(package, least, purpose, f"not importable ({error})") from error
    found = str(getattr(module, "__version__", "0"))
    if _numbers(found) < _numbers(least):
        raise MissingPackageError(package, least, purpose, f"version {found}")
    return module


def _numbers(version: str) -> tuple[int, ...]:
    """``"4.57.1.dev0"`` as (4, 57, 1): the numbers before the first word."""
    return tuple(int(n) for n in re.findall(r"\d+", re.split(r"[a-z+]", version, maxsplit=1)[0]))
