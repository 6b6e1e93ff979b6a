"""Arrays of other libraries as NumPy arrays over the same memory; no library is imported for it.

NumPy reads most of them by itself. Tensors of torch need help: NumPy has no bfloat16 for them to
name, refuses one that requires a gradient, and has no word for one that lies on a GPU.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from pagedcache.errors import DeviceError, FormatError

Array = np.ndarray[Any, Any]


def is_tensor(x: Any) -> bool:
    """Whether ``x`` is a torch tensor; without torch loaded nothing is."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return isinstance(tensor, type) and isinstance(x, tensor)


def as_ndarray(x: Any, what: str, *, written: bool = False) -> Array:
    """``x`` as a NumPy array that shares its memory where it can be shared.

    ``written``: the array will be written to, which a tensor that requires a gradient must not be
    behind torch's back (:class:`FormatError`). Raises :class:`DeviceError` for memory that is not
    the CPU's, and what NumPy or torch raise (``TypeError``, ``ValueError``, ``RuntimeError``) for
    what is no array.
    """
    if is_tensor(x):
        return _from_tensor(x, what, written)
    if hasattr(x, "__cuda_array_interface__"):
        raise DeviceError("memory of the CPU", "memory of a CUDA device", what)
    return np.asarray(x)


def _from_tensor(x: Any, what: str, written: bool) -> Array:
    if x.device.type != "cpu":
        raise DeviceError("a tensor on cpu", f"one on {x.device}", what)
    if x.requires_grad:
        if written:
            raise FormatError("a tensor without gradient (x.detach())", "one that needs it", what)
        x = x.detach()
    torch = sys.modules["torch"]
    if x.dtype != torch.bfloat16:
        return np.asarray(x.numpy())
    import ml_dtypes  # not a dtype of NumPy itself

    return np.asarray(x.view(torch.int16).numpy()).view(ml_dtypes.bfloat16)
