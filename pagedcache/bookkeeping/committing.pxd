from libc.stdint cimport int64_t
from pagedcache.bookkeeping.types cimport pool_t, result_t, seq_t

cdef result_t may_commit(pool_t *p, seq_t *s, int64_t n) noexcept nogil
cdef void index_blocks(pool_t *p, seq_t *s) noexcept nogil
cdef void apply_commit(pool_t *p, seq_t *s, int64_t n) noexcept nogil
