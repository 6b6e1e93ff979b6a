"""``attn_implementation="pagedcache"``: attention that reads the pages, and what it falls back to.

The attention function gets stand-ins for keys and values from a ``PagedCache`` that keeps its
pages (``tensors.py``), and ordinary tensors from any other cache, from none, or for a prompt whose
tokens attend to each other as computed. Grouped-query heads, scaling, ``softcap``, attention sinks
and a window are honoured on both ways.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from pagedcache.errors import InvalidArgumentError
from pagedcache.integrations.transformers.masks import (
    causal_mask,
    dense_mask,
    mask_of_none,
    paged_mask,
)
from pagedcache.integrations.transformers.tensors import PagedTensor, Pages, flat

NAME = "pagedcache"


def register() -> None:
    """Make ``attn_implementation="pagedcache"`` known to transformers.

    Importing ``pagedcache.integrations.transformers`` does it; calling it again changes nothing.
    """
    AttentionInterface.register(NAME, paged_attention)
    AttentionMaskInterface.register(NAME, paged_mask)


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer: ``query`` ``[rows, heads, new, head_dim]`` -> ``(output, None)``,
    output ``[rows, new, heads, head_dim]`` of the query's dtype.

    The form is that of transformers' ``AttentionInterface``. With ``dropout``, a mask, a
    ``position_bias``, or pages on another kind of device, stand-ins are gathered and attention is
    computed on them.
    """
    window = kwargs.get("sliding_window")
    pages = _pages(key, value)
    if pages is None:
        # A model may change keys or values behind the cache; the mask was left to the pages.
        if attention_mask is None and getattr(module, "is_causal", True):
            attention_mask = mask_of_none(query, key, window)
        return _dense(module, query, key, value, attention_mask, scaling, dropout, kwargs), None
    if (
        attention_mask is None
        and not dropout
        and kwargs.get("position_bias") is None
        and pages.rows.pool.layer_device(pages.layer).startswith(query.device.type)
    ):
        out = torch.empty(
            (query.shape[0], query.shape[2], query.shape[1], query.shape[3]),
            dtype=query.dtype,
            device=query.device,
        )
        _attend(pages, query, out, scaling, window, _soft_cap(kwargs), _sinks(kwargs))
        return out, None
    if attention_mask is None:
        attention_mask = dense_mask(query, pages.end, pages.starts, window)
    k, v = pages.gathered()
    return _dense(module, query, k, v, attention_mask, scaling, dropout, kwargs), None


def _pages(key: Any, value: Any) -> Pages | None:
    """The pages that both stand for, as they came from the cache."""
    if type(key) is not PagedTensor or type(value) is not PagedTensor:
        return None
    return key.pages if key.pages is value.pages and (key.which, value.which) == (0, 1) else None


def _attend(
    pages: Pages,
    query: torch.Tensor,
    out: torch.Tensor,
    scaling: float | None,
    window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    rows = pages.rows
    batch, new, heads, dim = out.shape
    rows.pool.attend(
        pages.layer,
        flat(query),
        rows.seqs,
        q_lens=[new] * batch,
        lengths=[pages.end] * batch,
        starts=pages.starts,
        scale=scaling,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        out=out.view(batch * new, heads, dim),
        stream=rows.stream(),
    )


def _soft_cap(kwargs: dict[str, Any]) -> float | None:
    return kwargs.get("softcap")


def _sinks(kwargs: dict[str, Any]) -> torch.Tensor | None:
    sinks = kwargs.get("s_aux")
    return None if sinks is None else sinks.detach().float()


def _dense(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Attention on ordinary tensors: that of ``"sdpa"``, with soft cap and sinks where asked."""
    cap, sinks = _soft_cap(kwargs), kwargs.get("s_aux")
    if cap is None and sinks is None:
        out: torch.Tensor = sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
        )[0]
        return out
    if kwargs.get("position_bias") is not None:
        raise InvalidArgumentError(
            'attn_implementation="pagedcache" takes a position_bias, or softcap and sinks, not '
            'both; use "eager"'
        )
    count, end = query.shape[2], key.shape[2]
    if mask is None:
        mask = causal_mask(count, end, None, None, query.device)
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.matmul(query, key.transpose(2, 3)).float() * scale
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(torch.float32).min)
    else:
        scores = scores + mask
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1)[..., :end].to(value.dtype)
    weights = torch.nn.functional.dropout(weights, dropout, training=dropout > 0)
    return torch.matmul(weights, value).transpose(1, 2).contiguous()
