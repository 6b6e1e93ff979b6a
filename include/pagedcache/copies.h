/*
 * Blocks and tokens copied from place to place (space.h). Between places of one kind bytes are
 * copied; from an open to a sealed place a block is quantised (sealed), the other way round it is
 * read back (reopened). Only whole blocks can be written where groups run along the tokens.
 *
 * Nothing here checks its arguments.
 */
#ifndef PAGEDCACHE_COPIES_H
#define PAGEDCACHE_COPIES_H

#include "rows.h"

/*
 * Copy `count` token rows from (src_block, src_offset) to (dst_block, dst_offset) of one geometry:
 * their quants and their scales, and no other byte. The rows of a head (HND) or of the block (NHD)
 * follow one another, so a run of tokens is one piece of quants and one of scales.
 */
PC_INLINE void pc_copy_run(const pc_geometry *geometry, const pc_slab *slab, int64_t src_block,
                           int64_t src_offset, int64_t dst_block, int64_t dst_offset,
                           int64_t count) {
    const int by_head = geometry->layout == PC_HND;
    const int64_t num_runs = by_head ? geometry->num_heads : 1;
    const int64_t num_rows = by_head ? count : count * geometry->num_heads;
    int64_t run;
    for (run = 0; run < num_runs; run++) {
        const pc_address from =
            pc_row_address(geometry, slab->block_stride, src_block, run, src_offset);
        const pc_address to =
            pc_row_address(geometry, slab->block_stride, dst_block, run, dst_offset);
        memmove(slab->base + to.data, slab->base + from.data,
                (size_t)(num_rows * geometry->row_data_nbytes));
        if (geometry->row_scale_nbytes > 0)
            memmove(slab->base + to.scales, slab->base + from.scales,
                    (size_t)(num_rows * geometry->row_scale_nbytes));
    }
}

/* Copy `count` token rows between places of two kinds, row by row, by way of float32. */
PC_INLINE void pc_convert_run(const pc_space *space, const pc_slab slabs[2], int64_t src,
                              int64_t src_offset, int64_t dst, int64_t dst_offset, int64_t count,
                              float *buffer) {
    const int from = pc_where_is(space, src), to = pc_where_is(space, dst);
    const pc_geometry *const source = &space->geometry[from];
    const pc_geometry *const target = &space->geometry[to];
    int64_t head, i;
    for (head = 0; head < source->num_heads; head++) {
        for (i = 0; i < count; i++) {
            const pc_address in =
                pc_row_address(source, slabs[from].block_stride, src, head, src_offset + i);
            const pc_address out =
                pc_row_address(target, slabs[to].block_stride, dst, head, dst_offset + i);
            if (source->code == target->code) {
                memcpy(slabs[to].base + out.data, slabs[from].base + in.data,
                       (size_t)source->row_data_nbytes);
                continue;
            }
            pc_decode_at(source, slabs[from].base, in, buffer);
            pc_encode_at(target, slabs[to].base, out, buffer, PC_NONFINITE_SATURATE, buffer);
        }
    }
}

/* Quantise a whole open block whose groups run along the tokens. */
PC_INLINE void pc_seal_block(const pc_space *space, const pc_slab slabs[2], int64_t src,
                             int64_t dst, float *buffer) {
    const pc_geometry *const open = &space->geometry[PC_OPEN];
    const pc_slab *const from = &slabs[PC_OPEN];
    const pc_address first = pc_row_address(open, from->block_stride, src, 0, 0);
    pc_rows rows;
    rows.base = from->base + first.data;
    rows.token_stride = open->row_data_nbytes * (open->layout == PC_HND ? 1 : open->num_heads);
    rows.head_stride = open->layout == PC_HND ? open->plane_nbytes : open->row_data_nbytes;
    rows.value_stride = pc_dtype_nbytes(open->code);
    rows.dtype = open->code;
    pc_put_block(&space->geometry[PC_SEALED], &slabs[PC_SEALED], dst, &rows, 0,
                 PC_NONFINITE_SATURATE, buffer);
}

/* Copy `count` token rows from one place to another. Not into a sealed place whose groups run along
 * the tokens, nor from one such place to another. buffer: pc_buffer_values() floats. */
PC_INLINE void pc_copy_tokens(const pc_space *space, const pc_slab slabs[2], int64_t src,
                              int64_t src_offset, int64_t dst, int64_t dst_offset, int64_t count,
                              float *buffer) {
    const int where = pc_where_is(space, src);
    if (where == pc_where_is(space, dst))
        pc_copy_run(&space->geometry[where], &slabs[where], src, src_offset, dst, dst_offset,
                    count);
    else
        pc_convert_run(space, slabs, src, src_offset, dst, dst_offset, count, buffer);
}

/* Copy the first `rows` token rows of a block, or every byte of it if that is all of them and both
 * places are of one kind. Groups along the tokens: a sealed dst takes whole blocks only. */
PC_INLINE void pc_copy_block(const pc_space *space, const pc_slab slabs[2], int64_t src,
                             int64_t dst, int64_t rows, float *buffer) {
    const int from = pc_where_is(space, src), to = pc_where_is(space, dst);
    const pc_geometry *const target = &space->geometry[to];
    if (from == to && rows == target->block_size)
        memmove(slabs[to].base + pc_block_offset(target, &slabs[to], dst),
                slabs[from].base + pc_block_offset(target, &slabs[from], src),
                (size_t)target->block_nbytes);
    else if (target->token_groups && rows == target->block_size)
        pc_seal_block(space, slabs, src, dst, buffer);
    else
        pc_copy_tokens(space, slabs, src, 0, dst, 0, rows, buffer);
}

/* Move a whole block; id -1 on either side is the scratch block. */
PC_INLINE void pc_move_block(const pc_geometry *geometry, const pc_slab *slab, uint8_t *scratch,
                             int64_t src, int64_t dst) {
    const uint8_t *from = src < 0 ? scratch : slab->base + pc_block_offset(geometry, slab, src);
    uint8_t *to = dst < 0 ? scratch : slab->base + pc_block_offset(geometry, slab, dst);
    memmove(to, from, (size_t)geometry->block_nbytes);
}

#endif
