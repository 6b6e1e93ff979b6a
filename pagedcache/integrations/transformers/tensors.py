"""Keys and values that stay in the pages until somebody asks for them.

Where the attention function reads the pages itself, ``update`` has nothing to gather. It returns a
pair of stand-ins instead: tensors of the right shape, dtype and device without memory. The
attention function ``"pagedcache"`` recognises them; any other torch function that is given one gets
the gathered values, so that a model may do with its keys what it likes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from pagedcache.errors import InvalidArgumentError
from pagedcache.integrations.transformers.rows import Rows

# What can be told without the values: asked of the stand-in itself.
_TOLD = {
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_cuda")
} | {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.stride}

# What each float format holds without rounding; a quantised one holds nothing so.
_HELD: dict[str, tuple[torch.dtype, ...]] = {
    "float32": (torch.float32, torch.float16, torch.bfloat16),
    "float16": (torch.float16,),
    "bfloat16": (torch.bfloat16,),
}


class Pages:
    """One layer's K and V of positions 0 … ``end`` of every row, in the pages.

    ``starts``: first position of each row that exists (left padding), None for 0.
    """

    __slots__ = ("_epoch", "_pair", "device", "dtype", "end", "layer", "rows", "starts")

    def __init__(self, rows: Rows, layer: int, plan: Any, like: torch.Tensor) -> None:
        self.rows, self.layer, self.end, self.starts = rows, layer, plan.end, plan.starts
        self.dtype, self.device = like.dtype, like.device
        self._epoch = rows.epoch
        self._pair: tuple[torch.Tensor, torch.Tensor] | None = None

    def gathered(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as ordinary tensors ``[rows, num_kv_heads, end, head_dim]``, gathered once."""
        if self._pair is None:
            if self.rows.epoch != self._epoch:
                raise InvalidArgumentError(
                    "keys or values of an earlier forward pass are used after the cache went on; "
                    "use them within the pass, or another attn_implementation"
                )
            self._pair = gather(self.rows, self.layer, self.end, self.dtype, self.device)
        return self._pair


class PagedTensor(torch.Tensor):
    """A stand-in for the keys (``which`` 0) or values (1) of ``pages``."""

    pages: Pages
    which: int

    @staticmethod
    def __new__(cls, pages: Pages, which: int) -> PagedTensor:
        spec = pages.rows.pool.spec
        shape = (len(pages.rows.seqs), spec.num_kv_heads, pages.end, spec.head_dim)
        self: PagedTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=pages.dtype, device=pages.device
        )
        self.pages, self.which = pages, which
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _TOLD:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*tree_map(_values, args), **tree_map(_values, kwargs or {}))

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*tree_map(_values, args), **tree_map(_values, kwargs or {}))


def _values(x: Any) -> Any:
    return x.pages.gathered()[x.which] if type(x) is PagedTensor else x


def stand_ins(rows: Rows, layer: int, plan: Any, like: torch.Tensor) -> tuple[Any, Any]:
    """Keys and values of one layer that ``plan`` reads from the pages."""
    pages = Pages(rows, layer, plan, like)
    return PagedTensor(pages, 0), PagedTensor(pages, 1)


def gather(
    rows: Rows, layer: int, end: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of positions 0 … ``end`` as tensors ``[rows, num_kv_heads, end, head_dim]``."""
    k, v = _room(rows, end, dtype, device)
    _read(rows, layer, k, v)
    return k, v


def joined(
    rows: Rows, layer: int, start: int, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of positions 0 … ``start`` as they are stored, and behind them ``key`` and ``value``
    (``[rows, num_kv_heads, new, head_dim]``) as they are; no copy where ``start`` is 0.

    Without gradient, like everything else that comes from the cache.
    """
    if not start:
        return key.detach(), value.detach()
    k, v = _room(rows, start + key.shape[2], key.dtype, key.device)
    _read(rows, layer, k[:, :, :start], v[:, :, :start])
    k[:, :, start:], v[:, :, start:] = key.detach(), value.detach()
    return k, v


def _room(rows: Rows, end: int, dtype: torch.dtype, device: torch.device) -> Any:
    spec = rows.pool.spec
    shape = (len(rows.seqs), spec.num_kv_heads, end, spec.head_dim)
    return tuple(torch.empty(shape, dtype=dtype, device=device) for _ in range(2))


def _read(rows: Rows, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
    """Fill both from position 0 on."""
    stream = rows.stream()
    for row, seq in enumerate(rows.seqs):
        out = (k[row].transpose(0, 1), v[row].transpose(0, 1))
        seq.gather(layer, 0, k.shape[2], out=out, stream=stream)


def holds(spec: Any, dtype: Any) -> bool:
    """Whether pages give back every finite K and V of this torch dtype as they were written."""
    formats = (spec.k_format, spec.v_format)
    return all(dtype in _HELD.get(kv_format.name, ()) for kv_format in formats)


def flat(x: torch.Tensor) -> torch.Tensor:
    """``[rows, heads, new, head_dim]`` as ``[rows * new, heads, head_dim]``, a view where it can
    be one."""
    rows, heads, new, dim = x.shape
    if new == 1:
        return x[:, :, 0]
    if rows == 1:
        return x[0].transpose(0, 1)
    return x.transpose(1, 2).reshape(rows * new, heads, dim)
