from libc.stdint cimport int64_t, uint32_t
from pagedcache.bookkeeping.admission cimport admit_t
from pagedcache.bookkeeping.handles cimport SeqState
from pagedcache.bookkeeping.ledger_base cimport LedgerBase
from pagedcache.bookkeeping.types cimport result_t

cdef class LedgerOpen(LedgerBase):
    cdef SeqState _new(self, admit_t *a, object tokens, bytes root, list extra_keys,
                       object allocate_upto, object resumed, object room)
    cdef int _keep_tokens(self, admit_t *a, const uint32_t *tokens) except -1
    cdef int _make_room(self, admit_t *a) except -1
    cdef int64_t _admit(self, admit_t *all, int64_t n, bint fitting) except -1
    cdef result_t _find_slots(self, admit_t *all, int64_t *fit, bint fitting) except *
    cdef int _copy_heads(self, admit_t *all, int64_t n, int64_t copies) except -1
