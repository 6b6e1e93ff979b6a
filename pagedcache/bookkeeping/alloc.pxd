# C memory of the bookkeeping, through one door that tests can make fail.
from libc.stdint cimport int64_t

cdef void *pc_calloc(int64_t count, int64_t size) noexcept nogil
cdef void *pc_grow(void *old, int64_t count, int64_t size) noexcept nogil
cdef void pc_release(void *p) noexcept nogil
