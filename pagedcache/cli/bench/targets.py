"""What the library wants to reach, in one table, and which rows each line of it judges.

A target holds for one run; a figure of several runs meets it when each of them does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

EIGHT = ("q8", "q8_0")
FOUR = ("q4", "q4_0", "q4_1", "q4k")

Metric = Literal["share", "ratio", "ns"]


@dataclass(frozen=True)
class Target:
    """``bound`` for one metric of all rows of ``op`` whose variant matches ``variant`` whole.

    ``share``: per cent of the copy (or read), at least. ``ratio``: the time of a peer whose name
    begins with ``peer`` over ours, at least. ``ns``: nanoseconds per item, at most.
    """

    what: str
    op: str
    variant: str
    metric: Metric
    bound: float
    peer: str = ""
    formats: tuple[str, ...] = ()

    def judges(self, row: Mapping[str, Any]) -> bool:
        """Whether the row has a figure that this target is about."""
        return (
            row["op"] == self.op
            and (not self.formats or row["format"] in self.formats)
            and re.fullmatch(self.variant, row["variant"]) is not None
            and (self.metric != "share" or row["pct_of_copy"] is not None)
            and (self.metric != "ratio" or (row["peer"] or "").startswith(self.peer))
        )

    def figure(self, row: Mapping[str, Any]) -> float:
        """The row's figure, in the unit of ``bound``."""
        column = {"share": "pct_of_copy", "ratio": "peer_ratio", "ns": "ns_per_item"}[self.metric]
        return float(row[column])

    def met(self, figure: float) -> bool:
        """Exactly: 94.9 % is no 95 %."""
        return figure <= self.bound if self.metric == "ns" else figure >= self.bound

    @property
    def text(self) -> str:
        """The bound with its unit, such as ``≥ 95 %``."""
        if self.metric == "share":
            return f"≥ {self.bound:g} %"
        return f"≥ {self.bound:g}×" if self.metric == "ratio" else f"≤ {nanoseconds(self.bound)}"


def nanoseconds(value: float) -> str:
    """With three digits and a unit that suits them."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} ns"


_WIDE = r"f32→.*"  # with any count of threads
_BACK = r".*→f32.*"
_ONE = r"[^,]*"  # of flat arrays, on one thread
_DECODE = r"decode, \d+ keys, .*"
_SINGLE = r"decode, \d+ keys, 1 thread"

CPU: tuple[Target, ...] = (
    Target("conversion", "convert", ".*", "share", 95),
    Target("conversion", "convert", ".*", "ratio", 1, "torch"),
    Target("conversion", "convert", _ONE, "ratio", 1, "ggml"),
    Target("f32→f16", "convert", r"f32→float16", "ratio", 8, "numpy"),
    Target("f16→f32", "convert", r"float16→f32", "ratio", 8, "numpy"),
    Target("quantise", "quantize", _WIDE, "share", 85),
    Target("quantise to 8 bits", "quantize", r"f32→[^,]*", "ratio", 1.5, "ggml", EIGHT),
    Target("quantise to 4 bits", "quantize", r"f32→[^,]*", "ratio", 5, "ggml q4_0", FOUR),
    Target("dequantise", "quantize", _BACK, "share", 90),
    Target("dequantise 8 bits", "quantize", r"[^,]*→f32", "ratio", 1, "ggml", EIGHT),
    Target("dequantise 4 bits", "quantize", r"[^,]*→f32", "ratio", 1.5, "ggml", FOUR),
    Target("store 2,048 tokens", "store", r".* prefill 2048.*", "share", 80),
    Target("store f32→bf16", "store", r"float32, .* prefill 2048.*", "ratio", 3, "vllm",
           ("bfloat16",)),
    Target("store a token of 256 sequences", "store", r".* decode 256.*", "ratio", 3, "vllm"),
    Target("a call of store", "store", r"one token.*", "ns", 2_000),
    Target("gather", "gather", ".*", "share", 85),
    Target("allocate + free one block", "pool", r"allocate \+ free one", "ns", 300),
    Target("allocate + free one block", "pool", r"allocate \+ free one", "ratio", 6, "vllm"),
    Target("allocate + free 2,048", "pool", r"allocate \+ free 2048", "ns", 15),
    Target("allocate + free 2,048", "pool", r"allocate \+ free 2048", "ratio", 20, "vllm"),
    Target("open 32,768 tokens, full hit", "prefix", r"open, full hit", "ns", 300_000),
    Target("open 32,768 tokens, full hit", "prefix", r"open, full hit", "ratio", 25, "vllm"),
    Target("open cold and commit", "prefix", r"open cold \+ commit", "ratio", 20, "vllm"),
    Target("free after commit", "prefix", r"free after commit", "ratio", 20, "vllm"),
    Target("decode step, per sequence of 256", "prefix", r"decode step", "ns", 60_000 / 256),
    Target("decode step of 256 sequences", "prefix", r"decode step", "ratio", 25, "vllm"),
    Target("attention in 16 bits", "attend", _DECODE, "share", 75, "", ("float16", "bfloat16")),
    Target("attention in 8 bits", "attend", _SINGLE, "ratio", 1.6, "ours, bfloat16", EIGHT),
    Target("attention in 4 bits", "attend", _SINGLE, "ratio", 2, "ours, bfloat16", FOUR),
    Target("the same with up to 10^7 blocks", "pool", r"allocate \+ free 512", "ratio", 0.67,
           "ours, 1000 blocks"),
    Target("import pagedcache", "import", "import pagedcache", "ns", 150_000_000),
)  # fmt: skip

GPU: tuple[Target, ...] = (
    Target("quantise and dequantise", "quantize", ".*", "share", 85),
    Target("conversion", "convert", ".*", "share", 85),
    Target("store", "store", r"float32.*", "share", 85),
    Target("gather", "gather", ".*", "share", 85),
    Target("attention", "attend", r"decode, \d+ x (8192|\d{5,}) keys", "share", 80),
)


def targets_of(device: str) -> tuple[Target, ...]:
    """The targets on "cpu", or on any other device."""
    return CPU if device == "cpu" else GPU
