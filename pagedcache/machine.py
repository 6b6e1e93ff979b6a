"""What of this machine work on the CPU uses: threads, and an instruction set.

The environment is read when either is first asked for, never by importing the package:
``PAGEDCACHE_NUM_THREADS`` (1…1024), and ``PAGEDCACHE_ISA``, one of the names that
``pagedcache info`` shows; by default the best that the processor has.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from pagedcache._native.machine import MOST_THREADS, instruction_sets, use, when_needed
from pagedcache.arguments import as_count
from pagedcache.errors import InvalidArgumentError, shown

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/{}"
_QUOTA = "/sys/fs/cgroup/cpu.max"

_num_threads: int | None = None
_isa: int | None = None


def set_num_threads(n: int) -> None:
    """Let later calls on the CPU use at most ``n`` threads (1…1024), theirs included.

    ``attend``, ``store``, ``gather``, and conversions of large arrays share their work; small ones
    stay on the caller's thread. Applies to the whole process. Results do not depend on it, to the
    last bit. Raises ``InvalidArgumentError``.
    """
    global _num_threads
    _num_threads = as_count(n, "n", least=1, most=MOST_THREADS)
    when_needed(_choose)


def get_num_threads() -> int:
    """Threads that a call on the CPU uses at most.

    What ``set_num_threads`` said, else ``PAGEDCACHE_NUM_THREADS``, else the physical cores that
    this process may run on, no more than a container's share of processor time is worth. Raises
    ``InvalidArgumentError`` when the variable holds anything but 1…1024.
    """
    global _num_threads
    if _num_threads is None:
        text = os.environ.get("PAGEDCACHE_NUM_THREADS")
        _num_threads = min(usable_cores(), MOST_THREADS) if text is None else _from_text(text)
    return _num_threads


def _from_text(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MOST_THREADS):
        raise InvalidArgumentError(
            f"PAGEDCACHE_NUM_THREADS: expected 1…{MOST_THREADS}, got {shown(text)}"
        )
    return int(text)


def usable_cores() -> int:
    """Physical cores that this process may run on, no more than its share of time is worth."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = os.cpu_count() or 1
    cores = _physical(affinity(0)) if affinity else count
    return max(1, min(cores, _quota() or cores))


def _physical(processors: Iterable[int]) -> int:
    """Cores behind logical processors, where the system tells; else their number."""
    cores = set()
    for processor in processors:
        try:
            parts = [
                open(_TOPOLOGY.format(processor, name), encoding="ascii").read().strip()
                for name in ("physical_package_id", "core_id")
            ]
        except OSError:
            parts = [str(processor)]
        cores.add(tuple(parts))
    return len(cores)


def _quota() -> int | None:
    """Processors' worth of time that a container may use, rounded up; None without a limit."""
    try:
        quota, period = open(_QUOTA, encoding="ascii").read().split()
        return None if quota == "max" else -(-int(quota) // int(period))
    except (OSError, ValueError):
        return None


def isa_index() -> int:
    """Which of ``instruction_sets()`` is used; ``InvalidArgumentError`` when
    ``PAGEDCACHE_ISA`` asks for one that is not there."""
    global _isa
    if _isa is None:
        name = os.environ.get("PAGEDCACHE_ISA")
        _isa = _index_of(name) if name else instruction_sets()[1] - 1
    return _isa


def isa_name() -> str:
    """Name of the instruction set that is used."""
    return instruction_sets()[0][isa_index()]


def usable_isas() -> list[str]:
    """Names of the instruction sets that this machine has kernels for, the best one last."""
    names, usable = instruction_sets()
    return names[:usable]


def use_isa(name: str | None) -> None:
    """Use another instruction set from now on (None: what the environment or the processor says).
    For tests and benchmarks; not to be called while another thread works."""
    global _isa
    _isa = None if name is None else _index_of(name)
    when_needed(_choose)


def _index_of(name: str) -> int:
    usable = usable_isas()
    if name not in usable:
        raise InvalidArgumentError(
            f"PAGEDCACHE_ISA: this machine has {', '.join(usable)}, not {shown(name)}"
        )
    return usable.index(name)


def _choose() -> None:
    """What compiled code asks for before it first converts anything, and after a change."""
    use(isa_index(), get_num_threads())


when_needed(_choose)
