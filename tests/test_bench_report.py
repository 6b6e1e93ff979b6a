"""The report of ``pagedcache bench``: what is judged, how runs are put together, where it goes."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from cli_tools import run

from pagedcache.cli.bench import peers, saved
from pagedcache.cli.bench.figures import figures_of, size_text
from pagedcache.cli.bench.report import compact, markdown
from pagedcache.cli.bench.rows import Row
from pagedcache.cli.bench.targets import CPU, GPU, nanoseconds, targets_of

Capture = pytest.CaptureFixture[str]
MIB = 1 << 20


def row(op: str, variant: str, **changes: Any) -> Row:
    values: dict[str, Any] = dict(
        op=op, variant=variant, format=None, size=4 * MIB, gbps_moved=10.0, pct_of_copy=90.0,
        ns_per_item=2.0, peer=None, peer_ratio=None, runs=7,
    )
    return Row(**(values | changes))


def timed_row(op: str, variant: str, ns: float, **changes: Any) -> Row:
    return row(op, variant, **({"size": 8192, "gbps_moved": None, "pct_of_copy": None,
                                "ns_per_item": ns} | changes))  # fmt: skip


@pytest.fixture(autouse=True)
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "vllm", "ggml"):
        monkeypatch.setattr(peers, name, lambda: None)
    monkeypatch.setattr(peers, "gguf_types", dict)


def judged(rows: list[Row], device: str = "cpu") -> dict[tuple[str, str], tuple[str, bool | None]]:
    """By variant and opponent: the bounds asked for, and whether they are met."""
    return {
        (figure.key[1], figure.against): (
            ", ".join(target.text for target in figure.targets), figure.met
        )
        for figure in figures_of([rows], device)
    }


# What BENCHMARKS asks of each kind of row, typed in again from its table.
@pytest.mark.parametrize(
    ("given", "against", "bound", "good", "bad"),
    [
        (row("convert", "f32→float16"), "copy", "≥ 95 %", 95.0, 94.99),
        (row("convert", "bfloat16→f32, 2 threads"), "copy", "≥ 95 %", 120.0, 94.0),
        (row("convert", "f32→float16", peer="numpy"), "numpy", "≥ 8×", 8.0, 7.999),
        (row("convert", "f32→float16", peer="torch"), "torch", "≥ 1×", 1.0, 0.999),
        (row("convert", "float16→f32", peer="ggml"), "ggml", "≥ 1×", 1.5, 0.5),
        (row("quantize", "f32→q4k", format="q4k"), "copy", "≥ 85 %", 85.0, 84.9),
        (row("quantize", "q4k→f32", format="q4k"), "copy", "≥ 90 %", 90.0, 89.9),
        (row("quantize", "f32→q8", format="q8", peer="ggml q8_0"), "ggml q8_0", "≥ 1.5×", 1.5, 1.4),
        (row("quantize", "f32→q4_0", format="q4_0", peer="ggml q4_0"), "ggml q4_0", "≥ 5×", 5, 4.9),
        (row("quantize", "q8_0→f32", format="q8_0", peer="ggml q8_0"), "ggml q8_0", "≥ 1×", 1, 0.9),
        (row("quantize", "q4_1→f32", format="q4_1", peer="ggml q4_1"), "ggml q4_1", "≥ 1.5×", 2, 1),
        (row("store", "float16, HND, prefill 2048", format="q4"), "copy", "≥ 80 %", 80, 79),
        (row("store", "float32, HND, prefill 2048", format="bfloat16", peer="vllm"), "vllm",
         "≥ 3×", 3, 2.9),
        (row("store", "bfloat16, HND, decode 256", format="bfloat16", peer="vllm"), "vllm",
         "≥ 3×", 3, 2.9),
        (timed_row("store", "one token of 32 values: the call", 1), "–", "≤ 2 µs", 2000, 2001),
        (row("gather", "NHD→float32, 2048 tokens"), "copy", "≥ 85 %", 85, 84),
        (timed_row("pool", "allocate + free one", 1), "–", "≤ 300 ns", 300, 301),
        (timed_row("pool", "allocate + free one", 1, peer="vllm"), "vllm", "≥ 6×", 6, 5.9),
        (timed_row("pool", "allocate + free 2048", 1), "–", "≤ 15 ns", 15, 15.1),
        (timed_row("pool", "allocate + free 2048", 1, peer="vllm"), "vllm", "≥ 20×", 20, 19),
        (timed_row("prefix", "open, full hit", 1), "–", "≤ 300 µs", 300e3, 301e3),
        (timed_row("prefix", "open, full hit", 1, peer="vllm"), "vllm", "≥ 25×", 25, 24),
        (timed_row("prefix", "open cold + commit", 1, peer="vllm"), "vllm", "≥ 20×", 20, 19),
        (timed_row("prefix", "free after commit", 1, peer="vllm"), "vllm", "≥ 20×", 20, 19),
        # 60 µs for all 256 sequences
        (timed_row("prefix", "decode step", 1), "–", "≤ 234 ns", 234.3, 234.4),
        (timed_row("prefix", "decode step", 1, peer="vllm, no slots"), "vllm, no slots", "≥ 25×",
         25, 24),
        (row("attend", "decode, 8192 keys, 1 thread", format="bfloat16"), "read", "≥ 75 %", 75, 74),
        (row("attend", "decode, 8192 keys, 1 thread", format="q8_0", peer="ours, bfloat16"),
         "ours, bfloat16", "≥ 1.6×", 1.6, 1.5),
        (row("attend", "decode, 8192 keys, 1 thread", format="q4k", peer="ours, bfloat16"),
         "ours, bfloat16", "≥ 2×", 2, 1.9),
        (timed_row("import", "import pagedcache", 1), "–", "≤ 150 ms", 150e6, 151e6),
    ],
)  # fmt: skip
def test_targets_of_the_cpu(given: Row, against: str, bound: str, good: float, bad: float) -> None:
    column = "ns_per_item" if against == "–" else "peer_ratio" if given.peer else "pct_of_copy"
    for value, met in ((good, True), (bad, False)):
        values = asdict(given) | {"peer_ratio": 1.0 if given.peer else None} | {column: value}
        assert judged([Row(**values)])[given.variant, against] == (bound, met)


def test_what_nothing_is_asked_of() -> None:
    rows = [
        row("convert", "f32→bfloat16", peer="numpy", peer_ratio=0.1),  # 8x is for float16
        row("convert", "f32→float16, 2 threads", peer="non-temporal copy", peer_ratio=0.1),
        row("store", "float32, HND, decode 256", format="q8"),
        row("attend", "decode, 8192 keys, 1 thread", format="q4"),
        timed_row("prefix", "open, full hit, list", 1e9, peer="vllm", peer_ratio=0.1),
        timed_row("import", "first use of a cache", 1e9),
    ]
    found = judged(rows)
    for key in (("f32→bfloat16", "numpy"), ("f32→float16, 2 threads", "non-temporal copy"),
                ("float32, HND, decode 256", "copy"), ("decode, 8192 keys, 1 thread", "read"),
                ("open, full hit, list", "vllm"), ("first use of a cache", "–")):
        assert found[key] == ("", None)


def test_targets_of_a_gpu() -> None:
    rows = [
        row("gather", "HND→float32, 131072 tokens", pct_of_copy=85.0),
        row("store", "float16, HND, decode 256", pct_of_copy=10.0),
        row("attend", "decode, 1 x 8192 keys", pct_of_copy=79.0),
        row("attend", "decode, 4 x 131072 keys", pct_of_copy=80.0),
        row("attend", "decode, 64 x 1024 keys", pct_of_copy=1.0),
    ]
    assert list(judged(rows, "cuda:0").values()) == [
        ("≥ 85 %", True), ("", None), ("≥ 80 %", False), ("≥ 80 %", True), ("", None)
    ]
    assert targets_of("cpu") is CPU and targets_of("cuda:1") is GPU


def test_nanoseconds() -> None:
    assert [nanoseconds(x) for x in (0.0683, 15, 999, 1000, 2205.4, 3e5, 1.5e8, 2e9)] == [
        "0.0683 ns", "15 ns", "999 ns", "1 µs", "2.21 µs", "300 µs", "150 ms", "2 s",
    ]


def run_of(rows: list[Row], **facts: Any) -> saved.Run:
    return saved.Run({"date": "2026-01-02 03:04 UTC", "device": "cpu", **facts}, tuple(rows))


FIRST = [
    row("gather", "HND→float32, 2048 tokens", format="q8", pct_of_copy=90.0),
    timed_row("pool", "allocate + free one", 100.0, peer="vllm", peer_ratio=9.0),
]
SECOND = [
    row("gather", "HND→float32, 2048 tokens", format="q8", pct_of_copy=80.0, gbps_moved=30.0),
    timed_row("pool", "allocate + free one", 400.0, peer="vllm", peer_ratio=7.0),
    timed_row("pool", "free 2048", 3.0),
]
THIRD = [
    row("gather", "HND→float32, 2048 tokens", format="q8", pct_of_copy=99.0, gbps_moved=20.0),
    timed_row("pool", "allocate + free one", 200.0, peer="vllm", peer_ratio=8.0),
]


def cells(text: str, start: str) -> list[list[str]]:
    """Cells of the table lines that begin so."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines() if line.startswith(f"| {start} |")
    ]


def test_one_run_says_ours_peer_ratio_target_and_miss() -> None:
    text = markdown([run_of(SECOND)])
    assert cells(text, "HND→float32, 2048 tokens") == [
        ["HND→float32, 2048 tokens", "q8", "4 MiB", "30 GB/s", "copy", "80 %", "≥ 85 %"],
        ["HND→float32, 2048 tokens", "q8", "4 MiB", "30 GB/s", "copy", "80 %", "≥ 85 %", "**no**"],
    ]  # under Misses and in its area
    assert cells(text, "allocate + free one") == [
        ["allocate + free one", "", "8,192", "400 ns", "–", "400 ns", "≤ 300 ns"],
        ["allocate + free one", "", "8,192", "400 ns", "–", "400 ns", "≤ 300 ns", "**no**"],
    ]
    assert "|  |  |  |  | vllm | 7× | ≥ 6× | yes |" in text
    assert cells(text, "gather") == [["gather", "≥ 85 % of copy", "80 %", "**no**"]]
    assert cells(text, "import pagedcache") == [
        ["import pagedcache", "≤ 150 ms", "not measured", "–"]
    ]
    assert "| free 2048 |  | 8,192 | 3 ns | – | 3 ns |  |  |" in text


def test_runs_together_are_judged_by_their_worst() -> None:
    runs = [run_of(FIRST, cpu="A"), run_of(SECOND, cpu="B"), run_of(THIRD, cpu="C")]
    text = markdown(runs)
    assert "From 3 runs: least / median / greatest." in text
    assert all(f"- cpu: {name}" in text for name in "ABC")
    gather = [*cells(text, "HND→float32, 2048 tokens")[-1][3:]]
    assert gather == ["20 GB/s", "copy", "80 % / 90 % / 99 %", "≥ 85 %", "**no**"]
    time = cells(text, "allocate + free one")[-1]
    assert time[5:] == ["100 ns / 200 ns / 400 ns", "≤ 300 ns", "**no**"]
    assert "| vllm | 7× / 8× / 9× | ≥ 6× | yes |" in text
    figures = figures_of([run.rows for run in runs])
    assert [figure.met for figure in figures] == [False, False, True, None]
    assert [size_text(figure) for figure in figures] == ["4 MiB", "8,192", "8,192", "8,192"]
    assert figures[-1].values == (3.0,)  # only one run has that row
    # The worst comes first, also where less is better.
    short = compact(runs)
    assert cells(short, "allocate + free one block")[0][1:] == [
        "≤ 300 ns", "400 ns … 100 ns, median 200 ns", "**no**"
    ]
    assert "| gather | ≥ 85 % of copy | 80 % … 99 %, median 90 % | **no** |" in short
    assert short.count("Measured 2026-01-02 03:04 UTC, ") == 3


def test_no_misses_say_none() -> None:
    text = markdown([run_of([row("gather", "HND→float32, 2048 tokens")])])
    assert text.split("## Misses\n")[1].split("##")[0].strip() == "None."


def test_rounding_hides_no_miss() -> None:
    rows = [row("convert", "f32→float16", pct_of_copy=94.98, peer="torch", peer_ratio=0.9996)]
    text = markdown([run_of(rows)])
    assert "| copy | 94.98 % | ≥ 95 % | **no** |" in text
    assert "| torch | 0.9996× | ≥ 1× | **no** |" in text


def test_a_summary_counts_rows_that_meet_a_target() -> None:
    rows = [row("gather", f"HND→float32, {n} tokens", pct_of_copy=p)
            for n, p in ((1, 84.0), (2, 85.0), (3, 140.0))]  # fmt: skip
    assert cells(compact([run_of(rows)]), "gather") == [
        ["gather", "≥ 85 % of copy", "84 % … 140 %, median 85 %", "**no**, 2 of 3"]
    ]
    assert cells(compact([run_of(rows[1:])]), "gather") == [
        ["gather", "≥ 85 % of copy", "85 % … 140 %", "yes, 2 of 2"]
    ]


def test_sizes_are_bytes_where_bytes_move() -> None:
    rows = [row("attend", "prefill of 128, 8192 keys, 1 thread", gbps_moved=None, size=64 * MIB),
            timed_row("store", "one token of 32 values: the call", 1.0, size=256),
            timed_row("prefix", "decode step", 1.0, size=256)]  # fmt: skip
    assert [size_text(figure) for figure in figures_of([rows])] == ["64 MiB", "256 B", "256"]


ARGV = ["bench", "convert", "--sizes", "4KiB", "--threads", "1"]


def test_a_report_has_its_rows_beside_it_and_can_be_made_again(
    capsys: Capture, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    first, again = tmp_path / "out.md", tmp_path / "again.md"
    done = run(capsys, *ARGV, "-o", "json", "--report", first)
    assert done.code == 0
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["rows"] == done.json() and data["facts"]["areas"] == ["convert"]
    wanted = {"date", "command", "cpu", "instruction_set", "threads", "versions", "runs"}
    assert wanted <= set(data["facts"])
    assert data["facts"]["versions"]["numpy"] and data["facts"]["ggml"] == "not there"
    assert (tmp_path / "out_plots" / "convert.png").read_bytes()[:4] == b"\x89PNG"
    assert run(capsys, "bench", "--from", tmp_path / "out.json", "--report", again).code == 0
    text = again.read_text()
    assert text.replace("again_plots", "out_plots") == first.read_text()
    assert "![convert](again_plots/convert.png)" in text
    # It is not what was measured here and now: no rows are written beside it.
    assert not (tmp_path / "again.json").exists()


def test_rows_alone_have_the_date_of_their_file(capsys: Capture, tmp_path: Path) -> None:
    done = run(capsys, *ARGV, "-o", "json")
    (tmp_path / "rows.json").write_text(done.out)
    loaded = saved.load(tmp_path / "rows.json")
    assert [asdict(row) for row in loaded.rows] == done.json()
    assert loaded.facts["date"].startswith("file of 2")
    # Two runs in one report.
    both = tmp_path / "both.md"
    argv = ["--from", tmp_path / "rows.json", tmp_path / "rows.json", "--report", both]
    assert run(capsys, "bench", *argv).code == 0
    assert "From 2 runs" in both.read_text()


def test_without_matplotlib_there_is_a_report_that_says_so(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = run(capsys, *ARGV, "--report", tmp_path / "out.md")
    assert done.code == 0
    assert done.err.startswith("pagedcache bench: no plots: matplotlib is not there")
    text = (tmp_path / "out.md").read_text()
    assert "pip install 'pagedcache[plot]'" in text and "## convert" in text
    assert "![" not in text and not (tmp_path / "out_plots").exists()


def test_write_replaces_what_stands_between_the_markers(capsys: Capture, tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- bench -->\nformer\n<!-- /bench -->\nafter\n")
    for _ in range(2):
        assert run(capsys, *ARGV, "--write", page).code == 0
        text = page.read_text()
        assert text.startswith("before\n<!-- bench -->\n\nMeasured 2")
        assert text.endswith("|\n<!-- /bench -->\nafter\n") and "former" not in text
        assert "`pagedcache" in text and "| conversion | ≥ 95 % of copy |" in text
        assert text.count("Measured") == 1


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--report", "{}/no/out.md"], "No such file or directory"),
        (["--report", "{}/out.txt"], "does not end in .md"),
        (["--write", "{}/missing.md"], "No such file or directory"),
        (["--write", "{}/plain.md"], "has no <!-- bench --> … <!-- /bench --> markers"),
        (["--write", "{}/binary.md"], "binary.md"),
        (["--from", "{}/rows.json"], "--from: give --report or --write too"),
        (["pool", "--from", "{}/rows.json", "--report", "{}/o.md"], "--from takes what the files"),
        (["--report", "{}/o.md", "--from", "{}/missing.json"], "No such file or directory"),
        (["--report", "{}/o.md", "--from", "{}/plain.md"], "is not JSON"),
        (["--report", "{}/o.md", "--from", "{}/number.json"], "holds no rows of pagedcache bench"),
        (["--report", "{}/o.md", "--from", "{}/other.json"], "holds no row of pagedcache bench in"),
        (["--report", "{}/o.md", "--from", "{}/typed.json"], "holds no row of pagedcache bench in"),
        (["--report", "{}/o.md", "--from", "{}/rows.json", "{}/gpu.json"], "some of a GPU"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_measured(
    capsys: Capture, tmp_path: Path, argv: list[str], said: str
) -> None:
    good = [asdict(row) for row in FIRST]
    (tmp_path / "plain.md").write_text("no markers\n")
    (tmp_path / "binary.md").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "rows.json").write_text(json.dumps(good))
    (tmp_path / "number.json").write_text("7")
    (tmp_path / "other.json").write_text('[{"op": "x"}]')
    (tmp_path / "typed.json").write_text(json.dumps([good[0] | {"ns_per_item": "fast"}]))
    gpu = {"facts": {"date": "today", "device": "cuda:0"}, "rows": good}
    (tmp_path / "gpu.json").write_text(json.dumps(gpu))
    done = run(capsys, "bench", *(text.format(tmp_path) for text in argv))
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("pagedcache bench: ") and said in done.err
    assert done.err.count("\n") == 1
