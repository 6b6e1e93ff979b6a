# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""One block: handed out, held, pinned, given back, cached; and the order of eviction.

A block is exactly one of

* used: held by sequences or pool users (``refs``) or pinned by views and byte movers (``pins``);
* idle (cached-free): free, but its prefix can still be hit; kept in order of recency;
* blank: free and holding nothing that could be hit. Ids from ``fresh`` on were never handed out.

Blank blocks are handed out first, then never used ones, then the least recently used idle block.
Sequences give back their tail first, so a prefix is evicted from its tail.

In a queued pool (blocks on a device, where work on a freed block may not have ended) never used
blocks go first, then blank ones in the order they were freed: whoever gets a block has the best
chance that nobody needs to be waited for.

All functions run with the pool's lock held, check nothing and cannot fail.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from pagedcache.bookkeeping.opening cimport close_block
from pagedcache.bookkeeping.prefix_index cimport alive, index_register, index_unregister
from pagedcache.bookkeeping.types cimport *


# ---------------------------------------------------------------- recency list
cdef inline void unlink_idle(pool_t *p, int32_t b) noexcept nogil:
    if p.prev[b] != NONE:
        p.next[p.prev[b]] = p.next[b]
    else:
        p.oldest = p.next[b]
    if p.next[b] != NONE:
        p.prev[p.next[b]] = p.prev[b]
    else:
        p.newest = p.prev[b]
    p.prev[b] = NONE
    p.next[b] = NONE


cdef inline void link_newest(pool_t *p, int32_t b) noexcept nogil:
    p.prev[b] = p.newest
    p.next[b] = NONE
    if p.newest != NONE:
        p.next[p.newest] = b
    else:
        p.oldest = b
    p.newest = b


cdef inline void link_before(pool_t *p, int32_t b, int32_t at) noexcept nogil:
    """Enter ``b`` as just older than ``at``."""
    p.prev[b] = p.prev[at]
    p.next[b] = at
    if p.prev[at] != NONE:
        p.next[p.prev[at]] = b
    else:
        p.oldest = b
    p.prev[at] = b


cdef inline void to_blank(pool_t *p, int32_t b) noexcept nogil:
    if p.queued and p.blank != NONE:
        p.next[p.last_blank] = b
        p.next[b] = NONE
    else:
        p.next[b] = p.blank
        p.blank = b
    p.last_blank = b                  # means something in a queue only
    p.num_blank += 1


cdef void forget_block(pool_t *p, int32_t b) noexcept nogil:
    """Take a block (in no list) out of the index.

    A block outlives its parent only where a view kept it longer; then the idle blocks that nothing
    can reach any more become blank, so that they are reused before any that can be hit.
    """
    cdef int32_t at, following
    cdef bint again = index_unregister(p, b)
    while again:
        again = False
        at = p.oldest
        while at != NONE:
            following = p.next[at]
            p.steps += 1
            if (p.index.nodes[p.node[at]].parent != 0
                    and alive(p, p.index.nodes[p.node[at]].parent) == NONE):
                unlink_idle(p, at)
                p.num_idle -= 1
                again = index_unregister(p, at) or again
                to_blank(p, at)
            at = following


# ---------------------------------------------------------------- one block
cdef int32_t take(pool_t *p) noexcept nogil:
    """Hand out one block with one reference. The caller has checked that there is one."""
    cdef int32_t b = p.blank
    if b != NONE and not (p.queued and p.fresh < p.num_blocks):
        p.blank = p.next[b]
        p.num_blank -= 1
    elif p.fresh < p.num_blocks:
        b = p.fresh
        p.fresh += 1
        p.node[b] = NONE
    else:
        b = p.oldest
        unlink_idle(p, b)
        p.num_idle -= 1
        forget_block(p, b)
        p.count.evicted_blocks += 1
        p.count.evicted_tokens += p.block_size
    p.refs[b] = 1
    p.generation[b] += 1
    p.flags[b] = 0
    p.count.blocks_allocated += 1
    p.steps += 1
    return b


cdef void retire(pool_t *p, int32_t b) noexcept nogil:
    """The last holder and the last pin of a used block are gone."""
    cdef node_t *n
    cdef int32_t parent, other
    cdef uint8_t late = p.flags[b] & FLAG_LATE
    p.count.blocks_freed += 1
    p.flags[b] = 0
    if is_open(p, b):
        close_block(p, b)
    if p.node[b] != NONE:
        n = &p.index.nodes[p.node[b]]
        parent = alive(p, n.parent)
        other = p.prev[b] if p.prev[b] != NONE else p.next[b]
        if other != NONE:
            p.flags[other] |= late
            forget_block(p, b)        # another copy is resident
        elif n.parent != 0 and parent == NONE:
            forget_block(p, b)        # nothing can reach it
        else:
            p.num_idle += 1
            to_idle(p, b, parent, late)
            return
    to_blank(p, b)


cdef void to_idle(pool_t *p, int32_t b, int32_t parent, bint late) noexcept nogil:
    """Enter a block in the recency list; no ancestor may be evicted before its descendant.

    The parent is idle already only where this block was held longer than it, by a view. Then it
    goes just before the parent; or, where a child was faster still, its ancestors go behind it.
    """
    cdef int32_t at = NONE if parent == NONE else p.index.nodes[parent].block
    if at != NONE and not in_use(p, at) and not late:
        link_before(p, b, at)
        return
    link_newest(p, b)
    while parent != NONE:
        at = p.index.nodes[parent].block
        if in_use(p, at):
            p.flags[at] |= FLAG_LATE
            return
        unlink_idle(p, at)
        link_newest(p, at)
        p.steps += 1
        parent = alive(p, p.index.nodes[parent].parent)


cdef void take_many(pool_t *p, int32_t *out, int64_t n) noexcept nogil:
    cdef int64_t i
    for i in range(n):
        out[i] = take(p)


cdef void release_many(pool_t *p, const int32_t *ids, int64_t n) noexcept nogil:
    cdef int64_t i
    for i in range(n):
        release_block(p, ids[i])


cdef void touch_block(pool_t *p, int32_t b) noexcept nogil:
    """One more holder of a used or idle block."""
    if not in_use(p, b):
        unlink_idle(p, b)
        p.num_idle -= 1
        p.count.blocks_allocated += 1
    p.refs[b] += 1
    p.steps += 1


cdef void release_block(pool_t *p, int32_t b) noexcept nogil:
    p.refs[b] -= 1
    p.steps += 1
    if not in_use(p, b):
        retire(p, b)
    elif p.pins[b] > 0:
        p.flags[b] |= FLAG_MUST_COPY  # who leaves may have been the one whose tokens are viewed


cdef void pin_block(pool_t *p, int32_t b) noexcept nogil:
    if not in_use(p, b):
        unlink_idle(p, b)
        p.num_idle -= 1
        p.count.blocks_allocated += 1
    if p.pins[b] == 0:
        p.num_pinned += 1
    p.pins[b] += 1


cdef void pin_next(pool_t *p, pin_t *pin, int32_t b) noexcept nogil:
    """Pin one more block of a handle that has room for it, where its bytes are now."""
    pin.blocks[pin.count] = b
    pin.places[pin.count] = place(p, b)
    pin.count += 1
    pin_block(p, b)


cdef void unpin_block(pool_t *p, int32_t b) noexcept nogil:
    p.pins[b] -= 1
    if p.pins[b] == 0:
        p.num_pinned -= 1
        p.flags[b] &= ~FLAG_MUST_COPY
        if p.refs[b] == 0:
            retire(p, b)


cdef void register_block(pool_t *p, int32_t block, uint64_t parent, const uint32_t *tokens,
                         const uint8_t *extra, int64_t extra_size) noexcept nogil:
    """Cache a used block. An idle copy of the same identity gives way to it: an idle block is
    always the only copy of its node."""
    cdef int32_t displaced = NONE
    index_register(p, block, parent, tokens, extra, extra_size, &displaced)
    if displaced != NONE:
        p.flags[block] |= FLAG_LATE   # what is cached behind it may be idle
        unlink_idle(p, displaced)
        p.num_idle -= 1
        to_blank(p, displaced)


cdef void forget_all(pool_t *p) noexcept nogil:
    """Forget every cached identity; used blocks stay with their holders, and what is computed now
    is never cached again."""
    cdef int32_t b, following
    cdef seq_t *s = p.first
    while s != NULL:
        s.outdated = s.computed
        s = s.next
    b = p.oldest
    while b != NONE:
        following = p.next[b]
        unlink_idle(p, b)
        index_unregister(p, b)
        to_blank(p, b)
        b = following
    p.num_idle = 0
    for b in range(p.fresh):
        if p.node[b] != NONE:
            index_unregister(p, b)
