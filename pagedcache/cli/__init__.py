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
from .output import note

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
    _open_streams()
    name = "pagedcache"
    args = None
    try:
        args = build_parser().parse_args(argv)
        name = f"pagedcache {args.command}"
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except SystemExit as stop:  # argparse has printed its message
        return _flushed(stop.code if isinstance(stop.code, int) else EXIT_USAGE)
    except BrokenPipeError:  # the reader went away (| head): it has seen what it wanted
        _discard_output()
        return EXIT_OK if args is not None and args.run is info.run else EXIT_FAILED
    except OSError as error:  # no room, or the device is gone
        _discard_output()
        note(f"{name}: cannot write the output: {error.strerror or error}")
        return EXIT_FAILED
    except MemoryError as error:
        text = " ".join(str(error).split()) or "this needs more than there is"
        note(f"{name}: not enough memory: {text}")
        return EXIT_USAGE
    except KeyboardInterrupt:
        note("interrupted")
        return 130


def _open_streams() -> None:
    """Give closed streams (``>&-``) a place to go; no character may make printing fail."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _flushed(code: int) -> int:
    try:
        sys.stdout.flush()
    except OSError as error:
        _discard_output()
        if not isinstance(error, BrokenPipeError):
            note(f"pagedcache: cannot write the output: {error.strerror or error}")
        return EXIT_FAILED
    return code


def _discard_output() -> None:
    """Keep the interpreter from complaining at exit about what stdout still holds."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        pass  # stdout is no file
