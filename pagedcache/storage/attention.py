"""What a call of attention is made of, on every device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How queries attend; see ``PagedKVCache.attend``. All checked."""

    scale: float
    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None


@dataclass(frozen=True, slots=True)
class AttentionArrays:
    """Arrays of one call, checked, as the storage takes them."""

    q: Any
    """``[total_q, num_q_heads, head_dim]``"""
    out: Any
    """The same; to be filled."""
    lse: Any
    """float32 ``[total_q, num_q_heads]``, contiguous, to be filled; or None."""
    sinks: Any
    """float32 ``[num_q_heads]``, contiguous; or None."""
    result: Any
    """What the caller gets: the ``out`` given, or an array of q's kind over the same memory."""
    result_lse: Any
    """What the caller gets for ``lse``; None where it is."""
