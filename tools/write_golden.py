"""Write the golden bytes of every storage format, once, to tests/golden/.

    python tools/write_golden.py tests/golden

A stored cache must be readable by every later version, so the files are written when a format is
new and only read from then on: an existing file is never overwritten. Each file holds the bytes of
one block of one layer's K, HND layout, of the inputs in ``inputs.npy``; tests/test_golden.py
compares them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from pagedcache.formats import FORMATS, KVFormat
from pagedcache.spec import CacheSpec
from pagedcache.storage import CpuStorage

HEADS, TOKENS, DIM = 2, 3, 40


def make_inputs() -> np.ndarray:
    """Float32 [tokens, heads, dim] of simple fractions, zeros of both signs, tiny and large."""
    index = np.arange(TOKENS * HEADS * DIM, dtype=np.int64)
    values = ((index * 7919) % 2003 - 1001).astype(np.float32) / np.float32(256)
    x = values.reshape(TOKENS, HEADS, DIM)
    x[0, 1] = np.where(np.arange(DIM) % 2, np.float32(-0.0), np.float32(0.0))
    x[1, 0, :32] *= np.float32(1e-6)
    x[1, 1] *= np.float32(1000)
    x[2, 0, 1:] = 0
    return x


def block_bytes(format: KVFormat, x: np.ndarray) -> np.ndarray:
    """Bytes of one HND block that holds ``x`` [tokens, heads, dim]."""
    tokens, heads, dim = x.shape
    spec = CacheSpec(1, heads, dim, tokens, k_format=format, v_format="float32")
    storage = CpuStorage(spec, 1)
    storage.store(0, *storage.check_rows(0, x, x, tokens), np.arange(tokens))
    return np.asarray(storage.block_array(0, "k", 0)).reshape(-1).view(np.uint8)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    inputs = folder / "inputs.npy"
    if not inputs.exists():
        np.save(inputs, make_inputs())
    x = np.load(inputs)
    for format in FORMATS.values():
        path = folder / f"{format.name}.bin"
        if path.exists():
            print(f"{path}: kept")
        else:
            path.write_bytes(block_bytes(format, x).tobytes())
            print(f"{path}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
