"""What imports take in a process of their own, compiled files being there.

Public names are loaded when they are first used, so the second row says what a user waits for.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from .rows import Options, Row, measure
from .timing import Timer

_CLOCK = "import time; began = time.perf_counter(); {0}; print(time.perf_counter() - began)"
_CHECK = "import sys, pagedcache; sys.exit('torch' in sys.modules)"


def rows(options: Options) -> Iterator[Row]:
    """``ns_per_item`` of one import; peer of the whole: NumPy alone, which is a part of it."""
    if subprocess.run([sys.executable, "-c", _CHECK], check=False).returncode:
        raise AssertionError("import pagedcache fails or brings torch with it: not timed")
    alone = {"ours": _timer("import pagedcache")}
    whole = {
        "ours": _timer("import pagedcache; pagedcache.PagedKVCache"),
        "numpy": _timer("import numpy"),
    }
    for variant, timers in (("import pagedcache", alone), ("first use of a cache", whole)):
        yield from measure("import", variant, None, 1, 1, timers, options.runs)


def _timer(statements: str) -> Timer:
    command = [sys.executable, "-c", _CLOCK.format(statements)]

    def measured() -> float:
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return float(done.stdout)

    return measured
