# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Prompts come in: matching a prefix, taking blocks for the rest, copying a part-matched block."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.string cimport memcpy

import numpy as np

from pagedcache.bookkeeping.admission cimport (
    apply_open, count_open, match_t, plan_open, scratch_size,
)
from pagedcache.bookkeeping.alloc cimport pc_calloc, pc_release
from pagedcache.bookkeeping.blocks cimport pin_block, release_block, unpin_block
from pagedcache.bookkeeping.copies cimport copies_reserve, queue_copy
from pagedcache.bookkeeping.gate cimport leave
from pagedcache.bookkeeping.handles cimport SeqState, enter_fast, new_state
from pagedcache.bookkeeping.ledger_base cimport HUGE, LedgerBase, token_pointer
from pagedcache.bookkeeping.opening cimport open_block, promise, slots_for
from pagedcache.bookkeeping.sequences cimport (
    identity_drop, identity_new, num_tokens, seq_destroy, seq_link, seq_new, table_reserve,
    tokens_reserve,
)
from pagedcache.bookkeeping.status cimport int_argument, raise_result
from pagedcache.bookkeeping.types cimport *

from pagedcache.errors import StorageMemoryError


cdef identity_t *make_identity(bytes root, list extra_keys) except NULL:
    """``extra_keys`` is sorted by start and validated by the caller (hashing.py)."""
    extra_keys = list(extra_keys)
    cdef const uint8_t *raw = root
    cdef identity_t *who = identity_new(raw, len(root), len(extra_keys))
    cdef const uint8_t *key_raw
    cdef bytes key
    cdef int64_t i
    if who == NULL:
        raise StorageMemoryError(sizeof(identity_t) + len(root), "a sequence's identity")
    for i in range(who.num_extras):
        start, stop, key = extra_keys[i]
        who.extras[i].start = min(start, HUGE)
        who.extras[i].stop = min(stop, HUGE)
        who.extras[i].size = len(key)
        who.extras[i].data = <uint8_t *> pc_calloc(len(key), 1)
        if who.extras[i].data == NULL:
            identity_drop(who)
            raise StorageMemoryError(max(len(key), 1), "an extra key")
        key_raw = key
        memcpy(who.extras[i].data, key_raw, len(key))
    return who


cdef class LedgerOpen(LedgerBase):
    """The ledger's operations on prompts; see ``Ledger``."""

    cdef int _admit(self, seq_t *s, const uint32_t *tokens, int64_t n, int64_t upto,
                    bint resumed) except -1:
        """Match, hold and take the blocks of a prompt for a sequence without any."""
        cdef pool_t *p = self.pool.p
        cdef int64_t size = scratch_size(p, n, s.identity)
        cdef uint8_t *scratch = <uint8_t *> pc_calloc(size, 1)
        cdef match_t m
        cdef result_t r
        cdef int32_t target = NONE, slots
        if (scratch == NULL or not tokens_reserve(s, n)
                or not table_reserve(s, blocks_for(max(n, upto), p.block_size))):
            pc_release(scratch)
            raise StorageMemoryError(size + max(n, upto) * 4, "a sequence")
        if n > 0:                     # matched and kept: the same bytes, whatever the caller does
            memcpy(s.tokens, tokens, n * sizeof(uint32_t))
        try:
            enter_fast(p)
            try:
                with nogil:
                    r = plan_open(p, s.tokens, n, s.identity, upto, scratch, &m)
                if r.code == OK:
                    slots = slots_for(p, m.cached_tokens, max(s.opened, n, upto))
                    if slots > free_slots(p):
                        self._seal_early(slots - free_slots(p))
                    if slots > free_slots(p):
                        r = answer(E_OPEN, slots, free_slots(p), p.num_open)
                with nogil:
                    if (r.code == OK and m.source != NONE and p.deferred
                            and not copies_reserve(p, 1)):
                        r = answer(E_MEMORY, sizeof(copy_t))
                    if r.code == OK:
                        if m.source != NONE:
                            pin_block(p, m.source)
                        apply_open(p, s, &m, &target)
                        promise(p, s, slots)
                        if target != NONE and p.num_open > 0:
                            open_block(p, target)
                            promise(p, s, slots - 1)
                if r.code == OK and target != NONE:
                    if p.deferred:
                        pin_block(p, target)
                        queue_copy(p, m.source, target)
                    else:
                        try:
                            self._move_bytes(self._copy_one,
                                             (m.source, place(p, target), m.rows))
                        except BaseException:
                            while s.num_blocks > 0:
                                s.num_blocks -= 1
                                release_block(p, s.table[s.num_blocks])
                            s.computed = 0
                            s.vouched = 0
                            s.num_cached = 0
                            s.indexed = 0
                            s.unsealed = 0
                            promise(p, s, 0)
                            raise
                        finally:
                            unpin_block(p, m.source)
                    p.count.partial_copies += 1
                if r.code == OK:
                    s.known = n
                    s.history = n
                    s.opened = max(s.opened, n, upto)
                    count_open(p, &m, n, resumed)
                    if s.serial == 0:
                        seq_link(p, s)
                    p.epoch += 1
            finally:
                leave(p)
        finally:
            pc_release(scratch)
        if r.code != OK:
            raise_result(r)
        return 0

    def _copy_one(self, src, dst, rows):
        if self.mover is not None:
            self.mover(np.array([src], dtype=np.int32), np.array([dst], dtype=np.int32),
                       np.array([rows], dtype=np.int32))

    def _checked_prompt(self, int64_t n, allocate_upto):
        cdef pool_t *p = self.pool.p
        cdef int64_t upto = int_argument(allocate_upto, "allocate_upto", -1, HUGE)
        if n > p.max_seq_len:
            raise_result(answer(E_TOO_LONG, n, p.max_seq_len))
        if upto == -1:
            return n
        if upto > n or upto == 0:
            raise_result(answer(E_ARGUMENT, 4, upto, n))
        return upto

    def open(self, tokens, bytes root=b"", list extra_keys=None, allocate_upto=-1,
             bint resumed=False, room=0):
        """Admit a prompt (uint32 array): hits are shared, the rest is allocated. -> SeqState.

        ``room``: blocks for at least so many tokens, known or not (at most the pool's size).
        Raises OutOfBlocksError when even a cold prompt would not fit; nothing has changed then.
        """
        cdef int64_t n = 0
        cdef const uint32_t *raw = token_pointer(tokens, &n)
        cdef int64_t longest = <int64_t> self.pool.p.num_blocks * self.pool.p.block_size
        cdef int64_t upto = max(self._checked_prompt(n, allocate_upto),
                                int_argument(room, "room", 0, longest))
        cdef SeqState handle = new_state(self.pool)
        cdef identity_t *who = make_identity(root, extra_keys or [])
        cdef seq_t *s = seq_new(self.pool.p, who)
        if s == NULL:
            identity_drop(who)
            raise StorageMemoryError(sizeof(seq_t), "a sequence")
        try:
            self._admit(s, raw, n, upto, resumed)
        except BaseException:
            seq_destroy(s)
            raise
        handle.s = s
        return handle

    def allocate_tokens(self, SeqState seq, tokens, allocate_upto=-1, bint resumed=False):
        """Admit a prompt for a sequence that has no blocks and no tokens yet."""
        cdef int64_t n = 0
        cdef const uint32_t *raw = token_pointer(tokens, &n)
        cdef int64_t upto = self._checked_prompt(n, allocate_upto)
        cdef pool_t *p = self._of(seq)
        cdef int64_t blocks = seq.s.num_blocks
        cdef int64_t known = num_tokens(p, seq.s)
        leave(p)
        if blocks > 0 or known > 0:
            raise_result(answer(E_ARGUMENT, 2, blocks, known))
        self._admit(seq.s, raw, n, upto, resumed)

    def _plan(self, tokens, bytes root, list extra_keys, allocate_upto):
        """(hit tokens, fresh blocks) of a prompt; counts and touches nothing."""
        cdef pool_t *p = self.pool.p
        cdef int64_t n = 0
        cdef const uint32_t *raw = token_pointer(tokens, &n)
        cdef int64_t upto = self._checked_prompt(n, allocate_upto)
        cdef identity_t *who = make_identity(root, extra_keys or [])
        cdef uint8_t *scratch = <uint8_t *> pc_calloc(scratch_size(p, n, who), 1)
        cdef match_t m
        if scratch == NULL:
            identity_drop(who)
            raise StorageMemoryError(n * 4, "a prefix look-up")
        try:
            enter_fast(p)
            with nogil:
                plan_open(p, raw, n, who, upto, scratch, &m)
                leave(p)
        finally:
            identity_drop(who)
            pc_release(scratch)
        return m.cached_tokens, m.fresh

    def probe(self, tokens, bytes root=b"", list extra_keys=None):
        """Tokens of a prompt that would hit now; counts nothing, touches no recency."""
        return self._plan(tokens, root, extra_keys, -1)[0]

    def blocks_needed(self, tokens, bytes root=b"", list extra_keys=None, allocate_upto=-1):
        """Blocks that open() would take beyond hits, copies included."""
        return self._plan(tokens, root, extra_keys, allocate_upto)[1]
