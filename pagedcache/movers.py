"""What the ledger calls to move bytes, and on which queue they are moved.

The ledger knows no streams: an operation that may copy blocks runs inside :meth:`Movers.run`,
which keeps the queue for this thread until the ledger has called back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Movers(threading.local):
    """Forwards to the storage until the cache is closed.

    Handles keep the ledger alive; through this object they do not keep the storage alive too.
    """

    queue: Any = None

    def __init__(self, held: list[Any]) -> None:
        self._held = held  # [storage], emptied by close(): shared by the threads

    def run(self, queue: Any, call: Callable[..., Any], *arguments: Any) -> Any:
        """``call(*arguments)``, block copies that it makes going to ``queue``."""
        if queue is None:
            return call(*arguments)
        before, self.queue = self.queue, queue
        try:
            return call(*arguments)
        finally:
            self.queue = before

    def copy(self, src: Any, dst: Any, rows: Any) -> None:
        """The first ``rows[i]`` token rows of block ``src[i]`` to ``dst[i]``, every layer."""
        for storage in self._held:
            storage.copy_blocks(src, dst, rows, self.queue)

    def move(self, moves: Any) -> None:
        """Whole blocks, (src, dst) in order, every layer."""
        for storage in self._held:
            storage.move_blocks(moves, self.queue)

    def forget(self) -> None:
        """The cache is closed: nothing moves any more."""
        self._held.clear()
