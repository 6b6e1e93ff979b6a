"""Every row, case and trap of the contract has a test that names it.

A test names what it proves in a comment beside it (inside the test, or right above it):
``# SPEC F12 F13``, ``# CASE C5``, ``# TRAP 3``. This test reads all test files and fails for
what nobody names, and for names that are in no contract.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

ROWS = {f"F{n}" for n in range(1, 50)} | {"F9a", "F28a"}
# Events come with their feature.
LATER_CASES = {"C55"}
CASES = {f"C{n}" for n in range(1, 70)} - LATER_CASES
TRAPS = {str(n) for n in range(1, 15)}

NAMES = {"SPEC": r"F\d+a?\b", "CASE": r"C\d+\b", "TRAP": r"\d+\b"}


def comments_beside_tests(source: str) -> list[str]:
    """Comments inside test functions, and those on the lines right above one."""
    lines = source.splitlines()
    covered: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if not node.name.startswith(("test", "Test")):
            continue
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        covered.update(range(first, node.end_lineno + 1))
        while first > 1 and lines[first - 2].strip().startswith("#"):
            first -= 1
            covered.add(first)
    found = tokenize.generate_tokens(io.StringIO(source).readline)
    return [t.string for t in found if t.type == tokenize.COMMENT and t.start[0] in covered]


def named() -> dict[str, dict[str, list[str]]]:
    """kind -> name -> files that name it."""
    out: dict[str, dict[str, list[str]]] = {kind: {} for kind in NAMES}
    for path in sorted(TESTS.rglob("test_*.py")):
        if path == Path(__file__):
            continue
        for comment in comments_beside_tests(path.read_text(encoding="utf-8")):
            for kind, pattern in NAMES.items():
                for listed in re.findall(rf"\b{kind}((?:[\s,]+{pattern})+)", comment):
                    for name in re.findall(pattern, listed):
                        out[kind].setdefault(name, []).append(path.name)
    return out


FOUND = named()


@pytest.mark.parametrize(
    ("kind", "wanted", "later"),
    [("SPEC", ROWS, set()), ("CASE", CASES, LATER_CASES), ("TRAP", TRAPS, set())],
)
def test_everything_promised_has_a_test_that_names_it(kind, wanted, later):
    missing = sorted(wanted - set(FOUND[kind]), key=lambda n: (len(n), n))
    assert not missing, f"no test names {kind} {', '.join(missing)}"
    unknown = {n: files for n, files in FOUND[kind].items() if n not in wanted | later}
    assert not unknown, f"tests name what is in no contract: {unknown}"


def test_a_comment_counts_only_beside_a_test():
    source = '''
# SPEC F1
x = 1

# SPEC F2
@decorated
def test_one():
    # CASE C3
    pass

def helper():
    # TRAP 4
    pass
'''
    assert comments_beside_tests(source) == ["# SPEC F2", "# CASE C3"]
