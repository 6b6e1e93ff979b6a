"""Which devices a cache can live on here, and arrays on their way there and back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def device_problem(device: str) -> str | None:
    """``None`` when a cache can be made on ``device``, else the reason why it cannot."""
    import pagedcache

    try:
        spec = pagedcache.CacheSpec(num_layers=1, num_kv_heads=1, head_dim=32)
        pagedcache.PagedKVCache(spec, 1, device=device).close()
    except Exception as error:
        # Any failure counts: a probe that raises would hide the reason it was asked for.
        reason = str(getattr(error, "reason", "")) or f"{type(error).__name__}: {error}"
        return f"not available: {reason}"
    return None


def host(array: Any) -> NDArray[Any]:
    """An array that a cache gave out, in the CPU's memory: itself, or a copy from its device."""
    return np.asarray(array)


def upload(rows: NDArray[Any], device: str) -> Any:
    """The same rows in memory of a CUDA device, with the same strides."""
    from pagedcache._cuda.arrays import DeviceArray
    from pagedcache._cuda.driver import get_device
    from pagedcache._cuda.memory import DeviceMemory

    where = get_device(int(device.partition(":")[2] or 0))
    low, high = np.lib.array_utils.byte_bounds(rows) if rows.size else (0, 0)
    memory = DeviceMemory(where, max(high - low, 1), "rows of a check")
    if rows.size:
        where.call("pc_cuda_copy", memory.address, low, high - low, None)
        where.call("pc_cuda_stream_synchronize", None)
    first = rows.__array_interface__["data"][0] - low if rows.size else 0
    return DeviceArray(
        memory.address + first, rows.shape, rows.strides, rows.dtype, where, owner=memory
    )
