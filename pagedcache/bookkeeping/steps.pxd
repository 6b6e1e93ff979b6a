from libc.stdint cimport int64_t, uint32_t
from pagedcache.bookkeeping.types cimport pool_t, result_t, seq_t

cdef result_t may_commit_many(pool_t *p, seq_t **seqs, const int64_t *counts,
                              int64_t n) noexcept nogil
cdef result_t may_append_many(pool_t *p, seq_t **seqs, const int64_t *counts,
                              int64_t n) noexcept nogil
cdef void name_many(seq_t **seqs, const uint32_t *tokens, const int64_t *counts,
                    int64_t n) noexcept nogil
cdef result_t append_many(pool_t *p, seq_t **seqs, const uint32_t *tokens, const int64_t *counts,
                          int64_t n) noexcept nogil
