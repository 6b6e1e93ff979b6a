"""What a call of attention is made of, on every device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pagedcache.errors import ShapeError
from pagedcache.spec import CacheSpec


class AttentionOptions(NamedTuple):
    """How queries attend; see ``PagedKVCache.attend``. All checked."""

    scale: float
    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None


class AttentionBatch(NamedTuple):
    """Whose keys and values are attended to; int64 ``[sequences]`` but where it says otherwise."""

    places: Any
    """int32, of all sequences in token order."""
    indptr: Any
    """One more than sequences: ``places[indptr[i]:indptr[i + 1]]`` hold the positions of sequence
    i from 0 on."""
    lengths: Any
    """Keys."""
    q_lens: Any
    """Queries: the last positions."""
    starts: Any
    """The first key that exists."""


class AttentionArrays(NamedTuple):
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


def num_q_heads(spec: CacheSpec, shape: Sequence[int]) -> int:
    """Query heads of a ``q`` ``[total_q, heads, head_dim]`` or ``[total_q, heads * head_dim]``.

    Raises :class:`ShapeError` for any other shape.
    """
    heads, dim = spec.num_kv_heads, spec.head_dim
    if len(shape) == 2:
        found, left = divmod(shape[1], dim)
    elif len(shape) == 3:
        found, left = shape[1], shape[2] - dim
    else:
        found, left = 0, 1
    if left or found < 1 or found % heads:
        raise ShapeError(
            f"[total_q, num_q_heads, {dim}] or [total_q, num_q_heads * {dim}] with num_q_heads a "
            f"multiple of {heads} (num_kv_heads)",
            list(shape),
            "q",
        )
    return found
