"""The GIL, collections in other threads, and use after fork()."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from cachekit import empty, make_cache, rows
from devicekit import cpu_memory
from threadkit import SECONDS, run_threads

import pagedcache as pc
from pagedcache.errors import ForkedProcessError, OutOfBlocksError


@cpu_memory("the time its copies take")
def test_the_gil_is_released_while_bytes_move():
    # SPEC F34
    cache = make_cache(2_048, B=16, heads=8, dim=128, fmt="float32")
    n = 4_096
    seq = cache.open(range(n))
    data = np.ones((n, 8, 128), np.float32)
    seq.append(0, data, data)
    seq.commit(n)
    out = (np.empty_like(data), np.empty_like(data))
    progress = 0
    stop = threading.Event()

    def counter() -> None:
        nonlocal progress
        while not stop.is_set():
            progress += 1
            time.sleep(0)

    thread = threading.Thread(target=counter, daemon=True)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1_000)  # nobody is made to give the GIL up
    thread.start()
    try:
        time.sleep(0.05)
        before = progress
        for _ in range(20):
            seq.gather(0, 0, n, out=out)
        assert progress > before
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        thread.join(timeout=60)


def test_dropping_handles_in_other_threads_never_deadlocks():
    # SPEC F29 F34
    cache = make_cache(64, B=2)
    end = time.monotonic() + SECONDS / 5

    def dropper(seed: int) -> Callable[[], None]:
        def work() -> None:
            rng = random.Random(seed)
            while time.monotonic() < end:
                try:
                    seq = cache.open([rng.randint(0, 3) for _ in range(5)])
                except OutOfBlocksError:
                    continue
                seq.append(0, *rows(cache.spec, 0, range(5 - seq.num_cached_tokens)))
                views = seq.views(0)
                loop = [seq, views]
                loop.append(loop)  # only the garbage collector can free these
                del seq, views, loop

        return work

    run_threads([dropper(i) for i in range(4)])
    import gc

    gc.collect()
    cache.check()
    empty(cache)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork() on this system")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_use_in_a_forked_child_is_refused():
    # SPEC F34
    cache = make_cache(8, B=4)
    pool = pc.BlockPool(4, 4)
    seq = cache.open(range(6))
    seq.append(0, *rows(cache.spec, 0, range(1, 7)))
    seq.commit(6)
    view = seq.views(0)[0]
    k = view.k
    seq_id = cache.allocate_sequence(2)
    calls = [
        lambda: cache.open(range(3)),
        lambda: cache.probe(range(3)),
        lambda: cache.stats(),
        lambda: cache.check(),
        lambda: cache.defragment(),
        lambda: cache.allocate_sequence(1),
        lambda: cache.free_sequence(seq_id),
        lambda: cache.block_tables([seq]),
        lambda: cache.prepare([seq], [1]),
        lambda: seq.append_token(1),
        lambda: seq.commit(0),
        lambda: seq.gather(0),
        lambda: seq.views(0),
        lambda: seq.block_table,
        lambda: seq.fork(),
        lambda: seq.truncate(0),
        lambda: seq.free(),
        lambda: pool.allocate(1),
        lambda: pool.allocate_one(),
        lambda: pool.check(),
    ]
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = b"ok"
        try:
            for i, call in enumerate(calls):
                try:
                    call()
                    status = b"call %d was accepted" % i
                    break
                except ForkedProcessError:
                    pass
            own = make_cache(4, B=4, device="cpu")  # a new cache in the child works
            with own.open(range(5)) as mine:
                mine.append(0, *rows(own.spec, 0, range(1, 6)))
                mine.commit(5)
            own.check()
            repr(cache), repr(seq), repr(pool)
            cache.close()
            del view, k
            import gc

            gc.collect()
        except BaseException as e:
            status = repr(e).encode()[:500]
        os.write(w, status)
        os._exit(0)
    os.close(w)
    got = b""
    while chunk := os.read(r, 1000):
        got += chunk
    os.close(r)
    _, code = os.waitpid(pid, 0)
    assert got == b"ok" and code == 0, got.decode()
    # the parent is as it was
    cache.check()
    assert seq.seq_len == 6 and cache.stats().pinned == 1
    del view, k
    cache.free_sequence(seq_id)
    seq.free()
    empty(cache)
