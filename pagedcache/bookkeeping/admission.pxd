from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from pagedcache.bookkeeping.types cimport identity_t, pool_t, result_t, seq_t

# What a prompt would get: filled by match(), turned into a plan by plan_open().
cdef struct match_t:
    int32_t *hits            # resident blocks of the matched full blocks
    int64_t num_hits
    int64_t idle_hits        # of these, cached-free
    int32_t source           # block whose head is copied, or NONE
    int64_t rows             # tokens to copy from it
    int64_t total            # blocks in all
    int64_t fresh            # blocks to take
    int64_t available        # free blocks less this request's own hits
    int64_t cached_tokens

cdef int64_t scratch_size(pool_t *p, int64_t tokens, identity_t *who) noexcept nogil
cdef result_t plan_open(pool_t *p, const uint32_t *tokens, int64_t n, identity_t *who,
                        int64_t upto, uint8_t *scratch, match_t *m) noexcept nogil
cdef void apply_open(pool_t *p, seq_t *s, match_t *m, int32_t *target) noexcept nogil
cdef void count_open(pool_t *p, match_t *m, int64_t n, bint resumed) noexcept nogil
