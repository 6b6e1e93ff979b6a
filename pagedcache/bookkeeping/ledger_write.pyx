# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Tokens get their slots: write ranges made private and grown."""
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memset

import numpy as np

from pagedcache.bookkeeping.alloc cimport pc_calloc, pc_release
from pagedcache.bookkeeping.blocks cimport pin_block, pin_next
from pagedcache.bookkeeping.copies cimport copies_reserve, queue_copy
from pagedcache.bookkeeping.exports cimport seq_pointers, unique_and_live
from pagedcache.bookkeeping.gate cimport leave
from pagedcache.bookkeeping.handles cimport Pin, SeqState, enter_fast, new_pin
from pagedcache.bookkeeping.ledger_base cimport HUGE
from pagedcache.bookkeeping.ledger_open cimport LedgerOpen
from pagedcache.bookkeeping.mapping cimport SlotMapping
from pagedcache.bookkeeping.sequences cimport written_end
from pagedcache.bookkeeping.status cimport int_argument, raise_result
from pagedcache.bookkeeping.types cimport *
from pagedcache.bookkeeping.writing cimport (
    apply_writes, batch_release, batch_t, cancel_privates, place_batch, plan_t, plan_writes,
    private_t, take_privates, write_t,
)

from pagedcache.errors import InvalidArgumentError, StorageMemoryError


cdef void spare(pool_t *p, plan_t *plan, bint spared) noexcept nogil:
    """Keep the blocks of a plan's write ranges from being sealed meanwhile."""
    cdef int64_t i, j, blocks
    cdef write_t *w
    for i in range(plan.num_writes):
        w = &plan.writes[i]
        blocks = min(blocks_for(w.start + w.count, p.block_size), w.seq.num_blocks)
        for j in range(w.start // p.block_size, blocks):
            if spared:
                p.flags[w.seq.table[j]] |= FLAG_SEALING
            else:
                p.flags[w.seq.table[j]] &= ~FLAG_SEALING


cdef class LedgerWrite(LedgerOpen):
    """The ledger's operations that make slots writable; see ``Ledger``."""

    cdef result_t _plan(self, plan_t *plan) except *:
        """plan_writes(); where open slots are missing, full and committed blocks of sequences that
        are not written now are sealed before their time. Entered and left with the lock held."""
        cdef pool_t *p = self.pool.p
        cdef result_t r = plan_writes(p, plan)
        if r.code != E_OPEN or r.a > r.c:
            return r
        spare(p, plan, True)
        try:
            if self._seal_early(r.a - r.b) > 0:
                r = plan_writes(p, plan)
        finally:
            spare(p, plan, False)
        return r

    cdef int _execute(self, plan_t *plan) except -1:
        """Carry out a checked plan, copies first. Entered and left with the lock held."""
        cdef pool_t *p = self.pool.p
        cdef int64_t i
        if plan.num_privates > 0:
            if p.deferred and not copies_reserve(p, plan.num_copies):
                raise StorageMemoryError(plan.num_copies * sizeof(copy_t), "block copies")
            take_privates(p, plan)
            if plan.num_copies > 0 and not p.deferred:
                try:
                    self._move_bytes(self._copy_privates, (<size_t> plan,))
                except BaseException:
                    cancel_privates(p, plan)
                    raise
            elif p.deferred:
                for i in range(plan.num_privates):
                    if plan.privates[i].copy:
                        pin_block(p, plan.privates[i].old)
                        pin_block(p, plan.privates[i].new)
                        queue_copy(p, plan.privates[i].old, plan.privates[i].new)
        apply_writes(p, plan)
        return 0

    def _copy_privates(self, size_t address):
        """Copy the old blocks of a plan to the new ones (the gate is shut)."""
        cdef plan_t *plan = <plan_t *> address
        cdef int64_t i, n = 0
        if self.mover is None:
            return
        src = np.empty(plan.num_copies, dtype=np.int32)
        dst = np.empty(plan.num_copies, dtype=np.int32)
        cdef int32_t[::1] s = src
        cdef int32_t[::1] d = dst
        for i in range(plan.num_privates):
            if plan.privates[i].copy:
                s[n] = plan.privates[i].from_place
                d[n] = place(self.pool.p, plan.privates[i].new)
                n += 1
        self.mover(src, dst, np.full(n, self.pool.p.block_size, dtype=np.int32))

    cdef SlotMapping _begin_batch(self, batch_t *b, list seqs, list counts):
        """Check the arguments of a step and take all memory that it needs; ``b`` is empty and the
        caller's to release. ``counts`` None: one token each."""
        cdef pool_t *p = self.pool.p
        cdef int64_t i, count, bound = 0
        cdef SlotMapping mapping = SlotMapping.__new__(SlotMapping)
        b.n = len(seqs)
        if counts is not None and len(counts) != b.n:
            raise InvalidArgumentError(f"counts: expected one per sequence ({b.n}), "
                                       f"got {len(counts)}")
        b.counts = <int64_t *> pc_calloc(b.n, sizeof(int64_t))
        if b.counts == NULL:
            raise StorageMemoryError(b.n * 8, "a batch step")
        for i in range(b.n):
            count = 1
            if counts is not None:
                item = counts[i]
                if type(item) is not int or not 0 <= item <= 2**40:
                    # the name is formatted only for what is no plain count: this loop is hot
                    item = int_argument(item, f"counts[{i}]", 0, 2**40)
                count = item
            b.counts[i] = count       # read once: the caller's list and its numbers may change
            b.total += count
            bound += count // p.block_size + 2
        if b.total > 2**40:
            raise InvalidArgumentError(f"counts: {b.total} tokens in one step are too many")
        b.seqs = seq_pointers(self.pool, seqs)
        # as many slots as the pool has at most: a larger step is refused before it is allocated
        if b.total > <int64_t> p.num_blocks * p.block_size:
            raise_result(answer(E_BLOCKS, blocks_for(b.total, p.block_size), num_free(p),
                                p.num_blocks))
        b.plan.num_writes = b.n
        b.plan.privates = <private_t *> pc_calloc(bound, sizeof(private_t))
        b.plan.writes = <write_t *> pc_calloc(b.n, sizeof(write_t))
        mapping.pool = self.pool
        if b.plan.privates == NULL or b.plan.writes == NULL or not mapping.reserve(bound):
            raise StorageMemoryError(bound * 48, "a slot mapping")
        for i in range(b.n):
            b.plan.writes[i].seq = b.seqs[i]
            b.plan.writes[i].count = b.counts[i]
        mapping.make_slots(b.total)
        return mapping

    cdef int _grant(self, batch_t *b, SlotMapping mapping) except -1:
        """The ranges of an executed plan may be written: list their slots."""
        cdef pool_t *p = self.pool.p
        cdef int64_t B = p.block_size
        cdef int64_t i, j, first, last, at = 0
        cdef int32_t block
        cdef write_t *w
        for i in range(b.n):
            w = &b.plan.writes[i]
            w.seq.granted = max(w.seq.granted, w.start + w.count)
            first = w.start
            while first < w.start + w.count:      # the part that lies in one block
                last = min((first // B + 1) * B, w.start + w.count)
                block = w.seq.table[first // B]
                mapping.note(block)
                for j in range(first % B, last - first // B * B):
                    mapping.raw[at] = block * B + j
                    if p.num_open > 0:
                        mapping.placed[at] = place(p, block) * B + j
                    at += 1
                first = last
        mapping.epoch = p.layout_epoch
        mapping.checked = p.epoch
        return 0

    def prepare(self, list seqs, list counts):
        """Make the next ``counts[i]`` tokens of each sequence writable -> SlotMapping.

        Grows tables and copies shared or cached blocks of the write ranges, all or nothing.
        """
        cdef pool_t *p = self.pool.p
        cdef batch_t b
        cdef result_t r
        cdef SlotMapping mapping
        memset(&b, 0, sizeof(batch_t))
        try:
            # lists of our own: an __index__ may change the caller's
            mapping = self._begin_batch(&b, list(seqs), list(counts))
            enter_fast(p)
            try:
                r = unique_and_live(p, b.seqs, b.n, True)
                if r.code == OK:
                    place_batch(p, &b, NULL)
                    r = self._plan(&b.plan)
                if r.code == OK:
                    self._execute(&b.plan)
                    self._grant(&b, mapping)
            finally:
                leave(p)
        finally:
            batch_release(&b)
        if r.code != OK:
            raise_result(r)
        return mapping

    def prepare_blocks_needed(self, SeqState seq, n):
        """Blocks that preparing the next ``n`` tokens would take, copies included."""
        cdef write_t w
        cdef plan_t plan
        cdef result_t r
        cdef pool_t *p = self.pool.p
        w.count = int_argument(n, "n", 0, HUGE)
        plan.writes = &w
        plan.num_writes = 1
        plan.fresh = 0
        plan.privates = <private_t *> pc_calloc(
            min(w.count // p.block_size, <int64_t> p.num_blocks) + 2, sizeof(private_t))
        if plan.privates == NULL:
            raise StorageMemoryError(sizeof(private_t), "a plan")
        try:
            self._of(seq)
            w.seq = seq.s
            w.start = seq.s.computed
            w.settled = high_water(p, seq.s)
            r = plan_writes(p, &plan)
            leave(p)
        finally:
            pc_release(plan.privates)
        if r.code != OK and r.code != E_BLOCKS and r.code != E_OPEN:
            raise_result(r)
        return plan.fresh

    cdef int _write_one(self, write_t *w, int64_t layer, Pin pin, object out) except -1:
        """Plan and apply one range; pins its blocks and lists its slots when asked.

        ``layer`` >= 0: w.start may be -1 for that layer's written end; w.settled is that end.
        """
        cdef pool_t *p = self.pool.p
        cdef int64_t B = p.block_size
        cdef plan_t plan
        cdef result_t r = answer(OK)
        cdef int64_t[::1] slots
        cdef int64_t j, end
        plan.writes = w
        plan.num_writes = 1
        plan.privates = <private_t *> pc_calloc(w.count // B + 2, sizeof(private_t))
        if plan.privates == NULL:
            raise StorageMemoryError(sizeof(private_t) * (w.count // B + 2), "a plan")
        if out is not None:
            slots = out
        try:
            enter_fast(p)
            try:
                if w.seq.freed:
                    r = answer(E_FREED, w.seq.serial)
                elif layer >= 0:
                    w.settled = written_end(w.seq, layer)
                    if w.start == -1:
                        w.start = w.settled
                    elif w.start > w.settled:
                        r = answer(E_POSITION, w.start, w.settled, 3)
                else:
                    w.settled = high_water(p, w.seq)
                    end = w.seq.num_blocks * B
                    if w.start < 0 or w.start >= end:
                        r = answer(E_POSITION, w.start, end, 4)
                if r.code == OK:
                    r = self._plan(&plan)
                if r.code == OK:
                    self._execute(&plan)
                    for j in range(w.start, w.start + w.count):
                        if pin is not None:
                            if j == w.start or j % B == 0:
                                pin_next(p, pin.pin, w.seq.table[j // B])
                            slots[j - w.start] = (<int64_t> place(p, w.seq.table[j // B]) * B
                                                  + j % B)
                        else:         # nothing is pinned until it is written: not sealed early
                            p.flags[w.seq.table[j // B]] &= ~FLAG_FULL
            finally:
                leave(p)
        finally:
            pc_release(plan.privates)
        if r.code != OK:
            raise_result(r)
        return 0

    def begin_append(self, SeqState seq, layer, n, start=-1):
        """Make the range of an append writable and pin it -> (start position, Pin with slots).

        ``start`` -1 is the layer's written end. Call end_append() once the bytes are written, or
        release the pin to give up (the table stays grown, no length changes).
        """
        cdef write_t w
        cdef int64_t i = int_argument(layer, "layer", 0, self.pool.p.num_layers - 1)
        cdef int64_t longest = <int64_t> self.pool.p.num_blocks * self.pool.p.block_size
        if seq is None or seq.pool is not self.pool:
            raise_result(answer(E_ARGUMENT, 6))
        w.seq = seq.s
        w.count = int_argument(n, "new_tokens", 0, HUGE)
        w.start = int_argument(start, "start_pos", -HUGE, HUGE)
        if w.start < -1:
            raise_result(answer(E_POSITION, w.start, seq.num_tokens))
        if w.count > longest:
            raise_result(answer(E_BLOCKS, blocks_for(w.count, self.pool.p.block_size),
                                num_free(self.pool.p), self.pool.p.num_blocks))
        cdef Pin pin = new_pin(self.pool, w.count // self.pool.p.block_size + 2)
        pin.slots = np.empty(w.count, dtype=np.int64)
        self._write_one(&w, i, pin, pin.slots)
        return w.start, pin

    def end_append(self, SeqState seq, layer, start, n, Pin pin):
        """The bytes of begin_append() are written: advance the layer's written end, unpin."""
        cdef int64_t i = int_argument(layer, "layer", 0, self.pool.p.num_layers - 1)
        cdef int64_t first = int_argument(start, "start", 0, HUGE)
        cdef int64_t end = first + int_argument(n, "n", 0, HUGE)
        cdef pool_t *p = self._of(seq)
        if first <= written_end(seq.s, i):      # not truncated meanwhile by another thread
            seq.s.written[i] = max(seq.s.written[i], end)
            seq.s.appended = max(seq.s.appended, end)
        leave(p)
        pin.release()

    def make_writable(self, SeqState seq, position):
        """The id of the block that holds ``position``, copied first if shared or cached."""
        cdef write_t w
        if seq is None or seq.pool is not self.pool:
            raise_result(answer(E_ARGUMENT, 6))
        w.seq = seq.s
        w.start = int_argument(position, "position", -HUGE, HUGE)
        w.count = 1
        self._write_one(&w, -1, None, None)
        return seq.block_for_position(position)
