from libc.stdint cimport int32_t, int64_t, uint32_t
from pagedcache.bookkeeping.block_pool cimport BlockPool
from pagedcache.bookkeeping.handles cimport SeqState
from pagedcache.bookkeeping.types cimport pool_t

cdef extern from *:
    """
    #define PC_HUGE ((int64_t)1 << 62)
    """
    const int64_t HUGE "PC_HUGE"     # beyond any count that a pool could serve

cdef const uint32_t *token_pointer(object tokens, int64_t *n) except? NULL

cdef class LedgerBase:
    cdef readonly BlockPool pool
    cdef object mover
    cdef object move_mover
    cdef object __weakref__
    cdef pool_t *_of(self, SeqState seq) except NULL
    cdef int _move_seals(self, const int32_t *blocks, int64_t n) except -1
    cdef int64_t _seal_early(self, int64_t wanted) except -1
    cdef int _move_bytes(self, object call, tuple arguments) except -1
