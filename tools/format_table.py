"""The README's table of formats, computed by the library.

``python tools/format_table.py`` prints it, ``--write`` puts it into README.md between its
markers, ``--check`` exits with 1 when the README says something else.
"""

from __future__ import annotations

import argparse
import sys
from importlib.resources import files
from pathlib import Path

import numpy as np

import pagedcache as pc
from pagedcache.cli.marked import between, put_between

README = Path(__file__).resolve().parent.parent / "README.md"


def relative_rmse(given: np.ndarray, got: np.ndarray) -> float:
    error = got.astype(np.float64) - given
    return float(np.sqrt(np.mean(error**2) / np.mean(given.astype(np.float64) ** 2)))


def round_trip(name: str, k: np.ndarray, v: np.ndarray) -> tuple[float, float, float]:
    """Bytes per value, and relative RMSE of K and V ``[layers, tokens, heads, head_dim]`` through
    a cache with blocks of 16 tokens."""
    layers, tokens, heads, head_dim = k.shape
    spec = pc.CacheSpec(
        num_layers=layers, num_kv_heads=heads, head_dim=head_dim, block_size=16, kv_format=name
    )
    with pc.PagedKVCache(spec, num_blocks=-(-tokens // 16)) as cache, cache.open() as seq:
        for layer in range(layers):
            seq.append(layer, k[layer], v[layer])
        read = [seq.gather(layer, dtype=np.float32) for layer in range(layers)]
    return (
        spec.bytes_per_value,
        relative_rmse(k, np.stack([pair[0] for pair in read])),
        relative_rmse(v, np.stack([pair[1] for pair in read])),
    )


def figure(error: float) -> str:
    """In per cent, three digits."""
    return "0" if error == 0 else f"{100 * error:#.3g} %"


def table() -> str:
    with files("pagedcache").joinpath("data/smollm2_kv_sample.npz").open("rb") as file:
        sample = np.load(file)
        k, v = sample["k"], sample["v"]
    lines = [
        "| format | bytes per value | times smaller than 16 bit | error of K | error of V |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in pc.FORMATS:
        nbytes, error_k, error_v = round_trip(name, k, v)
        lines.append(
            f"| `{name}` | {nbytes:g} | {2 / nbytes:.2f} "
            f"| {figure(error_k)} | {figure(error_v)} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put it into README.md")
    parser.add_argument("--check", action="store_true", help="compare it with README.md")
    options = parser.parse_args()
    found, computed = between(README, "formats"), table()
    if found is None:
        print("README.md has no <!-- formats --> markers", file=sys.stderr)
        return 1
    if options.write:
        put_between(README, "formats", computed)
    print(computed, end="")
    if options.check and found != computed:
        print("README.md has another table; run this with --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
