"""The mask of ``attn_implementation="pagedcache"``, and how it tells a cache to keep its pages.

transformers asks the cache for its lengths and then, in the same thread, the mask function of the
attention implementation in use for a mask. So a cache that hears from this function knows, before
the first layer runs, that attention is going to read its pages, and with which padding. A mask that
pages cannot express (a window, packed sequences, holes, two-way attention) is made as for
``"sdpa"``, and keys and values are gathered for the layers that get it. So it is where tokens are
to attend to each other's keys and values as computed (``exact_prompts``), which lossy pages do not
hold.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

from pagedcache.integrations.transformers.rows import Rows
from pagedcache.integrations.transformers.tensors import holds

Array = np.ndarray[Any, Any]


class Plan(NamedTuple):
    """What attention of one forward pass reads: keys ``starts[row] … end`` of every row."""

    end: int
    starts: list[int] | None


class _Asked(threading.local):
    """The rows that told their lengths last, in this thread."""

    rows: Any = None
    plan: Plan | None = None  # what the last None for a mask stands for


_asked = _Asked()


def asked_for_lengths(rows: Rows, end: int) -> None:
    """Called by a cache that is asked for the lengths of a mask, ``end`` keys: a forward pass
    begins, or wants another mask. A plan stays: whoever got None for a mask relies on it."""
    if rows.plan is not None and rows.plan.end != end:
        rows.plan = None
    _asked.rows = ref(rows)


def answered() -> None:
    """The forward pass goes on; a mask made from now on belongs to another cache."""
    _asked.rows = None


def paged_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """The mask function registered for ``"pagedcache"``.

    Gives None, and the rows a plan, where they attend to their pages; else the mask of ``"sdpa"``.
    """
    rows = _asked.rows and _asked.rows()
    _asked.rows = _asked.plan = None
    if rows is not None and not args:
        plan = _plan(rows, kwargs)
        if plan is not None and not _computed(rows, plan, kwargs.get("dtype")):
            rows.plan = _asked.plan = plan
            return None
    mask: torch.Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)
    return mask


def _plan(rows: Rows, asked: dict[str, Any]) -> Plan | None:
    plain = (
        asked.get("mask_function") is causal_mask_function
        and asked.get("allow_is_causal_skip", True)
        and asked.get("kv_offset", 0) == 0
    )
    end, padding = asked.get("kv_length"), asked.get("attention_mask")
    if not plain or not isinstance(end, int):
        return None
    if padding is None:
        rows.see_mask(None)
        return Plan(end, None)
    if padding.ndim != 2 or padding.shape[1] < end:
        return None
    mask = padding[:, :end].cpu().numpy() != 0
    if mask.all():
        rows.see_mask(None)
        return Plan(end, None)
    rows.see_mask(mask)
    starts = left_padding(mask)
    return None if starts is None else Plan(end, starts)


def _computed(rows: Rows, plan: Plan, dtype: Any) -> bool:
    """Whether the new tokens read K and V (of ``dtype``) that the pages do not hold as they are."""
    return rows.as_computed(plan.end - rows.length) and not holds(rows.pool.spec, dtype)


def mask_of_none(query: torch.Tensor, key: torch.Tensor, window: int | None) -> Any:
    """The mask that None stood for, for a model that made other keys of those it got; None where
    it stands for itself.

    ``query``: ``[rows, heads, new, head_dim]``; ``key``: ``[rows, heads, keys, head_dim]``.
    """
    plan = _asked.plan
    if plan is None or plan.end != key.shape[2]:
        return None
    return dense_mask(query, plan.end, plan.starts, window)


def dense_mask(
    query: torch.Tensor, end: int, starts: list[int] | None, window: int | None
) -> torch.Tensor | None:
    """``causal_mask`` for queries over ordinary tensors; None where attention without a mask means
    the same: all keys for one query, or the causal ones for as many queries as keys."""
    count = query.shape[2]
    if starts is None and window is None and count in (1, end):
        return None
    return causal_mask(count, end, starts, window, query.device)


def left_padding(mask: Array) -> list[int] | None:
    """Where each row (bool ``[rows, n]``) starts, if all masked positions lie before that and
    every row has a token."""
    starts = mask.argmax(1)
    if (mask.sum(1) != mask.shape[1] - starts).any() or not mask.any(1).all():
        return None
    return [int(start) for start in starts]


def causal_mask(
    count: int,
    end: int,
    starts: list[int] | None,
    window: int | None,
    device: torch.device,
) -> torch.Tensor:
    """What a plan means, as a bool mask ``[rows or 1, 1, count, end]``, True where a query sees."""
    at = torch.arange(end - count, end, device=device)[:, None]
    key = torch.arange(end, device=device)[None, :]
    mask = key <= at
    if window is not None:
        mask = mask & (at - key < window)
    if starts is None:
        return mask[None, None]
    first = torch.tensor(starts, device=device)[:, None, None, None]
    return mask[None, None] & (key >= first)
