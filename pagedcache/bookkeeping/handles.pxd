from libc.stdint cimport int32_t, int64_t
from pagedcache.bookkeeping.block_pool cimport BlockPool
from pagedcache.bookkeeping.types cimport pin_t, pool_t, seq_t

cdef class SeqState:
    cdef BlockPool pool
    cdef seq_t *s
    cdef pin_t *last_will    # how the sequence is given back when the handle is collected
    cdef object __weakref__
    cdef int _enter(self) except? 99

cdef class Pin:
    cdef BlockPool pool
    cdef pin_t *pin
    cdef readonly object slots
    cdef object __weakref__

cdef int enter_fast(pool_t *p) except? 99
cdef SeqState new_state(BlockPool pool)
cdef Pin new_pin(BlockPool pool, int64_t room)
cdef object int32_array(const int32_t *data, int64_t n)
