"""Runs tests (or any Python program) on emulated CUDA: real PyCUDA, the stub driver, the kernels.

    python tests/cuda_emulation/run.py [OPTIONS] -- PYTEST-ARGUMENTS
    python tests/cuda_emulation/run.py [OPTIONS] --python -- -m pagedcache selftest --device cuda

Builds what is out of date first. The exit status is the program's, or 66 where a sanitizer reported
something that the program survived.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path

if __package__:  # imported by a test
    from cuda_emulation import build
else:
    import build

REPORTED = 66
#: A report with one of these is a fault; AddressSanitizer also notes memory it could not give.
FAULTS = ("ERROR: ", "runtime error: ", "WARNING: ThreadSanitizer")
ADDR_NO_RANDOMIZE = 0x0040000


def runtime(name: str) -> str:
    """Path of a library of the compiler's, such as ``libasan.so``."""
    command = [build.compiler(), f"-print-file-name={name}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def environment(
    folder: Path, sanitizer: str | None = None, order: str | None = None, asynchronous: int = 0
) -> dict[str, str]:
    """What a process needs to find the stub and the emulated kernels in ``folder``.

    ``sanitizer``: None, ``"address"`` or ``"thread"``. ``order`` of CTAs, warps and lanes:
    ``"fwd"``, ``"rev"`` or a seed. ``asynchronous``: streams work at once (0), as late as possible
    (1) or at random times (a seed above 1).
    """
    library = folder / build.LIBRARIES[sanitizer or "plain"]
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("LD_LIBRARY_PATH"))))
    changes = {
        "LD_LIBRARY_PATH": path,
        "PAGEDCACHE_CUDA_EMULATION": str(folder),
        "PAGEDCACHE_CUDA_LIBRARY": str(library),
        "PAGEDCACHE_CUDA_SANITIZER": sanitizer or "",
        "PC_STUB_ASYNC": str(asynchronous),
        "PC_EMU_ORDER": order or os.environ.get("PC_EMU_ORDER", "fwd"),
    }
    # Python's extension modules throw: the C++ library must be there when a sanitizer looks for it.
    if sanitizer == "address":
        preload = ("libasan.so", "libubsan.so", "libstdc++.so.6")
        changes["ASAN_OPTIONS"] = "detect_leaks=0:allocator_may_return_null=1"
        changes["UBSAN_OPTIONS"] = "print_stacktrace=1:halt_on_error=1"
    elif sanitizer == "thread":
        preload = ("libtsan.so", "libstdc++.so.6")
        changes["TSAN_OPTIONS"] = f"exitcode={REPORTED}:report_thread_leaks=0:history_size=4"
    else:
        return changes
    changes["LD_PRELOAD"] = " ".join(map(runtime, preload))
    return changes


def fix_addresses() -> None:
    """Programs started from now on get no random addresses, which ThreadSanitizer may not bear."""
    ctypes.CDLL(None).personality(ADDR_NO_RANDOMIZE)  # where this is forbidden, we try without


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sanitize", choices=("address", "thread"))
    parser.add_argument("--order", metavar="fwd|rev|SEED", help="of CTAs, warps and lanes")
    parser.add_argument(
        "--async", dest="asynchronous", nargs="?", type=int, const=1, default=0, metavar="SEED",
        help="streams work only when waited for; with a seed above 1, at random times",
    )  # fmt: skip
    parser.add_argument("--folder", type=Path, default=build.FOLDER, help="of the built libraries")
    parser.add_argument("--python", action="store_true", help="arguments of Python, not of pytest")
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT")
    chosen = parser.parse_args()
    folder = chosen.folder.resolve()
    build.Builder(folder).build(("stub", chosen.sanitize or "plain"))
    changes = environment(folder, chosen.sanitize, chosen.order, chosen.asynchronous)
    command = [sys.executable, *([] if chosen.python else ["-m", "pytest"]), *chosen.arguments]
    if chosen.sanitize is None:
        os.environ.update(changes)
        os.execv(sys.executable, command)
    with tempfile.TemporaryDirectory() as reports:
        return run_watched(command, changes, Path(reports))


def run_watched(command: list[str], changes: dict[str, str], reports: Path) -> int:
    """Runs under a sanitizer and shows its reports, which pytest would otherwise keep."""
    for name in ("ASAN_OPTIONS", "TSAN_OPTIONS", "UBSAN_OPTIONS"):
        if name in changes:
            changes[name] += f":log_path={reports / 'report'}"
    if "TSAN_OPTIONS" in changes:
        fix_addresses()
    code = subprocess.run(command, env={**os.environ, **changes}).returncode
    for path in sorted(reports.iterdir()):
        report = path.read_text(errors="replace")
        print(report[:20_000], file=sys.stderr)
        if any(mark in report for mark in FAULTS):
            code = code or REPORTED
    return code


if __name__ == "__main__":
    sys.exit(main())
