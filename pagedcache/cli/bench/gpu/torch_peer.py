"""The same work by PyTorch's own indexing, where it is installed and sees the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...output import note
from .. import peers
from ..store import BLOCK_SIZE, HEAD_DIM, HEADS
from ..timing import Timer
from .machine import Machine

Pair = tuple[Any, Any]


def store_peer(machine: Machine, cache: Any, slots: np.ndarray, source: Any) -> dict[str, Timer]:
    """Indexed assignment of rows of ``source`` to slabs like the cache's."""

    def make(torch: Any, where: str) -> Callable[[], None]:
        slabs, hnd = _slabs(torch, where, cache), cache.spec.layout == "HND"
        shape = (len(slots), HEADS, HEAD_DIM)
        given = [torch.ones(shape, dtype=getattr(torch, source.name), device=where)] * 2
        flat = torch.from_numpy(np.array(slots)).to(where)
        blocks, offsets = flat // BLOCK_SIZE, flat % BLOCK_SIZE

        def scatter() -> None:
            for slab, rows in zip(slabs, given, strict=True):
                at = (blocks, slice(None), offsets) if hnd else (blocks, offsets)
                slab[at] = rows.to(slab.dtype)

        return scatter

    return _timer(machine, make)


def gather_peer(machine: Machine, cache: Any, table: np.ndarray, dtype: Any) -> dict[str, Timer]:
    """``index_select`` of the blocks, put in token order, as ``dtype``."""

    def make(torch: Any, where: str) -> Callable[[], None]:
        slabs, hnd = _slabs(torch, where, cache), cache.spec.layout == "HND"
        ids = torch.from_numpy(table.astype(np.int64)).to(where)
        shape = (len(table), BLOCK_SIZE, HEADS, HEAD_DIM)
        out = torch.empty(shape, dtype=getattr(torch, dtype.name), device=where)

        def select() -> None:
            for slab in slabs:
                blocks = slab.index_select(0, ids)
                out.copy_(blocks.transpose(1, 2) if hnd else blocks)

        return select

    return _timer(machine, make)


def _slabs(torch: Any, where: str, cache: Any) -> Pair:
    spec = cache.spec
    inner = (HEADS, BLOCK_SIZE) if spec.layout == "HND" else (BLOCK_SIZE, HEADS)
    shape = (cache.num_blocks, *inner, HEAD_DIM)
    kind = getattr(torch, spec.k_format.name)
    return torch.zeros(shape, dtype=kind, device=where), torch.zeros(
        shape, dtype=kind, device=where
    )


def _timer(
    machine: Machine, make: Callable[[Any, str], Callable[[], None]]
) -> dict[str, Timer]:
    torch = peers.torch()
    if torch is None:
        return {}
    try:
        if not torch.cuda.is_available():
            return {}
        work = make(torch, machine.name)
        work()
        torch.cuda.synchronize()
    except Exception as error:  # no room for it, or no kernels for this GPU
        note(f"peer torch: not used ({type(error).__name__}: {error})")
        return {}
    return {"torch": machine.timer(work)}
