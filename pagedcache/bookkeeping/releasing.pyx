# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Many blocks are given back at once: a sequence's tail, or ids that users of the pool held.

What happens to a block, and in which order, is what release_block() (``blocks``) does one by one.
The plain cases, which are nearly all, are done here in one loop that touches each field of a block
once and keeps the ends of the lists, the counts and the addresses of the arrays in registers.

All functions run with the pool's lock held.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from pagedcache.bookkeeping.blocks cimport release_block
from pagedcache.bookkeeping.types cimport *

cdef enum:
    ELSEWHERE = -2           # no block's id, and not NONE


cdef inline chain_t chain_of(pool_t *p) noexcept nogil:
    cdef chain_t c
    c.head = p.blank
    c.last = p.last_blank
    c.count = 0
    return c


cdef inline void chain(chain_t *c, int32_t *next, bint queued, int32_t b) noexcept nogil:
    """What to_blank() does, to a list in registers."""
    if queued and c.head != NONE:
        next[c.last] = b
        next[b] = NONE
    else:
        next[b] = c.head
        c.head = b
    c.last = b
    c.count += 1


cdef void keep_chain(pool_t *p, chain_t *c) noexcept nogil:
    """Its blocks are blank and counted from now on."""
    p.blank = c.head
    p.last_blank = c.last
    p.num_blank += c.count
    p.count.blocks_freed += c.count
    p.steps += c.count


# ---------------------------------------------------------------- a sequence's tail
cdef inline int32_t late_parent(const node_t *nodes, const int32_t *node, const int32_t *table,
                                int64_t i) noexcept nogil:
    """The block that must hear of it (FLAG_LATE) when the table's i-th, which is cached, becomes
    idle: NONE for a root's; ELSEWHERE where its parent is not the block before, which is used."""
    cdef int32_t before
    cdef const node_t *n = &nodes[node[table[i]]]
    if i == 0:
        return NONE if n.parent == 0 else ELSEWHERE
    before = node[table[i - 1]]
    if before == NONE or n.parent != (<uint64_t> nodes[before].generation << 32
                                      | <uint64_t> (<uint32_t> before + 1)):
        return ELSEWHERE
    return nodes[before].block        # used as well: an idle block is the only copy of its node


cdef int64_t release_run(pool_t *p, const int32_t *table, int64_t keep, int64_t n) noexcept nogil:
    """Let go of the blocks n - 1 … keep of a table until one is no plain case -> the number left.

    Plain are blocks without a pin and an open slot that others hold too, or that hold nothing
    cached, or that are the only copy of a node behind that of the block before. As that one is in
    use, retire() would enter them as the newest, and tell it so; which means nothing any more when
    it is let go next.
    """
    cdef int32_t *refs = p.refs
    cdef int32_t *prev = p.prev
    cdef int32_t *next = p.next
    cdef const int32_t *pins = p.pins if p.num_pinned > 0 else NULL
    cdef const int32_t *open_of = p.open_of if p.num_open > 0 else NULL
    cdef const int32_t *node = p.node
    cdef const node_t *nodes = p.index.nodes
    cdef uint8_t *flags = p.flags
    cdef chain_t blank = chain_of(p)
    cdef bint queued = p.queued
    cdef int32_t newest = p.newest, late = NONE, num_idle = 0, shared = 0
    cdef int32_t b, parent
    while n > keep:
        b = table[n - 1]
        if (pins != NULL and pins[b] > 0) or (open_of != NULL and open_of[b] != NONE):
            break
        if refs[b] > 1:
            refs[b] -= 1
            shared += 1
            n -= 1
            continue
        if node[b] == NONE:
            chain(&blank, next, queued, b)
        else:
            parent = late_parent(nodes, node, table, n - 1)
            if parent == ELSEWHERE or prev[b] != NONE or next[b] != NONE:
                break
            prev[b] = newest          # next[b] is NONE, as that of the newest must be
            if newest != NONE:
                next[newest] = b
            else:
                p.oldest = b
            newest = b
            num_idle += 1
            if late != NONE and late != b:
                flags[late] |= FLAG_LATE
            late = parent
        refs[b] = 0
        flags[b] = 0
        n -= 1
    if late != NONE:
        flags[late] |= FLAG_LATE
    p.newest = newest
    p.num_idle += num_idle
    p.count.blocks_freed += num_idle
    p.steps += num_idle + shared
    keep_chain(p, &blank)
    return n


cdef void release_tail(pool_t *p, const int32_t *table, int64_t keep, int64_t n) noexcept nogil:
    """One holder lets go of the blocks n - 1 … keep of its table, in this order."""
    while n > keep:
        n = release_run(p, table, keep, n)
        if n > keep:
            n -= 1
            release_block(p, table[n])


# ---------------------------------------------------------------- ids of the pool's users
cdef int64_t chain_plain(pool_t *p, const int32_t *ids, int64_t n, chain_t *out) noexcept nogil:
    """Check and let go of ids until one is no plain case -> how many that were.

    Plain are blocks with one reference that hold nothing cached and have no pin, no open slot and
    no flag. The caller keeps the chain, or undoes it where an id behind it may not be freed.
    """
    cdef int32_t *refs = p.refs
    cdef int32_t *next = p.next
    cdef int32_t *loans = p.loans
    cdef const int32_t *pins = p.pins if p.num_pinned > 0 else NULL
    cdef const int32_t *open_of = p.open_of if p.num_open > 0 else NULL
    cdef const int32_t *node = p.node
    cdef const uint8_t *flags = p.flags
    cdef chain_t blank = chain_of(p)
    cdef bint queued = p.queued
    cdef uint32_t fresh = <uint32_t> p.fresh
    cdef int64_t i
    cdef int32_t b
    for i in range(n):
        b = ids[i]
        if (<uint32_t> b >= fresh or refs[b] != 1 or node[b] != NONE or flags[b] != 0
                or (pins != NULL and pins[b] > 0) or (open_of != NULL and open_of[b] != NONE)):
            break
        if loans != NULL:
            if loans[b] == 0:
                break
            loans[b] -= 1
        refs[b] = 0
        chain(&blank, next, queued, b)
    out[0] = blank
    return blank.count


cdef void undo_chain(pool_t *p, const int32_t *ids, int64_t n) noexcept nogil:
    """The n ids that were let go are held as before. Their links meant nothing then."""
    cdef int64_t i
    for i in range(n):
        p.refs[ids[i]] = 1
        if p.loans != NULL:
            p.loans[ids[i]] += 1
    if p.last_blank != NONE and p.queued and p.blank != NONE:
        p.next[p.last_blank] = NONE
