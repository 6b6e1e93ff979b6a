/*
 * Rows in, rows out, blocks copied: the loops over the rows of a slab.
 *
 * A row is one head's vector of one token. Outside the pool rows are float32, float16 or
 * bfloat16 with any strides (pc_rows); inside they are in the slab's format at the address that
 * pc_row_address() gives. pc_put_row() and pc_get_row() are the only places that convert, and
 * pc_store_rows() and pc_load_rows() the only ones that iterate: a vector path replaces the
 * former and leaves the latter alone.
 *
 * Rounding: float32 goes straight to the stored format; float16 and bfloat16 are widened to
 * float32 first, which is exact. A row whose dtype is the stored one is copied as bits, NaN
 * payloads included.
 *
 * Nothing here checks its arguments: slots, ids and shapes are right when they come in.
 */
#ifndef PAGEDCACHE_ROWS_H
#define PAGEDCACHE_ROWS_H

#include "geometry.h"

/* One slab: the storage of K or of V of one layer. */
typedef struct {
    uint8_t *base;
    int64_t block_stride; /* bytes from a block to the next; may be negative */
} pc_slab;

/* Rows outside the pool: [token][head][value], every stride in bytes and of any sign. */
typedef struct {
    uint8_t *base;
    int64_t token_stride, head_stride, value_stride;
    int dtype; /* code of a dense format */
} pc_rows;

/* ---- one value, one row ------------------------------------------------------------------ */

PC_INLINE uint16_t pc_load_u16(const uint8_t *at) {
    uint16_t bits;
    memcpy(&bits, at, sizeof bits);
    return bits;
}

PC_INLINE uint32_t pc_load_u32(const uint8_t *at) {
    uint32_t bits;
    memcpy(&bits, at, sizeof bits);
    return bits;
}

PC_INLINE int64_t pc_dtype_nbytes(int dtype) {
    return dtype == PC_FORMAT_float32 ? 4 : 2;
}

/* Widen a row to float32. The contiguous loops are apart so that the compiler vectorises them. */
PC_INLINE void pc_widen_row(int dtype, const uint8_t *row, int64_t stride, int64_t head_dim,
                            float *out) {
    int64_t i;
    if (dtype == PC_FORMAT_float32) {
        if (stride == 4)
            memcpy(out, row, (size_t)head_dim * 4);
        else
            for (i = 0; i < head_dim; i++)
                memcpy(out + i, row + i * stride, 4);
    } else if (dtype == PC_FORMAT_float16) {
        if (stride == 2)
            for (i = 0; i < head_dim; i++)
                out[i] = pc_half_to_float(pc_load_u16(row + i * 2));
        else
            for (i = 0; i < head_dim; i++)
                out[i] = pc_half_to_float(pc_load_u16(row + i * stride));
    } else {
        if (stride == 2)
            for (i = 0; i < head_dim; i++)
                out[i] = pc_bfloat_to_float(pc_load_u16(row + i * 2));
        else
            for (i = 0; i < head_dim; i++)
                out[i] = pc_bfloat_to_float(pc_load_u16(row + i * stride));
    }
}

/* Round a float32 row to a row of dtype. */
PC_INLINE void pc_narrow_row(int dtype, const float *in, int64_t head_dim, uint8_t *row,
                             int64_t stride) {
    int64_t i;
    uint16_t bits;
    if (dtype == PC_FORMAT_float32) {
        if (stride == 4)
            memcpy(row, in, (size_t)head_dim * 4);
        else
            for (i = 0; i < head_dim; i++)
                memcpy(row + i * stride, in + i, 4);
    } else if (dtype == PC_FORMAT_float16) {
        for (i = 0; i < head_dim; i++) {
            bits = pc_float_to_half(in[i]);
            memcpy(row + i * stride, &bits, 2);
        }
    } else {
        for (i = 0; i < head_dim; i++) {
            bits = pc_float_to_bfloat(in[i]);
            memcpy(row + i * stride, &bits, 2);
        }
    }
}

/* Copy a row of values of nbytes each without looking at them. */
PC_INLINE void pc_copy_row(int64_t nbytes, const uint8_t *from, int64_t from_stride, uint8_t *to,
                           int64_t to_stride, int64_t head_dim) {
    int64_t i;
    if (from_stride == nbytes && to_stride == nbytes)
        memcpy(to, from, (size_t)(head_dim * nbytes));
    else if (nbytes == 2)
        for (i = 0; i < head_dim; i++)
            memcpy(to + i * to_stride, from + i * from_stride, 2);
    else
        for (i = 0; i < head_dim; i++)
            memcpy(to + i * to_stride, from + i * from_stride, 4);
}

/* Store one outside row at `at`. buffer: head_dim floats. Returns a status code. */
PC_INLINE int pc_put_row(const pc_geometry *geometry, uint8_t *slab, pc_address at,
                         const uint8_t *row, int dtype, int64_t stride, int policy, float *buffer) {
    const int64_t head_dim = geometry->head_dim;
    const float *values = buffer;
    if (dtype == geometry->code) {
        const int64_t nbytes = pc_dtype_nbytes(dtype);
        pc_copy_row(nbytes, row, stride, slab + at.data, nbytes, head_dim);
        return PC_OK;
    }
    if (dtype == PC_FORMAT_float32 && stride == 4)
        values = (const float *)(const void *)row; /* rows are aligned: the door sees to it */
    else
        pc_widen_row(dtype, row, stride, head_dim, buffer);
    return pc_encode_row(geometry->code, values, head_dim, slab + at.data, slab + at.scales,
                         policy);
}

/* Read the row at `at` into an outside row. buffer: head_dim floats. */
PC_INLINE void pc_get_row(const pc_geometry *geometry, const uint8_t *slab, pc_address at,
                          uint8_t *row, int dtype, int64_t stride, float *buffer) {
    const int64_t head_dim = geometry->head_dim;
    if (dtype == geometry->code) {
        const int64_t nbytes = pc_dtype_nbytes(dtype);
        pc_copy_row(nbytes, slab + at.data, nbytes, row, stride, head_dim);
    } else if (dtype == PC_FORMAT_float32 && stride == 4) {
        pc_decode_row(geometry->code, slab + at.data, slab + at.scales, head_dim,
                      (float *)(void *)row);
    } else {
        pc_decode_row(geometry->code, slab + at.data, slab + at.scales, head_dim, buffer);
        pc_narrow_row(dtype, buffer, head_dim, row, stride);
    }
}

/* ---- the loops --------------------------------------------------------------------------- */

/*
 * Store n tokens of rows at their slots (block * block_size + offset; negative: skipped).
 * Stops at the first row that cannot be stored and returns its status.
 */
PC_INLINE int pc_store_rows(const pc_geometry *geometry, const pc_slab *slab, const pc_rows *rows,
                            const int64_t *slots, int64_t n, int policy, float *buffer) {
    int64_t token, head;
    for (token = 0; token < n; token++) {
        const uint8_t *row = rows->base + token * rows->token_stride;
        int64_t block, offset;
        if (slots[token] < 0)
            continue;
        block = slots[token] / geometry->block_size;
        offset = slots[token] - block * geometry->block_size;
        for (head = 0; head < geometry->num_heads; head++) {
            const pc_address at = pc_row_address(geometry, slab->block_stride, block, head, offset);
            const int status = pc_put_row(geometry, slab->base, at, row + head * rows->head_stride,
                                          rows->dtype, rows->value_stride, policy, buffer);
            if (status != PC_OK)
                return status;
        }
    }
    return PC_OK;
}

/* Read n tokens from token `first` of the table's blocks on into rows. */
PC_INLINE void pc_load_rows(const pc_geometry *geometry, const pc_slab *slab,
                            const int32_t *block_ids, int64_t first, const pc_rows *rows, int64_t n,
                            float *buffer) {
    int64_t token, head;
    for (token = 0; token < n; token++) {
        uint8_t *row = rows->base + token * rows->token_stride;
        const int64_t index = (first + token) / geometry->block_size;
        const int64_t offset = first + token - index * geometry->block_size;
        for (head = 0; head < geometry->num_heads; head++) {
            const pc_address at =
                pc_row_address(geometry, slab->block_stride, block_ids[index], head, offset);
            pc_get_row(geometry, slab->base, at, row + head * rows->head_stride, rows->dtype,
                       rows->value_stride, buffer);
        }
    }
}

/*
 * Flat index ((token * num_heads + head) * head_dim + value) of the first value that is not
 * finite, or -1. Each row is first folded without a branch, then searched only if it has one.
 */
PC_INLINE int64_t pc_find_nonfinite(const pc_rows *rows, int64_t n, int64_t num_heads,
                                    int64_t head_dim) {
    const uint32_t mask = rows->dtype == PC_FORMAT_float32   ? 0x7F800000u
                          : rows->dtype == PC_FORMAT_float16 ? 0x7C00u
                                                             : 0x7F80u;
    const int64_t stride = rows->value_stride;
    int64_t token, head, i;
    for (token = 0; token < n; token++) {
        for (head = 0; head < num_heads; head++) {
            const uint8_t *row = rows->base + token * rows->token_stride + head * rows->head_stride;
            uint32_t found = 0;
            if (rows->dtype == PC_FORMAT_float32) {
                if (stride == 4)
                    for (i = 0; i < head_dim; i++)
                        found |= (pc_load_u32(row + i * 4) & mask) == mask;
                else
                    for (i = 0; i < head_dim; i++)
                        found |= (pc_load_u32(row + i * stride) & mask) == mask;
            } else {
                if (stride == 2)
                    for (i = 0; i < head_dim; i++)
                        found |= (pc_load_u16(row + i * 2) & mask) == mask;
                else
                    for (i = 0; i < head_dim; i++)
                        found |= (pc_load_u16(row + i * stride) & mask) == mask;
            }
            if (!found)
                continue;
            for (i = 0; i < head_dim; i++) {
                const uint32_t bits = rows->dtype == PC_FORMAT_float32
                                          ? pc_load_u32(row + i * stride)
                                          : pc_load_u16(row + i * stride);
                if ((bits & mask) == mask)
                    return (token * num_heads + head) * head_dim + i;
            }
        }
    }
    return -1;
}

/* ---- copies inside a slab ---------------------------------------------------------------- */

/*
 * Copy `count` token rows from (src_block, src_offset) to (dst_block, dst_offset): their quants
 * and their scales, and no other byte. The rows of a head (HND) or of the block (NHD) follow one
 * another, so a run of tokens is one piece of quants and one of scales.
 */
PC_INLINE void pc_copy_tokens(const pc_geometry *geometry, const pc_slab *slab, int64_t src_block,
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

/* Offset of a block's first byte: the first row of every format and layout lies there. */
PC_INLINE int64_t pc_block_offset(const pc_geometry *geometry, const pc_slab *slab, int64_t block) {
    return pc_row_address(geometry, slab->block_stride, block, 0, 0).data;
}

/* Copy the first `rows` token rows of a block, or every byte of it if that is all of them. */
PC_INLINE void pc_copy_block(const pc_geometry *geometry, const pc_slab *slab, int64_t src,
                             int64_t dst, int64_t rows) {
    if (rows == geometry->block_size)
        memmove(slab->base + pc_block_offset(geometry, slab, dst),
                slab->base + pc_block_offset(geometry, slab, src), (size_t)geometry->block_nbytes);
    else
        pc_copy_tokens(geometry, slab, src, 0, dst, 0, rows);
}

/* Move a whole block; id -1 on either side is the scratch block. */
PC_INLINE void pc_move_block(const pc_geometry *geometry, const pc_slab *slab, uint8_t *scratch,
                             int64_t src, int64_t dst) {
    const uint8_t *from = src < 0 ? scratch : slab->base + pc_block_offset(geometry, slab, src);
    uint8_t *to = dst < 0 ? scratch : slab->base + pc_block_offset(geometry, slab, dst);
    memmove(to, from, (size_t)geometry->block_nbytes);
}

#endif
