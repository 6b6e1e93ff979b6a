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

# One prompt on its way in: its sequence, which has no blocks yet, holds the tokens.
cdef struct admit_t:
    seq_t *s
    int64_t n                # tokens of the prompt
    int64_t upto             # tokens to take blocks for
    bint resumed
    uint8_t *scratch
    match_t m
    int32_t slots            # open slots to promise
    int32_t target           # block that gets the copy of the source's head, or NONE

cdef int64_t scratch_size(pool_t *p, int64_t tokens, identity_t *who) noexcept nogil
cdef result_t plan_open(pool_t *p, const uint32_t *tokens, int64_t n, identity_t *who,
                        int64_t upto, int64_t taken, bint copying, uint8_t *scratch,
                        match_t *m) noexcept nogil
cdef result_t plan_many(pool_t *p, admit_t *all, int64_t n, bint fitting,
                        int64_t *fit) noexcept nogil
cdef int64_t want_slots(pool_t *p, admit_t *all, int64_t n) noexcept nogil
cdef int64_t apply_many(pool_t *p, admit_t *all, int64_t n) noexcept nogil
cdef void cancel_many(pool_t *p, admit_t *all, int64_t n) noexcept nogil
cdef void finish_many(pool_t *p, admit_t *all, int64_t n) noexcept nogil
