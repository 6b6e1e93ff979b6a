"""``pagedcache bench``: the rows, their formats, and the timing rules."""

from __future__ import annotations

import csv
import io
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from cli_tools import run

from pagedcache._native import bandwidth
from pagedcache.checks import devices
from pagedcache.cli.bench import peers
from pagedcache.cli.bench.copies import STREAM, stream_timers
from pagedcache.cli.bench.counts import each_count
from pagedcache.cli.bench.rows import measure
from pagedcache.cli.bench.timing import medians, staged, timed

LOAD_TORCH: Any = peers.torch
Capture = pytest.CaptureFixture[str]
COLUMNS = [
    "op", "variant", "format", "size", "gbps_moved", "pct_of_copy", "ns_per_item", "peer",
    "peer_ratio", "runs",
]


@pytest.fixture(autouse=True)
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without optional peers the same rows come on every machine."""
    monkeypatch.setattr(peers, "torch", lambda: None)
    monkeypatch.setattr(peers, "vllm", lambda: None)
    monkeypatch.setattr(peers, "gguf_types", dict)
    monkeypatch.setattr(peers, "ggml", lambda: None)


def bench(capsys: Capture, *argv: str) -> list[dict[str, Any]]:
    done = run(capsys, "bench", *argv, "-o", "json")
    assert (done.code, done.err) == (0, "")
    rows: list[dict[str, Any]] = done.json()
    for row in rows:
        assert list(row) == COLUMNS
        assert row["runs"] >= 7 and row["ns_per_item"] > 0
        assert (row["peer"] is None) == (row["peer_ratio"] is None)
    return rows


def without_stream(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All rows but those against the non-temporal copy, which every machine but x86 lacks."""
    return [row for row in rows if row["peer"] != STREAM]


@pytest.fixture
def no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that has no such copy: rows stand as if there were no limit but memcpy."""
    monkeypatch.setattr(bandwidth, "STREAMS", False)


def test_bytes_rows(capsys: Capture, no_stream: None) -> None:
    rows = bench(capsys, "convert", "quantize", "--sizes", "64KiB", "--format", "q8",
                 "--threads", "1")  # fmt: skip
    assert [row["variant"] for row in rows] == [
        "f32→float16", "float16→f32", "f32→bfloat16", "bfloat16→f32", "f32→q8", "q8→f32",
    ]
    for row in rows:
        assert row["size"] == 65536
        assert row["gbps_moved"] > 0 and row["pct_of_copy"] > 0
    assert [row["peer"] for row in rows] == ["numpy"] * 4 + [None] * 2


def test_store_and_gather_rows(capsys: Capture, no_stream: None) -> None:
    rows = bench(capsys, "store", "gather", "--format", "bfloat16", "--format", "q4",
                 "--threads", "1")  # fmt: skip
    store = [row for row in rows if row["op"] == "store"]
    # 2 formats x 2 layouts x 3 source dtypes x prefill and decode, and the call by itself
    assert len(store) == 25
    assert {row["peer"] for row in store if row["format"] == "bfloat16"} == {"numpy"}
    assert {row["peer"] for row in store if row["format"] == "q4"} == {None}
    call = store[-1]
    assert (call["variant"], call["size"]) == ("one token of 32 values: the call", 2 * 32 * 4)
    gather = [row["variant"] for row in rows if row["op"] == "gather"]
    assert len(gather) == 6 and "HND→bfloat16, 2048 tokens" in gather


def test_the_copies_are_rows_of_their_own(capsys: Capture) -> None:
    rows = bench(capsys, "copy", "--sizes", "64KiB,4KiB", "--threads", "2,1")
    kinds = ["memcpy", "non-temporal copy", "read"]
    kinds = [kind for kind in kinds if bandwidth.STREAMS or not kind.startswith("non")]
    assert [(row["size"], row["variant"]) for row in rows] == [
        (size, kind + more)
        for size in (65536, 4096) for more in (", 2 threads", "") for kind in kinds
    ]
    assert all((row["pct_of_copy"] is None) == row["variant"].startswith("memcpy") for row in rows)


def test_every_count_of_threads_has_rows_and_a_copy_on_as_many(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagedcache import get_num_threads

    seen: set[tuple[int, int]] = set()

    def spied(copy: Any) -> Any:
        def copied(source: Any, target: Any, threads: int = 1) -> None:
            seen.add((threads, get_num_threads()))
            copy(source, target, threads)

        return copied

    monkeypatch.setattr(bandwidth, "copy", spied(bandwidth.copy))
    monkeypatch.setattr(bandwidth, "stream", spied(bandwidth.stream))
    before = get_num_threads()
    rows = bench(capsys, "convert", "quantize", "store", "gather", "--sizes", "4KiB",
                 "--threads", "1,3", "--format", "q8_0")  # fmt: skip
    assert seen == {(1, 1), (3, 3)} and get_num_threads() == before
    variants = {(row["op"], row["variant"]) for row in rows}
    alone = {(op, variant) for op, variant in variants if not variant.endswith("threads")}
    assert variants - alone == {
        (op, f"{variant}, 3 threads") for op, variant in alone if not variant.startswith("one")
    }
    assert len(alone) == 4 + 2 + 12 + 1 + 2
    # NumPy has one thread: nothing is claimed about it with three.
    assert {row["peer"] for row in without_stream(rows) if "3 threads" in row["variant"]} == {None}


def test_torch_gets_as_many_threads_also_where_it_is_loaded_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[int] = []
    stand_in = SimpleNamespace(set_num_threads=told.append)
    monkeypatch.setattr(peers, "optional", lambda name: stand_in)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    load = LOAD_TORCH.__wrapped__  # the cache keeps what this process really has
    for count in each_count((3, 2)):
        if count == 3:
            assert load() is stand_in and told == [3]
            monkeypatch.setitem(sys.modules, "torch", stand_in)
    assert told == [3, 2, 1]


def test_the_non_temporal_copy_moves_as_many_bytes(capsys: Capture) -> None:
    if not bandwidth.STREAMS:
        pytest.skip("no non-temporal stores here")
    rows = bench(capsys, "convert", "quantize", "--sizes", "4KiB", "--format", "q8",
                 "--threads", "1")  # fmt: skip
    assert [row["peer"] for row in rows] == ["numpy", STREAM] * 4 + [STREAM] * 2
    sizes: list[int] = []

    def stream(source: Any, target: Any, threads: int) -> None:
        sizes.append(2 * source.nbytes)

    (timer,) = stream_timers(4096 // 2 * 3).values()
    timer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bandwidth, "stream", stream)
        (timer,) = stream_timers(4096 // 2 * 3).values()
        timer()
    assert set(sizes) == {6144}  # 4 KiB of float32 read, 2 KiB written


def test_import_rows(capsys: Capture) -> None:
    rows = bench(capsys, "import")
    assert [(row["variant"], row["peer"]) for row in rows] == [
        ("import pagedcache", None), ("first use of a cache", "numpy"),
    ]
    assert all(1e5 < row["ns_per_item"] < 1e11 for row in rows)


def test_attend_rows(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedcache import get_num_threads, machine
    from pagedcache.cli.bench import attend

    monkeypatch.setattr(attend, "CONTEXT", 256)
    monkeypatch.setattr(attend, "CHUNK", 16)
    monkeypatch.setattr(attend, "LAYERS_NBYTES", 1)
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)  # so that 1,2 are the default
    threads = get_num_threads()
    rows = bench(capsys, "attend", "--format", "bfloat16", "--format", "q4k")
    assert [(row["format"], row["variant"]) for row in rows] == [
        (name, variant)
        for name in ("bfloat16", "q4k")
        for variant in ("decode, 256 keys, 1 thread", "decode, 256 keys, 2 threads",
                        "prefill of 16, 256 keys, 1 thread")
    ]  # fmt: skip
    for row in rows:
        decoding = row["variant"].startswith("decode")
        assert row["size"] == 256 * 8 * 128 * 2 * pc_bytes(row["format"])
        assert (row["pct_of_copy"] is not None) == decoding
        # What a format gains over 16 bits is measured beside them.
        wanted = "ours, bfloat16" if decoding and row["format"] == "q4k" else None
        assert row["peer"] == wanted
    assert get_num_threads() == threads


def pc_bytes(name: str) -> float:
    """Bytes per value of K and V in blocks of 16: scales of q4k are per 16 tokens."""
    return {"bfloat16": 2, "q4k": (0.75 + 0.625) / 2}[name]


def test_pool_and_prefix_rows(capsys: Capture) -> None:
    rows = bench(capsys, "pool", "prefix")
    variants = [row["variant"] for row in rows]
    for wanted in ("allocate one", "free 2048", "allocate 2048, all cached", "open, full hit",
                   "allocate + free one", "allocate + free 2048", "open, full hit, list",
                   "open cold + commit", "decode step"):
        assert wanted in variants
    growth = [(row["size"], row["peer"]) for row in rows if row["variant"] == "allocate + free 512"]
    least = "ours, 1000 blocks"
    assert growth == [(10**3, None), (10**5, least), (10**7, least)]
    assert all(row["gbps_moved"] is None for row in rows)


def test_csv_and_md(capsys: Capture, no_stream: None) -> None:
    argv = ["bench", "convert", "--sizes", "4KiB", "--threads", "1"]
    done = run(capsys, *argv, "-o", "csv")
    table = list(csv.DictReader(io.StringIO(done.out)))
    assert list(table[0]) == COLUMNS and len(table) == 4
    lines = run(capsys, *argv).lines
    assert [cell.strip() for cell in lines[0].strip("|").split("|")] == COLUMNS
    assert set(lines[1]) == {"|", "-", " "} and len(lines) == 6
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.parametrize(
    "argv",
    [["nonsense"], ["store", "--format", "q5"], ["--sizes", "1KiB"], ["--sizes", "2G"],
     ["--runs", "6"], ["convert", "--sizes", "9999TiB"], ["quantize", "--sizes", "4KiB,7EiB"],
     ["--sizes", "9223372036854775807"], ["quantize", "--format", "float32"],
     ["store", "quantize", "--format", "float16", "--format", "bfloat16"],
     ["--device", "gpu"], ["--device", "cuda:x"], ["pool", "--device", "cuda"], ["tables"],
     ["store", "--device", "cuda", "--tokens", "0"], ["--threads", "0"], ["--threads", "1,x"],
     ["--threads", ""], ["--threads", "1025"]],
)
def test_usage(capsys: Capture, argv: list[str]) -> None:
    done = run(capsys, "bench", *argv)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(("pagedcache bench: ", "usage: ")) and "Traceback" not in done.err


def test_a_device_that_cannot_be_used_ends_with_the_reason(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # CASE C48
    monkeypatch.setattr(devices, "device_problem", lambda name: f"not available: no {name} here")
    done = run(capsys, "bench", "store", "--device", "cuda:1")
    assert (done.code, done.out) == (1, "")
    assert done.err == "pagedcache bench: cuda:1 is not available: no cuda:1 here\n"


def test_formats_that_are_not_quantised_say_which_are(capsys: Capture) -> None:
    done = run(capsys, "bench", "quantize", "--format", "float32")
    assert done.err == "pagedcache bench: quantize covers q8 q4 q8_0 q4_0 q4_1 q4k, not float32\n"


def test_missing_peer_is_noted_once(capsys: Capture) -> None:
    capsys.readouterr()
    assert peers.optional("no_such_peer_anywhere") is None
    assert peers.optional("no_such_peer_anywhere") is None
    printed = capsys.readouterr().err
    assert printed.count("peer no_such_peer_anywhere: not used (ModuleNotFoundError") == 1


def test_contenders_take_turns_after_a_warm_up() -> None:
    calls: list[str] = []

    def timer(name: str, seconds: list[float]) -> Any:
        def measured() -> float:
            calls.append(name)
            return seconds.pop(0)

        return measured

    times = medians(
        {"a": timer("a", [99.0, 1, 2, 3]), "b": timer("b", [99.0, 5, 50, 6])}, runs=3
    )
    assert calls == ["a", "b"] * 4
    assert times == {"a": 2, "b": 6}


def test_staged_restores_and_counts_only_the_function() -> None:
    calls: list[str] = []
    timer = staged(
        lambda: calls.append("prepare"), lambda: calls.append("work"),
        lambda: calls.append("restore"), repeats=2,
    )
    assert 0 <= timer() < 1
    assert calls == ["prepare", "work", "restore"] * 2


def test_rows_do_the_arithmetic() -> None:
    def seconds(value: float) -> Any:
        return lambda: value

    timers = {"ours": seconds(2e-3), "copy": seconds(1e-3), "x": seconds(6e-3), "y": seconds(1e-3)}
    # 3 MB moved in 2 ms is 1.5 GB/s; a copy of 4 MB in 1 ms moves 8 GB/s.
    rows = list(measure("op", "v", None, 4_000_000, 1000, timers, 7, moved=3_000_000))
    assert [(row.gbps_moved, row.pct_of_copy, row.ns_per_item) for row in rows] == [
        (1.5, 18.75, 2000.0)
    ] * 2
    assert [(row.peer, row.peer_ratio) for row in rows] == [("x", 3.0), ("y", 0.5)]
    # The copy may be one of another size: 6 MB moved in 1 ms are 6 GB/s.
    del timers["x"], timers["y"]
    (row,) = measure("op", "v", None, 4_000_000, 1000, timers, 7, 3_000_000, copied=3_000_000)
    assert (row.gbps_moved, row.pct_of_copy, row.peer) == (1.5, 25.0, None)


def test_timed_repeats_short_functions() -> None:
    count = 0

    def work() -> None:
        nonlocal count
        count += 1

    assert timed(work)() < 1e-3
    assert count > 100
