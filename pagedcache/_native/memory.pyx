# cython: language_level=3
"""Memory for slabs: where it begins, large pages, and touching it with many threads."""
from cpython.buffer cimport (
    PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uintptr_t

from pagedcache._native.machine cimport pc_tools, take_tools


cdef extern from "pagedcache/memory.h" nogil:
    void pc_advise_huge(void *p, size_t size)


cdef extern from "pagedcache/touch.h" nogil:
    void pc_touch(const pc_tools *tools, void *p, int64_t nbytes)


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


def advise_huge(object buffer):
    """Ask the system for large pages under a contiguous, writable buffer; a hint, no more."""
    cdef Py_buffer view
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE | PyBUF_WRITABLE)
    pc_advise_huge(view.buf, <size_t> view.len)
    PyBuffer_Release(&view)


def touch(object buffer):
    """Have the system provide every page of a contiguous, writable buffer, on as many threads as
    bulk operations use; the bytes stay as they are. Nobody else may write to it meanwhile."""
    cdef Py_buffer view
    cdef pc_tools tools
    take_tools(&tools)
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE | PyBUF_WRITABLE)
    with nogil:
        pc_touch(&tools, view.buf, view.len)
    PyBuffer_Release(&view)
