# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Preparing a write: tables grow, and shared or cached blocks of the write range are replaced by
the sequence's own (copy-on-write). One plan serves a single append and a whole batch step.

Where the pool has open slots, a block that the range fills whole, from its first token to its last,
is written sealed, unless it is open or is a copy of an open one, which other layers may have filled
in part; one that the range fills in part gets a slot.

plan_writes() checks everything and changes nothing that stays; take_privates() takes the new
blocks so that bytes can be copied; apply_writes() cannot fail, cancel_privates() undoes.
"""
from libc.stdint cimport int32_t, int64_t

from pagedcache.bookkeeping.alloc cimport pc_release
from pagedcache.bookkeeping.blocks cimport pin_block, release_block, take, unpin_block
from pagedcache.bookkeeping.opening cimport close_block, open_block, promise
from pagedcache.bookkeeping.sequences cimport table_reserve
from pagedcache.bookkeeping.types cimport *


cdef void batch_release(batch_t *b) noexcept nogil:
    pc_release(b.seqs)
    pc_release(b.counts)
    pc_release(b.plan.privates)
    pc_release(b.plan.writes)


cdef void place_batch(pool_t *p, batch_t *b, const int64_t *more) noexcept nogil:
    """Let the ranges begin at the computed lengths, or where those will be after ``more``."""
    cdef int64_t i
    cdef write_t *w
    for i in range(b.n):
        w = &b.plan.writes[i]
        w.start = w.seq.computed + (more[i] if more != NULL else 0)
        w.settled = max(high_water(p, w.seq), w.start)


cdef bint must_replace(pool_t *p, int32_t b, write_t *w) noexcept nogil:
    return (p.refs[b] > 1 or p.node[b] != NONE or viewed(p, b)
            or (p.pins[b] > 0 and w.start < w.settled))


cdef int32_t left_behind(pool_t *p, int32_t b) noexcept nogil:
    """1 where the last holder of a batch can keep the block that all others leave, so that plans
    count the holders down; 0 where a view may show what one of those wrote."""
    return p.pins[b] == 0


cdef result_t plan_one(pool_t *p, plan_t *plan, write_t *w) noexcept nogil:
    cdef seq_t *s = w.seq
    cdef int64_t end = w.start + w.count
    cdef int64_t blocks = blocks_for(end, p.block_size)
    cdef int64_t j, held
    cdef int32_t b
    cdef bint replaced, whole
    cdef private_t *own
    if s.freed:
        return answer(E_FREED, s.serial)
    if w.count <= 0:
        return answer(OK)
    if end > p.max_seq_len:
        return answer(E_TOO_LONG, end, p.max_seq_len)
    held = max(high_water(p, s), s.vouched)
    for j in range(w.start // p.block_size, min(blocks, s.num_blocks)):
        b = s.table[j]
        replaced = must_replace(p, b, w)
        whole = w.start <= j * p.block_size and (j + 1) * p.block_size <= end
        if not replaced and (p.num_open == 0 or whole or is_open(p, b)):
            continue
        own = &plan.privates[plan.num_privates]
        own.seq = s
        own.index = j
        own.old = b
        own.new = NONE
        own.from_place = place(p, b)
        own.copy = j * p.block_size < held
        own.open = p.num_open > 0 and not (
            whole and (own.from_place < p.num_blocks or not own.copy))
        own.replaced = replaced
        plan.num_privates += 1
        plan.num_copies += own.copy
        plan.opens += own.open
        if replaced:
            plan.fresh += 1
            p.refs[b] -= left_behind(p, b)
    plan.fresh += max(<int64_t> 0, blocks - s.num_blocks)
    plan.opens += p.num_open > 0 and blocks > s.num_blocks and end % p.block_size != 0
    if plan.fresh > num_free(p):
        return answer(OK)             # refused by the caller, before memory is asked for
    if blocks > s.num_blocks and not table_reserve(s, blocks):
        return answer(E_MEMORY, blocks * 4)
    return answer(OK)


cdef int64_t first_of_last(pool_t *p, seq_t *s) noexcept nogil:
    """Position where the block of the next token to compute begins: promises are for it and those
    behind it."""
    return s.computed // p.block_size * p.block_size


cdef result_t plan_writes(pool_t *p, plan_t *plan) noexcept nogil:
    cdef int64_t i, before, slots = free_slots(p)
    cdef result_t r = answer(OK)
    plan.num_privates = 0
    plan.num_copies = 0
    plan.fresh = 0
    plan.opens = 0
    for i in range(plan.num_writes):
        before = plan.opens
        r = plan_one(p, plan, &plan.writes[i])
        if plan.writes[i].start >= first_of_last(p, plan.writes[i].seq):
            slots += min(<int64_t> plan.writes[i].seq.promised, plan.opens - before)
        if r.code != OK:
            break
    for i in range(plan.num_privates):
        if plan.privates[i].replaced:
            p.refs[plan.privates[i].old] += left_behind(p, plan.privates[i].old)
    if r.code != OK:
        return r
    if plan.fresh > num_free(p):
        return answer(E_BLOCKS, plan.fresh, num_free(p), p.num_blocks)
    if plan.opens > slots:
        return answer(E_OPEN, plan.opens, slots, p.num_open)
    return answer(OK)


cdef void take_privates(pool_t *p, plan_t *plan) noexcept nogil:
    """Take the new blocks and slots and pin the old blocks: bytes can be copied now."""
    cdef int64_t i
    cdef private_t *own
    for i in range(plan.num_privates):
        own = &plan.privates[i]
        pin_block(p, own.old)
        own.new = take(p) if own.replaced else own.old
        if own.open:
            open_block(p, own.new)


cdef void cancel_privates(pool_t *p, plan_t *plan) noexcept nogil:
    cdef int64_t i = plan.num_privates
    cdef private_t *own
    while i > 0:
        i -= 1
        own = &plan.privates[i]
        if own.replaced:
            release_block(p, own.new)
        else:
            close_block(p, own.new)
        unpin_block(p, own.old)


cdef void redeem(pool_t *p, seq_t *s, int64_t i) noexcept nogil:
    """The sequence's i-th block got a slot."""
    if s.promised > 0 and i * p.block_size >= first_of_last(p, s):
        promise(p, s, s.promised - 1)


cdef void apply_writes(pool_t *p, plan_t *plan) noexcept nogil:
    """Put the own blocks into the tables and grow them."""
    cdef int64_t i, blocks
    cdef private_t *own
    cdef write_t *w
    for i in range(plan.num_privates):
        own = &plan.privates[i]
        if own.replaced:
            own.seq.table[own.index] = own.new
            release_block(p, own.old)
            p.count.cow_copies += own.copy
        unpin_block(p, own.old)
        if own.open:
            own.seq.unsealed = min(own.seq.unsealed, own.index)
            p.count.blocks_reopened += own.copy and own.from_place < p.num_blocks
            redeem(p, own.seq, own.index)
    for i in range(plan.num_writes):
        w = &plan.writes[i]
        if w.count <= 0:
            continue
        blocks = blocks_for(w.start + w.count, p.block_size)
        while w.seq.num_blocks < blocks:
            w.seq.table[w.seq.num_blocks] = take(p)
            w.seq.num_blocks += 1
            if p.num_open > 0 and w.seq.num_blocks * p.block_size > w.start + w.count:
                open_block(p, w.seq.table[w.seq.num_blocks - 1])
                redeem(p, w.seq, w.seq.num_blocks - 1)
        if w.start <= max(w.seq.vouched, w.seq.computed):
            w.seq.vouched = max(w.seq.vouched, w.start + w.count)
        if p.num_open > 0:
            mark_written(p, w)
    p.epoch += 1


cdef void mark_written(pool_t *p, write_t *w) noexcept nogil:
    """A block that is full and committed is not going to be cached after this write; another one
    must stay open until it is, whatever a former holder had committed."""
    cdef int64_t j
    for j in range(w.start // p.block_size, blocks_for(w.start + w.count, p.block_size)):
        if (j + 1) * p.block_size <= w.seq.computed:
            p.flags[w.seq.table[j]] |= FLAG_REWRITTEN
        else:
            p.flags[w.seq.table[j]] &= ~FLAG_FULL
