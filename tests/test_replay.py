"""``pagedcache replay``: published hit counts, hand-made traces, stored bytes, broken files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import profiles
import pytest
from cli_tools import Run, run

from pagedcache.cli import replay_run
from pagedcache.cli.replay_trace import MAX_HASH_ID, Request, read_trace
from pagedcache.cli.replay_values import ValueMaker
from pagedcache.formats import FORMATS

Capture = pytest.CaptureFixture[str]
SAMPLE = Path(__file__).resolve().parent / "data" / "conversation_1000.jsonl"


def line(length: int, ids: list[int], **more: Any) -> str:
    record = {"timestamp": 0, "input_length": length, "output_length": 1, "hash_ids": ids}
    return json.dumps(record | more)


def trace(path: Path, *lines: str) -> Path:
    file = path / "trace.jsonl"
    file.write_text("".join(text + "\n" for text in lines), encoding="utf-8")
    return file


def figures(capsys: Capture, *argv: object) -> dict[str, Any]:
    done = run(capsys, "replay", *argv, "--json")
    assert done.code == 0, done.err
    result: dict[str, Any] = done.json()
    return result


# -- what is counted -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_blocks", "hits"), [("unlimited", 2_959_360), (3000, 841_216), (1000, 537_088)]
)
def test_published_hits_of_a_thousand_requests(
    capsys: Capture, num_blocks: object, hits: int
) -> None:
    got = figures(capsys, SAMPLE, "--num-blocks", num_blocks)
    assert (got["requests"], got["input_tokens"], got["too_large"]) == (1000, 13_732_944, 0)
    assert got["hit_tokens"] == hits
    assert got["hit_rate"] == hits / 13_732_944
    assert (got["evicted_blocks"] == 0) == (num_blocks == "unlimited")
    assert got["peak_blocks"] <= got["num_blocks"]
    assert 0 < got["cache_seconds"] <= got["seconds"]


def test_counts_of_a_hand_made_trace(capsys: Capture, tmp_path: Path) -> None:
    file = trace(
        tmp_path,
        line(1500, [1, 2, 3]),  # 2 full blocks and 476 tokens
        line(1024, [1, 2]),  # all of it cached; the last token is left to compute
        line(1025, [1, 2, 9]),  # hits both blocks
        line(512 * 9, list(range(10, 19))),  # 9 blocks: too large for 8
        line(600, [2, 1]),  # the same blocks in another order: no hit
        line(0, []),
    )
    got = figures(capsys, file, "--num-blocks", 8)
    assert (got["requests"], got["too_large"]) == (6, 1)
    assert got["input_tokens"] == 1500 + 1024 + 1025 + 512 * 9 + 600
    assert got["hit_tokens"] in (512 + 1024, 1023 + 1024)
    assert (got["peak_used_blocks"], got["evicted_blocks"]) == (3, 0)
    assert figures(capsys, file, "--limit", 3)["input_tokens"] == 1500 + 1024 + 1025


@pytest.mark.parametrize(("block_size", "hits"), [(16, 1488), (512, 1024), (1000, 1000)])
def test_block_size(capsys: Capture, tmp_path: Path, block_size: int, hits: int) -> None:
    # 1,500 equal tokens: the hit is the whole blocks of the pool's own size.
    file = trace(tmp_path, line(1500, [1, 2, 3]), line(1600, [1, 2, 3, 4]))
    assert figures(capsys, file, "--block-size", block_size)["hit_tokens"] == hits


def test_partial_block_reuse_hits_to_the_token(capsys: Capture, tmp_path: Path) -> None:
    # SPEC F40
    file = trace(tmp_path, line(1024, [1, 2]), line(700, [1, 2]))
    assert figures(capsys, file)["hit_tokens"] == 512
    assert figures(capsys, file, "--partial-block-reuse", 1)["hit_tokens"] == 699
    assert figures(capsys, file, "--partial-block-reuse", 200)["hit_tokens"] == 512


def test_evictions_are_counted(capsys: Capture, tmp_path: Path) -> None:
    file = trace(tmp_path, *(line(1024, [2 * i, 2 * i + 1]) for i in range(5)))
    got = figures(capsys, file, "--num-blocks", 4)
    assert (got["hit_tokens"], got["evicted_blocks"], got["peak_blocks"]) == (0, 6, 4)


def test_lines_for_people(capsys: Capture, tmp_path: Path) -> None:
    file = trace(tmp_path, line(1500, [1, 2, 3]), line(1600, [1, 2, 3, 4]))
    done = run(capsys, "replay", file)
    assert (done.code, done.err) == (0, "")  # no progress bar: stderr is no terminal
    facts = {text.split("  ")[0]: text.split("  ", 1)[1].strip() for text in done.lines}
    assert facts["requests"] == "2" and facts["input tokens"] == "3,100"
    assert facts["hit tokens"] == "1,024 (33.03 %)"
    assert facts["evicted blocks"] == "0" and "µs mean" in facts["per request"]
    assert {"peak blocks", "requests/s", "time"} <= facts.keys()


def test_progress_bar_on_a_terminal(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    done = run(capsys, "replay", trace(tmp_path, line(5, [1])), "--json")
    assert "replay" in done.err and done.json()["requests"] == 1


# -- tokens and values -----------------------------------------------------------------------


def test_tokens_of_a_request() -> None:
    request = Request(1000, np.array([7, MAX_HASH_ID], np.uint32))
    tokens = request.tokens()
    assert tokens.dtype == np.uint32 and tokens.shape == (1000,)
    assert tokens[:512].tolist() == list(range(7 * 512, 8 * 512))
    assert tokens[512:].tolist() == list(range(MAX_HASH_ID * 512, MAX_HASH_ID * 512 + 488))
    assert MAX_HASH_ID * 512 + 511 == 2**32 - 1


def test_values_depend_on_token_position_layer_and_kind_only() -> None:
    maker, again = ValueMaker(2, 8), ValueMaker(2, 8)
    tokens = np.array([5, 6, 5], np.uint32)
    rows = maker.rows(tokens, 10, 1, "k")
    assert rows.shape == (3, 2, 8) and rows.dtype == np.float32
    # Any position can be made again by itself.
    assert np.array_equal(again.rows(tokens[2:], 12, 1, "k")[0], rows[2])
    others = [
        maker.rows(tokens, 11, 1, "k"), maker.rows(tokens, 10, 0, "k"),
        maker.rows(tokens, 10, 1, "v"), maker.rows(tokens + 1, 10, 1, "k"),
    ]
    assert not any(np.array_equal(other[0], rows[0]) for other in others)
    assert not np.array_equal(rows[0], rows[2])
    many = maker.rows(np.arange(50_000, dtype=np.uint32), 0, 0, "k").reshape(50_000, -1)
    assert len(np.unique(many, axis=0)) > 49_990


# -- stored bytes ----------------------------------------------------------------------------

SMALL = ("--layers", 2, "--kv-heads", 1, "--head-dim", 40)


@pytest.mark.parametrize("name", list(FORMATS))
def test_store_reads_every_hit_back(capsys: Capture, name: str) -> None:
    # 40 requests in a pool that must evict; parts of blocks are reused too.
    argv = (SAMPLE, "--store", "--num-blocks", 1500, "--block-size", 64, "--format", name, *SMALL)
    limit = profiles.scaled(40, 12)
    got = figures(capsys, *argv, "--limit", limit, "--partial-block-reuse", 8)
    width = {"float16": 2, "bfloat16": 2}.get(name, 4)
    assert got["hit_tokens"] > 0 and got["format"] == name
    assert got["compared_bytes"] == got["hit_tokens"] * 2 * 2 * 40 * width
    assert got["differing_bytes"] == 0


def test_store_counts_hits_as_without(capsys: Capture) -> None:
    argv = (SAMPLE, "--num-blocks", 100, "--limit", 60, *SMALL)
    with_bytes, ids_only = figures(capsys, *argv, "--store"), figures(capsys, *argv)
    assert "differing_bytes" not in ids_only
    for name in ("hit_tokens", "evicted_blocks", "peak_blocks", "too_large"):
        assert with_bytes[name] == ids_only[name]


def test_a_wrong_stored_value_is_counted(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(self: ValueMaker, tokens: Any, start: int, layer: int, kind: str) -> Any:
        rows = right(self, tokens, start, layer, kind)
        # One value of V of one token, and only in the cache that is judged.
        if (layer, kind, start, len(tokens)) == (1, "v", 0, 600):
            rows[3, 0, 0] = 99.0
        return rows

    right = ValueMaker.rows
    monkeypatch.setattr(replay_run.ValueMaker, "rows", wrong)
    file = trace(tmp_path, line(600, [1, 2]), line(700, [1, 2]))
    done = run(capsys, "replay", file, "--store", "--json", *SMALL)
    assert done.code == 1
    got = done.json()
    assert got["hit_tokens"] == 512 and 1 <= got["differing_bytes"] <= 2
    assert "differing bytes" in run(capsys, "replay", file, "--store", *SMALL).out
    # with open blocks: by value, of which the wrong one spoils its group of 32
    done = run(capsys, "replay", file, "--store", "--json", "--format", "q4k", *SMALL)
    got = done.json()
    assert done.code == 1 and got["compared_bytes"] == 512 * 2 * 2 * 40 * 4
    assert 4 <= got["differing_bytes"] <= 4 * 32


def test_storage_that_no_machine_has_is_refused(capsys: Capture) -> None:
    done = run(capsys, "replay", SAMPLE, "--store", "--layers", 1000, "--kv-heads", 1000)
    assert (done.code, done.out) == (2, "")
    assert "give a smaller --num-blocks" in done.err


# -- files that cannot be used ---------------------------------------------------------------

GOOD = line(600, [1, 2])
BROKEN = {
    "not JSON": "{",
    "no object": "[1, 2]",
    "not a JSON object": "null",
    "missing hash_ids": json.dumps({"timestamp": 0, "input_length": 5, "output_length": 1}),
    "missing timestamp, output_length": '{"input_length": 5, "hash_ids": [1]}',
    "input_length is -5; it cannot be negative": line(-5, [1]),
    "output_length is -1; it cannot be negative": line(5, [1], output_length=-1),
    "timestamp is -1.5; it cannot be negative": line(5, [1], timestamp=-1.5),
    "timestamp is nan": line(5, [1], timestamp=float("nan")),
    "input_length is 5.0": line(5, [1]).replace("5,", "5.0,"),
    "input_length is True": line(True, [1]),
    "hash_ids is not a list": line(5, [1], hash_ids="1"),
    "needs 2 hash_ids of 512 tokens each, there are 1": line(513, [1]),
    "needs 1 hash_ids of 512 tokens each, there are 2": line(512, [1, 2]),
    "hash_ids has -1": line(5, [-1]),
    f"hash_ids has {MAX_HASH_ID + 1}": line(5, [MAX_HASH_ID + 1]),
    "hash_ids has True": line(5, [True]),
    "hash_ids has '1'": line(5, ["1"]),  # type: ignore[list-item]
    "hash_ids has a number of": line(5, [10**200]),
    "nested too deeply": "[" * 100_000,
}


def refused(done: Run, *words: str) -> None:
    assert (done.code, done.out) == (2, "")
    assert "Traceback" not in done.err
    for word in words:
        assert word in done.err


@pytest.mark.parametrize("words", BROKEN)
def test_broken_line_is_named_and_nothing_is_reported(
    capsys: Capture, tmp_path: Path, words: str
) -> None:
    file = trace(tmp_path, GOOD, GOOD, BROKEN[words], GOOD)
    expected = {"no object": "not a JSON object"}.get(words, words)
    for extra in ([], ["--json"]):
        refused(run(capsys, "replay", file, *extra), f"{file}, line 3: ", expected)
    # Lines behind the limit are not read.
    assert figures(capsys, file, "--limit", 2)["requests"] == 2


def test_blank_lines_and_a_byte_order_mark_are_no_requests(
    capsys: Capture, tmp_path: Path
) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + f"{GOOD}\r\n\n  \t\n{GOOD}\n\n".encode())
    got = figures(capsys, file)
    assert (got["requests"], got["hit_tokens"]) == (2, 512)
    file.write_bytes(f"\n{GOOD}\n\n{{\n".encode())
    refused(run(capsys, "replay", file), "line 4: not JSON")  # lines are counted as an editor does
    file.write_bytes(b"\xef\xbb\xbf\n\n")
    refused(run(capsys, "replay", file), "the trace has no requests")
    file.write_bytes(f"{GOOD}\n".encode() + b"\xef\xbb\xbf" + GOOD.encode())
    refused(run(capsys, "replay", file), "line 2: not JSON")  # in the middle it is no mark


def test_options_that_need_a_store_say_so(capsys: Capture, tmp_path: Path) -> None:
    file = trace(tmp_path, GOOD)
    given = {"--format": "q8", "--layers": 3, "--kv-heads": 1, "--head-dim": 32}
    for option, value in given.items():
        done = run(capsys, "replay", file, option, value)
        assert done.code == 0 and "--store" in done.err and option in done.err
        assert run(capsys, "replay", file, option, value, "--json").json()["requests"] == 1
    assert run(capsys, "replay", file).err == ""
    argv = [str(part) for pair in given.items() for part in pair]
    done = run(capsys, "replay", file, "--store", *argv)
    assert done.code == 0 and "changes nothing" not in done.err
    refused(run(capsys, "replay", file, "--partial-block-reuse", 513), "partial_block_reuse")


def test_bytes_that_are_no_text(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(GOOD.encode() + b"\n\xff\xfe\n")
    refused(run(capsys, "replay", file), "line 2: not UTF-8")


def test_files_that_are_not_there(capsys: Capture, tmp_path: Path) -> None:
    refused(run(capsys, "replay", tmp_path / "none.jsonl"), "none.jsonl: No such file")
    refused(run(capsys, "replay", tmp_path), "Is a directory")
    refused(run(capsys, "replay", trace(tmp_path)), "the trace has no requests")


@pytest.mark.parametrize(
    "argv",
    [
        ["--num-blocks", "0"], ["--num-blocks", "many"], ["--block-size", "-1"],
        ["--limit", "0"], ["--store", "--format", "q5"], ["--partial-block-reuse", "-1"],
    ],
)
def test_usage(capsys: Capture, tmp_path: Path, argv: list[str]) -> None:
    refused(run(capsys, "replay", trace(tmp_path, GOOD), *argv), argv[-1])


def test_read_trace_keeps_ids_and_lengths() -> None:
    requests = read_trace(SAMPLE, 2)
    assert [request.input_length for request in requests] == [6758, 7322]
    assert requests[1].hash_ids.tolist() == [0, *range(14, 28)]


# -- the picture -----------------------------------------------------------------------------


def test_plot_is_a_picture(capsys: Capture, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "hits.png"
    figures(capsys, SAMPLE, "--limit", 50, "--plot", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    bad = run(capsys, "replay", SAMPLE, "--limit", 5, "--plot", tmp_path / "hits.nothing")
    assert bad.code == 2 and "--plot" in bad.err


def test_plot_without_matplotlib(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    argv = ("replay", SAMPLE, "--limit", 5, "--plot", tmp_path / "x.png")
    refused(run(capsys, *argv), "pip install 'pagedcache[plot]'")
