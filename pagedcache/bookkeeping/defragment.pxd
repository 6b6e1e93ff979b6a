from libc.stdint cimport int32_t, int64_t
from pagedcache.bookkeeping.types cimport pool_t, result_t, seq_t

# A plan that gives blocks new ids. `to` maps every id below `size` (NONE: holds nothing).
cdef struct relocation_t:
    int64_t size
    int32_t *to
    int32_t *back            # who comes to an id, NONE for nobody
    int32_t *moves           # [num_moves][2] (src, dst), in an order that loses nothing
    int64_t num_moves        # entries of `moves`, with the detours of cycles
    int64_t num_blocks       # blocks that get another id
    int32_t *scratch         # [6][size] for apply

cdef result_t plan_defragment(pool_t *p, relocation_t *r) noexcept nogil
cdef result_t plan_compact(pool_t *p, seq_t *s, relocation_t *r) noexcept nogil
cdef void apply_relocation(pool_t *p, relocation_t *r) noexcept nogil
cdef void relocation_release(relocation_t *r) noexcept nogil
