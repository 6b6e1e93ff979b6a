"""NumPy arrays with a device array's address and shape, for arithmetic on addresses only.

Whether two arrays share a byte, lie densely or are aligned is decided for device memory by the
same code as for the CPU's. The memory behind a shadow is never looked at: reading one value of it
would fault.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedcache.storage.slabs import Array


class _Address:
    __slots__ = ("__array_interface__", "array")

    def __init__(self, array: Any) -> None:
        self.array = array  # kept alive with the shadow
        self.__array_interface__ = {
            "version": 3,
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"=u{array.dtype.itemsize}".replace("=u1", "|u1"),
            "data": (array.address, array.readonly),
        }


def shadow(array: Any) -> Array:
    """The shadow of a ``DeviceArray``: same address, shape, strides, dtype and writability."""
    integers = np.asarray(_Address(array))
    return integers if integers.dtype == array.dtype else integers.view(array.dtype)


def shadowed(array: Array) -> Any:
    """The ``DeviceArray`` of a shadow."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base.array
