"""One model layer of a ``PagedCache``, as transformers 4.57 … 5.24 want it.

All layers share the same rows, so what changes rows (``crop``, ``reorder_cache``, …) is done once,
by layer 0; a loop over all layers, as ``Cache`` makes it, has the same effect as one call.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from pagedcache.errors import FormatError, InvalidArgumentError, InvalidPositionError, ShapeError
from pagedcache.integrations.transformers.masks import answered, asked_for_lengths
from pagedcache.integrations.transformers.rows import Rows
from pagedcache.integrations.transformers.tensors import flat, gather, joined, stand_ins


class PagedLayer(CacheLayerMixin):
    """K and V of one layer, in the pages of a pool."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, rows: Rows, index: int) -> None:
        # The base class would assign tensors to what are properties here.
        self.rows, self.index = rows, index
        spec = rows.pool.spec
        self._heads, self._dim = spec.num_kv_heads, spec.head_dim
        self._dtype, self._device = torch.float32, torch.device("cpu")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new tokens, ``[rows, num_kv_heads, new, head_dim]`` each, and return all keys and
        values of the layer: gathered (with ``exact_prompts`` the new ones of a prompt as they were
        given), or as stand-ins where attention reads the pages."""
        shape = key_states.shape
        if (
            len(shape) != 4
            or shape != value_states.shape
            or shape[1] != self._heads
            or shape[3] != self._dim
        ):
            self._refuse(key_states, value_states)
        rows, index = self.rows, self.index
        step = rows.step
        if step is None or step.written[index]:
            answered()
            step = rows.begin(shape[0], shape[2])
            if rows.plan is not None and rows.plan.end != step.end:
                rows.abandon()
                raise ShapeError(
                    f"{rows.length} + new tokens, as the mask of this forward pass has",
                    f"{shape[2]} new ones",
                    f"layer {index}",
                )
        elif step.count != shape[2] or len(rows.seqs) != shape[0]:
            raise ShapeError(
                f"{len(rows.seqs)} rows of {step.count} tokens, as the layers before",
                f"{shape[0]} rows of {shape[2]}",
                f"layer {index}",
            )
        self._dtype, self._device = key_states.dtype, key_states.device
        end, plan = step.end, rows.plan
        rows.store(step, index, flat(key_states), flat(value_states))
        if plan is not None:
            return stand_ins(rows, index, plan, key_states)
        if rows.as_computed(step.count):
            return joined(rows, index, step.start, key_states, value_states)
        return gather(rows, index, end, key_states.dtype, key_states.device)

    def _refuse(self, key: torch.Tensor, value: torch.Tensor) -> None:
        raise ShapeError(
            f"K and V of [rows, {self._heads}, new, {self._dim}] in every layer, as the spec of "
            "the pool says (spec_for(model) makes it; layers that differ are not supported)",
            f"{list(key.shape)} and {list(value.shape)}",
            f"layer {self.index}",
        )

    # ---- what it shows -------------------------------------------------------------------

    def get_seq_length(self) -> int:
        """Tokens of the layer, those of a forward pass under way included."""
        step = self.rows.step
        if step is not None and step.written[self.index]:
            return step.end
        return self.rows.length

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """(keys, offset) of a mask: an int (5.x), or the new tokens' positions (4.57)."""
        new = query_length if isinstance(query_length, int) else _new_tokens(query_length)
        end = self.rows.length + new
        asked_for_lengths(self.rows, end)
        return end, 0

    def get_max_length(self) -> int:
        """-1: no maximum but the pool's size."""
        return -1

    def get_max_cache_shape(self) -> int:
        """-1, as above."""
        return -1

    @property
    def keys(self) -> torch.Tensor | None:
        """All keys, gathered: ``[rows, num_kv_heads, tokens, head_dim]``; None before the first."""
        return self._gathered(0)

    @property
    def values(self) -> torch.Tensor | None:
        """All values, as ``keys``."""
        return self._gathered(1)

    def _gathered(self, which: int) -> torch.Tensor | None:
        length = self.get_seq_length()
        if not length:
            return None
        return gather(self.rows, self.index, length, self._dtype, self._device)[which]

    @property
    def is_initialized(self) -> bool:
        """Whether there are rows."""
        return bool(self.rows.seqs)

    @property
    def max_batch_size(self) -> int:
        """Rows, -1 before there are any."""
        return len(self.rows.seqs) or -1

    batch_size = max_batch_size

    @property
    def max_cache_len(self) -> int:
        """-1, as ``get_max_length``."""
        return -1

    def __repr__(self) -> str:
        return f"PagedLayer({self.index})"

    # ---- what changes the rows: layer 0 does it for all ----------------------------------

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the pool was allocated when it was made."""

    def crop(self, max_length: Any) -> None:
        """Keep ``max_length`` tokens (above 0), or remove ``-max_length`` (0 or below)."""
        if self.index:
            return
        number = int(max_length)
        if number <= 0 and -number > self.rows.length:
            raise InvalidPositionError(number, self.rows.length, "more tokens to remove than are")
        self.rows.crop(number if number > 0 else self.rows.length + number)

    def reorder_cache(self, beam_idx: Any) -> None:
        """Row i becomes what row ``beam_idx[i]`` was; a table swap, no bytes move."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Fork each row, so that ``repeats`` of it lie side by side."""
        if self.index == 0 and self.rows.seqs:
            times = int(repeats)
            if times < 1:
                raise InvalidArgumentError(f"repeats must be 1 or more, got {times}")
            rows = range(len(self.rows.seqs))
            self.rows.select([row for row in rows for _ in range(times)])

    def batch_select_indices(self, indices: Any) -> None:
        """Keep these rows, in this order; indices, or a mask of bools."""
        if self.index == 0 and self.rows.seqs:
            chosen = torch.as_tensor(indices)
            if chosen.dtype == torch.bool:
                chosen = chosen.nonzero().squeeze(1)
            self.rows.select([int(row) for row in chosen.tolist()])

    def reset(self) -> None:
        """Forget every token and row."""
        if self.index == 0:
            self.rows.reset()

    def offload(self) -> None:
        """Refused: pages stay where the pool is."""
        raise FormatError("a cache without offloading", "offloading", "PagedCache")

    prefetch = offload


def _new_tokens(positions: Any) -> int:
    """How many positions a tensor names; a tensor without dimensions is a number itself."""
    return int(positions.shape[0]) if positions.ndim else int(positions)
