"""Running threads to the end, whatever happens in them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from cachekit import by_profile

THREADS = 8
SECONDS = by_profile(3.0, 30.0, 120.0)


def run_threads(workers: list[Callable[[], None]]) -> None:
    """Run all to the end; the first error of any of them is raised here."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=guarded, args=(w,), daemon=True) for w in workers]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for t in threads:
            t.start()
        for t in threads:
            t.join(timeout=SECONDS + 240)
        assert not any(t.is_alive() for t in threads), "deadlock"
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]
