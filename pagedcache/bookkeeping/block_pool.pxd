from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from pagedcache.bookkeeping.types cimport pin_t, pool_t, result_t

ctypedef void (*reaper_t)(pool_t *, void *, bint) noexcept nogil

cdef class BlockPool:
    cdef pool_t *p
    cdef object __weakref__

cdef int64_t fork_generation() noexcept nogil
cdef int enter(pool_t *p) noexcept nogil
cdef void leave(pool_t *p) noexcept nogil
cdef void shut_gate(pool_t *p) noexcept nogil
cdef void open_gate(pool_t *p) noexcept nogil
cdef int32_t take(pool_t *p) noexcept nogil
cdef void touch_block(pool_t *p, int32_t block) noexcept nogil
cdef void release_block(pool_t *p, int32_t block) noexcept nogil
cdef void pin_block(pool_t *p, int32_t block) noexcept nogil
cdef void unpin_block(pool_t *p, int32_t block) noexcept nogil
cdef void register_block(pool_t *p, int32_t block, uint64_t parent, const uint32_t *tokens,
                         const uint8_t *extra, int64_t extra_size) noexcept nogil
cdef void forget_all(pool_t *p) noexcept nogil
cdef void drop(pool_t *p, pin_t *pin) noexcept nogil
cdef void set_reaper(reaper_t reaper) noexcept
