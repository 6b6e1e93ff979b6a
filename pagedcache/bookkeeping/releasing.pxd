from libc.stdint cimport int32_t, int64_t
from pagedcache.bookkeeping.types cimport pool_t

# The list of blank blocks with some more in it, while the pool does not know of them yet.
cdef struct chain_t:
    int32_t head
    int32_t last
    int32_t count

cdef void release_tail(pool_t *p, const int32_t *table, int64_t keep, int64_t n) noexcept nogil
cdef int64_t chain_plain(pool_t *p, const int32_t *ids, int64_t n, chain_t *out) noexcept nogil
cdef void keep_chain(pool_t *p, chain_t *c) noexcept nogil
cdef void undo_chain(pool_t *p, const int32_t *ids, int64_t n) noexcept nogil
