# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""One step of a whole batch in one call: tokens named, made writable, committed."""
from libc.stdint cimport int64_t, uint32_t
from libc.string cimport memset

from pagedcache.bookkeeping.alloc cimport pc_calloc, pc_release
from pagedcache.bookkeeping.committing cimport apply_commit
from pagedcache.bookkeeping.exports cimport seq_pointers, unique_and_live
from pagedcache.bookkeeping.gate cimport leave
from pagedcache.bookkeeping.handles cimport enter_fast
from pagedcache.bookkeeping.ledger_base cimport token_pointer
from pagedcache.bookkeeping.ledger_seal cimport LedgerSeal
from pagedcache.bookkeeping.mapping cimport SlotMapping
from pagedcache.bookkeeping.sequences cimport outstanding
from pagedcache.bookkeeping.status cimport int_argument, raise_result
from pagedcache.bookkeeping.steps cimport append_many, may_append_many, may_commit_many, name_many
from pagedcache.bookkeeping.types cimport *
from pagedcache.bookkeeping.writing cimport batch_release, batch_t, place_batch, plan_writes

from pagedcache.errors import InvalidArgumentError, StorageMemoryError


cdef class LedgerStep(LedgerSeal):
    """The ledger's operations on a batch of sequences; see ``Ledger``."""

    def commit_many(self, list seqs, list counts):
        """commit() of ``counts[i]`` tokens for every ``seqs[i]``, all or nothing."""
        self._each(seqs, counts, None)

    def append_many(self, list seqs, tokens, list counts=None):
        """Extend the histories: ``counts[i]`` of the tokens (uint32 array) for ``seqs[i]``, one
        behind the other; one token each by default. All or nothing."""
        self._each(seqs, counts, tokens)

    def _each(self, list seqs, list counts, tokens):
        seqs = list(seqs)                 # an __index__ may change the caller's lists
        counts = None if counts is None else list(counts)
        cdef pool_t *p = self.pool.p
        cdef int64_t i, n = len(seqs), total = 0, given = 0
        cdef const uint32_t *raw = NULL
        cdef int64_t *amounts
        cdef seq_t **pointers
        cdef result_t r
        cdef bint committing = tokens is None
        if counts is not None and len(counts) != n:
            raise InvalidArgumentError(f"counts: expected one per sequence ({n}), "
                                       f"got {len(counts)}")
        if tokens is not None:
            raw = token_pointer(tokens, &given)
        pointers = seq_pointers(self.pool, seqs)
        amounts = <int64_t *> pc_calloc(n, sizeof(int64_t))
        try:
            if amounts == NULL:
                raise StorageMemoryError(n * 8, "a batch step")
            for i in range(n):
                amounts[i] = 1 if counts is None else int_argument(counts[i], "counts", 0, 2**40)
                total += amounts[i]
            if tokens is not None and total != given:
                raise InvalidArgumentError(f"tokens: expected {total} for these sequences, "
                                           f"got {given}")
            enter_fast(p)
            try:
                r = unique_and_live(p, pointers, n, True)
                if r.code == OK and committing:
                    r = self._commit(pointers, amounts, n)
                elif r.code == OK:
                    r = append_many(p, pointers, raw, amounts, n)
            finally:
                leave(p)
        finally:
            pc_release(amounts)
            pc_release(pointers)
        if r.code != OK:
            raise_result(r)

    def step(self, list seqs, tokens, list counts=None):
        """Commit what was named and made writable before and make the next ``counts[i]`` positions
        of each sequence writable (one each by default) -> SlotMapping.

        ``tokens`` (uint32 array) names those of them that have no name yet, sequence by sequence.
        All or nothing. Only where there are open slots, the commit stands when slots for the new
        positions are missing, or cannot be freed, after all: it frees some itself.
        """
        cdef pool_t *p = self.pool.p
        cdef int64_t i, given = 0, wanted = 0
        cdef const uint32_t *raw = token_pointer(tokens, &given)
        cdef int64_t *done = NULL         # tokens to commit
        cdef int64_t *named = NULL        # tokens to name
        cdef batch_t b
        cdef result_t r
        cdef SlotMapping mapping
        memset(&b, 0, sizeof(batch_t))
        try:
            # lists of our own: an __index__ may change the caller's
            mapping = self._begin_batch(&b, list(seqs), None if counts is None else list(counts))
            done = <int64_t *> pc_calloc(b.n, 2 * sizeof(int64_t))
            if done == NULL:
                raise StorageMemoryError(b.n * 16, "a batch step")
            named = done + b.n
            enter_fast(p)
            try:
                r = unique_and_live(p, b.seqs, b.n, True)
                if r.code == OK:
                    for i in range(b.n):
                        done[i] = outstanding(b.seqs[i])
                        named[i] = max(<int64_t> 0, b.seqs[i].computed + done[i] + b.counts[i]
                                       - b.seqs[i].history)
                        wanted += named[i]
                    if wanted != given:
                        raise InvalidArgumentError(
                            f"tokens: {wanted} of the next positions of these sequences have no "
                            f"token yet, got {given}")
                    r = self._step(&b, done, named)
                if r.code == OK:
                    name_many(b.seqs, raw, named, b.n)
                    self._grant(&b, mapping)
            finally:
                leave(p)
        finally:
            pc_release(done)
            batch_release(&b)
        if r.code != OK:
            raise_result(r)
        return mapping

    cdef result_t _step(self, batch_t *b, const int64_t *done, const int64_t *named) except *:
        """Check all, commit done[i] tokens, make the ranges behind them the sequences' own, and
        have room for the names. Entered and left with the lock held."""
        cdef pool_t *p = self.pool.p
        cdef int64_t i
        cdef result_t r = may_commit_many(p, b.seqs, done, b.n)
        if r.code == OK:
            r = may_append_many(p, b.seqs, named, b.n)
        if r.code != OK:
            return r
        place_batch(p, b, done)
        r = plan_writes(p, &b.plan)
        if p.num_open == 0:
            if r.code == OK:
                self._execute(&b.plan)        # bytes that move may fail, what follows cannot
                for i in range(b.n):
                    apply_commit(p, b.seqs[i], done[i])
        elif r.code == OK or r.code == E_OPEN:
            r = self._commit(b.seqs, done, b.n)
            if r.code == OK:
                place_batch(p, b, NULL)
                r = self._plan(&b.plan)
            if r.code == OK:
                self._execute(&b.plan)
        return r
