"""float32 to and from 16 bits on the device."""

from __future__ import annotations

from collections.abc import Iterator

from ..rows import Options, Row
from .flat import flat_rows


def rows(options: Options) -> Iterator[Row]:
    """f32→f16, f32→bf16 and back, at every size."""
    return flat_rows(options, "convert", ("float16", "bfloat16"))
