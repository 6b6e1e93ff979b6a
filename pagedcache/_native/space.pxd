"""The C side of slabs, as Cython sees it: ``include/pagedcache/copies.h`` and what it includes."""
from libc.stdint cimport int32_t, int64_t, uint8_t

from pagedcache._native.machine cimport pc_tools

cdef extern from "pagedcache/copies.h" nogil:
    int PC_OK
    int PC_E_FORMAT
    int PC_NUM_FORMATS
    int PC_FORMAT_float32
    int PC_FORMAT_float16
    int PC_FORMAT_bfloat16
    int PC_SEALED
    int PC_OPEN

    ctypedef struct pc_geometry:
        int64_t num_heads
        int64_t block_size
        int64_t head_dim
        int64_t block_nbytes
        int64_t token_groups

    ctypedef struct pc_space:
        pc_geometry geometry[2]
        int64_t num_blocks
        int64_t num_open

    ctypedef struct pc_slab:
        uint8_t *base
        int64_t block_stride

    ctypedef struct pc_rows:
        uint8_t *base
        int64_t token_stride
        int64_t head_stride
        int64_t value_stride
        int dtype

    int pc_space_check(int code, int open_code, int layout, int64_t num_heads,
                       int64_t block_size, int64_t head_dim)
    void pc_space_init(pc_space *space, int code, int open_code, int layout, int64_t num_heads,
                       int64_t block_size, int64_t head_dim, int64_t num_blocks,
                       int64_t num_open)
    pc_slab pc_open_slab(const pc_space *space, uint8_t *base, int64_t block_stride)
    int64_t pc_num_places(const pc_space *space)
    int64_t pc_buffer_values(const pc_space *space)
    int64_t pc_dtype_nbytes(int dtype)
    int pc_store_rows(const pc_tools *tools, const pc_space *space, const pc_slab *slabs,
                      const pc_rows *rows, const int64_t *slots, int64_t n, int policy)
    void pc_load_rows(const pc_tools *tools, const pc_space *space, const pc_slab *slabs,
                      const int32_t *places, int64_t first, const pc_rows *rows, int64_t n)
    void pc_copy_tokens(const pc_tools *tools, const pc_space *space, const pc_slab *slabs,
                        int64_t src, int64_t src_offset, int64_t dst, int64_t dst_offset,
                        int64_t count)
    void pc_copy_block(const pc_tools *tools, const pc_space *space, const pc_slab *slabs,
                       int64_t src, int64_t dst, int64_t rows)
    void pc_move_block(const pc_geometry *geometry, const pc_slab *slab, uint8_t *scratch,
                       int64_t src, int64_t dst)

cdef extern from "pagedcache/nonfinite.h" nogil:
    int64_t pc_find_nonfinite(const pc_tools *tools, const pc_rows *rows, int64_t n,
                              int64_t num_heads, int64_t head_dim)
