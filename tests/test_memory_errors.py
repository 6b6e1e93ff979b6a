"""Memory that Python or NumPy cannot have is reported as the library's own error."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pagedcache.errors import OutOfBlocksError, StorageMemoryError
from pagedcache.guards import taking

SCRIPT = """
import resource
import numpy as np
import pagedcache as pc

spec = pc.CacheSpec(1, 1, 4, block_size=2048, max_seq_len=None)
count = 2**24  # 64 MiB of tokens
tokens = np.arange(count, dtype=np.uint32)
wide = tokens.astype(np.int64)
cache = pc.PagedKVCache(spec, num_blocks=count // 2048 + 2, storage=None)
seq = cache.open(tokens)
own = pc.PagedKVCache(pc.CacheSpec(1, 1, 1, 2048, "float16"), num_blocks=count // 2048)
other = own.open(tokens)
slots = other.prepare(count)
rows = np.ones((count, 1), np.float16)
own.store(0, rows, rows, slots)
flat = pc.quantize(rows, "float16")
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + 2**23  # 8 MiB more than now
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
calls = {
    "tokens": lambda: seq.tokens,
    "slot_mapping": lambda: seq.slot_mapping(0, count),
    "open": lambda: cache.open(wide),
    "compute_block_hashes": lambda: pc.compute_block_hashes(wide, 16),
    "gather": lambda: other.gather(0, 0, count, np.float32),
    "read": flat.read,
    "quantize": lambda: pc.quantize(rows, "q8"),
}
for name, call in calls.items():
    try:
        call()
        print(name, "was given its memory")
    except pc.StorageMemoryError as error:
        assert error.nbytes > 2**23, (name, error.nbytes)
    except BaseException as error:
        print(name, type(error).__name__, error)
cache.check()
own.check()
assert seq.num_tokens == count
print("done")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_AS is Linux's")
def test_what_a_limit_on_memory_refuses() -> None:
    # SPEC 7
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stdout + done.stderr


def test_errors_of_our_own_stay_what_they_are() -> None:
    with pytest.raises(OutOfBlocksError), taking(10, "nothing"):
        raise OutOfBlocksError(1, 0, 1)
    with pytest.raises(StorageMemoryError, match="10 bytes for a list"), taking(10, "a list"):
        raise MemoryError
