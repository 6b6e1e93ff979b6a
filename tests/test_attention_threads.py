"""Threads and instruction sets of attention on the CPU: the same bits, any number, any caller."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from attendkit import FORMATS, Shape, check_batch, scattered
from attentionkit import Options
from cachekit import by_profile
from devicekit import cpu_memory
from processkit import assert_clean, run_program
from threadkit import run_threads

import pagedcache as pc
from pagedcache import machine

pytestmark = cpu_memory("threads and instruction sets of the CPU")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    threads = pc.get_num_threads()
    yield
    pc.set_num_threads(threads)
    machine.use_isa(None)


CASES: list[tuple[Shape, list[int], list[int], dict[str, Any]]] = [
    (Shape("bfloat16", heads=2, group=4, dim=128), [5000], [1], {}),  # one long one
    (Shape("q4_1", heads=1, group=2, dim=64), [6000], [1], {"window": 3500}),
    (Shape("q8", heads=3, group=3, dim=64), [900, 40, 3000, 7], [1, 1, 1, 1], {}),
    (Shape("q4k", heads=2, group=2, dim=64), [700, 300], [150, 1], {}),
    (Shape("float16", heads=1, group=1, dim=128), [4000], [6], {"soft_cap": 20.0}),
    (Shape("float32", heads=8, group=8, dim=64), [800, 200], [1, 90], {"causal": False}),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_results_do_not_depend_on_the_number_of_threads(number: int) -> None:
    shape, lengths, q_lens, options = CASES[number]
    rng = np.random.default_rng(number)
    with shape.cache(sum(lengths)) as cache:
        seqs = scattered(cache, shape, rng, lengths)
        q = shape.queries(rng, sum(q_lens))
        seen = set()
        for threads in (1, 2, 3, 4, 7, 16, 61):
            pc.set_num_threads(threads)
            assert pc.get_num_threads() == threads
            for _ in range(3):
                out, lse = cache.attend(0, q, seqs, q_lens=q_lens, return_lse=True, **options)
                seen.add((out.tobytes(), lse.tobytes()))
        assert len(seen) == 1


def test_many_callers_at_once() -> None:
    """Python threads that attend at the same time, each with helpers, get what one alone gets."""
    rng = np.random.default_rng(7)
    shape = Shape("q8", heads=2, group=4, dim=64)
    lengths = [1000, 1700, 300, 2500]
    with shape.cache(sum(lengths)) as cache:
        seqs = scattered(cache, shape, rng, lengths)
        q = shape.queries(rng, 4)
        pc.set_num_threads(1)
        want = [cache.attend(0, q[i : i + 1], seq).tobytes() for i, seq in enumerate(seqs)]
        pc.set_num_threads(3)

        def caller(i: int) -> None:
            for turn in range(by_profile(40, 400)):
                j = (i + turn) % len(seqs)
                assert cache.attend(0, q[j : j + 1], seqs[j]).tobytes() == want[j]

        run_threads([lambda i=i: caller(i) for i in range(8)])  # type: ignore[misc]
        cache.check()


def test_attending_beside_a_writer() -> None:
    """Sequences that others read may grow, fork and go meanwhile."""
    rng = np.random.default_rng(8)
    shape = Shape("float32", heads=1, group=2, dim=32)
    with shape.cache(4000) as cache:
        steady, growing = scattered(cache, shape, rng, [900, 10])
        q = shape.queries(rng, 1)
        want = cache.attend(0, q, steady).tobytes()
        rows = shape.rows(rng, 1)
        done = []

        def writer() -> None:
            for _ in range(by_profile(200, 1500)):
                growing.append(0, *rows)
                growing.commit(1)
                with growing.fork() as child:
                    child.append(0, *rows)
            done.append(True)

        def reader() -> None:
            while not done:
                assert cache.attend(0, q, steady).tobytes() == want
                lengths = [growing.seq_len, 900]
                out = cache.attend(0, np.repeat(q, 2, 0), [growing, steady], lengths=lengths)
                assert np.isfinite(out).all() and out[1:].tobytes() == want

        run_threads([writer, reader, reader])
        cache.check()


FORKED = """
import os, signal
import numpy as np
import pagedcache as pc

def result():
    spec = pc.CacheSpec(1, 2, 64, 16, kv_format="q8")
    rng = np.random.default_rng(0)
    with pc.PagedKVCache(spec, 200) as cache, cache.open() as seq:
        seq.append(0, *rng.standard_normal((2, 3000, 2, 64), np.float32))
        return cache.attend(0, rng.standard_normal((1, 8, 64), np.float32), seq).tobytes()

pc.set_num_threads(4)
want = result()
for _ in range(5):
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends a child that waits for threads it does not have
        ok = all(result() == want for _ in range(3))
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(0 if result() == want else 1)
        os._exit(0 if ok and os.waitpid(grandchild, 0)[1] == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert result() == want
print("same")
"""


def test_a_forked_child_has_threads_of_its_own() -> None:
    assert_clean(run_program(FORKED), "same")


FORKED_AT_WORK = """
import os, signal, threading
import numpy as np
import pagedcache as pc

pc.set_num_threads(4)
spec = pc.CacheSpec(1, 2, 64, 16, kv_format="q8")
cache = pc.PagedKVCache(spec, 200)
seq = cache.open()
rng = np.random.default_rng(0)
seq.append(0, *rng.standard_normal((2, 3000, 2, 64), np.float32))
q = rng.standard_normal((1, 8, 64), np.float32)
stop = []

def attend():
    while not stop:
        cache.attend(0, q, seq)

workers = [threading.Thread(target=attend) for _ in range(3)]
for worker in workers:
    worker.start()
for _ in range(20):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        other = pc.PagedKVCache(spec, 200)
        own = other.open()
        own.append(0, *rng.standard_normal((2, 1000, 2, 64), np.float32))
        ok = np.isfinite(other.attend(0, q, own)).all()
        try:
            cache.attend(0, q, seq)
            ok = False
        except pc.ForkedProcessError:
            pass
        os._exit(0 if ok else 1)
    assert os.waitpid(child, 0)[1] == 0
stop.append(1)
for worker in workers:
    worker.join()
print("whole")
"""


def test_a_fork_while_others_attend() -> None:
    assert_clean(run_program(FORKED_AT_WORK), "whole")


@pytest.mark.parametrize("isa", machine.usable_isas())
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_instruction_set(fmt: str, isa: str) -> None:
    """Each against float64, and within twice the bound of the baseline's own result."""
    rng = np.random.default_rng(9)
    machine.use_isa(isa)
    assert machine.isa_name() == isa
    for turn, (dim, group, block_size) in enumerate(
        ((64, 4, 16), (33, 1, 3), (80, 3, 32), (128, 2, 16), (7, 5, 1), (256, 8, 64))[
            : by_profile(3, 6)
        ]
    ):
        layout = ("HND", "NHD")[turn % 2]
        shape = Shape(fmt, layout, block_size, heads=2, group=group, dim=dim)
        lengths, q_lens = [150, 40, by_profile(200, 530)], [1, 1 + turn, 20]
        with shape.cache(sum(lengths)) as cache:
            seqs = scattered(cache, shape, rng, lengths)
            q = shape.queries(rng, sum(q_lens))
            for options in (Options(), Options(window=40, soft_cap=9.0)):
                check_batch(cache, seqs, q, q_lens, options, what=(isa, shape))


ENVIRONMENT = """
import pagedcache as pc
from pagedcache import machine
print(pc.get_num_threads(), machine.isa_name())
"""


def test_the_environment_is_asked_at_first_use() -> None:
    names = machine.usable_isas()
    done = run_program(ENVIRONMENT, PAGEDCACHE_NUM_THREADS="5", PAGEDCACHE_ISA=names[0])
    assert_clean(done, f"5 {names[0]}")
    done = run_program(ENVIRONMENT, without=("PAGEDCACHE_NUM_THREADS", "PAGEDCACHE_ISA"))
    cores, isa = done.stdout.split()
    assert 1 <= int(cores) <= 1024 and isa == names[-1]


@pytest.mark.parametrize("value", ("0", "-1", "1025", "two", "", " 3", "1e2", "٣"))
def test_a_bad_number_of_threads_in_the_environment(value: str) -> None:
    done = run_program(
        "import pagedcache as pc\n"
        "try:\n    pc.get_num_threads()\n"
        "except pc.InvalidArgumentError as error:\n"
        "    print('PAGEDCACHE_NUM_THREADS' in str(error))\n"
        "pc.set_num_threads(2)\n"  # said by the program, it counts
        "print(pc.get_num_threads())",
        PAGEDCACHE_NUM_THREADS=value,
    )
    assert_clean(done, "True\n2")


def test_an_instruction_set_that_is_not_there() -> None:
    done = run_program(
        "from pagedcache import machine, InvalidArgumentError\n"
        "try:\n    machine.isa_index()\n"
        "except InvalidArgumentError as error:\n    print(error)",
        PAGEDCACHE_ISA="amx",
    )
    assert done.returncode == 0 and "PAGEDCACHE_ISA" in done.stdout and "'amx'" in done.stdout
    for name in machine.usable_isas():
        assert name in done.stdout


@pytest.mark.parametrize("n", (0, -1, 1025, 2**70, 1.0, None, True, "2"))
def test_bad_numbers_of_threads(n: Any) -> None:
    before = pc.get_num_threads()
    with pytest.raises(pc.InvalidArgumentError):
        pc.set_num_threads(n)
    assert pc.get_num_threads() == before


def test_cores_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Logical processors of one core count once; a container's share of time is a limit."""
    topology = tmp_path / "cpu{}" / "{}"
    for processor, core in enumerate((0, 0, 1, 1)):
        folder = tmp_path / f"cpu{processor}"
        folder.mkdir()
        (folder / "physical_package_id").write_text("0\n")
        (folder / "core_id").write_text(f"{core}\n")
    monkeypatch.setattr(machine, "_TOPOLOGY", str(topology))
    assert machine._physical([0, 1, 2, 3]) == 2
    assert machine._physical([0, 2]) == 2
    assert machine._physical([0, 1, 9]) == 2  # nothing is known of number 9
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(machine, "_QUOTA", str(quota))
    for text, cores in (("max 100000", 2), ("100000 100000", 1), ("150000 100000", 2),
                        ("10000 100000", 1), ("900000 100000", 2), ("nonsense", 2)):  # fmt: skip
        quota.write_text(text)
        assert machine.usable_cores() == cores, text
    quota.unlink()
    assert machine.usable_cores() == 2
