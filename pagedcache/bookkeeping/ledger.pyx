# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The ledger: every operation on sequences, as plan -> check -> (bytes) -> apply.

An operation enters the pool once, plans and checks, and applies what cannot fail. Where bytes
must move first (copy-on-write, partial hits, defragmentation) it shuts the gate, so that every
other call waits, calls the mover it was given, and applies afterwards, or undoes its plan when
the mover failed. With ``deferred_copies`` the engine moves the bytes: the copies are queued and
their blocks stay pinned until it says that they are done.
"""
from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.string cimport memcpy

import numpy as np

from pagedcache.bookkeeping.alloc cimport pc_calloc
from pagedcache.bookkeeping.blocks cimport take
from pagedcache.bookkeeping.copies cimport finish_copies, take_copies
from pagedcache.bookkeeping.defragment cimport (
    apply_relocation, plan_compact, plan_defragment, relocation_release, relocation_t,
)
from pagedcache.bookkeeping.exports cimport export_pages, export_tables
from pagedcache.bookkeeping.gate cimport drop, leave
from pagedcache.bookkeeping.handles cimport SeqState, enter_fast, new_state
from pagedcache.bookkeeping.ledger_base cimport HUGE, token_pointer
from pagedcache.bookkeeping.ledger_step cimport LedgerStep
from pagedcache.bookkeeping.sequences cimport (
    append_tokens, fork, num_tokens, seq_free, table_reserve, truncate,
)
from pagedcache.bookkeeping.status cimport int_argument, raise_result
from pagedcache.bookkeeping.types cimport *

from pagedcache.errors import StorageMemoryError


cdef class Ledger(LedgerStep):
    """Sequences over a BlockPool: admission, writing, sharing, eviction, defragmentation.

    Parameters
    ----------
    num_blocks, block_size : int
        As for BlockPool.
    num_layers : int
        Layers whose written ends are tracked.
    max_seq_len : int or None
        Longest sequence in tokens.
    partial_block_reuse : int
        Fewest tokens worth copying from a partly matching block; 0 turns it off.
    mover : callable(src, dst, rows)
        Copies the first ``rows[i]`` token rows of place ``src[i]`` to ``dst[i]``, all layers. A
        place is a block id, or num_blocks + the slot of an open block.
    move_mover : callable(moves)
        Makes block moves [m, 2] in order; id -1 is the storage's spare block.
    deferred_copies : bool
        The engine copies: see take_block_copies().
    num_open : int
        Open slots: blocks that are not full are kept in one. 0: there are none, none is needed.
    queued : bool
        Freed blocks are reused in the order they were freed (blocks on a device).
    """

    # ------------------------------------------------------------ life of a sequence
    def fork(self, SeqState seq):
        """A child that shares every block of ``seq``; O(blocks), no bytes move."""
        cdef SeqState handle = new_state(self.pool)
        cdef seq_t *child = NULL
        cdef result_t r
        cdef pool_t *p = self._of(seq)
        with nogil:
            r = fork(p, seq.s, &child)
            leave(p)
        if r.code != OK:
            raise_result(r)
        handle.s = child
        return handle

    def extend(self, SeqState seq, n):
        """Room for ``n`` more tokens than the sequence has or was opened for."""
        cdef int64_t more = int_argument(n, "num_tokens", 0, HUGE)
        cdef pool_t *p = self._of(seq)
        cdef int64_t end = num_tokens(p, seq.s) + more
        cdef int64_t need = blocks_for(end, p.block_size) - seq.s.num_blocks
        cdef result_t r = answer(OK)
        if end > p.max_seq_len:
            r = answer(E_TOO_LONG, end, p.max_seq_len)
        elif need > num_free(p):
            r = answer(E_BLOCKS, need, num_free(p), p.num_blocks)
        elif not table_reserve(seq.s, seq.s.num_blocks + max(need, <int64_t> 0)):
            r = answer(E_MEMORY, need * 4)
        else:
            while need > 0:
                seq.s.table[seq.s.num_blocks] = take(p)
                seq.s.num_blocks += 1
                need -= 1
            seq.s.opened = max(seq.s.opened, end)
            seq.s.granted = max(seq.s.granted, end)
            p.epoch += 1
        leave(p)
        if r.code != OK:
            raise_result(r)

    def free(self, SeqState seq, bint seal=True):
        """Give everything back, the tail first. A second call does nothing.

        ``seal``: seal the last full blocks first, so that they are cached.
        """
        cdef pool_t *p = self.pool.p
        cdef pin_t *will
        if seq is None or seq.pool is not self.pool:
            raise_result(answer(E_ARGUMENT, 6))
        if pc_atomic_get(&p.owner) == pc_thread_id():
            will = <pin_t *> pc_calloc(1, sizeof(pin_t))   # a finalizer inside a call
            if will == NULL:
                raise StorageMemoryError(sizeof(pin_t), "a sequence to be freed later")
            will.seq = seq.s
            will.keep = True
            drop(p, will)
            return
        enter_fast(p)
        try:
            if seal and not seq.s.freed:
                self._seal_last(seq.s)
        finally:
            with nogil:
                seq_free(p, seq.s)
                leave(p)

    def truncate(self, SeqState seq, n):
        """Rewind to ``n`` tokens and release the blocks past them."""
        cdef int64_t length = int_argument(n, "n", -HUGE, HUGE)
        cdef pool_t *p = self._of(seq)
        cdef result_t r
        with nogil:
            r = truncate(p, seq.s, length, False)
            leave(p)
        if r.code != OK:
            raise_result(r)

    def set_computed(self, SeqState seq, n):
        """Set the computed length: growing commits, shrinking forgets tokens and keeps blocks."""
        cdef int64_t length = int_argument(n, "n", -HUGE, HUGE)
        cdef pool_t *p = self._of(seq)
        cdef result_t r = answer(OK)      # the same length: neither, nothing is forgotten
        cdef int64_t more = length - seq.s.computed
        try:
            if more > 0:
                r = self._commit(&seq.s, &more, 1)
            elif more < 0:
                r = truncate(p, seq.s, length, True)
        finally:
            leave(p)
        if r.code != OK:
            raise_result(r)

    def commit(self, SeqState seq, n):
        """Mark the next ``n`` tokens computed; newly full blocks of known tokens are cached."""
        cdef int64_t count = int_argument(n, "n", 0, HUGE)
        cdef pool_t *p = self._of(seq)
        cdef result_t r
        try:
            r = self._commit(&seq.s, &count, 1)
        finally:
            leave(p)
        if r.code != OK:
            raise_result(r)

    def append_tokens(self, SeqState seq, tokens):
        """Extend the token history (uint32 array)."""
        cdef int64_t n = 0
        cdef const uint32_t *raw = token_pointer(tokens, &n)
        cdef pool_t *p = self._of(seq)
        cdef result_t r = append_tokens(p, seq.s, raw, n)
        leave(p)
        if r.code != OK:
            raise_result(r)

    def append_token(self, SeqState seq, token):
        """Extend the token history by one token, 0 … 2**32 - 1."""
        cdef uint32_t value = <uint32_t> int_argument(token, "token", 0, 2**32 - 1)
        cdef pool_t *p = self._of(seq)
        cdef result_t r = append_tokens(p, seq.s, &value, 1)
        leave(p)
        if r.code != OK:
            raise_result(r)

    # ------------------------------------------------------------ copies left to the engine
    def take_block_copies(self):
        """(int32 [n, 2] of (src, dst), ticket): copies to make now, right in any order.

        Longer chains come in the next call, after copies_done(ticket). Ticket 0: nothing to do.
        """
        cdef pool_t *p = self.pool.p
        cdef int64_t n, ticket = 0
        cdef int32_t[:, ::1] view
        enter_fast(p)
        n = p.num_copies
        leave(p)
        out = np.empty((n, 2), dtype=np.int32)
        if n == 0:
            return out, 0
        view = out
        enter_fast(p)
        n = take_copies(p, &view[0, 0], n, &ticket)
        leave(p)
        return out[:n].copy(), ticket

    def copies_done(self, ticket):
        """The copies of this ticket are made (or ordered before every later use)."""
        cdef int64_t t = int_argument(ticket, "ticket", 0, HUGE)
        cdef result_t r
        if t == 0:
            return
        enter_fast(self.pool.p)
        r = finish_copies(self.pool.p, t)
        leave(self.pool.p)
        if r.code != OK:
            raise_result(r)

    # ------------------------------------------------------------ defragmentation
    cdef int _relocate(self, relocation_t *r) except -1:
        """Move the bytes of a plan, then the ids. Entered and left with the lock held."""
        cdef pool_t *p = self.pool.p
        if r.num_blocks > 0:
            if not p.deferred:
                self._move_bytes(self._copy_moves, (<size_t> r,))
            apply_relocation(p, r)
        return 0

    def _copy_moves(self, size_t address):
        cdef relocation_t *r = <relocation_t *> address
        cdef int32_t[:, ::1] view
        if self.move_mover is None:
            return
        out = np.empty((r.num_moves, 2), dtype=np.int32)
        view = out
        memcpy(&view[0, 0], r.moves, r.num_moves * 2 * sizeof(int32_t))
        self.move_mover(out)

    cdef int64_t _pack(self, seq_t *s) except -1:
        """Plan and carry out new ids, for one sequence or (NULL) for all. Entered on entry."""
        cdef relocation_t r
        cdef result_t a
        cdef pool_t *p = self.pool.p
        cdef int64_t moved = 0
        try:
            with nogil:
                a = plan_defragment(p, &r) if s == NULL else plan_compact(p, s, &r)
            if a.code == OK:
                try:
                    self._relocate(&r)
                    p.count.defragmentations += s == NULL
                    moved = r.num_blocks
                finally:
                    relocation_release(&r)
        finally:
            leave(p)
        if a.code != OK:
            raise_result(a)
        return moved

    def defragment(self):
        """Pack used and cached-free blocks into the lowest ids -> blocks moved."""
        enter_fast(self.pool.p)
        return self._pack(NULL)

    def compact_sequence(self, SeqState seq):
        """Bring one sequence's blocks into one run of ids, if there is room -> blocks moved."""
        self._of(seq)
        return self._pack(seq.s)

    def contiguity(self, SeqState seq):
        """Share of neighbouring block pairs whose ids are adjacent; 1.0 for one block or none."""
        cdef int64_t i, n, adjacent = 0
        cdef pool_t *p = self._of(seq)
        n = seq.s.num_blocks
        for i in range(1, n):
            adjacent += seq.s.table[i] == seq.s.table[i - 1] + 1
        leave(p)
        return adjacent / (n - 1.0) if n > 1 else 1.0

    # ------------------------------------------------------------ exports
    def block_tables(self, list seqs, lengths=None):
        """int32 [num_seqs, max_blocks], padded with id 0; exactly ceil(length / block_size)."""
        return export_tables(self.pool, seqs, lengths)

    def page_table(self, list seqs, lengths=None, bint allow_empty=False):
        """(kv_indptr, kv_indices, kv_last_page_len), int32 CSR as FlashInfer reads it."""
        return export_pages(self.pool, seqs, lengths, allow_empty)
