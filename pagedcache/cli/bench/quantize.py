"""Quantise and dequantise flat arrays, into buffers that are there already."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from pagedcache import FORMATS, FlatQuantized
from pagedcache._native import arithmetic as native

from . import peers
from .rows import Options, Row, measure
from .timing import Timer, timed

_GGUF_MOST = 64 << 20  # gguf's NumPy quantisers need many copies of their input


def rows(options: Options) -> Iterator[Row]:
    """Every quantised format at every size, under "saturate"; peer: gguf's NumPy quantisers."""
    names = [name for name in options.formats if FORMATS[name].is_quantized]
    for size in options.sizes:
        count = size // 4
        values = np.random.default_rng(0).standard_normal(count, dtype=np.float32)
        plain, wide = np.empty_like(values), np.empty_like(values)
        copy = timed(partial(np.copyto, plain, values))
        for name in names:
            buffer = FlatQuantized(name, count)
            code, moved = buffer.format.code, size + buffer.nbytes

            encode = partial(buffer.write, 0, values, on_nonfinite="saturate")
            encode()
            _check(buffer.to_float32(), values, name)
            scales = buffer.num_values // 32 * FORMATS[name].quant_nbytes
            scales = -(-scales // 16) * 16 if FORMATS[name].packing == "planar" else 0

            decode = partial(native.decode, code, buffer.data, scales, wide)
            decode()
            _check(wide, values, name)
            quantise, dequantise = _gguf(name, values)
            timers: dict[str, Timer] = {"ours": timed(encode), "copy": copy, **quantise}
            yield from measure(
                "quantize", f"f32→{name}", name, size, count, timers, options.runs, moved
            )
            timers = {"ours": timed(decode), "copy": copy, **dequantise}
            yield from measure(
                "quantize", f"{name}→f32", name, size, count, timers, options.runs, moved
            )


def _check(got: np.ndarray, given: np.ndarray, name: str) -> None:
    error = float(np.sqrt(np.mean((got - given) ** 2, dtype=np.float64)))
    if not error < 0.2:  # of values with a spread of 1
        raise AssertionError(f"{name} reads back with an error of {error}: not timed")


def _gguf(name: str, values: np.ndarray) -> tuple[dict[str, Timer], dict[str, Timer]]:
    kind = peers.gguf_types().get(name)
    if kind is None or values.nbytes > _GGUF_MOST:
        return {}, {}
    from gguf import quants

    rows = values.reshape(-1, 1024)
    data = quants.quantize(rows, kind)
    peer = f"gguf {kind.name.lower()}"
    return (
        {peer: timed(lambda: quants.quantize(rows, kind))},
        {peer: timed(lambda: quants.dequantize(data, kind))},
    )
