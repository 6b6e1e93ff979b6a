"""One line of the table of ``perplexity.py``: a format with its settings, read from a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pagedcache as pc

_SETTINGS = ("kv", "k", "v", "block", "open", "chunk", "reads")
_READS = {"stored": False, "computed": True}


@dataclass(frozen=True)
class Case:
    """``label`` is the text as it was given; ``chunk``: tokens per forward pass, 0 for a window;
    ``exact``: what ``exact_prompts`` of a ``PagedCache`` is."""

    label: str
    formats: dict[str, str]
    block_size: int
    open_blocks: str | None
    chunk: int
    exact: bool

    def spec(self, num_layers: int, num_kv_heads: int, head_dim: int) -> pc.CacheSpec:
        """What a cache of this format stores for a model of that geometry."""
        options: dict[str, Any] = dict(self.formats)
        if self.open_blocks is not None:
            options["open_blocks"] = self.open_blocks
        return pc.CacheSpec(num_layers, num_kv_heads, head_dim, self.block_size, **options)


def parse_case(
    text: str, block_size: int = 16, open_blocks: str | None = None, chunk: int = 0
) -> Case:
    """``q8_0``, ``k=q8,v=q4``, ``q4,open=float16,block=32,chunk=8``: see ``perplexity.py``.

    Raises ``ValueError`` (of which pagedcache's own errors are) for what no cache can have.
    """
    given: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals:
            name, value = "kv", name
        if name not in _SETTINGS or not value:
            raise ValueError(f"{text!r}: expected NAME or one of {_SETTINGS} = …, got {part!r}")
        if name in given:
            raise ValueError(f"{text!r}: {name} is given twice")
        given[name] = value
    formats = {f"{name}_format": given[name] for name in ("kv", "k", "v") if name in given}
    if not formats:
        raise ValueError(f"{text!r}: no format")
    chunk = _number(text, given.get("chunk", chunk), least=0)
    reads = given.get("reads", "computed" if chunk else "stored")
    if reads not in _READS:
        raise ValueError(f"{text!r}: reads must be one of {tuple(_READS)}, got {reads!r}")
    case = Case(
        text,
        formats,
        _number(text, given.get("block", block_size), least=1),
        # A default for all formats is nothing to those that have no use for it.
        given.get("open", open_blocks if _quantised(formats) else None),
        chunk,
        _READS[reads],
    )
    case.spec(1, 1, 32)  # refuses what no cache can have, before a model is loaded
    return case


def _quantised(formats: dict[str, str]) -> bool:
    return any(pc.get_format(name).is_quantized for name in formats.values())


def _number(text: str, value: str | int, least: int) -> int:
    try:
        number = int(value)
    except ValueError:
        raise ValueError(f"{text!r}: {value!r} is not a number") from None
    if number < least:
        raise ValueError(f"{text!r}: {number} is below {least}")
    return number
