"""A finalizer may run anywhere, also while its own thread moves bytes for another sequence."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from pagedcache.bookkeeping import Ledger
from pagedcache.errors import ReentrantCallError


def tokens(n: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + n, dtype=np.uint32)


class Finalizers:
    """Runs callables in the middle of a copy, as a garbage collection would."""

    def __init__(self) -> None:
        self.todo: list = []

    def __call__(self, src: np.ndarray, dst: np.ndarray, rows: np.ndarray) -> None:
        while self.todo:
            self.todo.pop()()


def run_with_time_limit(work: object) -> None:
    """A deadlock must fail the test, not hang the run."""
    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            work()  # type: ignore[operator]
        except BaseException as error:  # re-raised below, in the test's own thread
            failures.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "the call waits for itself"
    if failures:
        raise failures[0]


@pytest.mark.parametrize("keep_handle", [True, False])
def test_free_and_release_work_inside_a_copy(keep_handle: bool) -> None:
    # SPEC F34: a collection inside a call must not deadlock
    def work() -> None:
        mover = Finalizers()
        ledger = Ledger(8, 4, mover=mover)
        other = [ledger.open(tokens(8, 100))]
        ledger.commit(other[0], 8)
        pin = ledger.pin_range(other[0], 0, 8)
        seq = ledger.open(tokens(6))
        ledger.commit(seq, 6)
        child = ledger.fork(seq)

        def finalize() -> None:
            ledger.free(other[0])
            pin.release()
            if not keep_handle:
                other.clear()

        mover.todo.append(finalize)
        ledger.prepare([child], [1])          # copies the shared block: the finalizer runs
        assert not mover.todo
        assert ledger.stats()["cow_copies"] == 1
        ledger.check()
        assert ledger.pool.num_used_blocks == 3          # what seq and child hold
        assert ledger.probe(tokens(9, 100)) == 8         # freed, and still matchable
        if keep_handle:
            assert other[0].freed

    run_with_time_limit(work)


def test_other_calls_inside_a_copy_are_refused() -> None:
    # SPEC section 7: a typed error instead of a call that waits for itself
    def work() -> None:
        seen: list[BaseException] = []
        mover = Finalizers()
        ledger = Ledger(8, 4, mover=mover)
        seq = ledger.open(tokens(6))
        ledger.commit(seq, 6)
        child = ledger.fork(seq)

        def finalize() -> None:
            for call in (lambda: ledger.open(tokens(3)), lambda: seq.seq_len, ledger.check,
                         ledger.pool.allocate_one, lambda: ledger.truncate(seq, 0)):
                with pytest.raises(ReentrantCallError) as caught:
                    call()
                seen.append(caught.value)

        mover.todo.append(finalize)
        ledger.prepare([child], [1])
        assert len(seen) == 5
        ledger.check()
        assert seq.seq_len == 6
        assert ledger.pool.num_used_blocks == 3

    run_with_time_limit(work)


def test_another_thread_waits_for_the_copy() -> None:
    # SPEC F34: the gate holds others back, so nobody sees a table whose bytes are not there yet
    order: list[str] = []
    inside, go_on = threading.Event(), threading.Event()

    def mover(src: np.ndarray, dst: np.ndarray, rows: np.ndarray) -> None:
        inside.set()
        go_on.wait(30)
        order.append("copied")

    ledger = Ledger(8, 4, mover=mover)
    seq = ledger.open(tokens(6))
    ledger.commit(seq, 6)
    child = ledger.fork(seq)
    writer = threading.Thread(target=lambda: ledger.prepare([child], [1]))
    writer.start()
    assert inside.wait(30)
    tables: list[list[int]] = []

    def read() -> None:
        tables.append(child.block_table().tolist())
        order.append("read")

    reader = threading.Thread(target=read)
    reader.start()
    go_on.set()
    writer.join(30)
    reader.join(30)
    assert order == ["copied", "read"]
    assert tables[0] == child.block_table().tolist() == [0, 2]
    ledger.check()
