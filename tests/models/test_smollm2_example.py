"""examples/chat_with_prefix_cache.py, as a person starts it: a program of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from smollm2kit import model_file

for package in ("torch", "transformers", "gguf", "accelerate"):
    pytest.importorskip(package, reason=f"{package} is not installed")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "chat_with_prefix_cache.py"


def test_three_conversations_with_one_system_prompt(capfd: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--model", str(model_file()), "--max-new-tokens", "24"],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    with capfd.disabled():  # the table belongs into the log: its times are nobody's to assert
        print(f"\n{done.stdout}")
    number = r"([\d.]+)"
    row = rf"^\| (\d), (\d) \| (\d+) \| (\d+) .* \| {number} MB \| {number} MB \|$"
    rows = re.findall(row, done.stdout, re.MULTILINE)
    assert [(chat, turn) for chat, turn, *_ in rows] == [
        ("1", "1"), ("2", "1"), ("3", "1"), ("1", "2"),
    ]  # fmt: skip
    prompts = [int(row[2]) for row in rows]
    reused = [int(row[3]) for row in rows]
    assert min(prompts) > 1000
    assert reused[0] == 0
    for prompt, found in zip(prompts[1:], reused[1:], strict=True):
        assert prompt / (prompt - found) >= 10  # of the prompt a tenth at most is computed
    assert reused[3] > prompts[0]  # the second turn finds the first one's answer too
    stored, alone = ([float(row[at]) for row in rows] for at in (4, 5))
    # q8_0 takes 1.0625 of 4 bytes, with blocks that are not full; then the prefix exists once.
    assert 0.26 < stored[0] / alone[0] < 0.28
    assert stored[2] / alone[2] < 0.27 / 2
