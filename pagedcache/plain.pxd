from libc.stdint cimport int64_t, uintptr_t

from pagedcache._native.space cimport pc_rows

cdef struct extent_t:                # bytes of memory: low <= address < high
    uintptr_t low
    uintptr_t high

cdef struct plain_t:                 # a plain array, held until close_plain()
    Py_buffer view
    bint held
    int code                         # of its dtype
    int ndim                         # 2 or 3
    extent_t bytes
    bint dense                       # C-contiguous

cdef class PlainArrays:
    cdef int num_slabs
    cdef readonly int64_t num_layers, num_heads, head_dim
    cdef extent_t *slabs             # of a layer, one after the other
    cdef int _bound(self, list layers) except -1
    cdef bint look(self, object x, plain_t *found) except -1
    cdef bint look_at_rows(self, object x, int64_t num_tokens, plain_t *found) except -1
    cdef bint apart(self, const plain_t *found, int64_t layer) noexcept
    cdef pc_rows rows_of(self, const plain_t *found) noexcept
    cdef object as_rows(self, object x, const plain_t *found, int64_t num_heads)

cdef void close_plain(plain_t *found) noexcept
cdef bint overlap(const extent_t *a, const extent_t *b) noexcept
