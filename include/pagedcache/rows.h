/*
 * Rows in, rows out: the loops over the rows of a slab.
 *
 * A row is one head's vector of one token. Outside the pool rows are float32, float16 or
 * bfloat16 with any strides (pc_rows); inside they are in the format of their place (space.h) at
 * the address that pc_row_address() gives. pc_put_row() and pc_get_row() are the only places that
 * convert, and pc_store_rows() and pc_load_rows() the only ones that iterate: a vector path
 * replaces the former and leaves the latter alone.
 *
 * Rounding: float32 goes straight to the stored format; float16 and bfloat16 are widened to
 * float32 first, which is exact. A row whose dtype is the stored one is copied as bits, NaN
 * payloads included.
 *
 * Nothing here checks its arguments: slots, places and shapes are right when they come in.
 */
#ifndef PAGEDCACHE_ROWS_H
#define PAGEDCACHE_ROWS_H

#include "channels.h"
#include "space.h"

/* Rows outside the pool: [token][head][value], every stride in bytes and of any sign. */
typedef struct {
    uint8_t *base;
    int64_t token_stride, head_stride, value_stride;
    int dtype; /* code of a dense format */
} pc_rows;

/* float32 values that the functions below need as a buffer: a row; where groups run along the
 * tokens, a head of a block to store it, and a row with scales and minima to load it. */
PC_INLINE int64_t pc_buffer_values(const pc_space *space) {
    const pc_geometry *const g = &space->geometry[PC_SEALED];
    if (!g->token_groups)
        return g->head_dim;
    return g->head_dim * (g->block_size > 3 ? g->block_size : 3);
}

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
    } else if (dtype == PC_FORMAT_float16 && stride == 2) {
        for (i = 0; i < head_dim; i++) {
            bits = pc_float_to_half(in[i]);
            memcpy(row + i * 2, &bits, 2);
        }
    } else if (dtype == PC_FORMAT_float16) {
        for (i = 0; i < head_dim; i++) {
            bits = pc_float_to_half(in[i]);
            memcpy(row + i * stride, &bits, 2);
        }
    } else if (stride == 2) {
        for (i = 0; i < head_dim; i++) {
            bits = pc_float_to_bfloat(in[i]);
            memcpy(row + i * 2, &bits, 2);
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

/* The largest finite value of the float format `code`. */
PC_INLINE float pc_largest(int code) {
    return code == PC_FORMAT_float16    ? PC_HALF_MAX
           : code == PC_FORMAT_bfloat16 ? pc_bfloat_to_float(0x7F7Fu)
                                        : FLT_MAX;
}

/* A finite value cut at +-most. */
PC_INLINE float pc_clamp_value(float value, float most) {
    const float below = value > most ? most : value;
    return below < -most ? -most : below;
}

/* Whether no value of an outside row is NaN or Inf; folded without a branch. */
PC_INLINE int pc_row_is_finite(int dtype, const uint8_t *row, int64_t stride, int64_t head_dim) {
    const uint32_t mask = dtype == PC_FORMAT_float32   ? 0x7F800000u
                          : dtype == PC_FORMAT_float16 ? 0x7C00u
                                                       : 0x7F80u;
    uint32_t found = 0;
    int64_t i;
    if (dtype == PC_FORMAT_float32) {
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
    return !found;
}

/* Make of a row what an open slot of the float format `code` may hold for a quantised one: finite
 * values (by groups of PC_GROUP, as quantised formats saturate them) within the range of `code`.
 * Where that changes a value, *values becomes `buffer`, which it may be already.
 * PC_E_NONFINITE under "raise". */
PC_INLINE int pc_clamp_row(int code, const float **values, int64_t head_dim, int policy,
                           float *buffer) {
    const float most = pc_largest(code);
    const int32_t largest = pc_max_magnitude_bits(*values, head_dim);
    const float *row = *values;
    int64_t at, i;
    if (largest <= (int32_t)pc_float_bits(most))
        return PC_OK;
    if (largest >= 0x7F800000) {
        if (policy == PC_NONFINITE_RAISE)
            return PC_E_NONFINITE;
        for (at = 0; at < head_dim; at += PC_GROUP)
            pc_copy_saturated(row + at, head_dim - at < PC_GROUP ? head_dim - at : PC_GROUP,
                              buffer + at);
        row = buffer;
    }
    for (i = 0; i < head_dim; i++)
        buffer[i] = pc_clamp_value(row[i], most);
    *values = buffer;
    return PC_OK;
}

/* Store head_dim contiguous float32 at `at`; not where groups run along the tokens. buffer:
 * head_dim floats, or `values` itself. */
PC_INLINE int pc_encode_at(const pc_geometry *g, uint8_t *slab, pc_address at, const float *values,
                           int policy, float *buffer) {
    if (g->clamps) {
        const int status = pc_clamp_row(g->code, &values, g->head_dim, policy, buffer);
        if (status != PC_OK)
            return status;
    }
    return pc_encode_row(g->code, values, g->head_dim, slab + at.data, slab + at.scales, policy);
}

/* Read the row at `at`, of any format, as head_dim float32. */
PC_INLINE void pc_decode_at(const pc_geometry *g, const uint8_t *slab, pc_address at, float *out) {
    if (g->token_groups)
        pc_decode_channels(slab + at.data, slab + at.scales, g->head_dim, out);
    else
        pc_decode_row(g->code, slab + at.data, slab + at.scales, g->head_dim, out);
}

/* Store one outside row at `at`; not where groups run along the tokens. buffer: head_dim floats.
 * Returns a status code. */
PC_INLINE int pc_put_row(const pc_geometry *geometry, uint8_t *slab, pc_address at,
                         const uint8_t *row, int dtype, int64_t stride, int policy, float *buffer) {
    const int64_t head_dim = geometry->head_dim;
    const float *values = buffer;
    if (dtype == geometry->code &&
        (!geometry->clamps || pc_row_is_finite(dtype, row, stride, head_dim))) {
        const int64_t nbytes = pc_dtype_nbytes(dtype);
        pc_copy_row(nbytes, row, stride, slab + at.data, nbytes, head_dim);
        return PC_OK;
    }
    if (dtype == PC_FORMAT_float32 && stride == 4)
        values = (const float *)(const void *)row; /* rows are aligned: the door sees to it */
    else
        pc_widen_row(dtype, row, stride, head_dim, buffer);
    return pc_encode_at(geometry, slab, at, values, policy, buffer);
}

/* Read the row at `at` into an outside row. buffer: head_dim floats. */
PC_INLINE void pc_get_row(const pc_geometry *geometry, const uint8_t *slab, pc_address at,
                          uint8_t *row, int dtype, int64_t stride, float *buffer) {
    const int64_t head_dim = geometry->head_dim;
    if (dtype == geometry->code) {
        const int64_t nbytes = pc_dtype_nbytes(dtype);
        pc_copy_row(nbytes, slab + at.data, nbytes, row, stride, head_dim);
    } else if (dtype == PC_FORMAT_float32 && stride == 4) {
        pc_decode_at(geometry, slab, at, (float *)(void *)row);
    } else {
        pc_decode_at(geometry, slab, at, buffer);
        pc_narrow_row(dtype, buffer, head_dim, row, stride);
    }
}

/* Store a whole block, of which the groups run along the tokens, from block_size outside rows.
 * buffer: block_size * head_dim floats. */
PC_INLINE int pc_put_block(const pc_geometry *g, const pc_slab *slab, int64_t block,
                           const pc_rows *rows, int64_t first_token, int policy, float *buffer) {
    int64_t head, i;
    for (head = 0; head < g->num_heads; head++) {
        const uint8_t *row =
            rows->base + first_token * rows->token_stride + head * rows->head_stride;
        int status;
        for (i = 0; i < g->block_size; i++, row += rows->token_stride)
            pc_widen_row(rows->dtype, row, rows->value_stride, g->head_dim,
                         buffer + i * g->head_dim);
        status = pc_encode_head(g, slab->base, slab->block_stride, block, head, buffer, policy);
        if (status != PC_OK)
            return status;
    }
    return PC_OK;
}

/* Read `count` tokens of one token group of a sealed block into rows from `first_token` on.
 * buffer: 3 * head_dim floats. */
PC_INLINE void pc_get_group(const pc_geometry *g, const pc_slab *slab, int64_t block,
                            int64_t offset, int64_t count, const pc_rows *rows, int64_t first_token,
                            float *buffer) {
    const int dense = rows->dtype == PC_FORMAT_float32 && rows->value_stride == 4;
    const int64_t head_dim = g->head_dim;
    float *const scale = buffer, *const minimum = buffer + head_dim;
    int64_t head, i;
    for (head = 0; head < g->num_heads; head++) {
        uint8_t *row = rows->base + first_token * rows->token_stride + head * rows->head_stride;
        for (i = 0; i < count; i++, row += rows->token_stride) {
            const pc_address at = pc_row_address(g, slab->block_stride, block, head, offset + i);
            float *const out = dense ? (float *)(void *)row : buffer + 2 * head_dim;
            if (i == 0)
                pc_decode_scales(slab->base + at.scales, head_dim, scale, minimum);
            pc_decode_nibbles(slab->base + at.data, scale, minimum, head_dim, out);
            if (!dense)
                pc_narrow_row(rows->dtype, out, head_dim, row, rows->value_stride);
        }
    }
}

/* ---- the loops --------------------------------------------------------------------------- */

/*
 * Store n tokens of rows at their slots (place * block_size + offset; negative: skipped). Where
 * groups run along the tokens, the slots of a sealed block come one after the other and all of
 * them. Stops at the first row that cannot be stored and returns its status.
 */
PC_INLINE int pc_store_rows(const pc_space *space, const pc_slab slabs[2], const pc_rows *rows,
                            const int64_t *slots, int64_t n, int policy, float *buffer) {
    const int64_t block_size = space->geometry[PC_SEALED].block_size;
    int64_t token, head;
    for (token = 0; token < n; token++) {
        const uint8_t *row = rows->base + token * rows->token_stride;
        const int64_t block = slots[token] / block_size;
        const int64_t offset = slots[token] - block * block_size;
        const int where = pc_where_is(space, block);
        const pc_geometry *const geometry = &space->geometry[where];
        const pc_slab *const slab = &slabs[where];
        if (slots[token] < 0)
            continue;
        if (geometry->token_groups) {
            const int status = pc_put_block(geometry, slab, block, rows, token, policy, buffer);
            if (status != PC_OK)
                return status;
            token += block_size - 1;
            continue;
        }
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

/* Read n tokens from token `first` of the places listed on into rows. */
PC_INLINE void pc_load_rows(const pc_space *space, const pc_slab slabs[2], const int32_t *places,
                            int64_t first, const pc_rows *rows, int64_t n, float *buffer) {
    const int64_t block_size = space->geometry[PC_SEALED].block_size;
    int64_t token, head;
    for (token = 0; token < n; token++) {
        uint8_t *row = rows->base + token * rows->token_stride;
        const int64_t index = (first + token) / block_size;
        const int64_t offset = first + token - index * block_size;
        const int where = pc_where_is(space, places[index]);
        const pc_geometry *const geometry = &space->geometry[where];
        const pc_slab *const slab = &slabs[where];
        if (geometry->token_groups) {
            const int64_t group_end = offset / PC_GROUP * PC_GROUP + PC_GROUP;
            const int64_t end = group_end < block_size ? group_end : block_size;
            const int64_t left = n - token, count = left < end - offset ? left : end - offset;
            pc_get_group(geometry, slab, places[index], offset, count, rows, token, buffer);
            token += count - 1;
            continue;
        }
        for (head = 0; head < geometry->num_heads; head++) {
            const pc_address at =
                pc_row_address(geometry, slab->block_stride, places[index], head, offset);
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
            if (pc_row_is_finite(rows->dtype, row, stride, head_dim))
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

#endif
