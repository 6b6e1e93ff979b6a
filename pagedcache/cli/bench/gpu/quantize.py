"""Quantising on the device, and back."""

from __future__ import annotations

from collections.abc import Iterator

from pagedcache.formats import FORMATS

from ..rows import Options, Row
from .flat import flat_rows


def rows(options: Options) -> Iterator[Row]:
    """Every quantised format of the options at every size, under "saturate"."""
    names = [name for name in options.formats if FORMATS[name].is_quantized]
    return flat_rows(options, "quantize", names)
