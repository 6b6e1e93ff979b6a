# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Block copies that an engine with its own tensors makes (storage=None).

Both ends of a queued copy are pinned until the engine says that it is done, so neither is reused
or moved. One batch is right in order and in parallel: a copy that touches an end of an earlier,
unfinished one waits for the next batch.
"""
from libc.stdint cimport int32_t, int64_t

from pagedcache.bookkeeping.alloc cimport pc_grow
from pagedcache.bookkeeping.blocks cimport unpin_block
from pagedcache.bookkeeping.types cimport *

cdef enum:
    FLAG_SRC = 64            # marks while a batch is chosen
    FLAG_DST = 128


cdef bint copies_reserve(pool_t *p, int64_t more) noexcept nogil:
    cdef int64_t room
    cdef void *grown
    if p.num_copies + more <= p.copies_room:
        return True
    room = max(p.num_copies + more, 2 * p.copies_room, 16)
    grown = pc_grow(p.copies, room, sizeof(copy_t))
    if grown == NULL:
        return False
    p.copies = <copy_t *> grown
    p.copies_room = room
    return True


cdef void queue_copy(pool_t *p, int32_t src, int32_t dst) noexcept nogil:
    """Append a copy (room is reserved, the caller has pinned both ends)."""
    cdef copy_t *c = &p.copies[p.num_copies]
    c.src = src
    c.dst = dst
    c.ticket = 0
    p.flags[src] |= FLAG_PENDING
    p.flags[dst] |= FLAG_PENDING
    p.num_copies += 1


cdef int64_t take_copies(pool_t *p, int32_t *pairs, int64_t room, int64_t *ticket) noexcept nogil:
    """Write the copies that can be made now into pairs[room][2]; returns how many."""
    cdef int64_t i, n = 0
    cdef copy_t *c
    ticket[0] = 0
    for i in range(p.num_copies):
        c = &p.copies[i]
        if (c.ticket == 0 and n < room and not p.flags[c.src] & FLAG_DST
                and not p.flags[c.dst] & (FLAG_SRC | FLAG_DST)):
            c.ticket = p.next_ticket
            pairs[2 * n] = c.src
            pairs[2 * n + 1] = c.dst
            n += 1
        p.flags[c.src] |= FLAG_SRC
        p.flags[c.dst] |= FLAG_DST
    for i in range(p.num_copies):
        p.flags[p.copies[i].src] &= ~(FLAG_SRC | FLAG_DST)
        p.flags[p.copies[i].dst] &= ~(FLAG_SRC | FLAG_DST)
    if n > 0:
        ticket[0] = p.next_ticket
        p.next_ticket += 1
    return n


cdef void cancel_copies(pool_t *p) noexcept nogil:
    """Forget copies that nobody has taken and nobody needs: their destination has no holder, is
    not cached, and no later copy reads it."""
    cdef int64_t i = p.num_copies, kept
    cdef copy_t c
    while i > 0:                      # the end of a chain first
        i -= 1
        c = p.copies[i]
        if c.ticket != 0 or p.refs[c.dst] > 0 or p.pins[c.dst] != 1 or p.node[c.dst] != NONE:
            continue
        for kept in range(i, p.num_copies - 1):
            p.copies[kept] = p.copies[kept + 1]
        p.num_copies -= 1
        p.flags[c.src] &= ~FLAG_PENDING
        p.flags[c.dst] &= ~FLAG_PENDING
        unpin_block(p, c.src)
        unpin_block(p, c.dst)
    mark_pending(p)


cdef void mark_pending(pool_t *p) noexcept nogil:
    cdef int64_t i
    for i in range(p.num_copies):
        p.flags[p.copies[i].src] |= FLAG_PENDING
        p.flags[p.copies[i].dst] |= FLAG_PENDING


cdef result_t finish_copies(pool_t *p, int64_t ticket) noexcept nogil:
    """The engine has made the copies of this ticket: unpin their ends."""
    cdef int64_t i, kept = 0
    cdef copy_t c
    cdef bint found = False
    for i in range(p.num_copies):
        if p.copies[i].ticket == ticket:
            found = True
            p.flags[p.copies[i].src] &= ~FLAG_PENDING
            p.flags[p.copies[i].dst] &= ~FLAG_PENDING
    if not found:
        return answer(E_ARGUMENT, 5, ticket)
    for i in range(p.num_copies):
        c = p.copies[i]
        if c.ticket == ticket:
            unpin_block(p, c.src)
            unpin_block(p, c.dst)
        else:
            p.copies[kept] = c
            kept += 1
    p.num_copies = kept
    mark_pending(p)
    return answer(OK)
