"""The command line: ``pagedcache info | selftest | bench | replay``.

Data goes to stdout, notes to stderr. Each subcommand is a module with ``HELP``,
``add_arguments(parser)`` and ``run(args) -> exit code``; what it needs is imported when it runs,
so that ``--help`` stays quick.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from pagedcache._version import __version__

from . import bench, info, replay, selftest

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
_COMMANDS: dict[str, ModuleType] = {
    "info": info,
    "selftest": selftest,
    "bench": bench,
    "replay": replay,
}


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    parser = argparse.ArgumentParser(
        prog="pagedcache", description="A paged KV cache for LLM inference: check it, measure it."
    )
    parser.add_argument("--version", action="version", version=f"pagedcache {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in _COMMANDS.items():
        command = commands.add_parser(name, help=module.HELP, description=module.__doc__)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns 0 (fine), 1 (something failed) or 2 (cannot be used so)."""
    try:
        args = build_parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed its message
        return stop.code if isinstance(stop.code, int) else EXIT_USAGE
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader went away (| head); keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
