"""Replay a request trace (Mooncake JSONL) through the cache, one request at a time.

Token j of the block with hash id h is h*512 + j. Every request is opened, written (with --store),
committed and freed. With --store, every prefix hit is read back and compared byte for byte with
a fresh store of the same values; a differing byte makes the exit code 1.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from .output import free_memory, note, print_json, print_pairs, whole_number

HELP = "replay a request trace: prefix hits, evictions, time; --store checks every byte"
_MAX_BLOCKS = 2**31 - 1
_STORE_ONLY = {"format": "float16", "layers": 2, "kv_heads": 2, "head_dim": 64}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, count = parser.add_argument, whole_number(1, _MAX_BLOCKS)
    add("trace", type=Path, metavar="TRACE", help="JSONL: timestamp, input_length, … , hash_ids")
    add("--num-blocks", type=_num_blocks, default="unlimited", metavar="N|unlimited",
        help="blocks of the pool (default: as many as the whole trace could need)")
    add("--block-size", type=count, default=512, help="tokens per block (default 512)")
    add("--format", help="storage format with --store (default float16)")
    add("--store", action="store_true", help="store K and V made from the tokens; compare hits")
    add("--layers", type=count, help="with --store (default 2)")
    add("--kv-heads", type=count, help="with --store (default 2)")
    add("--head-dim", type=count, help="with --store (default 64)")
    add("--partial-block-reuse", type=whole_number(0, _MAX_BLOCKS), default=0, metavar="N",
        help="least tokens of a part-matched block to reuse (default 0: whole blocks only)")
    add("--limit", type=count, metavar="N", help="only the first N requests")
    add("--plot", type=Path, metavar="FILE", help="write a picture of the hit rate (matplotlib)")
    add("--json", action="store_true", help="one JSON object instead of lines")


def _num_blocks(text: str) -> int | str:
    if text == "unlimited":
        return text
    number: int = whole_number(1, _MAX_BLOCKS)(text)
    return number


def run(args: argparse.Namespace) -> int:
    """0, or 1 when stored bytes differ, or 2 when the trace or an argument cannot be used."""
    from .replay_plot import load_pyplot, plot
    from .replay_trace import TraceError, read_trace

    _fill_in(args)
    try:
        pyplot = load_pyplot() if args.plot else None
    except ImportError as error:
        note(f"pagedcache replay: {error}")
        return 2
    try:
        requests = read_trace(args.trace, args.limit)
        result = _replay(args, requests)
    except (TraceError, ValueError, MemoryError) as error:
        # The library's own refusals (unknown format, no memory) are ValueError or MemoryError.
        note(f"pagedcache replay: {error}")
        return 2
    figures = result.to_dict()
    if args.json:
        print_json(figures)
    else:
        print_pairs(_lines(figures))
    if pyplot is not None:
        title = f"{args.trace.name}, {figures['num_blocks']:,} blocks of {args.block_size} tokens"
        try:
            plot(pyplot, result, title, args.plot)
        except (OSError, ValueError) as error:
            note(f"pagedcache replay: --plot: {error}")
            return 2
    return 1 if figures.get("differing_bytes") else 0


def _fill_in(args: argparse.Namespace) -> None:
    """Defaults of the options that only ``--store`` reads, and a note where they do nothing."""
    given = [name for name in _STORE_ONLY if getattr(args, name) is not None]
    if given and not args.store:
        names = ", ".join("--" + name.replace("_", "-") for name in given)
        note(f"pagedcache replay: without --store no bytes are kept: {names} changes nothing")
    for name, value in _STORE_ONLY.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def _replay(args: argparse.Namespace, requests: list[Any]) -> Any:
    from tqdm import tqdm

    import pagedcache

    from .replay_run import Replay, Store, replay

    num_blocks = args.num_blocks
    if num_blocks == "unlimited":
        needed = sum(-(-request.input_length // args.block_size) for request in requests)
        num_blocks = max(1, needed)
    spec = pagedcache.CacheSpec(
        num_layers=args.layers, num_kv_heads=args.kv_heads, head_dim=args.head_dim,
        block_size=args.block_size, kv_format=args.format,
    )
    if args.store:
        _check_memory(spec.storage_nbytes(num_blocks), num_blocks)
    # disable=None: no bar where stderr is no terminal.
    bar = tqdm(requests, desc="replay", unit="req", file=sys.stderr, disable=None, leave=False)
    result = Replay(num_blocks, args.block_size, args.format if args.store else None)
    store = Store(spec) if args.store else None
    cache = pagedcache.PagedKVCache(
        spec, num_blocks, storage="own" if args.store else None,
        partial_block_reuse=args.partial_block_reuse,
    )
    with cache, bar:
        replay(bar, cache, store, result)
    if store is not None:
        store.close()
    return result


def _check_memory(nbytes: int, num_blocks: int) -> None:
    """Say what the storage takes, and refuse what this machine cannot hold."""
    from pagedcache.sizes import format_size

    note(f"storage of {num_blocks:,} blocks: {format_size(nbytes)}, taken as it is written")
    free = free_memory()
    if nbytes > free // 10 * 9:
        raise MemoryError(
            f"{format_size(nbytes)} of storage do not fit the {format_size(free)} of memory that "
            "are free; give a smaller --num-blocks"
        )


def _lines(figures: dict[str, Any]) -> list[tuple[str, object]]:
    def number(name: str) -> str:
        return f"{figures[name]:,}"

    def microseconds(name: str) -> str:
        return f"{figures[name] * 1e6:,.1f} µs"

    mean, median = (microseconds(f"{kind}_request_seconds") for kind in ("mean", "median"))
    lines: list[tuple[str, object]] = [
        ("requests", number("requests")),
        ("input tokens", number("input_tokens")),
        ("hit tokens", f"{number('hit_tokens')} ({100 * figures['hit_rate']:.2f} %)"),
        ("too large", number("too_large")),
        ("pool", f"{number('num_blocks')} blocks of {number('block_size')} tokens"),
        ("evicted blocks", number("evicted_blocks")),
        ("peak blocks", f"{number('peak_blocks')} holding tokens, "
                        f"{number('peak_used_blocks')} in use at once"),
        ("time", f"{figures['seconds']:.3f} s, of which {figures['cache_seconds']:.3f} s cache"),
        ("per request", f"{mean} mean, {median} median"),
        ("requests/s", f"{figures['requests_per_second']:,.0f}"),
    ]
    if "differing_bytes" in figures:
        compared = f"{number('differing_bytes')} of {number('compared_bytes')} read back from hits"
        lines += [("format", figures["format"]), ("differing bytes", compared)]
    return lines
