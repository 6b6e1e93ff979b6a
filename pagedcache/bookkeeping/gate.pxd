from libc.stdint cimport int64_t
from pagedcache.bookkeeping.types cimport pin_t, pool_t

ctypedef void (*reaper_t)(pool_t *, void *, bint) noexcept nogil

cdef int64_t fork_generation() noexcept nogil
cdef int enter(pool_t *p) noexcept nogil
cdef void leave(pool_t *p) noexcept nogil
cdef void shut_gate(pool_t *p) noexcept nogil
cdef void open_gate(pool_t *p) noexcept nogil
cdef void drop(pool_t *p, pin_t *pin) noexcept nogil
cdef void drain(pool_t *p) noexcept nogil
cdef void set_reaper(reaper_t reaper) noexcept
