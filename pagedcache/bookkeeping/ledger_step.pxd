from libc.stdint cimport int64_t
from pagedcache.bookkeeping.ledger_seal cimport LedgerSeal
from pagedcache.bookkeeping.types cimport result_t
from pagedcache.bookkeeping.writing cimport batch_t

cdef class LedgerStep(LedgerSeal):
    cdef result_t _step(self, batch_t *b, const int64_t *done, const int64_t *named) except *
