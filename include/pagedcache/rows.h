/*
 * One row: a head's vector of one token, outside the pool and inside.
 *
 * Outside the pool rows are float32, float16 or bfloat16 with any strides (pc_rows); inside they
 * are in the format of their place (space.h) at the address that pc_row_address() gives. What is
 * here converts a single row, for any machine; bulk.h has the loops over many.
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

/* Read the row at `at`, of any format, as head_dim float32. */
PC_INLINE void pc_decode_at(const pc_geometry *g, const uint8_t *slab, pc_address at, float *out) {
    if (g->token_groups)
        pc_decode_channels(slab + at.data, slab + at.scales, g->head_dim, out);
    else
        pc_decode_row(g->code, slab + at.data, slab + at.scales, g->head_dim, out);
}

#endif
