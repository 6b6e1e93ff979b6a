"""What was asked for on the command line, checked before anything is measured."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from pagedcache import machine
from pagedcache._native.machine import MOST_THREADS
from pagedcache.errors import DeviceError, InvalidArgumentError
from pagedcache.formats import FORMATS
from pagedcache.placement import resolve_placement
from pagedcache.sizes import format_size, parse_size

from ..marked import between
from ..output import free_memory, note, whole_number
from . import areas_of
from .rows import Options

_ARRAYS = 5  # arrays of the largest size that are alive at once


def options_of(args: argparse.Namespace) -> Options | None:
    """What is asked for, or None after a note that says why it cannot be."""
    try:
        device = resolve_placement(args.device, 1).layer_device(0)
    except DeviceError as error:
        note(f"pagedcache bench: --device: {error}")
        return None
    all_areas = areas_of(device)
    formats = tuple(args.format or FORMATS)
    unknown = [area for area in args.areas if area not in all_areas]
    unknown += [name for name in formats if name not in FORMATS]
    if unknown:
        note(f"pagedcache bench: no area or format {', '.join(unknown)}; areas on {device} are "
             f"{' '.join(all_areas)}, formats are {' '.join(FORMATS)}")
        return None
    try:
        # Whole rows of 1024 values, as gguf wants them.
        sizes = tuple(parse_size(size) // 4096 * 4096 for size in args.sizes.split(","))
    except InvalidArgumentError as error:
        note(f"pagedcache bench: --sizes: {error}")
        return None
    if not all(sizes):
        note("pagedcache bench: --sizes: the least size is 4KiB")
        return None
    threads = _threads(args.threads)
    if threads is None:
        return None
    quantised = [name for name, row in FORMATS.items() if row.is_quantized]
    if "quantize" in args.areas and not set(formats) & set(quantised):
        note(f"pagedcache bench: quantize covers {' '.join(quantised)}, not {' '.join(formats)}")
        return None
    if device == "cpu" and not _fits(args.areas or all_areas, max(sizes)):
        return None
    return Options(args.runs, sizes, formats, device, args.tokens, threads)


def _threads(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return (1, 2)[: machine.usable_cores()]
    try:
        counts = tuple(map(whole_number(1, MOST_THREADS), text.split(",")))
    except argparse.ArgumentTypeError as error:
        note(f"pagedcache bench: --threads: {error}")
        return None
    return tuple(dict.fromkeys(counts))


def can_write(args: argparse.Namespace) -> bool:
    """Whether a report has a place to go; said before minutes are spent on measuring."""
    problem = None
    if args.sources is not None and args.report is None and args.write is None:
        problem = "--from: give --report or --write too"
    elif args.sources is not None and args.areas:
        problem = f"--from takes what the files hold, not {' '.join(args.areas)}"
    elif args.report is not None and args.report.suffix != ".md":
        problem = f"--report: {args.report} does not end in .md"
    try:
        if problem is None and args.report is not None:
            args.report.open("a", encoding="utf-8").close()
        if problem is None and args.write is not None and between(args.write, "bench") is None:
            problem = f"--write: {args.write} has no <!-- bench --> … <!-- /bench --> markers"
    except (OSError, UnicodeDecodeError) as error:
        problem = f"{getattr(error, 'filename', None) or args.write}: {error}"
    if problem is not None:
        note(f"pagedcache bench: {problem}")
    return problem is None


def _fits(areas: Iterable[str], size: int) -> bool:
    """Whether the arrays of ``copy``, ``convert`` and ``quantize`` find room; if not, says so.

    The system gives more than it has and ends the process later, so asking it is no answer.
    """
    needed, free = _ARRAYS * size, free_memory()
    if needed <= free or not {"copy", "convert", "quantize"} & set(areas):
        return True
    note(f"pagedcache bench: --sizes: {format_size(size)} need {format_size(needed)} of memory, "
         f"{format_size(free)} are free")
    return False
