# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Looking at a whole pool: the consistency check and the measure of fragmentation.

Both walk everything once and change nothing. They run with the pool's lock held.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.string cimport memcmp

from pagedcache.bookkeeping.alloc cimport pc_calloc, pc_release
from pagedcache.bookkeeping.prefix_index cimport alive, index_check, tokens_of
from pagedcache.bookkeeping.types cimport *


cdef result_t check_lists(pool_t *p, uint8_t *where) noexcept nogil:
    """Blank list and recency list are whole and disjoint from each other and from use."""
    cdef int32_t b = p.blank
    cdef int32_t before = NONE
    cdef int32_t last = NONE
    cdef int64_t n = 0
    while b != NONE:
        if b < 0 or b >= p.fresh or where[b] or n > p.num_blank:
            return answer(E_CORRUPT, b, 4)
        if in_use(p, b) or p.node[b] != NONE:
            return answer(E_CORRUPT, b, 1)
        where[b] = 1
        n += 1
        last = b
        b = p.next[b]
    if n != p.num_blank or (p.queued and n > 0 and p.last_blank != last):
        return answer(E_CORRUPT, NONE, 5)
    b = p.oldest
    n = 0
    while b != NONE:
        if b < 0 or b >= p.fresh or where[b] or p.prev[b] != before:
            return answer(E_CORRUPT, b, 3)
        if in_use(p, b) or p.node[b] == NONE:
            return answer(E_CORRUPT, b, 2)
        if p.index.nodes[p.node[b]].block != b:
            return answer(E_CORRUPT, b, 13)
        if (p.index.nodes[p.node[b]].parent != 0
                and alive(p, p.index.nodes[p.node[b]].parent) == NONE):
            return answer(E_CORRUPT, b, 7)
        where[b] = 2
        n += 1
        before = b
        b = p.next[b]
    if n != p.num_idle or p.newest != before:
        return answer(E_CORRUPT, NONE, 5)
    return answer(OK)


cdef result_t check_blocks(pool_t *p, uint8_t *where) noexcept nogil:
    """Every block ever handed out is used, idle or blank; cached ones are in the index."""
    cdef int32_t b, at
    cdef int64_t used = 0, cached = 0, pinned = 0
    for b in range(p.fresh):
        if p.refs[b] < 0 or p.pins[b] < 0:
            return answer(E_CORRUPT, b, 11)
        if in_use(p, b):
            used += 1
        elif where[b] == 0:
            return answer(E_CORRUPT, b, 4)
        pinned += p.pins[b] > 0
        if p.node[b] == NONE:
            continue
        cached += 1
        at = p.index.nodes[p.node[b]].block
        if where[b] == 0:             # find the block among its node's copies
            while at != NONE and at != b:
                at = p.next[at]
        if at != b:
            return answer(E_CORRUPT, b, 6)
    if (used + num_free(p) != p.num_blocks or pinned != p.num_pinned
            or p.count.blocks_allocated - p.count.blocks_freed != used):
        return answer(E_CORRUPT, NONE, 5)
    if cached != p.num_cached:
        return answer(E_CORRUPT, NONE, 8)
    return answer(OK)


cdef result_t check_open(pool_t *p) noexcept nogil:
    """An open block is used and not cached, and its slot names it; all other slots are free."""
    cdef int32_t b, slot, used = 0, free = 0, last = NONE
    if p.num_open == 0:
        return answer(OK)
    for b in range(p.num_blocks):
        slot = p.open_of[b]
        if slot == NONE:
            continue
        used += 1
        if (slot < 0 or slot >= p.num_open or p.open_owner[slot] != b or b >= p.fresh
                or not in_use(p, b) or p.node[b] != NONE):
            return answer(E_CORRUPT, b, 16)
    slot = p.open_free
    while slot != NONE:
        if slot < 0 or slot >= p.num_open or free > p.num_open or p.open_owner[slot] != NONE:
            return answer(E_CORRUPT, NONE, 17)
        free += 1
        last = slot
        slot = p.open_next[slot]
    if used != p.open_used or used + free != p.num_open or last != p.open_last:
        return answer(E_CORRUPT, NONE, 17)
    if p.open_promised < 0 or p.open_promised > free:
        return answer(E_CORRUPT, NONE, 19)
    return answer(OK)


cdef result_t check_sequences(pool_t *p, int32_t *held) noexcept nogil:
    """Tables name used blocks, lengths fit, cached blocks hold the sequence's own tokens."""
    cdef seq_t *s = p.first
    cdef seq_t *before = NULL
    cdef int64_t i, furthest, n = 0, promised = 0
    cdef int32_t b
    while s != NULL:
        promised += s.promised
        if s.prev != before or s.freed:
            return answer(E_CORRUPT, NONE, 14)
        if (s.computed < 0 or s.known > s.history or s.known < 0
                or s.num_blocks * p.block_size < s.computed or s.num_blocks > s.table_room):
            return answer(E_CORRUPT, s.table[0] if s.num_blocks else NONE, 10)
        furthest = 0
        for i in range(p.num_layers):
            furthest = max(furthest, s.written[i])
        if furthest != s.appended:
            return answer(E_CORRUPT, s.table[0] if s.num_blocks else NONE, 10)
        for i in range(s.num_blocks):
            b = s.table[i]
            if b < 0 or b >= p.fresh or p.refs[b] == 0:
                return answer(E_CORRUPT, b, 9)
            held[b] += 1
            if i < s.unsealed and is_open(p, b):
                return answer(E_CORRUPT, b, 18)
            if (p.node[b] != NONE and (i + 1) * p.block_size <= s.known
                    and (i + 1) * p.block_size <= s.computed
                    and memcmp(tokens_of(p, p.node[b]), s.tokens + i * p.block_size,
                               p.block_size * sizeof(int32_t)) != 0):
                return answer(E_CORRUPT, b, 12)
        n += 1
        before = s
        s = s.next
    if n != p.num_sequences or p.last != before:
        return answer(E_CORRUPT, NONE, 14)
    if promised != p.open_promised:
        return answer(E_CORRUPT, NONE, 19)
    for b in range(p.fresh):
        if held[b] + (p.loans[b] if p.loans != NULL else p.refs[b]) != p.refs[b]:
            return answer(E_CORRUPT, b, 0)
    return answer(OK)


cdef result_t check_index(pool_t *p) noexcept nogil:
    """The index's own links; slots may outnumber ids once a defragmentation has packed those."""
    cdef int32_t *children = <int32_t *> pc_calloc(p.index.fresh, sizeof(int32_t))
    cdef int32_t slot
    if children == NULL:
        return answer(E_MEMORY, <int64_t> p.index.fresh * 4)
    slot = index_check(p, children)
    pc_release(children)
    if slot != NONE:
        return answer(E_CORRUPT, p.index.nodes[slot].block, 15)
    return answer(OK)


cdef result_t check_pool(pool_t *p) noexcept nogil:
    """Verify everything; E_CORRUPT names the block and the reason. E_MEMORY: no scratch."""
    cdef uint8_t *where = <uint8_t *> pc_calloc(p.fresh, 1)
    cdef int32_t *held = <int32_t *> pc_calloc(p.fresh, sizeof(int32_t))
    cdef result_t r
    if where == NULL or held == NULL:
        r = answer(E_MEMORY, <int64_t> p.fresh * 5)
    else:
        r = check_lists(p, where)
        if r.code == OK:
            r = check_blocks(p, where)
        if r.code == OK:
            r = check_open(p)
        if r.code == OK:
            r = check_sequences(p, held)
        if r.code == OK:
            r = check_index(p)
    pc_release(where)
    pc_release(held)
    return r


cdef result_t measure(pool_t *p, fragmentation_t *out) noexcept nogil:
    """Holes, waste and free runs (SPEC F18)."""
    cdef int32_t *fill = <int32_t *> pc_calloc(p.fresh, sizeof(int32_t))
    cdef seq_t *s
    cdef int64_t i, end, run = 0
    cdef int32_t b, n
    if fill == NULL:
        return answer(E_MEMORY, <int64_t> p.fresh * 4)
    s = p.first
    while s != NULL:
        end = high_water(p, s)      # computed, or written by its own appends
        for i in range(s.num_blocks):
            if end <= i * p.block_size:
                break
            n = <int32_t> min(<int64_t> p.block_size, end - i * p.block_size)
            if n > fill[s.table[i]]:
                fill[s.table[i]] = n
        s = s.next
    out.holes = 0
    out.used = 0
    out.largest_free_run = 0
    out.wasted = 0
    out.with_tokens = 0
    out.tokens = 0
    for b in range(p.fresh):
        if not in_use(p, b):
            run += 1
            continue
        if run > 0:
            out.holes += 1
            out.largest_free_run = max(out.largest_free_run, run)
        run = 0
        out.used += 1
        if fill[b] > 0:
            out.with_tokens += 1
            out.tokens += fill[b]
            out.wasted += p.block_size - fill[b]
    run += p.num_blocks - p.fresh
    out.largest_free_run = max(out.largest_free_run, run)
    out.free = p.num_blocks - out.used
    pc_release(fill)
    return answer(OK)
