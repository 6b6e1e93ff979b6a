"""Measure the library: every figure next to a plain copy or to a peer, taken in the same run.

Contenders take turns and the median of at least 7 runs after a warm-up is printed. gbps_moved
counts bytes read plus bytes written; pct_of_copy is its share of what memcpy moves at the same
size; peer_ratio is the peer's time over ours (above 1: we are faster). Peers that are not
installed leave the columns empty. One thread, but for attend, which says how many; there, and
for attend on a GPU, pct_of_copy is the share of a plain read.

With --device cuda the device's own time counts, by CUDA events, the host keeping ahead of it; the
copy is one from device to device that moves as many bytes. calls gives the host's time.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable, Iterator

from ..output import free_memory, note, whole_number

HELP = "speed beside memcpy and beside peers, on the CPU or on a GPU"
AREAS = ("convert", "quantize", "store", "gather", "pool", "prefix", "attend")
GPU_AREAS = ("convert", "quantize", "store", "gather", "attend", "blocks", "tables", "calls")
_MIN_RUNS = 7
_GPU_TOKENS = 1 << 17  # 1 GiB of float32 K and V: far more than any cache between
_ARRAYS = 5  # arrays of the largest size that are alive at once


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("areas", nargs="*", metavar="AREA", help=f"of {' '.join(AREAS)}; on a GPU of "
        f"{' '.join(GPU_AREAS)} (default: all)")
    add("--device", default="cpu", metavar="NAME", help="cpu (default), cuda or cuda:N")
    add("-o", "--output", choices=("md", "csv", "json"), default="md")
    add("--runs", type=whole_number(_MIN_RUNS, 1000), default=_MIN_RUNS,
        help="interleaved runs after the warm-up (default and least: 7)")
    add("--sizes", default="4MiB,64MiB,256MiB", metavar="LIST",
        help="bytes of float32 for convert and quantize (default 4MiB,64MiB,256MiB)")
    add("--format", action="append", metavar="NAME",
        help="only this storage format (quantize, store, gather, attend, blocks); may be given "
        "again")
    add("--tokens", type=whole_number(1, 1 << 24), default=_GPU_TOKENS, metavar="N",
        help="tokens of one store or gather on a GPU, halved until they fit; no longer contexts "
        f"of attend (default {_GPU_TOKENS:,})")


def run(args: argparse.Namespace) -> int:
    """0; 1 when the device cannot be used; 2 for a device, area, size or format that does not
    exist, or that nothing is measured of."""
    from pagedcache.checks.devices import device_problem
    from pagedcache.errors import DeviceError, InvalidArgumentError
    from pagedcache.formats import FORMATS
    from pagedcache.placement import resolve_placement
    from pagedcache.sizes import parse_size

    from .rows import Options, Row, print_rows

    try:
        device = resolve_placement(args.device, 1).layer_device(0)
    except DeviceError as error:
        note(f"pagedcache bench: --device: {error}")
        return 2
    all_areas = AREAS if device == "cpu" else GPU_AREAS
    formats = tuple(args.format or FORMATS)
    unknown = [area for area in args.areas if area not in all_areas]
    unknown += [name for name in formats if name not in FORMATS]
    if unknown:
        note(f"pagedcache bench: no area or format {', '.join(unknown)}; areas on {device} are "
             f"{' '.join(all_areas)}, formats are {' '.join(FORMATS)}")
        return 2
    try:
        # Whole rows of 1024 values, as gguf wants them.
        sizes = tuple(parse_size(size) // 4096 * 4096 for size in args.sizes.split(","))
    except InvalidArgumentError as error:
        note(f"pagedcache bench: --sizes: {error}")
        return 2
    if not all(sizes):
        note("pagedcache bench: --sizes: the least size is 4KiB")
        return 2
    areas = args.areas or all_areas
    quantised = [name for name, row in FORMATS.items() if row.is_quantized]
    if "quantize" in args.areas and not set(formats) & set(quantised):
        note(f"pagedcache bench: quantize covers {' '.join(quantised)}, not {' '.join(formats)}")
        return 2
    if device == "cpu" and not _fits(areas, max(sizes)):
        return 2
    problem = device_problem(device)
    if problem is not None:
        note(f"pagedcache bench: {device} is {problem}")
        return 1
    options = Options(args.runs, sizes, formats, device, args.tokens)
    package = __name__ if device == "cpu" else f"{__name__}.gpu"

    def rows() -> Iterator[Row]:
        for area in areas:
            yield from importlib.import_module(f"{package}.{area}").rows(options)

    print_rows(rows(), args.output)
    return 0


def _fits(areas: Iterable[str], size: int) -> bool:
    """Whether the arrays of ``convert`` and ``quantize`` find room; says so where they do not.

    The system gives more than it has and ends the process later, so asking it is no answer.
    """
    from pagedcache.sizes import format_size

    needed, free = _ARRAYS * size, free_memory()
    if needed <= free or not {"convert", "quantize"} & set(areas):
        return True
    note(f"pagedcache bench: --sizes: {format_size(size)} need {format_size(needed)} of memory, "
         f"{format_size(free)} are free")
    return False
