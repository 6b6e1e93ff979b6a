from libc.stdint cimport int64_t
from pagedcache.bookkeeping.types cimport pin_t, pool_t, result_t

cdef result_t check_slots(pool_t *p, int64_t *slots, int64_t n, pin_t *pin) noexcept nogil
