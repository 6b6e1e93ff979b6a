from libc.stdint cimport int64_t
from pagedcache.bookkeeping.defragment cimport relocation_t
from pagedcache.bookkeeping.ledger_step cimport LedgerStep
from pagedcache.bookkeeping.types cimport seq_t

cdef class Ledger(LedgerStep):
    cdef int _relocate(self, relocation_t *r) except -1
    cdef int64_t _pack(self, seq_t *s) except -1
