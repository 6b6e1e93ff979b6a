# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Admission of a prompt: longest cached prefix, partial hits, and the blocks for the rest.

plan_open() changes nothing; what is applied cannot fail. One token of a prompt is always left to
compute. A hit never needs more blocks than a miss: each shared block is one block fewer to take
and at most one free block fewer to take it from; only the source of a partial copy can be one too
many, and then the copy is given up.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from pagedcache.bookkeeping.blocks cimport pin_block, take, touch_block
from pagedcache.bookkeeping.opening cimport open_block, promise, slots_for
from pagedcache.bookkeeping.prefix_index cimport index_find, index_find_partial, serial_of
from pagedcache.bookkeeping.releasing cimport release_tail
from pagedcache.bookkeeping.sequences cimport extra_bytes, extra_size, seq_link
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
                        int64_t upto, int64_t taken, bint copying, uint8_t *scratch,
                        match_t *m) noexcept nogil:
    """What opening tokens[n] with blocks for the first ``upto`` tokens takes, where ``taken`` of
    the free blocks are meant for others; ``copying``: part-matched blocks may be copied.

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
    m.available = num_free(p) - taken - m.idle_hits
    if m.source != NONE and (not copying
                             or m.fresh > m.available - (not in_use(p, m.source))):
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


# ---------------------------------------------------------------- many prompts at once
cdef void count_holders(pool_t *p, match_t *m, int32_t by) noexcept nogil:
    """Let the next plan see what this one is going to hold, without moving it in any list."""
    cdef int64_t i
    for i in range(m.num_hits):
        p.refs[m.hits[i]] += by
    if m.source != NONE:
        p.refs[m.source] += by


cdef result_t plan_each(pool_t *p, admit_t *all, int64_t n, bint copying,
                        int64_t *fit) noexcept nogil:
    """Plan prompts as if opened one after the other; ``fit`` gets how many have a plan."""
    cdef int64_t i, taken = 0, fresh = 0
    cdef result_t r = answer(OK)
    cdef match_t *m
    fit[0] = 0
    for i in range(n):
        m = &all[i].m
        r = plan_open(p, all[i].s.tokens, all[i].n, all[i].s.identity, all[i].upto, taken, copying,
                      all[i].scratch, m)
        if r.code != OK:
            break
        taken += m.fresh + m.idle_hits + (m.source != NONE and not in_use(p, m.source))
        fresh += m.fresh
        count_holders(p, m, 1)
        fit[0] += 1
    for i in range(fit[0]):
        count_holders(p, &all[i].m, -1)
    if r.code == E_BLOCKS and r.a <= r.c:     # else it fits never, whatever the others take
        r.a += fresh
        r.b += fresh
    return r


cdef result_t plan_many(pool_t *p, admit_t *all, int64_t n, bint fitting,
                        int64_t *fit) noexcept nogil:
    """Plan all prompts; ``fit`` gets how many have a plan.

    E_BLOCKS, which names the blocks for all up to the one that does not fit, only where they would
    not fit cold either: a block that one prompt copies from is free for others, and copies are
    given up where that lets more of them in. ``fitting``: the one that does not fit ends the list,
    unless it is the very first.
    """
    cdef int64_t found
    cdef result_t r = plan_each(p, all, n, True, fit)
    if r.code == E_BLOCKS and fit[0] > 0:
        found = fit[0]
        r = plan_each(p, all, n, False, fit)
        if fitting and fit[0] == found:
            plan_each(p, all, found, True, fit)
    if r.code == E_BLOCKS and fitting and fit[0] > 0:
        return answer(OK)
    return r


cdef int64_t want_slots(pool_t *p, admit_t *all, int64_t n) noexcept nogil:
    """Open slots to promise to the first n."""
    cdef int64_t i, total = 0
    for i in range(n):
        all[i].slots = slots_for(p, all[i].m.cached_tokens,
                                 max(all[i].s.opened, max(all[i].n, all[i].upto)))
        total += all[i].slots
    return total


cdef int64_t apply_many(pool_t *p, admit_t *all, int64_t n) noexcept nogil:
    """Fill the tables (room is reserved): what is hit is held first, then the rest is taken -> the
    copies of sources' heads into targets, left to the caller. Their sources stay pinned."""
    cdef int64_t i, j, copies = 0
    cdef match_t *m
    cdef seq_t *s
    for i in range(n):
        m = &all[i].m
        if m.source != NONE:
            pin_block(p, m.source)
        for j in range(m.num_hits):
            touch_block(p, m.hits[j])
            all[i].s.table[j] = m.hits[j]
    for i in range(n):
        m = &all[i].m
        s = all[i].s
        for j in range(m.num_hits, m.total):
            s.table[j] = take(p)
        s.num_blocks = m.total
        s.computed = m.cached_tokens
        s.vouched = m.cached_tokens
        s.num_cached = m.cached_tokens
        s.indexed = m.num_hits
        s.unsealed = m.num_hits
        promise(p, s, all[i].slots)
        all[i].target = NONE
        if m.source != NONE:
            copies += 1
            all[i].target = s.table[m.num_hits]
            if p.num_open > 0:
                open_block(p, all[i].target)
                promise(p, s, all[i].slots - 1)
    return copies


cdef void cancel_many(pool_t *p, admit_t *all, int64_t n) noexcept nogil:
    """The bytes of a copy could not be had: give everything back, the last prompt's first."""
    cdef int64_t i = n
    cdef seq_t *s
    while i > 0:
        i -= 1
        s = all[i].s
        release_tail(p, s.table, 0, s.num_blocks)
        s.num_blocks = 0
        s.computed = 0
        s.vouched = 0
        s.num_cached = 0
        s.indexed = 0
        s.unsealed = 0
        promise(p, s, 0)


cdef void finish_many(pool_t *p, admit_t *all, int64_t n) noexcept nogil:
    """The prompts are in: their tokens are known, and they are counted."""
    cdef int64_t i
    cdef seq_t *s
    for i in range(n):
        s = all[i].s
        s.known = all[i].n
        s.history = all[i].n
        s.opened = max(s.opened, max(all[i].n, all[i].upto))
        p.count.partial_copies += all[i].target != NONE
        count_open(p, &all[i].m, all[i].n, all[i].resumed)
        if s.serial == 0:
            seq_link(p, s)
    p.epoch += n > 0


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
