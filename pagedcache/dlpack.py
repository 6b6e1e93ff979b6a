"""Arrays to and from other libraries by DLPack, bfloat16 included.

NumPy speaks DLPack for its own dtypes, and so do the plain NumPy arrays that a cache returns. It
cannot for bfloat16, which is ml_dtypes': hence :class:`Bfloat16Array`, and a reader of our own.
Device arrays are given and read by the same functions. No other library is imported.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedcache._native.dlpack import Borrowed, make_capsule

Array = np.ndarray[Any, Any]

CPU, CUDA, CUDA_MANAGED = 1, 2, 13  # kinds of devices, as DLPack numbers them
_HOST = {CPU: "the CPU", 3: "pinned memory of CUDA", 11: "pinned memory of ROCm"}
_BFLOAT16 = 4, 16  # code, bits
_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
_KINDS = {code: kind for kind, code in _CODES.items() if kind != "b"}


class Bfloat16Array(np.ndarray[Any, Any]):
    """A NumPy array of ``ml_dtypes.bfloat16`` that other libraries take by DLPack, without a copy.

    What a cache on the CPU returns in bfloat16 (``gather``, ``views``, ``slabs``) is of this type,
    so that ``torch.from_dlpack(k)`` works; a plain array raises ``BufferError`` there, because
    NumPy has no name for the dtype. Nothing else is different: slices, transposes and copies are
    of this type too, what is computed from them is a plain array. An array of your own becomes
    one by ``x.view(pagedcache.Bfloat16Array)``, which copies nothing.

    A tensor made from it keeps the memory, and of a view its blocks, until it is collected.
    Read-only arrays are given as such to readers that know DLPack 1.0, and raise ``BufferError``
    for older ones, as in NumPy. Torch knows it but has no read-only tensors: do not write to what
    it makes of a view.
    """

    # Why a subclass: DLPack asks the object itself, and the call that users write is
    # ``torch.from_dlpack(k)``. A function to wrap arrays in would have to be known first.

    __slots__ = ()

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A DLPack capsule over this memory, or for ``copy=True`` over a copy of it.

        ``max_version``: the newest version that the reader knows. Raises ``BufferError`` for
        another device, for a read-only array and a reader from before DLPack 1.0, and for values
        that lie askew in memory.
        """
        if not is_bfloat16(self.dtype):  # the same bytes viewed as another dtype
            return super().__dlpack__(
                stream=stream, max_version=max_version, dl_device=dl_device, copy=copy
            )
        if stream not in (None, -1):
            raise BufferError(f"memory of the CPU has no streams, got stream={stream!r}")
        if dl_device is not None and tuple(dl_device) != (CPU, 0):
            raise BufferError(f"the array lies on the CPU, (1, 0), not on {dl_device}")
        array = np.array(self) if copy else self
        if not array.flags.aligned:
            raise BufferError("the array is not aligned; give a copy of it")
        return capsule_of(
            array,
            array.__array_interface__["data"][0],
            array.shape,
            array.strides,
            array.dtype,
            (CPU, 0),
            max_version,
            readonly=not array.flags.writeable,
            copied=bool(copy),
        )

    def __array_wrap__(self, array: Array, context: Any = None, return_scalar: bool = False) -> Any:
        return array[()] if return_scalar else array

    def astype(self, dtype: Any, *args: Any, **options: Any) -> Array:
        """A copy of another dtype, as a plain array; see ``numpy.ndarray.astype``."""
        return self.view(np.ndarray).astype(dtype, *args, **options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.view(np.ndarray).__reduce_ex__(protocol)  # loads where this package is not

    def __repr__(self) -> str:
        return repr(self.view(np.ndarray))


def is_bfloat16(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is ``ml_dtypes.bfloat16``, in this machine's byte order."""
    return dtype.kind == "V" and dtype.name == "bfloat16" and dtype.isnative


def lent(array: Array) -> Array:
    """The array as it is given out: a view of type ``Bfloat16Array`` where it is of bfloat16."""
    return array.view(Bfloat16Array) if is_bfloat16(array.dtype) else array


def capsule_of(
    owner: Any,
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: np.dtype[Any],
    device: tuple[int, int],
    max_version: tuple[int, int] | None,
    *,
    readonly: bool = False,
    copied: bool = False,
) -> Any:
    """A capsule over the memory at ``address``, in the newest form that the reader knows.

    ``strides`` in bytes. ``owner`` is kept alive until the reader is done. Raises ``BufferError``
    for what DLPack, or the reader's version of it, cannot say.
    """
    size = dtype.itemsize
    if any(stride % size for stride in strides):
        raise BufferError("DLPack counts strides in elements")
    return make_capsule(
        owner,
        address,
        shape,
        tuple(stride // size for stride in strides),
        _named(dtype),
        device,
        max_version is not None and tuple(max_version) >= (1, 0),
        readonly,
        copied,
    )


def _named(dtype: np.dtype[Any]) -> tuple[int, int]:
    if is_bfloat16(dtype):
        return _BFLOAT16
    code = _CODES.get(dtype.kind)
    if code is None or not dtype.isnative or dtype.itemsize > 16:
        raise BufferError(f"DLPack has no name for {dtype}")
    return code, 8 * dtype.itemsize


# ---- reading -------------------------------------------------------------------------------


def place_of(x: Any) -> tuple[int, int] | None:
    """(kind, index) of the device of an array that speaks DLPack; None for what does not."""
    ask = getattr(x, "__dlpack_device__", None)
    if ask is None or not hasattr(x, "__dlpack__"):
        return None
    kind, index = ask()
    return int(kind), int(index)


def borrow(x: Any, stream: int | None = None) -> tuple[Borrowed, np.dtype[Any]]:
    """The array behind ``x.__dlpack__()`` and its dtype; ``stream``: where it is going to be read.

    Raises ``BufferError`` for a dtype that NumPy and ml_dtypes do not have, and what ``x`` raises.
    """
    options = {} if stream is None else {"stream": stream}
    try:
        capsule = x.__dlpack__(max_version=(1, 0), **options)
    except TypeError:  # a producer from before DLPack 1.0
        capsule = x.__dlpack__(**options)
    taken = Borrowed(capsule)
    return taken, _dtype_of(taken)


def _dtype_of(taken: Borrowed) -> np.dtype[Any]:
    code, bits, lanes = taken.dtype
    if lanes == 1 and (code, bits) == _BFLOAT16:
        import ml_dtypes  # not a dtype of NumPy itself

        return np.dtype(ml_dtypes.bfloat16)
    if lanes == 1 and (code, bits) == (_CODES["b"], 8):
        return np.dtype(np.bool)
    try:
        if lanes == 1 and bits % 8 == 0:
            return np.dtype(f"{_KINDS[code]}{bits // 8}")
    except (KeyError, TypeError):
        pass
    raise BufferError(f"dtype {code} of {bits} bits x {lanes} of DLPack has no name in NumPy")


class _Memory:
    """Base object of an array over borrowed memory, in integers where NumPy lacks the dtype."""

    __slots__ = ("__array_interface__", "_taken")

    def __init__(self, taken: Borrowed, dtype: np.dtype[Any]) -> None:
        size = dtype.itemsize
        self._taken = taken
        self.__array_interface__ = {
            "version": 3,
            "shape": taken.shape,
            "strides": taken.strides and tuple(step * size for step in taken.strides),
            "typestr": dtype.str if dtype.kind in "biufc" else np.dtype(f"u{size}").str,
            "data": (taken.address, taken.readonly),
        }


def host_array(x: Any) -> Array:
    """A NumPy array over the memory of the host's array behind ``x.__dlpack__()``.

    Raises ``BufferError`` for memory of a device, and as :func:`borrow`.
    """
    place = place_of(x)
    if place is None or place[0] not in _HOST:
        raise BufferError(f"memory of the host, got device {place} of DLPack")
    taken, dtype = borrow(x)
    if taken.device[0] != place[0]:
        raise BufferError(f"device {place}, as announced, got {taken.device}")
    if 0 in taken.shape:  # has no address
        return np.empty(taken.shape, dtype)
    array: Array = np.asarray(_Memory(taken, dtype))
    return array if array.dtype == dtype else array.view(dtype)
