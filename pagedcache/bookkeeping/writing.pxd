from libc.stdint cimport int32_t, int64_t
from pagedcache.bookkeeping.types cimport pool_t, result_t, seq_t

# One block of a write range that must become the sequence's own, or that must be opened: where
# `new` is `old`, the block stays and gets an open slot.
cdef struct private_t:
    seq_t *seq
    int64_t index
    int32_t old
    int32_t new
    int32_t from_place       # where the old bytes are
    bint copy                # the old block holds bytes that matter
    bint open                # the new block needs an open slot
    bint replaced            # another block takes the old one's place in the table

cdef struct write_t:
    seq_t *seq
    int64_t start
    int64_t count
    int64_t settled          # positions below it hold bytes (of this layer): rewriting copies

cdef struct plan_t:
    write_t *writes
    int64_t num_writes
    private_t *privates      # room for count // block_size + 2 of each write
    int64_t num_privates
    int64_t num_copies
    int64_t fresh            # blocks to take in all
    int64_t opens            # open slots to take in all

# The write ranges of many sequences, with the memory that they need.
cdef struct batch_t:
    seq_t **seqs
    int64_t *counts
    int64_t n
    int64_t total            # sum of the counts
    plan_t plan

cdef void batch_release(batch_t *b) noexcept nogil
cdef void place_batch(pool_t *p, batch_t *b, const int64_t *more) noexcept nogil
cdef result_t plan_writes(pool_t *p, plan_t *plan) noexcept nogil
cdef void take_privates(pool_t *p, plan_t *plan) noexcept nogil
cdef void cancel_privates(pool_t *p, plan_t *plan) noexcept nogil
cdef void apply_writes(pool_t *p, plan_t *plan) noexcept nogil
