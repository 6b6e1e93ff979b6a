"""DLPack as ctypes sees it: readers and producers that share no code with the package.

The structures are written down from https://dmlc.github.io/dlpack/latest/c_api.html.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64
from typing import Any

import numpy as np

READ_ONLY, IS_COPIED = 1, 2
BFLOAT16 = (4, 16, 1)

Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)  # called without the GIL
Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_kind", c_int32),
        ("device_index", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class Managed(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", Deleter)]


class Versioned(ctypes.Structure):
    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", Deleter),
        ("flags", c_uint64),
        ("tensor", Tensor),
    ]


FORMS = {"dltensor": Managed, "dltensor_versioned": Versioned}
_NAMES = {name: c_char_p(name.encode()) for name in (*FORMS, *(f"used_{name}" for name in FORMS))}

_api = ctypes.pythonapi
_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, c_char_p)(
    ("PyCapsule_IsValid", _api)
)
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, c_char_p)(
    ("PyCapsule_GetPointer", _api)
)
_rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, c_char_p)(
    ("PyCapsule_SetName", _api)
)
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", _api)
)


def name_of(capsule: Any) -> str:
    """The name of a capsule of DLPack; used ones count."""
    return next(name for name, raw in _NAMES.items() if _valid(capsule, raw))


def _behind(capsule: Any) -> Any:
    name = name_of(capsule)
    return FORMS[name].from_address(_pointer(capsule, _NAMES[name]))


def look(capsule: Any) -> Any:
    """The structure in a capsule that nobody took; keeps the capsule."""
    found = _behind(capsule)
    found.capsule = capsule
    return found


def take(capsule: Any) -> Any:
    """The same, taken as a reader does it: whoever has it must call :func:`delete`."""
    found = _behind(capsule)
    _rename(capsule, _NAMES[f"used_{name_of(capsule)}"])
    return found


def delete(taken: Any) -> None:
    taken.deleter(ctypes.addressof(taken))


def facts(tensor: Tensor) -> tuple[Any, ...]:
    """(dtype, shape, strides) as a tensor says them."""
    axes = range(tensor.ndim)
    return (
        (tensor.code, tensor.bits, tensor.lanes),
        tuple(tensor.shape[i] for i in axes),
        tuple(tensor.strides[i] for i in axes),
    )


def values(tensor: Tensor) -> np.ndarray:
    """A copy of a tensor's elements on the host, as unsigned integers of their width."""
    (_, bits, _), shape, strides = facts(tensor)
    out = np.empty(shape, f"u{bits // 8}")
    for index in np.ndindex(*shape):
        at = sum(i * step for i, step in zip(index, strides, strict=True)) * (bits // 8)
        raw = ctypes.string_at(tensor.data + tensor.byte_offset + at, bits // 8)
        out[index] = np.frombuffer(raw, out.dtype)[0]
    return out


class Producer:
    """An array that speaks DLPack and nothing else, and counts how often it is given back.

    ``array``: what it shows; the other arguments are what its capsules say beside.
    """

    def __init__(
        self,
        array: np.ndarray,
        dtype: tuple[int, int, int],
        *,
        versioned: bool = True,
        flags: int = 0,
        major: int = 1,
        device: tuple[int, int] = (1, 0),
        announced: tuple[int, int] | None = None,
        dense: bool = False,
        offset: int = 0,
    ) -> None:
        self.array, self.dtype, self.versioned = array, dtype, versioned
        self.flags, self.major, self.device = flags, major, device
        self.announced, self.dense, self.offset = announced or device, dense, offset
        self.deleted = 0
        self._kept: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.announced

    def _capsule(self) -> Any:
        made: Any = (Versioned if self.versioned else Managed)()
        axes, size = self.array.ndim, self.array.itemsize
        steps = [step // size for step in self.array.strides]
        shape, strides = (c_int64 * axes)(*self.array.shape), (c_int64 * axes)(*steps)
        tensor = made.tensor
        tensor.data = self.array.__array_interface__["data"][0] - self.offset
        tensor.byte_offset = self.offset
        tensor.device_kind, tensor.device_index = self.device
        tensor.ndim = axes
        tensor.code, tensor.bits, tensor.lanes = self.dtype
        tensor.shape = ctypes.cast(shape, POINTER(c_int64))
        if not self.dense:
            tensor.strides = ctypes.cast(strides, POINTER(c_int64))
        made.deleter = Deleter(self._delete)
        if self.versioned:
            made.major, made.flags = self.major, self.flags
        self._kept.append((made, shape, strides))
        name = "dltensor_versioned" if self.versioned else "dltensor"
        return _new(ctypes.addressof(made), _NAMES[name], ctypes.cast(_forget, ctypes.c_void_p))

    def _delete(self, _: Any) -> None:
        self.deleted += 1

    def __dlpack__(self, **options: Any) -> Any:
        if not self.versioned and "max_version" in options:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        return self._capsule()


@Destructor
def _forget(capsule: int) -> None:
    for name, form in FORMS.items():
        if _raw_valid(capsule, _NAMES[name]):
            delete(form.from_address(_raw_pointer(capsule, _NAMES[name])))


# For a capsule that is being destroyed, which must not get another reference.
_raw_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, c_char_p)(
    ("PyCapsule_IsValid", _api)
)
_raw_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, c_char_p)(
    ("PyCapsule_GetPointer", _api)
)
