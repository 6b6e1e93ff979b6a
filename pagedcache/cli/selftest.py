"""Run the library's checks against a slow NumPy reference, on this machine, without pytest."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Any

from .output import note, print_json, whole_number

HELP = "prove the library on this machine; the last line counts passed, failed, skipped"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda", "all"), default="cpu")
    parser.add_argument("--format", metavar="NAME", help="only checks of this storage format")
    parser.add_argument("-k", metavar="TEXT", default="", help="only checks whose name has TEXT")
    parser.add_argument("--seed", type=whole_number(0), default=0, help="of the random inputs")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")


def run(args: argparse.Namespace) -> int:
    """0 when nothing failed, 1 when something did, 2 when no check has the name or format."""
    from pagedcache.checks import Outcome, all_checks, judge
    from pagedcache.checks.devices import device_problem
    from pagedcache.formats import FORMATS

    if args.format is not None and args.format not in FORMATS:
        note(f"pagedcache selftest: no format {args.format!r}; there are {', '.join(FORMATS)}")
        return 2
    checks = [
        check
        for check in all_checks()
        if args.k in check.name and (args.format is None or args.format in check.formats)
    ]
    if not checks:
        asked = [f"-k {args.k!r}"] if args.k else []
        asked += [f"--format {args.format}"] if args.format is not None else []
        note(f"pagedcache selftest: no check matches {' '.join(asked)}")
        return 2

    report = _Report(args)
    for device in ("cpu", "cuda") if args.device == "all" else (args.device,):
        problem = device_problem(device)
        if problem is not None:
            missing_is = "skipped" if args.device == "all" and device != "cpu" else "failed"
            report.add(device, Outcome(f"device/{device}", missing_is, problem))
            continue
        for check in checks:
            report.add(device, judge(check, args.seed, device))
    report.close()
    return 1 if report.counts["failed"] else 0


class _Report:
    """Prints outcomes as they come, or keeps them for one JSON object."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}
        self.results: list[dict[str, Any]] = []

    def add(self, device: str, outcome: Any) -> None:
        self.counts[outcome.status] += 1
        repeat = self._command(device, outcome.name) if outcome.status == "failed" else None
        if self.args.json:
            row = {"name": outcome.name, "device": device, "status": outcome.status}
            row |= {"detail": outcome.detail, "repeat": repeat}
            self.results.append(row)
            return
        where = f"[{device}] " if self.args.device == "all" else ""
        detail = f": {outcome.detail}" if outcome.detail else ""
        print(f"{outcome.status.upper():<7} {where}{outcome.name}{detail}", flush=True)
        if repeat:
            print(f"        repeat with: {repeat}", flush=True)
            if outcome.trace:
                print(outcome.trace, file=sys.stderr, flush=True)

    def _command(self, device: str, name: str) -> str:
        parts = ["pagedcache", "selftest", "--device", device, "--seed", str(self.args.seed)]
        if not name.startswith("device/"):
            parts += ["-k", name]
        return shlex.join(parts)

    def close(self) -> None:
        if self.args.json:
            print_json({"seed": self.args.seed, **self.counts, "checks": self.results})
        else:
            print(", ".join(f"{count} {status}" for status, count in self.counts.items()))
