/*
 * Blocks and tokens copied from place to place (space.h). Between places of one kind bytes are
 * copied; from an open to a sealed place a block is quantised (sealed), the other way round it is
 * read back (reopened). Only whole blocks can be written where groups run along the tokens.
 *
 * Nothing here checks its arguments.
 */
#ifndef PAGEDCACHE_COPIES_H
#define PAGEDCACHE_COPIES_H

#include "bulk.h"

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

/* The rows of a run of tokens as they lie in an open block: of a float format, the way outside. */
PC_INLINE pc_rows pc_open_rows(const pc_space *space, const pc_slab *slab, int64_t place,
                               int64_t offset) {
    const pc_geometry *const open = &space->geometry[PC_OPEN];
    const pc_address first = pc_row_address(open, slab->block_stride, place, 0, offset);
    pc_rows rows;
    rows.base = slab->base + first.data;
    rows.token_stride = open->row_data_nbytes * (open->layout == PC_HND ? 1 : open->num_heads);
    rows.head_stride = open->layout == PC_HND ? open->plane_nbytes : open->row_data_nbytes;
    rows.value_stride = pc_dtype_nbytes(open->code);
    rows.dtype = open->code;
    return rows;
}

/* Quantise `count` token rows of an open block: all of it where groups run along the tokens. */
PC_INLINE void pc_seal_run(const pc_tools *tools, const pc_space *space, const pc_slab slabs[2],
                           int64_t src, int64_t src_offset, int64_t dst, int64_t dst_offset,
                           int64_t count) {
    const pc_geometry *const g = &space->geometry[PC_SEALED];
    const pc_slab *const slab = &slabs[PC_SEALED];
    const pc_rows rows = pc_open_rows(space, &slabs[PC_OPEN], src, src_offset);
    pc_strips strips;
    if (g->token_groups) {
        (void)pc_put_block(tools->codec, g, slab, dst, &rows, 0, 0, g->num_heads,
                           PC_NONFINITE_SATURATE, tools->buffer);
        return;
    }
    strips = pc_strips_of(g, slab, dst, dst_offset, &rows, 0, count, 0, g->num_heads);
    for (int64_t i = 0; i < strips.times; i++) {
        (void)pc_put_strip(tools, &strips.strip, &rows, PC_NONFINITE_SATURATE, tools->buffer);
        pc_next_strip(&strips);
    }
}

/* Read `count` token rows of a sealed block back into an open one, within what its format holds. */
PC_INLINE void pc_reopen_run(const pc_tools *tools, const pc_space *space, const pc_slab slabs[2],
                             int64_t src, int64_t src_offset, int64_t dst, int64_t dst_offset,
                             int64_t count) {
    const pc_geometry *const source = &space->geometry[PC_SEALED];
    const pc_geometry *const target = &space->geometry[PC_OPEN];
    const pc_slab *const from = &slabs[PC_SEALED], *const to = &slabs[PC_OPEN];
    float *const values = tools->buffer;
    for (int64_t head = 0; head < source->num_heads; head++) {
        for (int64_t i = 0; i < count; i++) {
            const pc_address in =
                pc_row_address(source, from->block_stride, src, head, src_offset + i);
            const pc_address out =
                pc_row_address(target, to->block_stride, dst, head, dst_offset + i);
            const float *row = values;
            if (source->code == target->code) {
                memcpy(to->base + out.data, from->base + in.data, (size_t)source->row_data_nbytes);
                continue;
            }
            pc_decode_at(source, from->base, in, values);
            if (target->clamps) {
                (void)pc_clamp_row(target->code, &row, target->head_dim, PC_NONFINITE_SATURATE,
                                   values);
            }
            (void)pc_encode_row(target->code, row, target->head_dim, to->base + out.data,
                                to->base + out.scales, PC_NONFINITE_SATURATE);
        }
    }
}

/* Copy `count` token rows from one place to another. Not into a sealed place whose groups run along
 * the tokens, but for whole blocks that are sealed, nor from one such place to another. */
PC_INLINE void pc_copy_tokens(const pc_tools *tools, const pc_space *space, const pc_slab slabs[2],
                              int64_t src, int64_t src_offset, int64_t dst, int64_t dst_offset,
                              int64_t count) {
    const int from = pc_where_is(space, src), to = pc_where_is(space, dst);
    if (from == to) {
        pc_copy_run(&space->geometry[to], &slabs[to], src, src_offset, dst, dst_offset, count);
    } else if (to == PC_SEALED) {
        pc_seal_run(tools, space, slabs, src, src_offset, dst, dst_offset, count);
    } else {
        pc_reopen_run(tools, space, slabs, src, src_offset, dst, dst_offset, count);
    }
}

/* Copy the first `rows` token rows of a block, or every byte of it if that is all of them and both
 * places are of one kind. Groups along the tokens: a sealed dst takes whole blocks only. */
PC_INLINE void pc_copy_block(const pc_tools *tools, const pc_space *space, const pc_slab slabs[2],
                             int64_t src, int64_t dst, int64_t rows) {
    const int from = pc_where_is(space, src), to = pc_where_is(space, dst);
    const pc_geometry *const target = &space->geometry[to];
    if (from == to && rows == target->block_size) {
        memmove(slabs[to].base + pc_block_offset(target, &slabs[to], dst),
                slabs[from].base + pc_block_offset(target, &slabs[from], src),
                (size_t)target->block_nbytes);
    } else if (rows > 0) {
        pc_copy_tokens(tools, space, slabs, src, 0, dst, 0, rows);
    }
}

/* Move a whole block; id -1 on either side is the scratch block. */
PC_INLINE void pc_move_block(const pc_geometry *geometry, const pc_slab *slab, uint8_t *scratch,
                             int64_t src, int64_t dst) {
    const uint8_t *from = src < 0 ? scratch : slab->base + pc_block_offset(geometry, slab, src);
    uint8_t *to = dst < 0 ? scratch : slab->base + pc_block_offset(geometry, slab, dst);
    memmove(to, from, (size_t)geometry->block_nbytes);
}

#endif
