# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Prompts come in: matching a prefix, taking blocks for the rest, copying a part-matched block."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.string cimport memcpy, memset

import numpy as np

from pagedcache.bookkeeping.admission cimport (
    admit_t, apply_many, cancel_many, finish_many, match_t, plan_many, plan_open, scratch_size,
    want_slots,
)
from pagedcache.bookkeeping.alloc cimport pc_calloc, pc_release
from pagedcache.bookkeeping.blocks cimport pin_block, unpin_block
from pagedcache.bookkeeping.copies cimport copies_reserve, queue_copy
from pagedcache.bookkeeping.gate cimport leave
from pagedcache.bookkeeping.handles cimport SeqState, enter_fast, new_state
from pagedcache.bookkeeping.ledger_base cimport HUGE, LedgerBase, token_pointer
from pagedcache.bookkeeping.sequences cimport (
    identity_drop, identity_new, num_tokens, seq_destroy, seq_new, table_reserve, tokens_reserve,
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

    cdef int64_t _admit(self, admit_t *all, int64_t n, bint fitting) except -1:
        """Match, hold and take the blocks of prompts for sequences without any -> how many are in:
        all, or with ``fitting`` as many of the first as fit, one at least."""
        cdef pool_t *p = self.pool.p
        cdef int64_t i, copies = 0, fit = 0
        cdef result_t r
        try:
            for i in range(n):
                self._make_room(&all[i])
            enter_fast(p)
            try:
                with nogil:
                    r = plan_many(p, all, n, fitting, &fit)
                if r.code == OK:
                    r = self._find_slots(all, &fit, fitting)
                if r.code == OK and p.deferred:
                    for i in range(fit):
                        copies += all[i].m.source != NONE
                    if copies > 0 and not copies_reserve(p, copies):
                        r = answer(E_MEMORY, copies * sizeof(copy_t))
                if r.code == OK:
                    with nogil:
                        copies = apply_many(p, all, fit)
                    if copies > 0:
                        self._copy_heads(all, fit, copies)
                    finish_many(p, all, fit)
            finally:
                leave(p)
        finally:
            for i in range(n):
                pc_release(all[i].scratch)
        if r.code != OK:
            raise_result(r)
        return fit

    cdef int _make_room(self, admit_t *a) except -1:
        """Memory for one prompt's plan, table and tokens; the tokens are copied by the caller."""
        cdef int64_t size = scratch_size(self.pool.p, a.n, a.s.identity)
        a.scratch = <uint8_t *> pc_calloc(size, 1)
        if (a.scratch == NULL
                or not table_reserve(a.s, blocks_for(max(a.n, a.upto), self.pool.p.block_size))):
            raise StorageMemoryError(size + max(a.n, a.upto) * 4, "a sequence")
        return 0

    cdef result_t _find_slots(self, admit_t *all, int64_t *fit, bint fitting) except *:
        """Open slots for all that fit, full and committed blocks being sealed before their time."""
        cdef pool_t *p = self.pool.p
        cdef int64_t wanted
        while True:
            wanted = want_slots(p, all, fit[0])
            if wanted > free_slots(p):
                self._seal_early(wanted - free_slots(p))
            if wanted <= free_slots(p):
                return answer(OK)
            if not fitting or fit[0] <= 1:
                return answer(E_OPEN, wanted, free_slots(p), p.num_open)
            fit[0] -= 1

    cdef int _copy_heads(self, admit_t *all, int64_t n, int64_t copies) except -1:
        """Bring the heads of part-matched blocks over, or undo what was applied."""
        cdef pool_t *p = self.pool.p
        cdef int64_t i
        try:
            if not p.deferred:
                self._move_bytes(self._copy_sources, (<size_t> all, n, copies))
        except BaseException:
            cancel_many(p, all, n)
            raise
        finally:
            for i in range(n):
                if all[i].m.source == NONE:
                    continue
                if p.deferred:        # the engine copies; the source stays pinned until it has
                    pin_block(p, all[i].target)
                    queue_copy(p, all[i].m.source, all[i].target)
                else:
                    unpin_block(p, all[i].m.source)
        return 0

    def _copy_sources(self, size_t address, n, copies):
        cdef admit_t *all = <admit_t *> address
        cdef int64_t i, at = 0
        cdef int32_t[:, ::1] view
        if self.mover is None:
            return
        lists = np.empty((3, copies), dtype=np.int32)
        view = lists
        for i in range(n):
            if all[i].m.source != NONE:
                view[0, at] = all[i].m.source
                view[1, at] = place(self.pool.p, all[i].target)
                view[2, at] = <int32_t> all[i].m.rows
                at += 1
        self.mover(lists[0], lists[1], lists[2])

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

    cdef SeqState _new(self, admit_t *a, tokens, bytes root, list extra_keys, allocate_upto,
                       resumed, room):
        """A handle for a prompt that is to be admitted; its sequence is in ``a``."""
        cdef int64_t n = 0
        cdef const uint32_t *raw = token_pointer(tokens, &n)
        cdef int64_t longest = <int64_t> self.pool.p.num_blocks * self.pool.p.block_size
        cdef SeqState handle
        cdef identity_t *who
        a.n = n
        a.upto = max(self._checked_prompt(n, allocate_upto),
                     int_argument(room, "room", 0, longest))
        a.resumed = resumed
        handle = new_state(self.pool)
        who = make_identity(root, extra_keys or [])
        a.s = seq_new(self.pool.p, who)
        if a.s == NULL:
            identity_drop(who)
            raise StorageMemoryError(sizeof(seq_t), "a sequence")
        self._keep_tokens(a, raw)
        return handle

    cdef int _keep_tokens(self, admit_t *a, const uint32_t *tokens) except -1:
        """Matched and kept: the same bytes, whatever the caller does with the array meanwhile."""
        if not tokens_reserve(a.s, a.n):
            raise StorageMemoryError(a.n * 4, "a sequence")
        if a.n > 0:
            memcpy(a.s.tokens, tokens, a.n * sizeof(uint32_t))
        return 0

    def open(self, tokens, bytes root=b"", list extra_keys=None, allocate_upto=-1,
             bint resumed=False, room=0):
        """Admit a prompt (uint32 array): hits are shared, the rest is allocated. -> SeqState.

        ``room``: blocks for at least so many tokens, known or not (at most the pool's size).
        Raises OutOfBlocksError when even a cold prompt would not fit; nothing has changed then.
        """
        cdef admit_t a
        cdef SeqState handle
        memset(&a, 0, sizeof(admit_t))
        try:
            handle = self._new(&a, tokens, root, extra_keys, allocate_upto, resumed, room)
            self._admit(&a, 1, False)
        except BaseException:
            seq_destroy(a.s)
            raise
        handle.s = a.s
        return handle

    def open_many(self, list prompts, bint fitting=False):
        """Admit prompts in one step -> SeqStates of all, or with ``fitting`` of the first that fit.

        ``prompts[i]``: (tokens, root, extra keys, allocate_upto, resumed) as for open(). All or
        nothing; prompts see what is cached before, not each other. Where not even the first fits,
        ``fitting`` raises too.
        """
        cdef int64_t i, n = len(prompts), fit = 0
        cdef SeqState handle
        cdef list handles = []
        cdef admit_t *all = <admit_t *> pc_calloc(n, sizeof(admit_t))
        if all == NULL:
            raise StorageMemoryError(n * sizeof(admit_t), "a list of prompts")
        try:
            for i in range(n):
                tokens, root, extra_keys, upto, resumed = prompts[i]
                handles.append(self._new(&all[i], tokens, root, extra_keys, upto, resumed, 0))
            fit = self._admit(all, n, fitting)
            for i in range(fit):
                handle = handles[i]
                handle.s = all[i].s
        finally:
            for i in range(fit, n):
                seq_destroy(all[i].s)
            pc_release(all)
        return handles[:fit]

    def allocate_tokens(self, SeqState seq, tokens, allocate_upto=-1, bint resumed=False):
        """Admit a prompt for a sequence that has no blocks and no tokens yet."""
        cdef admit_t a
        cdef const uint32_t *raw
        cdef int64_t blocks, known
        cdef pool_t *p
        memset(&a, 0, sizeof(admit_t))
        raw = token_pointer(tokens, &a.n)
        a.upto = self._checked_prompt(a.n, allocate_upto)
        a.resumed = resumed
        p = self._of(seq)
        a.s = seq.s
        blocks = seq.s.num_blocks
        known = num_tokens(p, seq.s)
        leave(p)
        if blocks > 0 or known > 0:
            raise_result(answer(E_ARGUMENT, 2, blocks, known))
        self._keep_tokens(&a, raw)
        self._admit(&a, 1, False)

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
                plan_open(p, raw, n, who, upto, 0, True, scratch, &m)
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
