# cython: language_level=3
"""Where an array's memory begins, for those who want it at a round address."""
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uintptr_t


def bytes_to_alignment(object buffer, int alignment):
    """How many bytes behind its first one a contiguous buffer passes a multiple of ``alignment``.

    ``alignment``: a power of two; the result is in ``0 … alignment - 1``.
    """
    cdef Py_buffer view
    cdef uintptr_t address
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    address = <uintptr_t> view.buf
    PyBuffer_Release(&view)
    return <int> (-address & (alignment - 1))
