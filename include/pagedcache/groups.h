/* One group of 32 values: what is common to the quantised formats, and the finite values that
 * stand for NaN and Inf under the "saturate" policy.
 *
 * A group function reads exactly 32 finite float32 values (the caller has padded with zeros) and
 * writes the quants and the scale where it is told; where those lie is the packing's business.
 */
#ifndef PAGEDCACHE_GROUPS_H
#define PAGEDCACHE_GROUPS_H

#include "round.h"

#define PC_GROUP 32

/* Bits of the largest magnitude. As integers, magnitudes are ordered like the floats, Inf and NaN
 * above all; and gcc vectorises an integer maximum, which it may not do with floats. */
PC_INLINE int32_t pc_max_magnitude_bits(const float *PC_RESTRICT values, int64_t count) {
    int32_t most = 0;
    for (int64_t i = 0; i < count; i++) {
        const int32_t bits = (int32_t)(pc_float_bits(values[i]) & 0x7FFFFFFFu);
        most = bits > most ? bits : most;
    }
    return most;
}

PC_INLINE float pc_amax(const float *PC_RESTRICT values, int64_t count) {
    return pc_bits_float((uint32_t)pc_max_magnitude_bits(values, count));
}

PC_INLINE int pc_all_finite(const float *PC_RESTRICT values, int64_t count) {
    return pc_max_magnitude_bits(values, count) < 0x7F800000;
}

/* What a group has of finite magnitudes: whether any, and the bits of the largest. Starts as zeros.
 */
typedef struct {
    uint32_t most;
    int any;
} pc_finite;

PC_INLINE void pc_see_finite(pc_finite *seen, float value) {
    const uint32_t magnitude = pc_float_bits(value) & 0x7FFFFFFFu;
    if (magnitude < 0x7F800000u) {
        seen->any = 1;
        seen->most = magnitude > seen->most ? magnitude : seen->most;
    }
}

/* The finite value that stands for a value of a group: Inf becomes +- its largest finite magnitude
 * and NaN 0; a group with no finite value becomes +0 throughout. */
PC_INLINE float pc_saturated(float value, pc_finite seen) {
    const uint32_t bits = pc_float_bits(value);
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    uint32_t kept = bits;
    if (magnitude > 0x7F800000u || !seen.any) {
        kept = 0u;
    } else if (magnitude == 0x7F800000u) {
        kept = (bits & 0x80000000u) | seen.most;
    }
    return pc_bits_float(kept);
}

/* Copy a group so that all of it is finite; `out` may be `values`. */
PC_INLINE void pc_copy_saturated(const float *values, int64_t count, float *out) {
    pc_finite seen = {0u, 0};
    for (int64_t i = 0; i < count; i++) {
        pc_see_finite(&seen, values[i]);
    }
    for (int64_t i = 0; i < count; i++) {
        out[i] = pc_saturated(values[i], seen);
    }
}

PC_INLINE void pc_store_float(uint8_t *to, float value) {
    memcpy(to, &value, sizeof value);
}

PC_INLINE float pc_load_float(const uint8_t *from) {
    float value;
    memcpy(&value, from, sizeof value);
    return value;
}

PC_INLINE void pc_store_half(uint8_t *to, uint16_t half) {
    memcpy(to, &half, sizeof half);
}

/* A scale or a minimum: finite, unless the bytes are nobody's. Device code does not look for NaN,
 * which comes out as one NaN or another. */
PC_INLINE float pc_load_half(const uint8_t *from) {
    uint16_t half;
    memcpy(&half, from, sizeof half);
#if defined(__CUDA_ARCH__)
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
#else
    return pc_half_to_float(half);
#endif
}

/* Groups below this magnitude are stored as zeros by q8 and q4. */
#define PC_ZERO_AMAX 1e-10f

/* q8: scale = amax / 127, quant = round(v * (1 / scale)) as int8.
 *
 * Every finite group reads back finite but one: where amax is FLT_MAX itself, 127 * scale rounds
 * past it to Inf (the rule is kept as it is stated: scale and product are rounded once each). */
PC_INLINE void pc_encode_q8(const float *PC_RESTRICT x, uint8_t *PC_RESTRICT quants,
                            uint8_t *PC_RESTRICT scale_at) {
    const float amax = pc_amax(x, PC_GROUP);
    if (amax < PC_ZERO_AMAX) {
        memset(quants, 0, PC_GROUP);
        pc_store_float(scale_at, 0.0f);
        return;
    }
    const float scale = amax / 127.0f;
    const float inverse = 1.0f / scale;
    for (int i = 0; i < PC_GROUP; i++) {
        quants[i] = (uint8_t)pc_round_away(x[i] * inverse, 127.0f);
    }
    pc_store_float(scale_at, scale);
}

PC_INLINE void pc_decode_q8(const uint8_t *PC_RESTRICT quants, const uint8_t *PC_RESTRICT scale_at,
                            float *PC_RESTRICT x) {
    const float scale = pc_load_float(scale_at);
    for (int i = 0; i < PC_GROUP; i++) {
        x[i] = (float)(int8_t)quants[i] * scale;
    }
}

/* q4: scale = amax / 7, nibble = clamp(round(v * (1 / scale)), -8, 7) + 8, value 2i in the low
 * half of byte i. */
PC_INLINE void pc_encode_q4(const float *PC_RESTRICT x, uint8_t *PC_RESTRICT quants,
                            uint8_t *PC_RESTRICT scale_at) {
    const float amax = pc_amax(x, PC_GROUP);
    if (amax < PC_ZERO_AMAX) {
        memset(quants, 0, PC_GROUP / 2);
        pc_store_float(scale_at, 0.0f);
        return;
    }
    const float scale = amax / 7.0f;
    const float inverse = 1.0f / scale;
    for (int i = 0; i < PC_GROUP / 2; i++) {
        const int32_t low = pc_round_away(x[2 * i] * inverse, 8.0f);
        const int32_t high = pc_round_away(x[2 * i + 1] * inverse, 8.0f);
        quants[i] = (uint8_t)(((low < 7 ? low : 7) + 8) | (((high < 7 ? high : 7) + 8) << 4));
    }
    pc_store_float(scale_at, scale);
}

PC_INLINE void pc_decode_q4(const uint8_t *PC_RESTRICT quants, const uint8_t *PC_RESTRICT scale_at,
                            float *PC_RESTRICT x) {
    const float scale = pc_load_float(scale_at);
    if (scale == 0.0f) { /* zeros are stored as bytes 0x00: nibble 0 times scale would be -0 */
        memset(x, 0, PC_GROUP * sizeof *x);
        return;
    }
    for (int i = 0; i < PC_GROUP / 2; i++) {
        x[2 * i] = (float)((quants[i] & 0xF) - 8) * scale;
        x[2 * i + 1] = (float)((quants[i] >> 4) - 8) * scale;
    }
}

#endif
