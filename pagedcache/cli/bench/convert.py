"""float32 to and from 16 bits, into buffers that are there already."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from pagedcache._native import arithmetic as native
from pagedcache.formats import FORMATS, NONFINITE_POLICIES

from . import peers
from .copies import copy_timer, stream_timers
from .counts import each_count
from .rows import Options, Row, label, measure
from .timing import Timer, timed

_DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_RAISE = NONFINITE_POLICIES["raise"]

Array = np.ndarray[Any, Any]


def rows(options: Options) -> Iterator[Row]:
    """f32→f16, f32→bf16 and back, at every size; peers: NumPy (with ml_dtypes), torch, ggml."""
    for size in options.sizes:
        values = np.random.default_rng(0).standard_normal(size // 4, dtype=np.float32)
        wide, plain = np.empty_like(values), np.empty_like(values)
        for name, dtype in _DTYPES.items():
            code, narrow = FORMATS[name].code, np.empty(values.size, dtype)
            raw = narrow.view(np.uint8)
            encode = partial(native.encode, code, values, raw, 0, _RAISE)
            decode = partial(native.decode, code, raw, 0, wide)
            encode()
            decode()
            exact = values.astype(dtype)
            _check(narrow, exact, name)
            _check(wide, exact.astype(np.float32), name)
            for threads in each_count(options.threads):
                limits: dict[str, Timer] = {"copy": copy_timer(values, plain, threads)}
                for variant, ours, given, out in (
                    (f"f32→{name}", encode, values, exact),
                    (f"{name}→f32", decode, exact, plain),
                ):
                    timers = {"ours": timed(ours), **limits}
                    if threads == 1:
                        timers["numpy"] = timed(partial(np.copyto, out, given, casting="unsafe"))
                        timers |= _ggml(name, given, out)
                    timers |= _torch(name, given, out)
                    timers |= stream_timers(size // 2 * 3, threads)
                    yield from measure(
                        "convert", label(variant, threads), name, size, values.size, timers,
                        options.runs, size // 2 * 3,
                    )


def _check(got: Array, want: Array, name: str) -> None:
    # Bits, not values: -0.0 is another number than 0.0 here.
    kind = np.dtype(f"u{got.itemsize}")
    if not np.array_equal(got.view(kind), want.view(kind)):
        raise AssertionError(f"a conversion of {name} is wrong: not timed")


def _torch(name: str, given: Array, out: Array) -> dict[str, Timer]:
    torch = peers.torch()
    if torch is None:
        return {}
    kind = getattr(torch, name)
    source, target = (
        torch.from_numpy(x if x.dtype == np.float32 else x.view(np.int16)) for x in (given, out)
    )
    if given.dtype == np.float32:
        target = target.view(kind)
    else:
        source = source.view(kind)
    return {"torch": timed(lambda: target.copy_(source))}


def _ggml(name: str, given: Array, out: Array) -> dict[str, Timer]:
    ggml = peers.ggml()
    if ggml is None:
        return {}
    kernel = (ggml.encoder if given.dtype == np.float32 else ggml.decoder)(name)
    want = given.astype(out.dtype)
    kernel(given, out)
    _check(out, want, f"{name} by ggml")
    return {"ggml": timed(partial(kernel, given, out))}
