from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from pagedcache.bookkeeping.types cimport pin_t, pool_t

cdef int32_t take(pool_t *p) noexcept nogil
cdef void take_many(pool_t *p, int32_t *out, int64_t n) noexcept nogil
cdef void touch_block(pool_t *p, int32_t block) noexcept nogil
cdef void release_block(pool_t *p, int32_t block) noexcept nogil
cdef void release_many(pool_t *p, const int32_t *ids, int64_t n) noexcept nogil
cdef void pin_block(pool_t *p, int32_t block) noexcept nogil
cdef void pin_next(pool_t *p, pin_t *pin, int32_t block) noexcept nogil
cdef void unpin_block(pool_t *p, int32_t block) noexcept nogil
cdef void register_block(pool_t *p, int32_t block, uint64_t parent, const uint32_t *tokens,
                         const uint8_t *extra, int64_t extra_size) noexcept nogil
cdef void forget_all(pool_t *p) noexcept nogil
