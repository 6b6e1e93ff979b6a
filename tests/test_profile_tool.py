"""``tools/profile_rows.py``: it calls our side alone, as often as asked, and subtracts counts."""

from __future__ import annotations

import sys
from collections import Counter
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest

from pagedcache.cli.bench import convert, peers, pool

TOOL = Path(__file__).resolve().parent.parent / "tools" / "profile_rows.py"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool, with what it replaces put back afterwards."""
    spec = util.spec_from_file_location("profile_rows", TOOL)
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "profile_rows", module)
    spec.loader.exec_module(module)
    for area in (pool, convert):
        for name in ("measure", "timed"):
            monkeypatch.setattr(area, name, getattr(area, name))
    for name in ("torch", "vllm", "ggml", "gguf_types"):
        monkeypatch.setattr(peers, name, getattr(peers, name))
    return module


def test_our_side_is_called_as_often_as_asked(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: Counter[str] = Counter()

    class Native:
        def encode(self, *_: object) -> None:
            calls["encode"] += 1

        def decode(self, *_: object) -> None:
            calls["decode"] += 1

    monkeypatch.setattr(convert, "native", Native())
    monkeypatch.setattr(convert, "_check", lambda *_: None)
    argv = ["convert", "--variant", "f32→.*16", "--size", "4KiB", "--calls", "7"]
    assert tool.main(argv) == 0
    # Once before anything is timed, for each of two formats; then f32→float16 and f32→bfloat16.
    assert calls == {"encode": 2 + 2 * 7, "decode": 2}
    assert capsys.readouterr().err == (
        "f32→float16: 7 calls of 1024 items\nf32→bfloat16: 7 calls of 1024 items\n"
    )


def test_no_such_row_is_a_failure(tool: ModuleType) -> None:
    assert tool.main(["pool", "--variant", "allocate no", "--calls", "1"]) == 1


def test_counts_are_read_by_function(tool: ModuleType) -> None:
    listed = """\
--------------------------------------------------------------------------------
Ir
--------------------------------------------------------------------------------
12,345 (100.0%)  PROGRAM TOTALS

--------------------------------------------------------------------------------
Ir              file:function
--------------------------------------------------------------------------------
8,000 (64.80%)  pagedcache/_native/rows.c:pc_store [/x/y/rows.abi3.so]
4,000 (32.40%)  ???:memcpy'2 [/usr/lib/libc.so.6]
  345 ( 2.79%)  include/pagedcache/encode.h:pc_store [/x/y/rows.abi3.so]
   10 ( 0.08%)  a.h:inlined
"""
    assert tool.parse(listed) == {"pc_store": 8345, "memcpy'2": 4000, "inlined": 10}


def test_a_count_is_what_twice_the_calls_add(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def instructions(options: object, calls: int, out: Path) -> Counter[str]:
        return Counter({"start": 5_000_000, "work": 300 * calls, "call": 100 * calls})

    monkeypatch.setattr(tool, "instructions", instructions)
    assert tool.main(["pool", "--calls", "50", "--count"]) == 0
    assert capsys.readouterr().out.split() == (
        "400 instructions a call 300 75.0 % work 100 25.0 % call".split()
    )
