# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""One step of a whole batch: commit and name the tokens of many sequences, all or nothing.

Run with the pool's lock held, on sequences that are live and named once.
"""
from libc.stdint cimport int64_t, uint32_t
from libc.string cimport memcmp

from pagedcache.bookkeeping.committing cimport may_commit
from pagedcache.bookkeeping.sequences cimport name_tokens, tokens_fit
from pagedcache.bookkeeping.types cimport *


cdef bint shares(pool_t *p, seq_t *s, int64_t n) noexcept nogil:
    """Whether the range to commit lies in a block that others hold and that is not cached yet."""
    cdef int64_t i
    for i in range(s.computed // p.block_size, blocks_for(s.computed + n, p.block_size)):
        if p.refs[s.table[i]] > 1 and p.node[s.table[i]] == NONE:
            return True
    return False


cdef bint agree(pool_t *p, seq_t *a, int64_t na, seq_t *b, int64_t nb) noexcept nogil:
    """Two sequences that commit the same shared block name the same tokens for it, from its start
    on and as far as both name any: as if one had committed, and cached it, before the other."""
    cdef int64_t end = min(a.computed + na, b.computed + nb)
    cdef int64_t i, start, named
    for i in range(max(a.computed, b.computed) // p.block_size, blocks_for(end, p.block_size)):
        if a.table[i] != b.table[i]:
            continue
        start = i * p.block_size
        named = min(min(end, start + p.block_size), min(a.known, b.known)) - start
        if named > 0 and memcmp(a.tokens + start, b.tokens + start,
                                named * sizeof(uint32_t)) != 0:
            return False
    return True


cdef result_t may_commit_many(pool_t *p, seq_t **seqs, const int64_t *counts,
                              int64_t n) noexcept nogil:
    """Whether counts[i] tokens of seqs[i] may be committed; apply_commit() then cannot fail."""
    cdef int64_t i, j
    cdef result_t r
    for i in range(n):
        r = may_commit(p, seqs[i], counts[i])
        if r.code != OK:
            return r
        if not shares(p, seqs[i], counts[i]):
            continue
        for j in range(i):            # forks of unfinished work: rare, and few at a time
            if shares(p, seqs[j], counts[j]) and not agree(p, seqs[j], counts[j],
                                                           seqs[i], counts[i]):
                return answer(E_ARGUMENT, 0, counts[i], seqs[i].computed)
    return answer(OK)


cdef result_t may_append_many(pool_t *p, seq_t **seqs, const int64_t *counts,
                              int64_t n) noexcept nogil:
    """Whether counts[i] more tokens of seqs[i] may be named; makes the room for them."""
    cdef int64_t i
    for i in range(n):
        if seqs[i].history + counts[i] > p.max_seq_len:
            return answer(E_TOO_LONG, seqs[i].history + counts[i], p.max_seq_len)
        if not tokens_fit(seqs[i], counts[i]):
            return answer(E_MEMORY, (seqs[i].known + counts[i]) * 4)
    return answer(OK)


cdef void name_many(seq_t **seqs, const uint32_t *tokens, const int64_t *counts,
                    int64_t n) noexcept nogil:
    """Name the next counts[i] tokens of seqs[i]; the tokens of all lie one behind the other."""
    cdef int64_t i, at = 0
    for i in range(n):
        name_tokens(seqs[i], tokens + at, counts[i])
        at += counts[i]


cdef result_t append_many(pool_t *p, seq_t **seqs, const uint32_t *tokens, const int64_t *counts,
                          int64_t n) noexcept nogil:
    cdef result_t r = may_append_many(p, seqs, counts, n)
    if r.code == OK:
        name_many(seqs, tokens, counts, n)
    return r
