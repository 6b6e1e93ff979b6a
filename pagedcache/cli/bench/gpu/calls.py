"""What a call costs, however little it moves: until it is queued, and until it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from pagedcache.checks.devices import upload

from ..rows import Options, Row, measure
from ..store import make_cache
from ..timing import Timer, staged
from .machine import Machine

_CALLS = 50  # queued in a row, less than what drivers hold


def rows(options: Options) -> Iterator[Row]:
    """One token stored and gathered, on the host's clock; peer: the least that can be queued, a
    copy of 256 bytes."""
    name = "bfloat16" if "bfloat16" in options.formats else options.formats[0]
    with Machine(options) as machine, make_cache(name, "HND", 1, machine.name) as cache:
        seq = cache.open([1])
        slots = seq.prepare(1)
        k, v = machine.rows(1, np.dtype(np.float32))
        raw = upload(np.asarray(slots), machine.name)
        out = machine.empty(k.shape, k.dtype), machine.empty(v.shape, v.dtype)
        small = machine.empty((512,), np.uint8)
        device = machine.device

        def copy() -> None:
            device.call("pc_cuda_copy", small.address + 256, small.address, 256, None)

        calls: dict[str, Callable[[], object]] = {
            "store 1 token": lambda: cache.store(0, k, v, slots),
            "store, device slots": lambda: cache.store(0, k, v, raw),
            "gather 1 token": lambda: seq.gather(0, 0, 1, out=out),
        }
        for what, call in calls.items():
            call()
            for until, waits in (("queued", False), ("done", True)):
                timers = {
                    "ours": _host_timer(machine, call, waits),
                    "copy of 256 B": _host_timer(machine, copy, waits),
                }
                yield from measure(
                    "calls", f"{what}, {until}", name, 1, 1, timers, options.runs
                )


def _host_timer(machine: Machine, call: Callable[[], object], waits: bool) -> Timer:
    """Seconds of the host for one call, with or without waiting for the device."""
    synchronize = machine.device.synchronize

    def work() -> None:
        for _ in range(_CALLS):
            call()
            if waits:
                synchronize()

    timer = staged(synchronize, work, synchronize)
    return lambda: timer() / _CALLS
