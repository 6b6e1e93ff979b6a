/* Sealed and open blocks of one kind (K or V): where the bytes of a block are.
 *
 * A place is a block id, for a block that lies in the format's own storage (sealed), or num_blocks
 * + i for one that is kept in open slot i, as rows of a float format, until it is full. A slot is
 * place * block_size + offset. Without open slots every place is a block id.
 */
#ifndef PAGEDCACHE_SPACE_H
#define PAGEDCACHE_SPACE_H

#include "geometry.h"

enum pc_where { PC_SEALED = 0, PC_OPEN = 1 };

typedef struct {
    pc_geometry geometry[2]; /* by pc_where */
    int64_t num_blocks, num_open;
} pc_space;

/* One slab: the storage of K or of V of one layer. */
typedef struct {
    uint8_t *base;
    int64_t block_stride; /* bytes from a block to the next; may be negative */
} pc_slab;

/* Offset of a block's first byte: the first row of every format and layout lies there. */
PC_INLINE int64_t pc_block_offset(const pc_geometry *geometry, const pc_slab *slab, int64_t block) {
    return pc_row_address(geometry, slab->block_stride, block, 0, 0).data;
}

PC_INLINE int pc_where_is(const pc_space *space, int64_t place) {
    return place >= space->num_blocks ? PC_OPEN : PC_SEALED;
}

/* Places, sealed and open, are 0 … this - 1. */
PC_INLINE int64_t pc_num_places(const pc_space *space) {
    return space->num_blocks + space->num_open;
}

/* The slab of open slots at `base`, to be addressed by places like the sealed one: its base is
 * moved down by num_blocks blocks. Computed as an integer, as nothing may lie there. */
PC_INLINE pc_slab pc_open_slab(const pc_space *space, uint8_t *base, int64_t block_stride) {
    pc_slab slab;
    const uint64_t shift = (uint64_t)space->num_blocks * (uint64_t)block_stride;
    slab.base = (uint8_t *)(uintptr_t)((uint64_t)(uintptr_t)base - shift);
    slab.block_stride = block_stride;
    return slab;
}

/* Whether pc_space_init may be called: as pc_geometry_check, and the open code is a float format.
 */
PC_INLINE int pc_space_check(int code, int open_code, int layout, int64_t num_heads,
                             int64_t block_size, int64_t head_dim) {
    const int status = pc_geometry_check(code, layout, num_heads, block_size, head_dim);
    if (status != PC_OK) {
        return status;
    }
    return pc_format_of(open_code).group_size == 1 ? PC_OK : PC_E_FORMAT;
}

/* open_code: the format of open slots; a float format, whose own code it may be. */
PC_INLINE void pc_space_init(pc_space *space, int code, int open_code, int layout,
                             int64_t num_heads, int64_t block_size, int64_t head_dim,
                             int64_t num_blocks, int64_t num_open) {
    pc_geometry_init(&space->geometry[PC_SEALED], code, layout, num_heads, block_size, head_dim);
    pc_geometry_init(&space->geometry[PC_OPEN], open_code, layout, num_heads, block_size, head_dim);
    if (pc_format_of(code).packing != PC_PACK_DENSE) {
        pc_geometry_clamp(&space->geometry[PC_OPEN]);
    }
    space->num_blocks = num_blocks;
    space->num_open = num_open;
}

#endif
