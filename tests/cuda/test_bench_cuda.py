"""``pagedcache bench --device cuda``: every area runs, its rows add up, and memory comes back."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_tools import run

from pagedcache.cli.bench import peers
from pagedcache.cli.bench.gpu import clock as clock_module
from pagedcache.cli.bench.gpu import machine as machine_module
from pagedcache.cli.bench.gpu.clock import Clock
from pagedcache.cli.bench.gpu.machine import Machine, check
from pagedcache.cli.bench.rows import Options

Capture = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("cuda")


@pytest.fixture(autouse=True)
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch the same rows come on every machine; short samples, since time is no matter."""
    monkeypatch.setattr(peers, "torch", lambda: None)
    monkeypatch.setattr(clock_module, "_SAMPLE_SECONDS", 1e-3)


def bench(capsys: Capture, *argv: str) -> list[dict[str, Any]]:
    done = run(capsys, "bench", "--device", "cuda", "--tokens", "4", "-o", "json", *argv)
    assert (done.code, done.err) == (0, "")
    rows: list[dict[str, Any]] = done.json()
    for row in rows:
        assert row["runs"] == 7 and row["ns_per_item"] > 0
        assert (row["gbps_moved"] is None) == (row["pct_of_copy"] is None)
        assert (row["peer"] is None) == (row["peer_ratio"] is None)
    return rows


def test_a_report_names_the_gpu_and_judges_by_its_targets(capsys: Capture, tmp_path: Path) -> None:
    bench(capsys, "gather", "--format", "q8", "--write", str(readme(tmp_path)))
    text = (tmp_path / "README.md").read_text()
    ordinal = 0
    name = pytest.importorskip("pycuda.driver").Device(ordinal).name()
    assert f", {name}, device cuda:{ordinal}; " in text
    assert "| gather | ≥ 85 % of copy |" in text and "import pagedcache" not in text
    assert "| attention | ≥ 80 % of a plain read | not measured | – |" in text


def readme(folder: Path) -> Path:
    page = folder / "README.md"
    page.write_text("<!-- bench -->\n<!-- /bench -->\n")
    return page


def test_store_and_gather_rows(capsys: Capture) -> None:
    # SPEC F43
    rows = bench(capsys, "store", "gather", "--format", "float16", "--format", "q8")
    store = [row for row in rows if row["op"] == "store"]
    assert [row["variant"] for row in store if row["format"] == "q8"] == [
        f"{source}, {layout}, {what} 4"
        for layout in ("HND", "NHD")
        for what in ("prefill", "decode")
        for source in ("float32", "float16", "bfloat16")
    ]
    assert len(store) == 24
    # 4 tokens of 8 heads x 128 values, K and V, and what they take in the format.
    for row in store:
        wide = 4 if row["variant"].startswith("float32") else 2
        assert row["size"] == 8192 * wide
        stored = 8192 * {"float16": 2, "q8": 1.125}[row["format"]]
        moved = row["size"] + stored
        seconds = 4 * row["ns_per_item"] * 1e-9
        assert row["gbps_moved"] == pytest.approx(moved / seconds / 1e9, rel=2e-3)
    gather = [(row["format"], row["variant"]) for row in rows if row["op"] == "gather"]
    assert gather == [
        ("float16", "HND→float32, 4 tokens"), ("float16", "HND→float16, 4 tokens"),
        ("float16", "NHD→float32, 4 tokens"), ("float16", "NHD→float16, 4 tokens"),
        ("q8", "HND→float32, 4 tokens"), ("q8", "NHD→float32, 4 tokens"),
    ]  # fmt: skip
    assert all(row["pct_of_copy"] > 0 and row["peer"] is None for row in rows)


def test_attend_rows(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of K and V per second, beside a plain read of as many."""
    from pagedcache.cli.bench.gpu import attend

    monkeypatch.setattr(attend, "LAYERS_NBYTES", 1)
    monkeypatch.setattr(attend, "BATCHES", (1, 3))
    formats = {"bfloat16": 2, "q4k": (0.75 + 0.625) / 2}
    rows = bench(capsys, "attend", *(f"--format={name}" for name in formats), "--tokens", "48")
    assert [(row["variant"], row["format"]) for row in rows] == [
        (f"decode, {batch} x 48 keys", name) for name in formats for batch in (1, 3)
    ]
    for row in rows:
        batch = int(row["variant"].split()[1])
        # 48 keys of 8 heads x 128 values, K and V
        assert row["size"] == batch * 48 * 2048 * formats[row["format"]]
        seconds = 48 * batch * row["ns_per_item"] * 1e-9
        assert row["gbps_moved"] == pytest.approx(row["size"] / seconds / 1e9, rel=2e-3)
        assert row["pct_of_copy"] > 0 and row["peer"] is None


def test_convert_and_quantize_rows(capsys: Capture) -> None:
    rows = bench(capsys, "convert", "quantize", "--sizes", "16KiB", "--format", "q4_1")
    assert [row["variant"] for row in rows] == [
        "f32→float16", "float16→f32", "f32→bfloat16", "bfloat16→f32", "f32→q4_1", "q4_1→f32",
    ]  # fmt: skip
    assert {row["size"] for row in rows} == {16384}  # whole tokens: 2 of 8192 bytes


def test_block_rows(capsys: Capture) -> None:
    # SPEC F44
    rows = bench(capsys, "blocks", "--format", "q4_0", "--format", "bfloat16")
    assert [row["variant"] for row in rows] == [
        "copy-on-write 1 block", "copy half of 1 block", "move 1 block",
    ] * 2  # fmt: skip
    # A block: 4 layers, K and V, 16 tokens of 8 heads x 128 values.
    assert [row["size"] for row in rows] == [131072 * 9 // 16] * 3 + [131072 * 2] * 3


def test_rows_of_a_format_with_open_blocks(capsys: Capture) -> None:
    """Parts of blocks are not copied; blocks are sealed and reopened; a decode step is stored in 16
    bits, a prefill of a whole block is quantised."""
    # SPEC F44
    rows = bench(capsys, "blocks", "store", "--format", "q4k", "--tokens", "16")
    blocks = [row for row in rows if row["op"] == "blocks"]
    assert [row["variant"] for row in blocks] == [
        "copy-on-write 1 block", "move 1 block", "seal 1 block", "reopen 1 block",
    ]  # fmt: skip
    # 4 layers, 16 tokens of 8 heads x 128 values; of K 4 bits and 4 bytes per channel.
    nbytes = 65536 * (0.5 + 4 / 16) + 65536 * 0.625
    assert {row["size"] for row in blocks} == {nbytes}
    for row in blocks:
        both = nbytes + (131072 * 2 if row["variant"][0] in "sr" else nbytes)
        assert row["gbps_moved"] == pytest.approx(both / row["ns_per_item"], rel=2e-3)
    for row in rows:
        if row["op"] == "store":
            values = 2 * 16 * 1024
            stored = values * 2 if "decode" in row["variant"] else nbytes / 4
            moved = row["size"] + stored
            assert row["gbps_moved"] == pytest.approx(moved / row["ns_per_item"] / 16, rel=2e-3)


def test_table_and_call_rows(capsys: Capture) -> None:
    # SPEC F45
    rows = bench(capsys, "tables", "calls")
    assert [(row["variant"], row["peer"]) for row in rows] == [
        ("build, 2 x 32 layers", "upload"),
        ("unchanged, 2 x 32 layers", "upload"),
        ("one block more, 2 x 32 layers", "upload"),
        ("store 1 token, queued", "copy of 256 B"),
        ("store 1 token, done", "copy of 256 B"),
        ("store, device slots, queued", "copy of 256 B"),
        ("store, device slots, done", "copy of 256 B"),
        ("gather 1 token, queued", "copy of 256 B"),
        ("gather 1 token, done", "copy of 256 B"),
    ]
    assert [row["size"] for row in rows[:3]] == [2 * 32 * 2 * 8] * 3
    assert all(row["gbps_moved"] is None for row in rows)


def test_time_is_the_device_s_own() -> None:
    """A function that queues nothing takes next to nothing, however long the host is busy."""
    options = Options(7, (), (), "cuda:0", 1)
    with Machine(options) as machine:
        large, small = machine.copy(32 << 20)(), machine.copy(1 << 20)()
        assert small < large
        assert 0 < machine.timer(lambda: None)() < large


def test_tokens_are_halved_until_they_fit(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Machine(Options(7, (), (), "cuda:0", 1)) as machine:
        room = 12 * machine_module.TOKEN_NBYTES  # of six arrays in half of the free memory
        monkeypatch.setattr(machine.device, "memory_info", lambda: (100 * room, 0))
        assert machine.fitting(100) == 100
        assert capsys.readouterr().err == ""
        assert machine.fitting(401) == 100
        said = capsys.readouterr().err
        assert said.startswith("pagedcache bench: cuda:0: 100 tokens at a time, not 401: ")


def test_wrong_values_are_not_timed() -> None:
    with Machine(Options(7, (), (), "cuda:0", 1)) as machine:
        k, v = machine.rows(3, np.dtype(np.float32))
        check(k, k, "a store")
        with pytest.raises(AssertionError, match="a store is wrong by .*: not timed"):
            check(k, v, "a store")


def test_the_host_is_ahead_of_the_device() -> None:
    with Machine(Options(7, (), (), "cuda:0", 1)) as machine:
        clock: Clock = machine.clock
        repeats, copies = clock._plan(lambda: None)
        assert 1 <= repeats <= 50 and 1 <= copies <= 300
        assert math.isfinite(clock._copy_seconds) and clock._copy_seconds > 0
