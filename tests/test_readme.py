"""What the README shows is run and compared."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(marker: str, language: str) -> str:
    """The one fenced block behind ``<!-- marker -->``."""
    pattern = rf"<!-- {re.escape(marker)} -->\n```{language}\n(.*?)^```$"
    found = re.findall(pattern, README, re.DOTALL | re.MULTILINE)
    assert len(found) == 1, f"{len(found)} blocks are marked {marker!r}"
    return str(found[0])


def run(code: str) -> tuple[dict[str, Any], str]:
    namespace: dict[str, Any] = {}
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "README.md", "exec"), namespace)
    return namespace, out.getvalue()


def test_quick_start() -> None:
    code = block("quickstart", "python")
    assert len(code.splitlines()) <= 20
    names, out = run(code)
    assert out == "96\n(2, 7)\n"
    assert names["keys"].shape == names["values"].shape == (100, 3, 64)
    assert names["keys"].dtype == names["values"].dtype == np.float32
    given = names["k"][0]
    step = np.abs(given).reshape(100, 3, 2, 32).max(-1) / 127
    error = np.abs(names["keys"] - given).reshape(100, 3, 2, 32).max(-1)
    assert (error <= step * 0.5001).all()  # q8: half a step of each group of 32


def test_by_ids() -> None:
    _, out = run(block("by-ids", "python"))
    assert out == "110 100\n"


def test_attention() -> None:
    """The last of the values shown, from a plain float64 softmax over what the pages give back."""
    names, out = run(block("attend", "python"))
    assert out == "(10, 8, 64) (10, 8)\n"
    assert names["window"].shape == (1, 8, 64)
    scores = names["q"][9].reshape(2, 4, 64).astype(float) @ names["k"][:9].transpose(1, 2, 0) / 8
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    want = (weights @ names["v"][:9].transpose(1, 0, 2)).reshape(8, 64)
    assert np.abs(names["out"][9] - want).max() < 0.2  # of values up to 3, in 4 bits


def test_a_step_of_an_engine() -> None:
    names, out = run(block("step", "python"))
    assert out == "[23, 23, 10]\n"
    assert names["tokens"] == [23, 23, 10]
    assert names["out"].shape == (3, 4, 64) and np.isfinite(names["out"]).all()


def test_the_example_for_gpus_is_python() -> None:
    """It runs in tests/cuda/test_readme_cuda.py, on a GPU or on the emulation of one."""
    code = block("gpu", "python")
    compile(code, "README.md", "exec")
    assert max(len(line) for line in code.splitlines()) <= 100


def test_format_table_is_what_the_library_computes() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "format_table.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_format_table_agrees_with_the_independent_figures() -> None:
    """To 3 digits with tests/data/README.md, which another program computed."""
    table = README.partition("<!-- formats -->")[2].partition("<!-- /formats -->")[0]
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", table, re.MULTILINE)
    ours = {name: [float(cell.strip(" %")) for cell in cells.split("|")[-2:]]
            for name, cells in rows}  # fmt: skip
    data = (ROOT / "tests" / "data" / "README.md").read_text(encoding="utf-8")
    theirs = re.findall(r"^\| (float16|q8|q4) \| ([\d.e-]+) \| ([\d.e-]+) \|$", data, re.MULTILINE)
    assert {name for name, *_ in theirs} == {"float16", "q8", "q4"}
    for name, error_k, error_v in theirs:
        assert ours[name] == pytest.approx([100 * float(error_k), 100 * float(error_v)], rel=5e-3)


def test_commands_are_the_ones_that_ci_runs() -> None:
    install, test = block("command: install", "sh"), block("command: test", "sh")
    assert len(install.strip().splitlines()) == len(test.strip().splitlines()) == 1
    assert (ROOT / "tests" / "data" / "conversation_1000.jsonl").is_file()
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "readme_command install" in script and "readme_command test" in script


def test_links_and_files_exist() -> None:
    for name in re.findall(r"`((?:[\w.-]+/)*[\w-]+\.(?:md|py|sh))`", README):
        assert (ROOT / name).exists(), name
