"""float32 to and from 16 bits, into buffers that are there already."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import ml_dtypes
import numpy as np

from pagedcache._native import arithmetic as native
from pagedcache.formats import FORMATS, NONFINITE_POLICIES

from . import peers
from .rows import Options, Row, measure
from .timing import Timer, timed

_DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_RAISE = NONFINITE_POLICIES["raise"]


def rows(options: Options) -> Iterator[Row]:
    """f32→f16, f32→bf16 and back, at every size; peers: NumPy (with ml_dtypes) and torch."""
    for size in options.sizes:
        count = size // 4
        values = np.random.default_rng(0).standard_normal(count, dtype=np.float32)
        wide, plain = np.empty_like(values), np.empty_like(values)
        for name in ("float16", "bfloat16"):
            code, narrow = FORMATS[name].code, np.empty(count, _DTYPES[name])
            raw = narrow.view(np.uint8)

            encode = partial(native.encode, code, values, raw, 0, _RAISE)
            decode = partial(native.decode, code, raw, 0, wide)
            encode()
            decode()
            _check(narrow.astype(np.float32), values.astype(_DTYPES[name]).astype(np.float32))
            _check(wide, narrow.astype(np.float32))
            copy = timed(partial(np.copyto, plain, values))
            other = np.empty_like(narrow)
            timers: dict[str, Timer] = {"ours": timed(encode), "copy": copy}
            timers["numpy"] = timed(partial(np.copyto, other, values, casting="unsafe"))
            timers |= _torch(name, values, encode=True)
            yield from measure(
                "convert", f"f32→{name}", name, size, count, timers, options.runs, count * 6
            )
            timers = {"ours": timed(decode), "copy": copy}
            timers["numpy"] = timed(partial(np.copyto, plain, narrow, casting="unsafe"))
            timers |= _torch(name, values, encode=False)
            yield from measure(
                "convert", f"{name}→f32", name, size, count, timers, options.runs, count * 6
            )


def _check(got: np.ndarray, want: np.ndarray) -> None:
    if not np.array_equal(got, want):
        raise AssertionError("a conversion is wrong: not timed")


def _torch(name: str, values: np.ndarray, encode: bool) -> dict[str, Timer]:
    torch = peers.torch()
    if torch is None:
        return {}
    wide = torch.from_numpy(values)
    narrow = wide.to(getattr(torch, name))
    source, out = (wide, narrow) if encode else (narrow, torch.empty_like(wide))
    return {"torch": timed(lambda: out.copy_(source))}
