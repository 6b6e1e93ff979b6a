/* Where a row lies in a slab: the one function from (block, head, offset) to byte addresses.
 *
 * A block of one layer and one kind (K or V) is a sequence of planes. A plane is a contiguous run
 * of rows: in HND the block_size rows of one head, in NHD all block_size * num_heads rows of the
 * block. Planar formats store a plane as
 *
 *     quants of all rows | padding to 16 | scales of all rows | padding to 16
 *
 * and all others as its rows back to back. Where groups run along the tokens, the scales of a
 * plane are, head by head, those of the first PC_GROUP tokens for every channel, then those of the
 * next, and the last group has the tokens that are left. 64-bit throughout: slabs pass 2 GiB.
 */
#ifndef PAGEDCACHE_GEOMETRY_H
#define PAGEDCACHE_GEOMETRY_H

#include "formats.h"

enum pc_layout { PC_HND = 0, PC_NHD = 1 };

#define PC_PLANE_ALIGNMENT 16

typedef struct {
    int code, layout;
    int64_t num_heads, block_size, head_dim;
    int64_t row_data_nbytes, row_scale_nbytes;
    int64_t plane_rows, plane_nbytes;
    int64_t scale_offset; /* of the first scale in a plane */
    int64_t block_nbytes;
    int64_t token_groups;   /* per head and channel of a block; 0: groups lie inside rows */
    int64_t channel_nbytes; /* scales of one token group of a head: all channels */
    int clamps;             /* 1: a float slab that stands in for a quantised one, see below */
} pc_geometry;

/* Byte offsets from the start of the slab; scales == data for formats that are not planar. Where
 * groups run along the tokens, scales is that of channel 0 for the row's token group. */
typedef struct {
    int64_t data, scales;
} pc_address;

PC_INLINE int64_t pc_align_up(int64_t nbytes, int64_t alignment) {
    return (nbytes + alignment - 1) / alignment * alignment;
}

/* Whether pc_geometry_init may be called: PC_OK, PC_E_FORMAT for an unknown code, or PC_E_ARGUMENT
 * for an unknown layout, a size outside 1 … 2^31 - 1, or a block of more than 62 bits. */
PC_INLINE int pc_geometry_check(int code, int layout, int64_t num_heads, int64_t block_size,
                                int64_t head_dim) {
    const int64_t most = INT32_MAX;
    if (pc_format_of(code).group_size == 0) {
        return PC_E_FORMAT;
    }
    if ((layout != PC_HND && layout != PC_NHD) || num_heads < 1 || num_heads > most ||
        block_size < 1 || block_size > most || head_dim < 1 || head_dim > most) {
        return PC_E_ARGUMENT;
    }
    /* a bound for a row of any format, its share of the padding included: scales along the tokens
     * take 4 bytes per value where a block is one token */
    const int64_t row_nbytes = 5 * (head_dim + PC_GROUP) + 2 * PC_PLANE_ALIGNMENT;
    return num_heads * block_size > (INT64_MAX / 2) / row_nbytes ? PC_E_ARGUMENT : PC_OK;
}

/* The sizes must be positive and the block must fit 63 bits: pc_geometry_check says so. */
PC_INLINE void pc_geometry_init(pc_geometry *g, int code, int layout, int64_t num_heads,
                                int64_t block_size, int64_t head_dim) {
    const pc_format f = pc_format_of(code);
    const int planar = f.packing == PC_PACK_PLANAR;
    const int64_t alignment = planar ? PC_PLANE_ALIGNMENT : 1;
    g->code = code;
    g->layout = layout;
    g->num_heads = num_heads;
    g->block_size = block_size;
    g->head_dim = head_dim;
    g->clamps = 0;
    g->token_groups = 0;
    g->channel_nbytes = 0;
    g->row_data_nbytes = pc_row_data_nbytes(code, head_dim);
    g->row_scale_nbytes = pc_row_scale_nbytes(code, head_dim);
    g->plane_rows = layout == PC_HND ? block_size : block_size * num_heads;
    int64_t scales_nbytes = g->plane_rows * g->row_scale_nbytes;
    if (f.group_axis == PC_AXIS_TOKENS) {
        const int64_t bits = 8 * (int64_t)f.quant_nbytes / f.group_size;
        g->token_groups = (block_size + f.group_size - 1) / f.group_size;
        g->channel_nbytes = head_dim * f.scale_nbytes;
        g->row_data_nbytes = (head_dim * bits + 7) / 8;
        g->row_scale_nbytes = 0;
        scales_nbytes = g->plane_rows / block_size * g->token_groups * g->channel_nbytes;
    }
    g->scale_offset = pc_align_up(g->plane_rows * g->row_data_nbytes, alignment);
    g->plane_nbytes = pc_align_up(g->scale_offset + scales_nbytes, alignment);
    g->block_nbytes = g->plane_nbytes * (layout == PC_HND ? num_heads : 1);
}

/* Make it the geometry of open blocks, which wait for a full block to be quantised: rows of a
 * float format that hold nothing a group could not (NaN, Inf, magnitudes beyond the format). */
PC_INLINE void pc_geometry_clamp(pc_geometry *g) {
    g->clamps = 1;
}

/* Address of the row of `head` at token `offset` of block `block`, blocks being
 * block_stride_nbytes apart (block_nbytes in a slab of our own). Arguments are not checked. */
PC_INLINE pc_address pc_row_address(const pc_geometry *g, int64_t block_stride_nbytes,
                                    int64_t block, int64_t head, int64_t offset) {
    const int hnd = g->layout == PC_HND;
    const int64_t plane = block * block_stride_nbytes + (hnd ? head * g->plane_nbytes : 0);
    const int64_t row = hnd ? offset : offset * g->num_heads + head;
    pc_address address;
    address.data = plane + row * g->row_data_nbytes;
    address.scales = address.data;
    if (g->row_scale_nbytes) {
        address.scales = plane + g->scale_offset + row * g->row_scale_nbytes;
    } else if (g->token_groups) {
        const int64_t group = (hnd ? 0 : head) * g->token_groups + offset / PC_GROUP;
        address.scales = plane + g->scale_offset + group * g->channel_nbytes;
    }
    return address;
}

#endif
