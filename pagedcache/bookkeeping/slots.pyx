# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Checking a raw slot mapping that an engine made itself.

A prepared SlotMapping is checked once; raw int64 slots are checked in full each time: in range,
none twice, and each in a block that exactly one sequence holds and that is not cached.
"""
from libc.stdint cimport int32_t, int64_t, uint64_t

from pagedcache.bookkeeping.alloc cimport pc_calloc, pc_release
from pagedcache.bookkeeping.blocks cimport pin_next
from pagedcache.bookkeeping.types cimport *


cdef result_t check_one(pool_t *p, int64_t slot) noexcept nogil:
    cdef int32_t b
    if slot < 0 or slot >= <int64_t> p.num_blocks * p.block_size:
        return answer(E_SLOT, slot, 0)
    b = <int32_t> (slot // p.block_size)
    if b >= p.fresh or p.refs[b] == 0:
        return answer(E_SLOT, slot, 4)
    if p.refs[b] > 1:
        return answer(E_SLOT, slot, 2)
    if p.node[b] != NONE:
        return answer(E_SLOT, slot, 3)
    if p.flags[b] & FLAG_PENDING:
        return answer(E_PENDING, b, 1)
    if viewed(p, b):
        return answer(E_SLOT, slot, 2)
    return answer(OK)


cdef bint seen(int64_t *table, uint64_t mask, int64_t slot) noexcept nogil:
    """Enter a slot into an open-addressing set; True when it was there."""
    cdef uint64_t at = (<uint64_t> slot * 0x9e3779b97f4a7c15u) >> 20
    while table[at & mask] != 0:
        if table[at & mask] == slot + 1:
            return True
        at += 1
    table[at & mask] = slot + 1
    return False


cdef result_t check_sealed(pool_t *p, const int64_t *slots, int64_t n) noexcept nogil:
    """Slots in blocks that are not open come a whole block at a time, in order."""
    cdef int64_t i = 0, j
    while i < n:
        if slots[i] == -1 or is_open(p, <int32_t> (slots[i] // p.block_size)):
            i += 1
            continue
        for j in range(p.block_size):
            if i + j >= n or slots[i + j] != slots[i] + j or slots[i] % p.block_size != 0:
                return answer(E_SLOT, slots[i], 5)
        i += p.block_size
    return answer(OK)


cdef result_t check_slots(pool_t *p, int64_t *slots, int64_t n, pin_t *pin) noexcept nogil:
    """Check all slots, pin their blocks into ``pin`` (room for n ids), and turn the slots of open
    blocks into those of their places."""
    cdef uint64_t size = 16
    cdef int64_t *table
    cdef int64_t i
    cdef int32_t b, last = NONE
    cdef result_t r = answer(OK)
    while size < 2 * <uint64_t> n:
        size *= 2
    table = <int64_t *> pc_calloc(size, sizeof(int64_t))
    if table == NULL:
        return answer(E_MEMORY, size * 8)
    for i in range(n):
        if slots[i] == -1:
            continue
        r = check_one(p, slots[i])
        if r.code == OK and seen(table, size - 1, slots[i]):
            r = answer(E_SLOT, slots[i], 1)
        if r.code != OK:
            break
    pc_release(table)
    if r.code == OK and p.num_open > 0:
        r = check_sealed(p, slots, n)
    if r.code != OK:
        return r
    for i in range(n):
        if slots[i] == -1:
            continue
        b = <int32_t> (slots[i] // p.block_size)
        if b != last:
            pin_next(p, pin, b)
            note_rewrite(p, b)
            last = b
        if p.num_open > 0:
            slots[i] += (<int64_t> place(p, b) - b) * p.block_size
    return answer(OK)
