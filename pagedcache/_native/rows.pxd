"""Slabs, for compiled modules that read them by address."""
from libc.stdint cimport int32_t, int64_t

from pagedcache._native.machine cimport pc_tools
from pagedcache._native.space cimport pc_rows, pc_slab, pc_space


cdef int open_rows(object array, int dtype, int flags, Py_buffer *view, pc_rows *rows) except -1

cdef int64_t find_nonfinite_at(const pc_rows *rows, int64_t n, int64_t num_heads,
                               int64_t head_dim) except -2

cdef class Slabs:
    cdef pc_space space
    cdef pc_slab *slabs  # of a layer, one after the other: sealed, open
    cdef list arrays
    cdef readonly int num_layers

    cdef int64_t describe(self, int where, str what) except -1
    cdef int check_layer(self, int64_t layer) except -1
    cdef int check_slots_at(self, const int64_t *slots, int64_t n, int64_t low) except -1
    cdef int check_store_at(self, const int64_t *slots, int64_t n) except -1
    cdef int store_at(self, int64_t layer, const pc_rows *rows, int64_t nbytes,
                      const int64_t *slots, int64_t n, int policy) except -1
    cdef int check_shape(self, Py_buffer *view, int64_t num_tokens) except -1
    cdef int open_tools(self, pc_tools *tools, float *small, int64_t nbytes) except -1
    cdef int check_moved(self, const int32_t[::1] ids) except -1
