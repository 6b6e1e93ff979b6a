# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Open blocks: blocks that are kept, while they fill, in one of a few open slots.

Some formats can store a block only once it is full. Where the pool has open slots, a block that is
written in part gets one (writing.pyx); it is *sealed* - its bytes brought to where the block's id
says - once it is full, committed and one block behind the end, so that rejected drafts do not seal
and reopen it. Where no slot is left, full and committed blocks are sealed before that time, so that
a sequence needs one slot for its last block and no more. A block is *reopened* when tokens of a
sealed one are rewritten. Only sealed blocks are cached, and none that was written to after it was
full and committed. A pinned block is not sealed: its reader has its place.

Slots are *promised* to a sequence for the tokens that it was opened for and has not computed yet,
so that writing them finds a slot whatever others do: two, because a step may fill one block and
begin another, as far as the sequence does not hold them already. This holds for steps that are
committed before the next is written.

All functions run with the pool's lock held.
"""
from libc.stdint cimport int32_t, int64_t

from pagedcache.bookkeeping.alloc cimport pc_calloc, pc_release
from pagedcache.bookkeeping.types cimport *


cdef bint opening_init(pool_t *p, int32_t num_open) noexcept nogil:
    """Make the slots, all free. False: no memory, and what there is is destroyed with the pool."""
    cdef int32_t i
    p.open_of = <int32_t *> pc_calloc(p.num_blocks, sizeof(int32_t))
    p.open_owner = <int32_t *> pc_calloc(num_open, sizeof(int32_t))
    p.open_next = <int32_t *> pc_calloc(num_open, sizeof(int32_t))
    if p.open_of == NULL or p.open_owner == NULL or p.open_next == NULL:
        return False
    for i in range(p.num_blocks):
        p.open_of[i] = NONE
    for i in range(num_open):
        p.open_owner[i] = NONE
        p.open_next[i] = i + 1 if i + 1 < num_open else NONE
    p.open_free = 0
    p.open_last = num_open - 1
    p.num_open = num_open
    return True


cdef void opening_destroy(pool_t *p) noexcept nogil:
    pc_release(p.open_of)
    pc_release(p.open_owner)
    pc_release(p.open_next)


cdef void open_block(pool_t *p, int32_t block) noexcept nogil:
    """Give a sealed block a slot; the caller has checked that there is one."""
    cdef int32_t slot = p.open_free
    p.open_free = p.open_next[slot]
    if p.open_free == NONE:
        p.open_last = NONE
    p.open_next[slot] = NONE
    p.open_owner[slot] = block
    p.open_of[block] = slot
    p.open_used += 1
    p.generation[block] += 1          # a mapping made before has the other place


cdef void close_block(pool_t *p, int32_t block) noexcept nogil:
    """Take the slot of an open block away. Slots are reused in the order they were freed: work on
    a device that still reads one is then most likely done."""
    cdef int32_t slot = p.open_of[block]
    p.open_of[block] = NONE
    p.open_owner[slot] = NONE
    p.open_next[slot] = NONE
    if p.open_last == NONE:
        p.open_free = slot
    else:
        p.open_next[p.open_last] = slot
    p.open_last = slot
    p.open_used -= 1
    p.generation[block] += 1


cdef int32_t slots_for(pool_t *p, int64_t start, int64_t end) noexcept nogil:
    """Slots that writing the tokens start … end may need at once."""
    if p.num_open == 0 or start >= end:
        return 0
    return min(2, blocks_for(end, p.block_size) - start // p.block_size)


cdef int32_t slots_wanted(pool_t *p, seq_t *s, int64_t computed) noexcept nogil:
    """What to promise to a sequence that is computed so far: what it holds already left out."""
    cdef int32_t n = slots_for(p, computed, s.opened)
    cdef int64_t i = computed // p.block_size
    while n > 0 and i < s.num_blocks and is_open(p, s.table[i]) and p.refs[s.table[i]] == 1:
        n -= 1
        i += 1
    return n


cdef void promise(pool_t *p, seq_t *s, int32_t slots) noexcept nogil:
    p.open_promised += slots - s.promised
    s.promised = slots


cdef void renew_promise(pool_t *p, seq_t *s) noexcept nogil:
    """After lengths have changed: what is wanted now, as far as slots are free."""
    if p.num_open > 0:
        promise(p, s, min(slots_wanted(p, s, s.computed), free_slots(p) + s.promised))


cdef int64_t plan_seals(
        pool_t *p, seq_t *s, int64_t end, int32_t behind, int32_t *blocks) noexcept nogil:
    """Blocks to seal when the sequence is computed up to ``end``, which is ``behind`` blocks or
    more behind theirs: their ids and number. ``blocks`` has room for the blocks from s.unsealed
    on. None is named twice until apply or cancel."""
    cdef int64_t i = s.unsealed, n = 0
    cdef int32_t b
    while (i + 1 + behind) * p.block_size <= end:
        b = s.table[i]
        i += 1
        if is_open(p, b) and p.pins[b] == 0 and not p.flags[b] & FLAG_SEALING:
            p.flags[b] |= FLAG_SEALING
            blocks[n] = b
            n += 1
    return n


cdef int64_t plan_last_seals(pool_t *p, seq_t *s, int32_t *blocks) noexcept nogil:
    """Blocks to seal before the sequence goes, so that they can be cached: the full and computed
    ones of known tokens behind a cached one, as far as nobody else holds them."""
    cdef int64_t i = s.indexed, n = 0
    cdef int32_t b
    if i > 0 and p.node[s.table[i - 1]] == NONE:
        return 0
    while ((i + 1) * p.block_size <= min(s.computed, s.known)
           and i * p.block_size >= s.outdated):
        b = s.table[i]
        i += 1
        if not is_open(p, b):
            continue
        if p.pins[b] > 0 or p.refs[b] > 1:
            break
        p.flags[b] |= FLAG_SEALING
        blocks[n] = b
        n += 1
    return n


cdef int64_t plan_early_seals(pool_t *p, int64_t wanted, int32_t *blocks) noexcept nogil:
    """``wanted`` full and committed blocks to seal so that their slots can be used: their ids and
    number, which is 0 where there are fewer. Blocks that bear FLAG_SEALING are left out."""
    cdef int32_t slot, b
    cdef int64_t n = 0
    for slot in range(p.num_open):
        b = p.open_owner[slot]
        if (n < wanted and b != NONE and p.flags[b] & FLAG_FULL and p.pins[b] == 0
                and not p.flags[b] & FLAG_SEALING):
            blocks[n] = b
            n += 1
    if n < wanted:
        return 0
    for slot in range(<int32_t> n):
        p.flags[blocks[slot]] |= FLAG_SEALING
    return n


cdef void cancel_seals(pool_t *p, const int32_t *blocks, int64_t n) noexcept nogil:
    cdef int64_t i
    for i in range(n):
        p.flags[blocks[i]] &= ~FLAG_SEALING


cdef void apply_seals(pool_t *p, const int32_t *blocks, int64_t n) noexcept nogil:
    """The bytes have been brought over: the slots are free again."""
    cdef int64_t i
    cancel_seals(p, blocks, n)
    for i in range(n):
        close_block(p, blocks[i])
    p.count.blocks_sealed += n
    p.epoch += n > 0
