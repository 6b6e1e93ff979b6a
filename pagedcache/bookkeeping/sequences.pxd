from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from pagedcache.bookkeeping.types cimport identity_t, pool_t, result_t, seq_t

cdef seq_t *seq_new(pool_t *p, identity_t *identity) noexcept nogil
cdef void seq_link(pool_t *p, seq_t *s) noexcept nogil
cdef void seq_free(pool_t *p, seq_t *s) noexcept nogil
cdef void seq_destroy(seq_t *s) noexcept nogil
cdef bint table_reserve(seq_t *s, int64_t blocks) noexcept nogil
cdef bint tokens_reserve(seq_t *s, int64_t tokens) noexcept nogil
cdef int64_t written_end(seq_t *s, int64_t layer) noexcept nogil
cdef int64_t readable_end(pool_t *p, seq_t *s, int64_t layer) noexcept nogil
cdef int64_t num_written(pool_t *p, seq_t *s) noexcept nogil
cdef int64_t outstanding(seq_t *s) noexcept nogil
cdef int64_t num_tokens(pool_t *p, seq_t *s) noexcept nogil
cdef int64_t extra_size(identity_t *who, int64_t start, int64_t stop) noexcept nogil
cdef void extra_bytes(identity_t *who, int64_t start, int64_t stop, uint8_t *out) noexcept nogil
cdef identity_t *identity_new(const uint8_t *root, int64_t root_size,
                              int64_t num_extras) noexcept nogil
cdef void identity_drop(identity_t *who) noexcept nogil
cdef result_t fork(pool_t *p, seq_t *s, seq_t **child) noexcept nogil
cdef result_t truncate(pool_t *p, seq_t *s, int64_t n, bint keep_blocks) noexcept nogil
cdef result_t append_tokens(pool_t *p, seq_t *s, const uint32_t *tokens,
                            int64_t n) noexcept nogil
cdef bint tokens_fit(seq_t *s, int64_t n) noexcept nogil
cdef void name_tokens(seq_t *s, const uint32_t *tokens, int64_t n) noexcept nogil
