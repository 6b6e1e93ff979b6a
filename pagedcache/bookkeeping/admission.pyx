# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Admission of a prompt: longest cached prefix, partial hits, and the blocks for the rest.

plan_open() changes nothing; apply_open() cannot fail. One token of a prompt is always left to
compute. A hit never needs more blocks than a miss: each shared block is one block fewer to take
and at most one free block fewer to take it from; only the source of a partial copy can be one too
many, and then the copy is given up.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from pagedcache.bookkeeping.blocks cimport take, touch_block
from pagedcache.bookkeeping.prefix_index cimport index_find, index_find_partial, serial_of
from pagedcache.bookkeeping.sequences cimport extra_bytes, extra_size
from pagedcache.bookkeeping.types cimport *


cdef int64_t scratch_size(pool_t *p, int64_t tokens, identity_t *who) noexcept nogil:
    """Bytes of scratch for plan_open: one id per full block, and the largest extra bytes."""
    cdef int64_t i, n = 0
    n += who.root_size
    for i in range(who.num_extras):
        n += 13 + who.extras[i].size
    return (tokens // p.block_size + 1) * sizeof(int32_t) + n


cdef void find_full(pool_t *p, const uint32_t *tokens, int64_t n, identity_t *who,
                    uint8_t *extra, match_t *m, uint64_t *parent) noexcept nogil:
    """Match full blocks from the start as far as they are cached."""
    cdef int64_t i, size
    cdef int32_t slot
    parent[0] = 0
    m.num_hits = 0
    m.idle_hits = 0
    for i in range(n // p.block_size):
        size = extra_size(who, i * p.block_size, (i + 1) * p.block_size)
        if size > 0:
            extra_bytes(who, i * p.block_size, (i + 1) * p.block_size, extra)
        slot = index_find(p, parent[0], tokens + i * p.block_size, extra, size)
        if slot == NONE:
            break
        m.hits[i] = p.index.nodes[slot].block
        m.idle_hits += not in_use(p, m.hits[i])
        m.num_hits += 1
        parent[0] = serial_of(p, slot)


cdef result_t plan_open(pool_t *p, const uint32_t *tokens, int64_t n, identity_t *who,
                        int64_t upto, uint8_t *scratch, match_t *m) noexcept nogil:
    """What opening tokens[n] with blocks for the first ``upto`` tokens takes.

    E_BLOCKS only when the same prompt would not fit cold either; ``m`` is filled in any case.
    """
    cdef uint8_t *extra = scratch + (n // p.block_size + 1) * sizeof(int32_t)
    cdef uint64_t parent
    cdef int64_t start, size, matched
    cdef int32_t slot
    cdef int64_t B = p.block_size
    m.hits = <int32_t *> scratch
    m.source = NONE
    m.rows = 0
    find_full(p, tokens, n, who, extra, m, &parent)
    if m.num_hits > 0 and m.num_hits * B == n:
        # cached in full: the last block is copied, so that its last token can be computed again
        m.num_hits -= 1
        m.source = m.hits[m.num_hits]
        m.idle_hits -= not in_use(p, m.source)
        m.rows = B - 1
    elif p.partial_min > 0 and n - m.num_hits * B > p.partial_min:
        start = m.num_hits * B
        size = extra_size(who, start, start + B)
        if size > 0:
            extra_bytes(who, start, start + B, extra)
        slot = index_find_partial(p, parent, tokens + start, n - 1 - start, extra, size, &matched)
        if slot != NONE and matched >= p.partial_min:
            m.source = p.index.nodes[slot].block
            m.rows = matched
    if m.rows == 0:
        m.source = NONE
    m.total = max(blocks_for(upto, B), m.num_hits + (m.source != NONE))
    m.fresh = m.total - m.num_hits
    m.available = num_free(p) - m.idle_hits
    if m.source != NONE and m.fresh > m.available - (not in_use(p, m.source)):
        m.source = NONE
        m.rows = 0
        m.total = max(blocks_for(upto, B), m.num_hits)
        m.fresh = m.total - m.num_hits
    m.cached_tokens = m.num_hits * B + m.rows
    if m.total > p.num_blocks:        # never, with or without hits: say it without them
        return answer(E_BLOCKS, m.total, num_free(p), p.num_blocks)
    if m.fresh > m.available:
        return answer(E_BLOCKS, m.fresh, m.available, p.num_blocks)
    return answer(OK)


cdef void apply_open(pool_t *p, seq_t *s, match_t *m, int32_t *target) noexcept nogil:
    """Fill the table (room is reserved): hits are held, the rest is taken. The copy of the
    source's head into ``target`` is left to the caller, which has pinned the source."""
    cdef int64_t i
    for i in range(m.num_hits):
        touch_block(p, m.hits[i])
        s.table[i] = m.hits[i]
    for i in range(m.num_hits, m.total):
        s.table[i] = take(p)
    s.num_blocks = m.total
    s.computed = m.cached_tokens
    s.vouched = m.cached_tokens
    s.num_cached = m.cached_tokens
    s.indexed = m.num_hits
    s.unsealed = m.num_hits
    target[0] = s.table[m.num_hits] if m.source != NONE else NONE


cdef void count_open(pool_t *p, match_t *m, int64_t n, bint resumed) noexcept nogil:
    """Query statistics, once per admission; those of a resumed request apart."""
    if n == 0:
        return
    if resumed:
        p.count.resumed_queries += 1
        p.count.resumed_hit_tokens += m.cached_tokens
        return
    p.count.prefix_queries += 1
    p.count.prefix_hits += m.cached_tokens > 0
    p.count.query_tokens += n
    p.count.hit_tokens += m.cached_tokens
    p.count.query_blocks += blocks_for(n, p.block_size)
    p.count.hit_blocks += m.num_hits
