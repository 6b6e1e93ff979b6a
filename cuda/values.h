/* Values of rows outside the pool: float32, float16 or bfloat16 of any strides. Up to 16 bytes at a
 * time where they lie dense and aligned, else one by one.
 */
#ifndef PAGEDCACHE_CUDA_VALUES_H
#define PAGEDCACHE_CUDA_VALUES_H

#include "pagedcache/rows.h"
#include "units.h"

/* How many neighbouring values one access may take in all of the rows: `most` (4 or 8), or 1. A
 * stride over a single row is never used, whatever it is. */
inline int pc_values_at_once(const pc_rows &rows, int64_t num_tokens, int64_t num_heads,
                             int64_t head_dim, int most) {
    const int64_t nbytes = pc_dtype_nbytes(rows.dtype);
    const int aligned = pc_unit_nbytes((uint64_t)(uintptr_t)rows.base |
                                       (num_tokens > 1 ? (uint64_t)rows.token_stride : 0) |
                                       (num_heads > 1 ? (uint64_t)rows.head_stride : 0));
    const bool dense = rows.value_stride == nbytes;
    return dense && head_dim % most == 0 && aligned >= pc_unit_nbytes(most * nbytes) ? most : 1;
}

/* Values whose exponent bits are all set are not finite. */
PC_INLINE constexpr uint32_t pc_exponent_bits(int dtype) {
    return dtype == PC_FORMAT_float32   ? 0x7F800000u
           : dtype == PC_FORMAT_float16 ? 0x7C00u
                                        : 0x7F80u;
}

/* NBYTES at `at`: those of one value anywhere, those of several at a multiple of NBYTES or of 16.
 */
template <int NBYTES> PC_DEVICE void pc_load_raw(const uint8_t *at, void *values) {
    constexpr int piece = NBYTES < 16 ? NBYTES : 16;
    pc_unit<piece> pieces[NBYTES / piece];
    PC_UNROLL
    for (int i = 0; i < NBYTES / piece; i++) {
        pieces[i] = NBYTES <= 4 ? pc_load_bytes<piece>(at) : pc_load_unit<piece>(at + i * piece);
    }
    memcpy(values, pieces, NBYTES);
}

template <int NBYTES> PC_DEVICE void pc_store_raw(uint8_t *at, const void *values) {
    constexpr int piece = NBYTES < 16 ? NBYTES : 16;
    pc_unit<piece> pieces[NBYTES / piece];
    memcpy(pieces, values, NBYTES);
    PC_UNROLL
    for (int i = 0; i < NBYTES / piece; i++) {
        if (NBYTES <= 4) {
            pc_store_bytes<piece>(at, pieces[i]);
        } else {
            pc_store_unit<piece>(at + i * piece, pieces[i]);
        }
    }
}

/* COUNT values of dtype, one after the other, widened to float32. */
template <int COUNT> PC_DEVICE void pc_widen_values(int dtype, const void *from, float *values) {
    if (dtype == PC_FORMAT_float32) {
        if constexpr (COUNT <= 4) {
            memcpy(values, from, COUNT * sizeof(float));
        }
        return;
    }
    uint16_t bits[COUNT];
    memcpy(bits, from, sizeof bits);
    if (dtype == PC_FORMAT_float16) {
        PC_UNROLL
        for (int i = 0; i < COUNT; i++) {
            values[i] = pc_half_to_float(bits[i]);
        }
    } else {
        PC_UNROLL
        for (int i = 0; i < COUNT; i++) {
            values[i] = pc_bfloat_to_float(bits[i]);
        }
    }
}

/* The same from memory. */
template <int COUNT> PC_DEVICE void pc_load_values(int dtype, const uint8_t *at, float *values) {
    if (dtype == PC_FORMAT_float32) {
        pc_load_raw<4 * COUNT>(at, values);
        return;
    }
    uint16_t bits[COUNT];
    pc_load_raw<2 * COUNT>(at, bits);
    pc_widen_values<COUNT>(dtype, bits, values);
}

/* The same way back, rounded to dtype. */
template <int COUNT> PC_DEVICE void pc_store_values(int dtype, uint8_t *at, const float *values) {
    if (dtype == PC_FORMAT_float32) {
        pc_store_raw<4 * COUNT>(at, values);
        return;
    }
    uint16_t bits[COUNT];
    if (dtype == PC_FORMAT_float16) {
        PC_UNROLL
        for (int i = 0; i < COUNT; i++) {
            bits[i] = pc_float_to_half(values[i]);
        }
    } else {
        PC_UNROLL
        for (int i = 0; i < COUNT; i++) {
            bits[i] = pc_float_to_bfloat(values[i]);
        }
    }
    pc_store_raw<2 * COUNT>(at, bits);
}

#endif
