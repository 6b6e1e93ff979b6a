# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Tokens become valid: whose blocks they may lie in, and which blocks are cached then.

All functions run with the pool's lock held. may_commit() checks; what is applied cannot fail.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp

from pagedcache.bookkeeping.alloc cimport pc_calloc, pc_release
from pagedcache.bookkeeping.blocks cimport register_block
from pagedcache.bookkeeping.prefix_index cimport serial_of, tokens_of
from pagedcache.bookkeeping.sequences cimport extra_bytes, extra_size, num_written
from pagedcache.bookkeeping.types cimport *


cdef bint contradicts(pool_t *p, seq_t *s, int64_t i, int64_t named) noexcept nogil:
    """Whether another holder of the sequence's i-th block has filled and committed it under tokens
    other than these, so that it is going to be cached, or was, under those."""
    cdef int64_t start = i * p.block_size
    cdef seq_t *other = p.first
    while other != NULL:
        p.steps += 1
        if (other != s and other.num_blocks > i and other.table[i] == s.table[i]
                and min(other.computed, other.known) >= start + p.block_size
                and memcmp(other.tokens + start, s.tokens + start,
                           named * sizeof(uint32_t)) != 0):
            return True
        other = other.next
    return False


cdef result_t own_range(pool_t *p, seq_t *s, int64_t end) noexcept nogil:
    """Every block of the range is the sequence's own, or was prepared by it before it was shared,
    or is cached under the very tokens that are committed, as far as they are known (a block with a
    token of unknown value is never cached for this sequence, nor is any behind it)."""
    cdef int64_t i, last, named
    cdef int32_t b
    cdef int64_t start = s.computed
    if end == start:
        return answer(OK)
    for i in range(start // p.block_size, blocks_for(end, p.block_size)):
        b = s.table[i]
        if p.flags[b] & FLAG_PENDING:
            return answer(E_PENDING, b, 0)
        last = min(end, (i + 1) * p.block_size)
        named = min(last, s.known) - i * p.block_size
        if p.node[b] != NONE:
            if last <= s.vouched and (named <= 0 or memcmp(
                    tokens_of(p, p.node[b]), s.tokens + i * p.block_size,
                    named * sizeof(uint32_t)) == 0):
                continue
            return answer(E_ARGUMENT, 0, end - start, start)
        if (p.refs[b] > 1 or viewed(p, b)) and last > s.vouched:
            return answer(E_ARGUMENT, 0, end - start, start)
        if p.refs[b] > 1 and named > 0 and contradicts(p, s, i, named):
            return answer(E_ARGUMENT, 0, end - start, start)
    return answer(OK)


cdef void cache_block(pool_t *p, seq_t *s, int64_t i) noexcept nogil:
    """Register the sequence's i-th block, now full and committed, when its parent is cached."""
    cdef uint64_t parent = 0
    cdef int32_t b = s.table[i]
    cdef int64_t start = i * p.block_size
    cdef int64_t size
    cdef uint8_t *extra = NULL
    if p.node[b] != NONE or start + p.block_size > s.known or start < s.outdated:
        return
    if p.flags[b] & FLAG_REWRITTEN:
        return
    if i > 0:
        if p.node[s.table[i - 1]] == NONE:
            return
        parent = serial_of(p, p.node[s.table[i - 1]])
    size = extra_size(s.identity, start, start + p.block_size)
    if size > 0:
        extra = <uint8_t *> pc_calloc(size, 1)
        if extra == NULL:
            p.index.refused += 1
            return
        extra_bytes(s.identity, start, start + p.block_size, extra)
    register_block(p, b, parent, s.tokens + start, extra, size)
    pc_release(extra)


cdef result_t may_commit(pool_t *p, seq_t *s, int64_t n) noexcept nogil:
    """Whether the next n tokens have room, bytes, and blocks of the sequence's own."""
    cdef int64_t end = s.computed + n
    if end > s.num_blocks * p.block_size:
        return answer(E_POSITION, end, s.num_blocks * p.block_size, 1)
    if end > p.max_seq_len:
        return answer(E_TOO_LONG, end, p.max_seq_len)
    if end > num_written(p, s) and (high_water(p, s) > s.computed
                                    or (s.appended > 0 and end > s.granted)):
        return answer(E_POSITION, end, num_written(p, s), 2)
    return own_range(p, s, end)


cdef void apply_commit(pool_t *p, seq_t *s, int64_t n) noexcept nogil:
    """Mark the next n tokens computed and cache the blocks that became full and are sealed."""
    cdef int64_t end = s.computed + n
    s.computed = end
    s.history = max(s.history, end)
    s.vouched = max(s.vouched, end)
    index_blocks(p, s)
    p.epoch += 1


cdef void index_blocks(pool_t *p, seq_t *s) noexcept nogil:
    """Cache what is computed, from where that was left, up to the first block that is open."""
    cdef int64_t full = s.computed // p.block_size
    cdef int64_t i
    while s.indexed < full and not is_open(p, s.table[s.indexed]):
        cache_block(p, s, s.indexed)
        s.indexed += 1
    if p.num_open == 0:
        s.unsealed = full
        return
    while s.unsealed < full and not is_open(p, s.table[s.unsealed]):
        s.unsealed += 1
    for i in range(s.unsealed, full):     # what waits for the index is behind it
        p.flags[s.table[i]] |= FLAG_FULL
