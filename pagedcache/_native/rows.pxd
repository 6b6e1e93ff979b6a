"""Slabs, for compiled modules that read them by address."""
from libc.stdint cimport int32_t, int64_t

from pagedcache._native.machine cimport pc_tools
from pagedcache._native.space cimport pc_rows, pc_slab, pc_space


cdef int open_rows(object array, int dtype, int flags, Py_buffer *view, pc_rows *rows) except -1

cdef class Slabs:
    cdef pc_space space
    cdef pc_slab *slabs  # of a layer, one after the other: sealed, open
    cdef list arrays
    cdef readonly int num_layers

    cdef int64_t describe(self, int where, str what) except -1
    cdef int check_layer(self, int64_t layer) except -1
    cdef int check_shape(self, Py_buffer *view, int64_t num_tokens) except -1
    cdef int open_tools(self, pc_tools *tools, float *small, int64_t nbytes) except -1
    cdef int check_moved(self, const int32_t[::1] ids) except -1
