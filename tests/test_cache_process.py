"""A cache belongs to the process that made it (SPEC 7, F34)."""

from __future__ import annotations

import os
import pickle
import threading

import numpy as np
import pytest
from cachekit import assert_holds, fill, make_cache, read, rows, whole

import pagedcache as pc


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no os.fork on this system")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_use_from_a_forked_process():
    # SPEC 7: refused by name; close() works; the parent goes on as if nothing had happened
    with make_cache(8, B=4) as cache, cache.open(range(6)) as seq:
        fill(cache, seq, range(6))
        view = seq.views(0)[0]
        k, v = rows(cache.spec, 0, [7])
        calls = {
            "open": lambda: cache.open([1]), "append": lambda: seq.append(0, k, v),
            "seq_len": lambda: seq.seq_len, "gather": lambda: seq.gather(0),
            "views": lambda: seq.views(0), "fork": lambda: seq.fork(), "free": lambda: seq.free(),
            "stats": lambda: cache.stats(), "prepare": lambda: cache.prepare([seq], [1]),
            "store": lambda: cache.store(0, k, v, [-1]), "check": lambda: cache.check(),
            "allocate_sequence": lambda: cache.allocate_sequence(1),
            "defragment": lambda: cache.defragment(),
        }  # fmt: skip
        receive, send = os.pipe()
        child = os.fork()
        if child == 0:
            outcome = {}
            try:
                for name, call in calls.items():
                    try:
                        call()
                        outcome[name] = "went through"
                    except BaseException as error:
                        outcome[name] = type(error).__name__
                cache.close()
                del view
                outcome["close"] = "closed" if cache.closed else "open"
            finally:
                os.write(send, pickle.dumps(outcome))
                os._exit(0)
        os.close(send)
        with os.fdopen(receive, "rb") as pipe:
            outcome = pickle.loads(pipe.read())
        os.waitpid(child, 0)
        assert outcome == dict.fromkeys(calls, "ForkedProcessError") | {"close": "closed"}
        assert_holds(cache, seq, range(6))
        whole(cache)


def test_many_threads_on_their_own_handles():
    # SPEC F34: each thread reads back its own values while all share one pool
    with make_cache(48, B=4, layers=2, heads=2) as cache:
        errors = []

        def work(number):
            try:
                for turn in range(60):
                    marks = [1000 * number + turn * 10 + i for i in range(9)]
                    with cache.open(marks[:4], request_id=number) as seq:
                        fill(cache, seq, marks)
                        with seq.fork() as twin:
                            fill(cache, twin, [5])
                            assert_holds(cache, twin, [*marks, 5])
                        view = seq.views(1)[1]
                    want = rows(cache.spec, 1, marks[4:8])[0].transpose(1, 0, 2)
                    assert np.array_equal(view.k, want)
                    if number == 0:
                        cache.defragment()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        whole(cache)
        assert cache.num_used_blocks == 0


def test_one_request_id_is_won_once():
    # SPEC F21, F34
    with make_cache(48) as cache:
        won, lost, start = [], [], threading.Barrier(6)

        def work():
            start.wait()
            try:
                won.append(cache.open([1, 2], request_id="same"))
            except pc.InvalidArgumentError as error:
                lost.append(error)

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(won), len(lost)) == (1, 5)


def test_close_while_others_work():
    # SPEC F11, F34: calls in flight end well or with FreedHandleError; nothing crashes
    for _ in range(5):
        cache = make_cache(32, B=4, layers=1)
        unexpected, began = [], threading.Event()

        def work(number, cache=cache, unexpected=unexpected, began=began):
            try:
                while True:
                    with cache.open() as seq:
                        fill(cache, seq, [number] * 9)
                        read(seq, 0)
                        began.set()
            except pc.FreedHandleError:
                pass
            except BaseException as error:
                unexpected.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        began.wait()
        cache.close()
        for thread in threads:
            thread.join()
        assert unexpected == []
