"""The check on real keys and values: what a format loses, beside what it may lose."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

import pagedcache

from .bounds import block_bound, bound_rmse, error_bound, relative_rmse
from .channels import BY_CHANNEL, channels_read_back
from .compare import require, same_bits
from .devices import host, upload
from .reference import Floats, read_back
from .registry import DEVICE, HOST, Context, SkipCheck

SAMPLE = Path(__file__).resolve().parent.parent / "data" / "smollm2_kv_sample.npz"

# Relative RMSE of K and V by an independent implementation, to 3 digits.
EXPECTED = {
    "float16": (2.09e-4, 2.08e-4),
    "q8": (8.000e-3, 5.443e-3),
    "q4": (0.14578, 0.09863),
    "q4k": (0.03188, 0.07920),
}


@lru_cache(maxsize=1)
def load_sample() -> tuple[Floats, Floats]:
    """K and V of SmolLM2-135M, float32 ``[3 layers, 320 tokens, 3 heads, 64]``."""
    if not SAMPLE.is_file():
        raise SkipCheck(f"the sample {SAMPLE.name} is not installed")
    with np.load(SAMPLE) as data:
        return data["k"], data["v"]


def measure(
    name: str, k: Floats, v: Floats, device: str = "cpu", arrays: str = HOST
) -> tuple[Floats, Floats]:
    """Store K and V in a cache of one format and gather them again, as float32."""
    layers, n, heads, head_dim = k.shape
    spec = pagedcache.CacheSpec(
        num_layers=layers, num_kv_heads=heads, head_dim=head_dim, kv_format=name
    )
    with pagedcache.PagedKVCache(spec, -(-n // spec.block_size), device=device) as cache:
        with cache.open() as seq:
            parts = []
            for layer in range(layers):
                given = k[layer], v[layer]
                if arrays == DEVICE:
                    given = upload(k[layer], device), upload(v[layer], device)
                seq.append(layer, *given)
                parts.append([host(part) for part in seq.gather(layer, dtype=np.float32)])
    return np.stack([part[0] for part in parts]), np.stack([part[1] for part in parts])


def _blocks(rows: Floats) -> list[Floats]:
    """The sample's blocks ``[16, heads, head_dim]``: it fills 20 a layer, each in one write."""
    return [layer[first : first + 16] for layer in rows for first in range(0, len(layer), 16)]


def _read_back(name: str, rows: Floats) -> Floats:
    if name not in BY_CHANNEL:
        return read_back(name, rows)
    return np.stack([channels_read_back(block) for block in _blocks(rows)]).reshape(rows.shape)


def _bound(name: str, rows: Floats) -> Floats:
    if name not in BY_CHANNEL:
        return error_bound(name, rows)
    parts = [block_bound(name, "float32", block, 16) for block in _blocks(rows)]
    return np.stack(parts).reshape(rows.shape)


def real_sample(context: Context) -> str:
    """Real keys and values keep the format's bound; the note shows measured and allowed error."""
    name = context.k_format
    given = load_sample()
    got = measure(name, *given, context.device, context.arrays)
    notes = []
    for kind, rows, read in zip("KV", given, got, strict=True):
        stored = name if kind == "K" else pagedcache.get_format(name).v_partner.name
        same_bits(read, _read_back(stored, rows), kind)
        bound = _bound(stored, rows)
        inside = np.abs(read - rows) <= bound
        require(bool(inside.all()), f"{kind}: an error is larger than the format's bound")
        measured, allowed = relative_rmse(rows, read), bound_rmse(bound, rows)
        expected = EXPECTED.get(name, (None, None))["KV".index(kind)]
        if expected is not None:
            close = abs(measured - expected) <= 0.005 * expected
            require(close, f"{kind}: relative RMSE {measured:.4g}, published {expected:.4g}")
        notes.append(f"{kind} {measured:.4e} (bound {allowed:.1e})")
    return "relative RMSE " + ", ".join(notes)
