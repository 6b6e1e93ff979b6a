"""The package's door: names load when used, and type checkers see the same ones."""

from __future__ import annotations

import ast
import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import pagedcache as pc


def test_names_for_type_checkers_are_the_same() -> None:
    tree = ast.parse(Path(pc.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {
        alias.name: node.module.removeprefix("pagedcache.")
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    assert typed == pc._HOMES


def test_every_error_is_public() -> None:
    errors = importlib.import_module("pagedcache.errors")
    public = {
        name for name, value in vars(errors).items()
        if isinstance(value, type) and value.__module__ == errors.__name__ and name[0] != "_"
    }
    assert public == {name for name, home in pc._HOMES.items() if home == "errors"}


def test_unknown_names_are_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        pc.nonsense  # noqa: B018
    assert pc.errors.ShapeError is pc.ShapeError  # submodules are found without an import


def test_import_loads_nothing_else() -> None:
    # DESIGN 1: no CUDA, no torch; not even NumPy until a name is used.
    code = (
        "import sys, pagedcache; "
        "print([m for m in sys.modules if m.startswith(('pagedcache', 'numpy', 'ml_dtypes'))])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "['pagedcache._version', 'pagedcache']"


def test_docstring_example_runs() -> None:
    assert doctest.testmod(pc).failed == 0
