from libc.stdint cimport int64_t
from pagedcache.bookkeeping.ledger_pin cimport LedgerPin
from pagedcache.bookkeeping.types cimport result_t, seq_t

cdef class LedgerSeal(LedgerPin):
    cdef result_t _commit(self, seq_t **seqs, const int64_t *counts, int64_t n) except *
    cdef int _seal(self, seq_t **seqs, const int64_t *counts, int64_t n) except -1
    cdef int _seal_last(self, seq_t *s) except -1
