"""What a block of bookkeeping costs, in bytes and in time, from 10^3 to 10^7 blocks.

    python tools/growth.py            # all sizes; the largest needs about 2 GiB and a minute
    python tools/growth.py 1e3 1e5    # some of them

Bytes are resident memory (Linux), so pages that were never touched do not count. Times are of one
pass over prompts of 400 blocks that nothing has seen before; shared machines are noisy.
"""

from __future__ import annotations

import sys
import time

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
        f"{steps / max(min(max(num_blocks, 10**5), 10**6), 1):.1f} steps a block when evicting"
    )


if __name__ == "__main__":
    for size in sys.argv[1:] or ["1e3", "1e4", "1e5", "1e6", "1e7"]:
        measure(int(float(size)))
