"""CUDA's codes and PyCUDA's exceptions as errors of this library."""

from __future__ import annotations

from pagedcache._cuda.libcuda import Driver
from pagedcache.errors import CudaCallError, PagedCacheError, StorageMemoryError

OUT_OF_MEMORY = 2
#: Of a stream or event that was destroyed, or belongs to another context. Drivers say "invalid
#: handle" or, of a stream whose memory they have given back, "context is destroyed".
GONE = frozenset({400, 709})

#: After one of these no call on the device succeeds any more; CUDA wants a new process.
STICKY = frozenset({214, 220, 226, 700, 702, 710, *range(714, 720), 721, 810, 911})

#: What a call returns that a capture of a stream forbids or has to do with.
CAPTURE = frozenset(range(900, 909))

# PyCUDA sorts codes into a few classes; where the text says nothing the class has to do.
_CLASS_CODES = {"MemoryError": OUT_OF_MEMORY, "LogicError": 1, "LaunchError": 719}
_UNKNOWN = 999


def failure(
    call: str, code: int, name: str, text: str, nbytes: int = 0, what: str = ""
) -> PagedCacheError:
    """The error for ``call`` having returned ``code``, with CUDA's ``name`` and ``text`` for it.

    Out of memory is a ``StorageMemoryError`` over ``nbytes`` for ``what``; everything else a
    ``CudaCallError``.
    """
    if code == OUT_OF_MEMORY:
        return StorageMemoryError(nbytes, what or f"the work of {call}")
    return CudaCallError(call, code, name, text)


def pycuda_code(error: Exception, driver: Driver) -> tuple[str, int]:
    """(function of the driver, code) of an exception that PyCUDA raised.

    Its text is ``"cuMemAlloc failed: out of memory"``, sometimes with more behind it; the code
    is found by the driver's words for it.
    """
    call, _, text = str(error).partition(" failed: ")
    codes = driver.codes()
    code = codes.get(text) or codes.get(text.partition(" - ")[0])
    return call, code or _CLASS_CODES.get(type(error).__name__, _UNKNOWN)


def pycuda_failure(
    error: Exception, driver: Driver, nbytes: int = 0, what: str = ""
) -> PagedCacheError:
    """The error of this library for an exception that PyCUDA raised; see :func:`failure`."""
    call, code = pycuda_code(error, driver)
    name, text = driver.error_name(code), driver.error_text(code)
    return failure(call, code, name, text, nbytes, what)
