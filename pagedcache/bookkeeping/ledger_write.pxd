from libc.stdint cimport int64_t
from pagedcache.bookkeeping.handles cimport Pin
from pagedcache.bookkeeping.ledger_open cimport LedgerOpen
from pagedcache.bookkeeping.mapping cimport SlotMapping
from pagedcache.bookkeeping.types cimport result_t
from pagedcache.bookkeeping.writing cimport batch_t, plan_t, write_t

cdef class LedgerWrite(LedgerOpen):
    cdef result_t _plan(self, plan_t *plan) except *
    cdef int _execute(self, plan_t *plan) except -1
    cdef SlotMapping _begin_batch(self, batch_t *b, list seqs, list counts)
    cdef int _grant(self, batch_t *b, SlotMapping mapping) except -1
    cdef int _write_one(self, write_t *w, int64_t layer, Pin pin, object out) except -1
