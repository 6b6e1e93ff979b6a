"""What a block of bookkeeping costs, in bytes and in time, from 10^3 to 10^7 blocks.

    python tools/growth.py            # all sizes; the largest needs about 2 GiB and a minute
    python tools/growth.py 1e3 1e5    # some of them

Bytes are resident memory (Linux), so pages that were never touched do not count. Times of evicting
are of one pass over prompts of 400 blocks that nothing has seen before. The second line has the
medians of calls in a pool that is full of cached blocks: they must not grow with the pool, and a
match must cost the same per token however long the prompt. Shared machines are noisy.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from pagedcache.bookkeeping import Ledger

BLOCK_SIZE, PROMPT = 16, 400


def resident() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def prompts(count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 2**32, (count, PROMPT * BLOCK_SIZE), dtype=np.uint32)


def cycle(ledger: Ledger, num_blocks: int, batch: np.ndarray) -> float:
    """Open cold, commit and free prompts worth ``num_blocks`` blocks; nanoseconds per block."""
    spent = done = 0
    while done < num_blocks:
        batch += np.uint32(1)
        started = time.perf_counter_ns()
        for prompt in batch:
            seq = ledger.open(prompt)
            ledger.commit(seq, len(prompt))
            ledger.free(seq)
        spent += time.perf_counter_ns() - started
        done += len(batch) * PROMPT
    return spent / done


def median_ns(call: Callable[[], object], restore: Callable[[], object], runs: int = 101) -> float:
    """Nanoseconds of a call that is undone each time, warm."""
    samples = []
    for _ in range(runs):
        began = time.perf_counter_ns()
        call()
        samples.append(time.perf_counter_ns() - began)
        restore()
    return statistics.median(samples)


def calls(ledger: Ledger, num_blocks: int) -> str:
    """Times of allocate, touch, free, of a decode step and of matches."""
    pool, n = ledger.pool, min(512, num_blocks // 2)
    ids: list[np.ndarray] = []
    allocate = median_ns(lambda: ids.append(pool.allocate(n)), lambda: pool.free(ids.pop()))
    ids.append(pool.allocate(n))
    touch = median_ns(lambda: pool.touch(ids[0]), lambda: pool.free(ids[0]))
    free = median_ns(lambda: pool.free(ids[0]), lambda: ids.__setitem__(0, pool.allocate(n)))
    pool.free(ids.pop())
    seq = ledger.open(np.arange(BLOCK_SIZE, dtype=np.uint32))
    token = np.array([7], np.uint32)
    ledger.prepare([seq], [BLOCK_SIZE])
    step = median_ns(lambda: ledger.step([seq], token), lambda: ledger.truncate(seq, BLOCK_SIZE))
    ledger.free(seq)
    times = [f"allocate {allocate / n:.1f}, touch {touch / n:.1f}, free {free / n:.1f} ns a block"]
    times.append(f"a step {step:.0f} ns")
    for length in (2**10, 2**13, 2**16):
        prompt = np.arange(length + 1, dtype=np.uint32)
        if length > num_blocks * BLOCK_SIZE // 2:
            break
        seq = ledger.open(prompt)
        ledger.commit(seq, length - seq.seq_len)
        ledger.free(seq)
        assert ledger.probe(prompt) == length
        match = median_ns(lambda p=prompt: ledger.probe(p), lambda: None, 21)
        times.append(f"match of {length:,} {match / length:.2f} ns a token")
    return ", ".join(times)


def measure(num_blocks: int) -> None:
    batch = prompts(min(max(num_blocks // PROMPT, 1), 250), seed=num_blocks)
    before = resident()
    ledger = Ledger(num_blocks, BLOCK_SIZE, partial_block_reuse=BLOCK_SIZE // 4)
    seq = ledger.open(np.empty(0, np.uint32), room=num_blocks * BLOCK_SIZE)
    handed_out = resident() - before
    ledger.free(seq)
    cycle(ledger, num_blocks, batch)
    cached = resident() - before - 4 * BLOCK_SIZE * ledger.pool.num_cached_blocks
    steps = ledger.pool.steps
    evicting = cycle(ledger, min(max(num_blocks, 10**5), 10**6), batch)
    steps = ledger.pool.steps - steps
    print(
        f"{num_blocks:>10,} blocks: {handed_out / num_blocks:6.1f} bytes handed out, "
        f"{cached / num_blocks:6.1f} cached (tokens apart), {evicting:5.0f} ns and "
        f"{steps / max(min(max(num_blocks, 10**5), 10**6), 1):.1f} steps a block when evicting\n"
        f"{'':>18} {calls(ledger, num_blocks)}"
    )


if __name__ == "__main__":
    for size in sys.argv[1:] or ["1e3", "1e4", "1e5", "1e6", "1e7"]:
        measure(int(float(size)))
