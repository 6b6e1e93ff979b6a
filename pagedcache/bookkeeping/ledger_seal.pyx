# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Tokens become valid: commit, and the seals of open blocks that it brings about."""
from libc.stdint cimport int32_t, int64_t

from pagedcache.bookkeeping.alloc cimport pc_calloc, pc_release
from pagedcache.bookkeeping.committing cimport apply_commit, index_blocks
from pagedcache.bookkeeping.ledger_pin cimport LedgerPin
from pagedcache.bookkeeping.opening cimport (
    plan_last_seals, plan_seals, renew_promise, slots_wanted,
)
from pagedcache.bookkeeping.steps cimport may_commit_many
from pagedcache.bookkeeping.types cimport *

from pagedcache.errors import PagedCacheError, StorageMemoryError


cdef class LedgerSeal(LedgerPin):
    """The ledger's operations that commit and seal; see ``Ledger``."""

    cdef result_t _commit(self, seq_t **seqs, const int64_t *counts, int64_t n) except *:
        """Commit counts[i] tokens of seqs[i], all or nothing. Entered and left with the lock held.
        A seal that fails raises, and nothing is committed."""
        cdef pool_t *p = self.pool.p
        cdef int64_t i
        cdef result_t r
        with nogil:
            r = may_commit_many(p, seqs, counts, n)
        if r.code != OK:
            return r
        if p.open_used > 0:
            self._seal(seqs, counts, n)
        for i in range(n):
            apply_commit(p, seqs[i], counts[i])
            renew_promise(p, seqs[i])
        return r

    cdef int _seal(self, seq_t **seqs, const int64_t *counts, int64_t n) except -1:
        """Seal what will be full and far enough behind the end once these counts are committed; or
        just full, where that leaves too few slots for what a sequence was opened for."""
        cdef pool_t *p = self.pool.p
        cdef int64_t i, end, found = 0, wanted = 0
        cdef int32_t *blocks = <int32_t *> pc_calloc(p.open_used, sizeof(int32_t))
        if blocks == NULL:
            raise StorageMemoryError(4 * p.open_used, "a list of blocks to seal")
        try:
            for i in range(n):
                end = seqs[i].computed + counts[i]
                found += plan_seals(p, seqs[i], end, 1, blocks + found)
                wanted += slots_wanted(p, seqs[i], end) - seqs[i].promised
            for i in range(n):
                if wanted <= free_slots(p) + found:
                    break
                end = seqs[i].computed + counts[i]
                found += plan_seals(p, seqs[i], end, 0, blocks + found)
            self._move_seals(blocks, found)
        finally:
            pc_release(blocks)
        return 0

    cdef int _seal_last(self, seq_t *s) except -1:
        """Seal and cache a sequence's last full blocks before it goes, if that can be done."""
        cdef pool_t *p = self.pool.p
        cdef int32_t *blocks
        if p.num_open == 0:
            return 0
        blocks = <int32_t *> pc_calloc(p.open_used, sizeof(int32_t))
        if blocks != NULL:
            try:
                self._move_seals(blocks, plan_last_seals(p, s, blocks))
            except (PagedCacheError, MemoryError):
                pass                  # then those are not cached
            finally:
                pc_release(blocks)
        index_blocks(p, s)            # what was sealed before its time, too
        return 0
