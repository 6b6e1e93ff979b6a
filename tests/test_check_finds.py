"""check() must find what it says it checks: one field is spoiled at a time."""

from __future__ import annotations

import ctypes
import gc

import numpy as np
import pytest

from pagedcache.bookkeeping import Ledger, sabotage
from pagedcache.errors import CorruptionError


def tokens(n: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + n, dtype=np.uint32)


def keep_for_ever(*objects: object) -> None:
    """A spoiled pool must never be taken apart, not even at exit: that would follow bad links."""
    for kept in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def lively_pool() -> tuple[Ledger, list]:
    """Used cached blocks 0 and 1 and an open tail 2, idle 3 and 4, blank 5, 6 and 7."""
    ledger = Ledger(12, 4, num_open=5)
    seq = ledger.open(tokens(10))
    ledger.commit(seq, 10)
    ledger.prepare([seq], [1])
    gone = ledger.open(tokens(8, 100))
    ledger.commit(gone, 8)
    blank = [ledger.open(tokens(4, 200 + 10 * i)) for i in range(3)]
    for other in (gone, *blank):
        ledger.free(other)
    ledger.check()
    assert ledger.pool.stats()["blocks_idle"] == 2
    return ledger, [seq]


@pytest.mark.parametrize("kind", sabotage.KINDS)
def test_check_finds_a_spoiled_block(kind: str) -> None:
    # SPEC F20
    ledger, held = lively_pool()
    sabotage.spoil(ledger.pool, kind, 2 if kind == "open slot of another" else 0)
    with pytest.raises(CorruptionError, match="corruption") as caught:
        ledger.check()
    assert caught.value.detail
    if kind in ("refs up", "refs down", "negative pin", "other tokens", "bucket", "children"):
        assert caught.value.block_id == 0
    keep_for_ever(ledger, held)


@pytest.mark.parametrize("kind", ["table", "length"])
def test_check_finds_a_spoiled_sequence(kind: str) -> None:
    # SPEC F20
    ledger, held = lively_pool()
    sabotage.spoil_sequence(held[0], kind)
    with pytest.raises(CorruptionError):
        ledger.check()
    keep_for_ever(ledger, held)


def test_check_is_content_with_the_same_pool_unspoiled() -> None:
    # SPEC F20
    ledger, held = lively_pool()
    for _ in range(2):
        ledger.check()
    ledger.free(held.pop())
    gc.collect()
    ledger.check()
    assert ledger.pool.num_used_blocks == 0
