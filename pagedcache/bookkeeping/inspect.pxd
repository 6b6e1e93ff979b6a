from libc.stdint cimport int32_t, int64_t
from pagedcache.bookkeeping.types cimport pool_t, result_t

cdef struct fragmentation_t:
    int64_t holes
    int64_t used
    int64_t free
    int64_t largest_free_run
    int64_t wasted
    int64_t with_tokens
    int64_t tokens

cdef result_t check_pool(pool_t *p) noexcept nogil
cdef result_t measure(pool_t *p, fragmentation_t *out) noexcept nogil
