"""Seeing the tokens that a model is fed: what makes generated text reusable."""

from __future__ import annotations

from typing import Any
from weakref import ReferenceType

import torch

from pagedcache.integrations.transformers.prompts import as_ids
from pagedcache.integrations.transformers.rows import Rows


def watch(model: Any, rows: ReferenceType[Rows]) -> Any:
    """Tell ``rows``, before each forward pass of ``model`` with their cache, the tokens it sees.

    Returns the handle that removes the hook. It keeps neither the rows nor the model alive.
    """

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        watched = rows()
        if watched is None or not _uses(watched, (*args, *kwargs.values())):
            return
        ids, mask = kwargs.get("input_ids", args[0] if args else None), kwargs.get("attention_mask")
        tokens = None
        if isinstance(ids, torch.Tensor) and ids.ndim == 2 and not ids.is_floating_point():
            tokens = as_ids(ids)
        if mask is None:
            watched.expect(tokens, lambda: None)
        elif isinstance(mask, torch.Tensor) and mask.ndim == 2:
            watched.expect(tokens, lambda: mask.cpu().numpy() != 0)
        else:  # a mask that is no padding: the same tokens give other values elsewhere
            watched.expect(None, lambda: None)

    return model.register_forward_pre_hook(before, with_kwargs=True)


def _uses(rows: Rows, values: tuple[Any, ...]) -> bool:
    return any(getattr(value, "_rows", None) is rows for value in values)
