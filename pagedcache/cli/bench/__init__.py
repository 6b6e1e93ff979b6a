"""Measure the library: every figure next to a plain copy or to a peer, taken in the same run.

Contenders take turns and the median of at least 7 runs after a warm-up is printed. gbps_moved
counts bytes read plus bytes written; pct_of_copy is its share of what memcpy moves at the same
size; peer_ratio is the peer's time over ours (above 1: we are faster). Peers that are not
installed leave the columns empty. "non-temporal copy" among the peers is one that moves as many
bytes. One thread unless the variant says more; a copy beside it then has as many. For attend
pct_of_copy is the share of a plain read. ns_per_item is what a call, a token, a block or a value
takes.

With --device cuda the device's own time counts, by CUDA events, the host keeping ahead of it; the
copy is one from device to device that moves as many bytes. calls gives the host's time.

--report writes what the rows say about every target: a Markdown file, plots beside it (where
matplotlib is installed), and the rows as JSON. --from makes it of such files, or of what -o json
printed, without measuring; of several runs each must meet a target. --write puts the short table
between <!-- bench --> and <!-- /bench --> of a file.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..output import note, whole_number

if TYPE_CHECKING:
    from .rows import Options, Row
    from .saved import Run

HELP = "speed beside memcpy and beside peers, on the CPU or on a GPU"
AREAS = (
    "copy", "convert", "quantize", "store", "gather", "pool", "prefix", "attend", "import",
)  # fmt: skip
GPU_AREAS = ("convert", "quantize", "store", "gather", "attend", "blocks", "tables", "calls")
_MIN_RUNS = 7
_GPU_TOKENS = 1 << 17  # 1 GiB of float32 K and V: far more than any cache between
_MODULES = {"import": "imports"}  # areas whose name no module can have


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("areas", nargs="*", metavar="AREA", help=f"of {' '.join(AREAS)}; on a GPU of "
        f"{' '.join(GPU_AREAS)} (default: all)")
    add("--device", default="cpu", metavar="NAME", help="cpu (default), cuda or cuda:N")
    add("-o", "--output", choices=("md", "csv", "json"), default="md")
    add("--runs", type=whole_number(_MIN_RUNS, 1000), default=_MIN_RUNS,
        help="interleaved runs after the warm-up (default and least: 7)")
    add("--sizes", default="4MiB,64MiB,256MiB", metavar="LIST",
        help="bytes of float32 for copy, convert and quantize (default 4MiB,64MiB,256MiB)")
    add("--threads", default=None, metavar="LIST",
        help="counts of threads for what can use more than one (default 1,2; 1 on one core)")
    add("--format", action="append", metavar="NAME",
        help="only this storage format (quantize, store, gather, attend, blocks); may be given "
        "again")
    add("--tokens", type=whole_number(1, 1 << 24), default=_GPU_TOKENS, metavar="N",
        help="tokens of one store or gather on a GPU, halved until they fit; no longer contexts "
        f"of attend (default {_GPU_TOKENS:,})")
    add("--report", type=Path, metavar="FILE.md", help="write a report there")
    add("--write", type=Path, metavar="FILE.md", help="put the short table into this file")
    add("--from", dest="sources", type=Path, nargs="+", metavar="FILE.json",
        help="measure nothing, take the rows of these runs")


def areas_of(device: str) -> tuple[str, ...]:
    """What is measured there, in this order."""
    return AREAS if device == "cpu" else GPU_AREAS


def run(args: argparse.Namespace) -> int:
    """0; 1 when the device cannot be used; 2 for a device, area, size, format or file that does not
    exist, or that nothing is measured of."""
    from pagedcache.checks.devices import device_problem

    from .asked import can_write, options_of
    from .rows import print_rows
    from .saved import Run

    if not can_write(args):
        return 2
    if args.sources is not None:
        return _from_files(args)
    options = options_of(args)
    if options is None:
        return 2
    problem = device_problem(options.device)
    if problem is not None:
        note(f"pagedcache bench: {options.device} is {problem}")
        return 1
    areas = tuple(args.areas or areas_of(options.device))
    taken: list[Row] = []

    def rows() -> Iterator[Row]:
        for row in _measured(areas, options):
            taken.append(row)
            yield row

    print_rows(rows(), args.output)
    if args.report is None and args.write is None:
        return 0
    from .facts import collect

    return _write(args, [Run(collect(options, areas), tuple(taken))])


def _measured(areas: Iterable[str], options: Options) -> Iterator[Row]:
    from tqdm import tqdm

    package = __name__ if options.device == "cpu" else f"{__name__}.gpu"
    bar = tqdm(areas, desc="bench", unit="area", file=sys.stderr, disable=None, leave=False)
    for area in bar:
        bar.set_postfix_str(area)
        name = _MODULES.get(area, area)
        yield from importlib.import_module(f"{package}.{name}").rows(options)


def _from_files(args: argparse.Namespace) -> int:
    from .saved import load

    try:
        runs = [load(path) for path in args.sources]
    except (OSError, ValueError) as error:
        note(f"pagedcache bench: --from: {error}")
        return 2
    if len({run.facts.get("device", "cpu") == "cpu" for run in runs}) > 1:
        note("pagedcache bench: --from: some runs are of a CPU and some of a GPU")
        return 2
    return _write(args, runs)


def _write(args: argparse.Namespace, runs: list[Run]) -> int:
    from ..marked import put_between
    from . import report, saved

    if args.report is not None:
        if args.sources is None:
            saved.save(args.report.with_suffix(".json"), runs[0])
        why = report.write(args.report, runs)
        if why is not None:
            note(f"pagedcache bench: no plots: {why}")
    if args.write is not None:
        put_between(args.write, "bench", report.compact(runs))
    return 0
