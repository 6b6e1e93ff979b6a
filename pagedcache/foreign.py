"""Arrays of other libraries as NumPy arrays over the same memory; no library is imported for it.

NumPy reads most of them by itself. Tensors of torch need help: NumPy has no bfloat16 for them to
name, refuses one that requires a gradient, and has no word for one that lies on a GPU. What
speaks DLPack alone is read by a reader of our own, which knows bfloat16 too.
"""

from __future__ import annotations

import operator
import sys
from typing import Any

import numpy as np

from pagedcache.dlpack import CUDA, CUDA_MANAGED, host_array, place_of
from pagedcache.errors import DeviceError, FormatError

Array = np.ndarray[Any, Any]


def is_tensor(x: Any) -> bool:
    """Whether ``x`` is a torch tensor; without torch loaded nothing is."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return isinstance(tensor, type) and isinstance(x, tensor)


def torch_dtype_name(x: Any) -> str | None:
    """``"bfloat16"`` for ``torch.bfloat16``; None for what is no dtype of torch."""
    dtype = getattr(sys.modules.get("torch"), "dtype", None)
    if isinstance(dtype, type) and isinstance(x, dtype):
        return str(x).removeprefix("torch.")
    return None


def is_array(x: Any) -> bool:
    """Whether ``x`` offers its memory, or a copy of it, by a protocol that is read here."""
    return any(hasattr(x, name) for name in ("__array_interface__", "__array__", "__dlpack__"))


def tensor_integer(x: Any) -> int | None:
    """The value of a torch tensor that holds one integer; None for everything else."""
    if not is_tensor(x) or str(x.dtype) == "torch.bool":
        return None
    try:
        return operator.index(x)
    except (TypeError, ValueError, RuntimeError):
        return None


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
    if hasattr(x, "__dlpack__") and not hasattr(x, "__array__"):
        return _from_dlpack(x, what)
    return np.asarray(x)


def _from_tensor(x: Any, what: str, written: bool) -> Array:
    if x.device.type == "meta":
        raise DeviceError("a tensor on cpu", "one on meta, which holds no values", what)
    if x.device.type != "cpu":
        raise DeviceError("a tensor on cpu (x.cpu())", f"one on {x.device}", what)
    if x.layout is not sys.modules["torch"].strided or x.is_nested:
        got = "a nested one" if x.is_nested else f"one of layout {x.layout}"
        raise FormatError("a strided tensor (x.to_dense())", got, what)
    if x.requires_grad:
        if written:
            raise FormatError("a tensor without gradient (x.detach())", "one that needs it", what)
        x = x.detach()
    if x.is_neg():  # its memory holds the negative of what it shows
        if written:
            raise FormatError(
                "a tensor that holds its values (x.resolve_neg())", "a lazily negated one", what
            )
        x = x.resolve_neg()
    torch = sys.modules["torch"]
    if x.dtype != torch.bfloat16:
        try:
            return np.asarray(x.numpy())
        except TypeError:
            raise TypeError(f"NumPy has no {x.dtype}; convert it with x.to()") from None
    import ml_dtypes  # not a dtype of NumPy itself

    return np.asarray(x.view(torch.int16).numpy()).view(ml_dtypes.bfloat16)


def _from_dlpack(x: Any, what: str) -> Array:
    try:
        kind, index = place_of(x) or (0, 0)
        if kind in (CUDA, CUDA_MANAGED):
            raise DeviceError("memory of the CPU", f"memory of cuda:{index}", what)
        return host_array(x)
    except (DeviceError, TypeError, ValueError, RuntimeError):
        raise
    except Exception as error:  # BufferError, and whatever the producer's own code raises
        raise TypeError(str(error)) from error
