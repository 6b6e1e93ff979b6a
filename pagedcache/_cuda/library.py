"""The compiled kernels: found, loaded and checked once; every signature is one row of a table."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from ctypes import CDLL, byref, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

from pagedcache.errors import CudaUnavailableError

#: The number that ``pc_cuda_abi()`` of a usable library returns (PC_CUDA_ABI in cuda/abi.h).
ABI = 4
#: Names another library than the one inside the package; read when a device is first asked for.
PATH_VARIABLE = "PAGEDCACHE_CUDA_LIBRARY"
FILE_NAME = "libpagedcache_cuda.so"

_HOW_TO_BUILD = (
    "install the CUDA toolkit (nvcc) and build pagedcache from source with PAGEDCACHE_CUDA=on "
    f"(PAGEDCACHE_CUDA=on pip install .), or set {PATH_VARIABLE} to a library built for this "
    "version"
)

_P, _I, _Q, _N = c_void_p, c_int, c_int64, c_size_t
_ROWS = (_P, _Q, _Q, _Q, _I)  # address; bytes from token, head and value to the next; dtype
_SLABS = (_P, _P, _I)  # geometry; array of {address, bytes from block to block}; its length

#: Function -> (what it returns, what it takes), as cuda/abi.h declares them.
SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "pc_cuda_abi": (_I, ()),
    "pc_cuda_error_name": (c_char_p, (_I,)),
    "pc_cuda_error_text": (c_char_p, (_I,)),
    "pc_cuda_device_count": (_I, (_P,)),
    "pc_cuda_geometry_nbytes": (_N, ()),
    "pc_cuda_geometry": (_I, (_P, _I, _I, _Q, _Q, _Q)),
    "pc_cuda_clamp": (_I, (_P,)),
    "pc_cuda_copy": (_I, (_P, _P, _N, _P)),
    "pc_cuda_fill": (_I, (_P, _I, _N, _P)),
    "pc_cuda_event_create": (_I, (_P,)),
    "pc_cuda_event_destroy": (_I, (_P,)),
    "pc_cuda_event_record": (_I, (_P, _P)),
    "pc_cuda_event_synchronize": (_I, (_P,)),
    "pc_cuda_stream_wait": (_I, (_P, _P)),
    "pc_cuda_stream_synchronize": (_I, (_P,)),
    "pc_cuda_stream_capturing": (_I, (_P, _P)),
    "pc_cuda_pointer": (_I, (_P, _P, _P)),
    "pc_cuda_store": (_I, (_P, _P, _Q, _Q, *_ROWS, _P, _Q, _I, _P, _P)),
    "pc_cuda_store_blocks": (_I, (_P, _P, _Q, _Q, *_ROWS, _Q, _P, _Q, _I, _P, _P)),
    "pc_cuda_load": (_I, (_P, _P, _Q, _P, _P, _Q, *_ROWS, _Q, _P)),
    "pc_cuda_attend_sizes": (_I, (_Q, _P)),
    "pc_cuda_attend": (_I, (_P, _P)),
    "pc_cuda_read": (_I, (_P, _N, _P, _P)),
    "pc_cuda_find_nonfinite": (_I, (*_ROWS, _Q, _Q, _Q, _P, _P)),
    "pc_cuda_copy_blocks": (_I, (*_SLABS, _P, _P, _P, _Q, _I, _P)),
    "pc_cuda_copy_tokens": (_I, (*_SLABS, _P, _P, _Q, _P)),
    "pc_cuda_convert": (_I, (_P, _P, *_SLABS, _P, _P, _P, _Q, _Q, _P)),
    "pc_cuda_move_blocks": (_I, (*_SLABS, _P, _Q, _P)),
    "pc_cuda_fill_blocks": (_I, (*_SLABS, _P, _Q, _I, _P)),
    "pc_cuda_build_pointers": (_I, (_P, _P, _P, _P, _Q, _I, _P, _Q, _Q, _P, _Q, _P)),
}


class Library:
    """A loaded library; its functions are attributes, and run without the GIL.

    ``functions``: the same by name.
    """

    def __init__(self, path: str, functions: dict[str, Callable[..., Any]]) -> None:
        self.path = path
        self.functions = functions

    def __getattr__(self, name: str) -> Callable[..., Any]:
        try:
            return self.functions[name]
        except KeyError:
            raise AttributeError(f"the kernel library has no function {name!r}") from None

    def error_name(self, code: int) -> str:
        """CUDA's name of a code, such as ``"cudaErrorInvalidValue"``."""
        return _text(self.functions["pc_cuda_error_name"](code))

    def error_text(self, code: int) -> str:
        """CUDA's words for a code, such as ``"invalid argument"``."""
        return _text(self.functions["pc_cuda_error_text"](code))

    def device_count(self) -> tuple[int, int]:
        """(CUDA code, number of GPUs). The code is 35 without a driver, 100 without a GPU."""
        count = c_int(0)
        code = self.functions["pc_cuda_device_count"](byref(count))
        return int(code), count.value

    def __repr__(self) -> str:
        return f"<Library {self.path}>"


def _text(words: bytes | None) -> str:
    return words.decode(errors="replace") if words else "no text"


_loaded: dict[str, Library] = {}
_lock = threading.Lock()


def library_path() -> tuple[str, bool]:
    """Where the library is looked for, and whether the environment names that place."""
    named = os.environ.get(PATH_VARIABLE, "")
    return (named, True) if named else (str(Path(__file__).parent.parent / FILE_NAME), False)


def load() -> Library:
    """The library for this process; loaded by the first call, which needs no driver and no GPU.

    Raises ``CudaUnavailableError`` that says how to get one when the file is missing, cannot be
    loaded, lacks a function or has another ABI number.
    """
    path, named = library_path()
    with _lock:
        if path not in _loaded:
            _loaded[path] = _open(path, named)
        return _loaded[path]


def _open(path: str, named: bool) -> Library:
    if not named and not Path(path).exists():
        raise CudaUnavailableError(
            f"this installation has no compiled kernels ({FILE_NAME} in the package): "
            + _HOW_TO_BUILD
        )
    origin = f"{path} (named by {PATH_VARIABLE})" if named else path
    try:
        handle = CDLL(path)
    except OSError as error:
        raise CudaUnavailableError(
            f"the kernel library {origin} cannot be loaded ({error}): {_HOW_TO_BUILD}"
        ) from None
    found = _number(handle)
    if found is None:
        raise CudaUnavailableError(
            f"{origin} is no kernel library of pagedcache (it lacks pc_cuda_abi): {_HOW_TO_BUILD}"
        )
    if found != ABI:
        raise CudaUnavailableError(
            f"the kernel library {origin} has ABI number {found}, this version of pagedcache needs "
            f"{ABI}: {_HOW_TO_BUILD}"
        )
    functions: dict[str, Callable[..., Any]] = {}
    for name, (restype, argtypes) in SIGNATURES.items():
        try:
            function = handle[name]
        except AttributeError:
            raise CudaUnavailableError(
                f"the kernel library {origin} lacks {name}: {_HOW_TO_BUILD}"
            ) from None
        function.restype, function.argtypes = restype, list(argtypes)
        functions[name] = function
    return Library(path, functions)


def _number(handle: CDLL) -> int | None:
    try:
        function = handle["pc_cuda_abi"]
    except AttributeError:
        return None
    function.restype, function.argtypes = c_int, []
    return int(function())
