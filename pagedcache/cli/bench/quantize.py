"""Quantise and dequantise flat arrays, into buffers that are there already."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from pagedcache import FORMATS, FlatQuantized
from pagedcache._native import arithmetic as native

from . import peers
from .copies import copy_timer, stream_timers
from .counts import each_count
from .ggml_peer import QUANTISED
from .rows import Options, Row, label, measure
from .timing import Timer, timed

_GGUF_MOST = 16 << 20  # gguf's NumPy quantisers are slow and copy their input many times
_GGML_BYTES = {"q8_0": 34, "q4_0": 18, "q4_1": 20}  # of 32 values

Array = np.ndarray[Any, Any]


def rows(options: Options) -> Iterator[Row]:
    """Every quantised format at every size, under "saturate"; peers: ggml's kernels, and gguf's
    NumPy quantisers."""
    names = [name for name in options.formats if FORMATS[name].is_quantized]
    for size in options.sizes:
        values = np.random.default_rng(0).standard_normal(size // 4, dtype=np.float32)
        plain, wide = np.empty_like(values), np.empty_like(values)
        for name in names:
            buffer = FlatQuantized(name, values.size)
            encode = partial(buffer.write, 0, values, on_nonfinite="saturate")
            encode()
            _check(buffer.to_float32(), values, name)
            decode = partial(
                native.decode, buffer.format.code, buffer.data, _scale_offset(buffer), wide
            )
            decode()
            _check(wide, values, name)
            moved = size + buffer.nbytes
            for threads in each_count(options.threads):
                timers: dict[str, Timer] = {"copy": copy_timer(values, plain, threads)}
                timers |= stream_timers(moved, threads)
                quantise, dequantise = _peers(name, values) if threads == 1 else ({}, {})
                for variant, ours, others in (
                    (f"f32→{name}", encode, quantise),
                    (f"{name}→f32", decode, dequantise),
                ):
                    yield from measure(
                        "quantize", label(variant, threads), name, size, values.size,
                        {"ours": timed(ours), **others, **timers}, options.runs, moved,
                    )


def _scale_offset(buffer: FlatQuantized) -> int:
    """Where scales that lie apart begin: behind the quants, at a multiple of 16 bytes."""
    quants = buffer.num_values // 32 * buffer.format.quant_nbytes
    return -(-quants // 16) * 16 if buffer.format.packing == "planar" else 0


def _check(got: Array, given: Array, name: str) -> None:
    error = float(np.sqrt(np.mean((got - given) ** 2, dtype=np.float64)))
    if not error < 0.2:  # of values with a spread of 1
        raise AssertionError(f"{name} reads back with an error of {error}: not timed")


def _peers(name: str, values: Array) -> tuple[dict[str, Timer], dict[str, Timer]]:
    """Who quantises, and who reads back."""
    quantise, dequantise = _ggml(name, values)
    kind = peers.gguf_types().get(name)
    if kind is None or values.nbytes > _GGUF_MOST:
        return quantise, dequantise
    from gguf import quants

    rows = values.reshape(-1, 1024)
    data = quants.quantize(rows, kind)
    peer = f"gguf {kind.name.lower()}"
    quantise[peer] = timed(lambda: quants.quantize(rows, kind))
    dequantise[peer] = timed(lambda: quants.dequantize(data, kind))
    return quantise, dequantise


def _ggml(name: str, values: Array) -> tuple[dict[str, Timer], dict[str, Timer]]:
    ggml = peers.ggml()
    if ggml is None or name not in QUANTISED:
        return {}, {}
    kind = QUANTISED[name]
    data = np.empty(values.size // 32 * _GGML_BYTES[kind], np.uint8)
    wide = np.zeros_like(values)
    encode, decode = ggml.encoder(name), ggml.decoder(name)
    encode(values, data)
    decode(data, wide)
    _check(wide, values, f"{kind} by ggml")
    if name == kind:
        _compare(data, values, name)
    peer = f"ggml {kind}"
    return {peer: timed(partial(encode, values, data))}, {peer: timed(partial(decode, data, wide))}


def _compare(data: Array, values: Array, name: str) -> None:
    """Raise unless ggml wrote our bytes: its vector kernels round ties, and products that fall
    next to one, another way, which is less than one value in ten thousand."""
    buffer = FlatQuantized(name, values.size)
    buffer.write(0, values)
    if np.count_nonzero(buffer.data != data) > 1e-4 * values.size:
        raise AssertionError(f"{name} by ggml are not our bytes: not timed")
