"""Where the time of a benchmark's rows goes: run our side of them alone, under a profiler.

    python tools/profile_rows.py AREA [--variant REGEX] [--format NAME] [--calls N]
    python tools/profile_rows.py AREA … --count          counts instructions, by function
    perf record -g python tools/profile_rows.py AREA … --calls 2000

Without ``--count`` it calls our side of every row of the area whose variant matches (whole) N
times, without clocks, copies and peers, for perf or anything else that looks at a process.

``--count`` does that under ``valgrind --tool=callgrind`` with N and with 2 N calls and prints the
difference of the two, divided by N: instructions of one call, whatever the process did before. They
do not depend on what else the machine does. Valgrind has no AVX-512: AVX2 kernels are counted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

from pagedcache.cli.bench import AREAS, peers
from pagedcache.cli.bench.rows import Options, Row
from pagedcache.formats import FORMATS
from pagedcache.sizes import parse_size

_LINE = re.compile(r"\s*([\d,]+) \([ \d.]+%\)\s+\S*?:([^\[\s][^\[]*?)(?: \[.*\])?\s*$")
_SHOWN = 12  # functions


class Untimed:
    """In the place of a timer: the function alone. (What prepares its work by itself keeps its
    timer, and is called as often as that says.)"""

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function

    def __call__(self) -> float:
        self.function()
        return 1.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("area", choices=[area for area in AREAS if area != "import"])
    add("--variant", default=".*", metavar="REGEX", help="rows that match it whole")
    add("--format", default="bfloat16", choices=list(FORMATS), help="%(default)s")
    add("--size", default="4MiB", help="of flat arrays (%(default)s)")
    add("--threads", type=int, default=1, help="%(default)s")
    add("--calls", type=int, default=10, metavar="N", help="%(default)s")
    add("--count", action="store_true", help="count instructions with callgrind")
    options = parser.parse_args(arguments)
    if options.count:
        return count(options)
    rows = run(options)
    for variant, items, calls in rows:
        print(f"{variant}: {calls} calls of {items} items", file=sys.stderr)
    return 0 if rows else 1


def run(options: argparse.Namespace) -> list[tuple[str, int, int]]:
    """Call our side; returns (variant, items of a call, calls) of the rows that matched."""
    without_peers()
    done: list[tuple[str, int, int]] = []

    def ours_alone(
        op: str, variant: str, format: str | None, size: int, items: int,
        timers: dict[str, Callable[[], float]], *_: Any,
    ) -> Iterator[Row]:  # fmt: skip
        if re.fullmatch(options.variant, variant):
            ours = timers["ours"]
            call = ours.function if isinstance(ours, Untimed) else ours
            for _ in repeat(None, options.calls):
                call()
            done.append((variant, items, options.calls))
        return iter(())

    module: Any = importlib.import_module(f"pagedcache.cli.bench.{options.area}")
    module.measure, module.timed = ours_alone, Untimed
    sizes = (parse_size(options.size),)
    list(module.rows(Options(7, sizes, (options.format,), threads=(options.threads,))))
    return done


def without_peers() -> None:
    """Let no peer be found: importing torch alone would be most of a profile."""
    names: Any = peers
    for name in ("torch", "vllm", "ggml"):
        setattr(names, name, lambda: None)
    names.gguf_types = dict


def count(options: argparse.Namespace) -> int:
    """Print the instructions of one call, and the functions that take most of them."""
    with tempfile.TemporaryDirectory() as folder:
        few, many = (
            instructions(options, times * options.calls, Path(folder) / str(times))
            for times in (1, 2)
        )
    each = Counter({name: (many[name] - few[name]) / options.calls for name in many})
    total = sum(each.values())
    print(f"{total:,.0f} instructions a call")
    for name, share in each.most_common(_SHOWN):
        if share > total / 200:
            print(f"{share:14,.0f} {100 * share / total:5.1f} %  {name}")
    return 0


def instructions(options: argparse.Namespace, calls: int, out: Path) -> Counter[str]:
    """Instructions by function of a whole process that makes ``calls`` calls."""
    again = ["--variant", options.variant, "--format", options.format, "--size", options.size,
             "--threads", str(options.threads), "--calls", str(calls)]  # fmt: skip
    command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", "-q",
               sys.executable, str(Path(__file__).resolve()), options.area, *again]  # fmt: skip
    # What differs from one start of Python to the next would drown a short call.
    same = os.environ | {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"}
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL, env=same)
    listed = subprocess.run(
        ["callgrind_annotate", "--threshold=100", str(out)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return parse(listed.stdout)


def parse(listed: str) -> Counter[str]:
    """Self cost by function of what ``callgrind_annotate`` prints."""
    found: Counter[str] = Counter()
    for line in listed.splitlines():
        match = _LINE.match(line)
        if match:
            found[match[2]] += int(match[1].replace(",", ""))
    return found


if __name__ == "__main__":
    sys.exit(main())
