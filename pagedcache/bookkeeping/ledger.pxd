from libc.stdint cimport int32_t, int64_t, uint32_t, uint8_t
from pagedcache.bookkeeping.admission cimport match_t
from pagedcache.bookkeeping.block_pool cimport BlockPool
from pagedcache.bookkeeping.defragment cimport relocation_t
from pagedcache.bookkeeping.handles cimport Pin, SeqState
from pagedcache.bookkeeping.types cimport identity_t, pool_t, seq_t
from pagedcache.bookkeeping.writing cimport plan_t, write_t

cdef class Ledger:
    cdef readonly BlockPool pool
    cdef object mover
    cdef object move_mover
    cdef object __weakref__
    cdef pool_t *_of(self, SeqState seq) except NULL
    cdef int _move_bytes(self, object call, tuple arguments) except -1
    cdef int _admit(self, seq_t *s, const uint32_t *tokens, int64_t n, int64_t upto,
                    bint resumed) except -1
    cdef int _execute(self, plan_t *plan) except -1
    cdef int _write_one(self, write_t *w, int64_t layer, Pin pin, object out) except -1
    cdef int _relocate(self, relocation_t *r) except -1
