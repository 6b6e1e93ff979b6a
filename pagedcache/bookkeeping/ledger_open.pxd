from libc.stdint cimport int64_t, uint32_t
from pagedcache.bookkeeping.ledger_base cimport LedgerBase
from pagedcache.bookkeeping.types cimport seq_t

cdef class LedgerOpen(LedgerBase):
    cdef int _admit(self, seq_t *s, const uint32_t *tokens, int64_t n, int64_t upto,
                    bint resumed) except -1
