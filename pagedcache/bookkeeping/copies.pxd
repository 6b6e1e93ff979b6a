from libc.stdint cimport int32_t, int64_t
from pagedcache.bookkeeping.types cimport pool_t, result_t

cdef bint copies_reserve(pool_t *p, int64_t more) noexcept nogil
cdef void queue_copy(pool_t *p, int32_t src, int32_t dst) noexcept nogil
cdef int64_t take_copies(pool_t *p, int32_t *pairs, int64_t room, int64_t *ticket) noexcept nogil
cdef void cancel_copies(pool_t *p) noexcept nogil
cdef result_t finish_copies(pool_t *p, int64_t ticket) noexcept nogil
