"""Memory of slabs: round addresses, pages that are there when asked for, and nothing changed."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import pagedcache as pc
from pagedcache._native import machine as native
from pagedcache._native.memory import advise_huge, bytes_to_alignment, touch


@pytest.fixture(autouse=True)
def as_before():
    threads = pc.get_num_threads()
    native.share_from(1 << 20)
    yield
    native.share_from(0)
    pc.set_num_threads(threads)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4097, (12 << 20) + 5])
def test_touching_changes_nothing(nbytes: int, threads: int) -> None:
    pc.set_num_threads(threads)
    memory = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
    before = memory.copy()
    touch(memory)
    advise_huge(memory)
    assert np.array_equal(memory, before)


def test_only_memory_that_can_be_written_is_touched() -> None:
    memory = np.zeros(10, np.uint8)
    memory.flags.writeable = False
    for call in (touch, advise_huge):
        with pytest.raises((ValueError, BufferError)):
            call(memory)
        with pytest.raises((ValueError, BufferError)):
            call(np.zeros(20, np.uint8)[::2])


PREFAULT = """
import sys
import numpy as np
import pagedcache as pc

def resident_kib():
    with open("/proc/self/status", encoding="ascii") as status:
        return int(next(line for line in status if line.startswith("RssAnon")).split()[1])

spec = pc.CacheSpec(num_layers=4, num_kv_heads=4, head_dim=64, kv_format="q4k")
pc.PagedKVCache(spec, 1).close()  # what a first cache loads
before = resident_kib()
with pc.PagedKVCache(spec, (160 << 20) // spec.block_nbytes, prefault=sys.argv[1] == "1") as cache:
    taken = resident_kib() - before
    pairs = [cache.slabs(layer) for layer in range(4)]
    assert not any(slab.view(np.uint8).any() for pair in pairs for slab in pair)
print(taken >> 10)
"""


# SPEC F15
@pytest.mark.skipif(sys.platform != "linux", reason="counts pages as Linux does")
def test_prefault_takes_the_memory_at_once() -> None:
    taken = [
        int(subprocess.run([sys.executable, "-c", PREFAULT, flag], capture_output=True, text=True,
                           check=True).stdout)
        for flag in "01"
    ]  # fmt: skip
    assert taken[0] < 32 and taken[1] >= 159, taken


def test_slabs_begin_at_round_addresses() -> None:
    spec = pc.CacheSpec(num_layers=3, num_kv_heads=1, head_dim=24, block_size=3, kv_format="q8")
    with pc.PagedKVCache(spec, 5) as cache:
        for layer in range(3):
            for slab in cache.slabs(layer):
                assert bytes_to_alignment(slab, 64) == 0


def test_prefault_leaves_adopted_memory_alone() -> None:
    spec = pc.CacheSpec(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4)
    slabs = [[np.full((3, *shape), 7, np.float16)] for shape in (spec.k_block_shape,) * 2]
    with pc.PagedKVCache(spec, 3, storage=tuple(slabs), prefault=True):
        assert all((slab == 7).all() for (slab,) in slabs)
    with pc.PagedKVCache(spec, 3, storage=None, prefault=True) as cache:
        assert cache.num_blocks == 3
