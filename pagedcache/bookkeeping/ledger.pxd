from pagedcache.bookkeeping.defragment cimport relocation_t
from pagedcache.bookkeeping.ledger_write cimport LedgerWrite

cdef class Ledger(LedgerWrite):
    cdef int _relocate(self, relocation_t *r) except -1
