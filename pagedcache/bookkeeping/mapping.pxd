from libc.stdint cimport int32_t, int64_t, uint32_t
from pagedcache.bookkeeping.block_pool cimport BlockPool
from pagedcache.bookkeeping.types cimport result_t

cdef class SlotMapping:
    cdef BlockPool pool
    cdef readonly object slots
    cdef readonly object place_slots
    cdef int32_t *blocks
    cdef uint32_t *generations
    cdef int64_t count, room
    cdef int64_t *raw        # the slots, while they are made
    cdef int64_t *placed     # place_slots; may be `raw`
    cdef int64_t checked     # pool epoch at the last check
    cdef readonly int64_t epoch
    cdef object __weakref__
    cdef int make_slots(self, int64_t n) except -1
    cdef bint reserve(self, int64_t room) noexcept nogil
    cdef void note(self, int32_t block) noexcept nogil
    cdef result_t recheck(self) noexcept nogil
