"""Seeing the tokens that a model is fed: what makes generated text reusable."""

from __future__ import annotations

from typing import Any, TypeGuard
from weakref import ReferenceType

import torch

from pagedcache.errors import InvalidArgumentError
from pagedcache.integrations.transformers.prompts import as_ids
from pagedcache.integrations.transformers.rows import Rows

# How arguments of a forward pass begin that bring images, video or audio.
_CONTENT = ("pixel_values", "image_", "video_", "audio_", "input_features", "input_values", "mm_en")


def watch(model: Any, rows: ReferenceType[Rows]) -> Any:
    """Tell ``rows``, before each forward pass of ``model`` with their cache, the tokens it sees.

    Returns the handle that removes the hook. It keeps neither the rows nor the model alive.
    """

    def before(
        module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        watched = rows()
        if watched is None or not _uses(watched, (*args, *kwargs.values())):
            return None
        changed = _without_cached(watched, kwargs)
        _tell(watched, args, kwargs if changed is None else changed)
        return None if changed is None else (args, changed)

    return model.register_forward_pre_hook(before, with_kwargs=True)


def _tell(rows: Rows, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell the rows the tokens and the mask of a forward pass."""
    ids, mask = kwargs.get("input_ids", args[0] if args else None), kwargs.get("attention_mask")
    tokens = None
    if _are_ids(ids):
        tokens = as_ids(ids)
    if _has_content(kwargs) and rows.prompt.extras is None:
        if rows.prompt.length:
            raise InvalidArgumentError(
                "images, video or audio stand behind tokens that PagedCache was opened with: "
                "name them by extra_keys, or give no input_ids"
            )
        rows.expect(None, lambda: None)
    elif mask is None:
        rows.expect(tokens, lambda: None)
    elif isinstance(mask, torch.Tensor) and mask.ndim == 2:
        rows.expect(tokens, lambda: mask.cpu().numpy() != 0)
    else:  # a mask that is no padding: the same tokens give other values elsewhere
        rows.expect(None, lambda: None)


def _without_cached(rows: Rows, kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Keyword arguments less the tokens that the cache holds, where all are fed to it again.

    Assisted decoding of transformers 5.4 … 5.24 does that with a cache that was filled before, also
    with one of its own. None where nothing has to change.
    """
    ids, seen = kwargs.get("input_ids"), rows.length
    if not seen or not _are_ids(ids) or not _is_whole_text(ids, kwargs, seen):
        return None
    rows.names.compare(rows.seqs, as_ids(ids), 0, "the model is fed")
    changed = {**kwargs, "input_ids": ids[:, seen:]}
    positions = kwargs.get("position_ids")
    if isinstance(positions, torch.Tensor) and positions.shape[-1] == ids.shape[1]:
        changed["position_ids"] = positions[..., seen:]
    return changed


def _is_whole_text(ids: torch.Tensor, kwargs: dict[str, Any], seen: int) -> bool:
    """Whether tokens are the text from its start on, not what follows the ``seen`` tokens.

    A mask tells it, being no longer than the tokens, as in ``generate``; without one, the
    position of the last token.
    """
    count = ids.shape[1]
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if count <= seen:
        return False
    if isinstance(mask, torch.Tensor):
        return mask.shape == ids.shape
    if not isinstance(positions, torch.Tensor) or positions.shape[-1] != count:
        return False
    return int(positions.flatten()[-1]) == count - 1


def _are_ids(ids: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(ids, torch.Tensor) and ids.ndim == 2 and not ids.is_floating_point()


def _has_content(kwargs: dict[str, Any]) -> bool:
    """Whether the forward pass is given what tokens alone do not tell apart."""
    return any(name.startswith(_CONTENT) and kwargs[name] is not None for name in kwargs)


def _uses(rows: Rows, values: tuple[Any, ...]) -> bool:
    return any(getattr(value, "_rows", None) is rows for value in values)
