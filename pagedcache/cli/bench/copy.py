"""What this machine's memory does: the copies and the read that other areas are held against."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pagedcache._native import bandwidth

from .copies import buffers
from .rows import Options, Row, label, measure
from .timing import Timer, timed


def rows(options: Options) -> Iterator[Row]:
    """``memcpy``, a non-temporal copy and a plain read of every size, with every count of threads.

    ``pct_of_copy`` is the share of ``memcpy`` on as many threads.
    """
    for size in options.sizes:
        source, target = buffers(size)
        for threads in options.threads:
            copy = timed(partial(bandwidth.copy, source, target, threads))
            stream = timed(partial(bandwidth.stream, source, target, threads))
            read = timed(partial(bandwidth.read, source, threads))
            contenders: list[tuple[str, Timer, int]] = [("memcpy", copy, 2 * size)]
            if bandwidth.STREAMS:
                contenders.append(("non-temporal copy", stream, 2 * size))
            contenders.append(("read", read, size))
            for variant, timer, moved in contenders:
                timers = {"ours": timer}
                if timer is not copy:
                    timers["copy"] = copy
                yield from measure(
                    "copy", label(variant, threads), None, size, size, timers, options.runs, moved
                )
        if not (source == target).all():
            raise AssertionError("a copy is wrong")
