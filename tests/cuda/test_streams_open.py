"""Order between streams where blocks are open (SPEC F49): kernels of others read and write open
slots, blocks are sealed, slots change hands; streams run as late as they may."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from devicekit import host
from gpukit import Foreign, finish, streams_of

import pagedcache as pc
from pagedcache.checks.devices import upload

B, HEADS, DIM = 4, 2, 32
SPEC = pc.CacheSpec(1, HEADS, DIM, B, kv_format="q4k")


@pytest.fixture
def deferred(cuda: Any, emulated: Any) -> Any:
    """The stub driver with streams that run only when something waits for them."""
    emulated.set("async", 1)
    return emulated


@pytest.fixture
def three(cuda: Any, deferred: Any) -> Iterator[list[Any]]:
    with streams_of(cuda, 3) as streams:
        yield streams


@pytest.fixture
def caches(three: Any) -> Iterator[tuple[Any, Any]]:
    """The same cache on the GPU and on the CPU."""
    made = [pc.PagedKVCache(SPEC, 8, device=d, num_open_blocks=2) for d in ("cuda:0", "cpu")]
    yield made[0], made[1]
    for cache in made:
        cache.close()


def keys(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    k, v = np.random.default_rng(seed).standard_normal((2, count, HEADS, DIM), np.float32)
    return k, v


def up(*arrays: np.ndarray) -> list[Any]:
    """In device memory. To be called before anything is queued: an upload lets streams run."""
    return [upload(np.ascontiguousarray(array), "cuda:0") for array in arrays]


def warm(cache: Any, streams: list[Any]) -> None:
    """Leave each stream temporary memory of its own, which another's would make it wait for."""
    storage = cache._storage
    queues = [storage.queue(stream) for stream in streams]
    regions = [(storage.take_region(512, queue), queue) for queue in queues for _ in range(2)]
    for region, queue in regions:
        region.used(queue)


def test_a_slot_that_a_foreign_kernel_reads_is_not_filled_again(
    caches: Any, cuda: Any, three: Any
) -> None:
    # SPEC F49, CASE C52
    one, two, reader = three
    cache, _ = caches
    warm(cache, three)
    k, v = keys(2 * B, 1)
    given = [up(k[i : i + 1], v[i : i + 1]) for i in range(2 * B)]
    others = up(*keys(1, 2))
    seq = cache.open(stream=one)
    for i in range(B):
        seq.append(0, *given[i], stream=one)
        seq.commit(1)
    with seq.views(0, stream=reader) as views:
        copy = Foreign(cuda, reader).read(views[0].k)
    cache.record_use([seq], reader)
    slot = cache.open_slots(seq)[0]
    for i in range(B, 2 * B):
        seq.append(0, *given[i], stream=one)
        seq.commit(1, stream=one)
    assert cache.stats().blocks_sealed == 1
    other = cache.open(stream=two)
    other.append(0, *others, stream=two)
    assert cache.open_slots(other)[0] == slot  # where the sealed block was
    finish(two, cuda)  # runs whatever stream 2 waits for, and nothing else
    want = k[:B].astype(np.float16).transpose(1, 0, 2)
    np.testing.assert_array_equal(host(copy), want)
    cuda.synchronize()


def test_a_block_is_sealed_after_foreign_kernels_that_filled_it(
    caches: Any, cuda: Any, three: Any
) -> None:
    """Engines write open slots themselves and vouch for them by ``commit(stream=)``."""
    # SPEC F49, CASE C52
    one, two, third = three
    cache, _ = caches
    warm(cache, three)
    seqs = [each.open(range(3 * B)) for each in caches]
    k, v = keys(2 * B, 3)
    parts = [slice(0, B), slice(B, 2 * B)]
    blocks = [
        up(*(x[part].astype(np.float16).transpose(1, 0, 2) for x in (k, v))) for part in parts
    ]
    for block, part in enumerate(parts):
        seqs[0].prepare(B - 1)
        slot = int(cache.open_slots(seqs[0])[block])
        for slab, values in zip(cache.open_slabs(0), blocks[block], strict=True):
            Foreign(cuda, two).write(slab[slot], values)
        seqs[0].commit(B - 1, stream=two)
        seqs[0].prepare(1)
        seqs[0].commit(1, stream=two)
        for i in range(part.start, part.stop):
            seqs[1].append(0, k[i : i + 1], v[i : i + 1])
            seqs[1].commit(1)
    for each in caches:
        assert each.stats().blocks_sealed == 1
    got = seqs[0].gather(0, dtype=np.float32, stream=third)
    hit = cache.open([*range(B), 99], stream=one)
    assert hit.num_cached_tokens == B  # the sealed block is in the prefix index
    again = hit.gather(0, 0, B, dtype=np.float32, stream=one)
    want = seqs[1].gather(0, dtype=np.float32)
    for a, b, c in zip(got, want, again, strict=True):
        np.testing.assert_array_equal(host(a), b)
        np.testing.assert_array_equal(host(c), b[:B])


def test_a_reopened_block_and_its_reader(caches: Any, cuda: Any, three: Any) -> None:
    """Truncated into a sealed block: its bytes are read back on one stream while another one still
    reads them, and its old block is written by a third."""
    # SPEC F49, CASE C52
    one, two, third = three
    warm(caches[0], three)
    k, v = keys(3 * B, 4)
    parts = [[x[start : start + 3] for x in (k, v)] for start in range(0, 3 * B, 3)]
    parts.append(list(keys(1, 5)))
    given = [up(*part) for part in parts]
    results = []
    for cache, rows, streams in zip(
        caches, (given, parts), (three, [None] * 3), strict=True
    ):
        first, second, last = streams
        seq = cache.open()
        for part in rows[:-1]:
            seq.append(0, *part, stream=first)
            seq.commit(3)
        before = seq.gather(0, dtype=np.float32, stream=second)
        seq.truncate(B + 2)
        seq.append(0, *rows[-1], stream=last)
        assert cache.stats().blocks_reopened == 1
        results.append([*seq.gather(0, dtype=np.float32, stream=first), *before])
    for got, want in zip(*results, strict=True):
        np.testing.assert_array_equal(host(got), want)
    cuda.synchronize()
