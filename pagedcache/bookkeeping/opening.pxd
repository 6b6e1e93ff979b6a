from libc.stdint cimport int32_t, int64_t
from pagedcache.bookkeeping.types cimport pool_t, seq_t

cdef bint opening_init(pool_t *p, int32_t num_open) noexcept nogil
cdef void opening_destroy(pool_t *p) noexcept nogil
cdef void open_block(pool_t *p, int32_t block) noexcept nogil
cdef void close_block(pool_t *p, int32_t block) noexcept nogil
cdef int32_t slots_for(pool_t *p, int64_t start, int64_t end) noexcept nogil
cdef int32_t slots_wanted(pool_t *p, seq_t *s, int64_t computed) noexcept nogil
cdef void promise(pool_t *p, seq_t *s, int32_t slots) noexcept nogil
cdef void renew_promise(pool_t *p, seq_t *s) noexcept nogil
cdef int64_t plan_seals(
    pool_t *p, seq_t *s, int64_t end, int32_t behind, int32_t *blocks) noexcept nogil
cdef int64_t plan_last_seals(pool_t *p, seq_t *s, int32_t *blocks) noexcept nogil
cdef int64_t plan_early_seals(pool_t *p, int64_t wanted, int32_t *blocks) noexcept nogil
cdef void cancel_seals(pool_t *p, const int32_t *blocks, int64_t n) noexcept nogil
cdef void apply_seals(pool_t *p, const int32_t *blocks, int64_t n) noexcept nogil
