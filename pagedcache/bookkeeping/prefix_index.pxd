from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from pagedcache.bookkeeping.types cimport pool_t

cdef int index_init(pool_t *p, uint64_t hash_mask, const uint64_t *keys) noexcept nogil
cdef void index_destroy(pool_t *p) noexcept nogil
cdef uint64_t serial_of(pool_t *p, int32_t slot) noexcept nogil
cdef int32_t alive(pool_t *p, uint64_t serial) noexcept nogil
cdef uint32_t *tokens_of(pool_t *p, int32_t slot) noexcept nogil
cdef int32_t index_find(pool_t *p, uint64_t parent, const uint32_t *tokens, const uint8_t *extra,
                        int64_t extra_size) noexcept nogil
cdef int32_t index_find_partial(pool_t *p, uint64_t parent, const uint32_t *tokens, int64_t count,
                                const uint8_t *extra, int64_t extra_size,
                                int64_t *matched) noexcept nogil
cdef bint index_register(pool_t *p, int32_t block, uint64_t parent, const uint32_t *tokens,
                         const uint8_t *extra, int64_t extra_size,
                         int32_t *displaced) noexcept nogil
cdef int32_t index_check(pool_t *p, int32_t *children) noexcept nogil
cdef bint index_unregister(pool_t *p, int32_t block) noexcept nogil
