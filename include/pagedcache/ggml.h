/* Groups of 32 values as ggml stores them: q8_0, q4_0, q4_1, byte for byte where the float16 scale
 * (and q4_1's minimum) is finite. Quants are computed with the float32 scale; the stored scale is
 * float16. Nibble formats hold value i in the low and value i + 16 in the high half of byte i.
 *
 * Where ggml's C is undefined or stores Inf, this is the rule, the same everywhere:
 *  - 1 / scale is not finite (scale below 2^-128, stored as a zero): every quant byte is 0x00;
 *  - the float16 scale would be Inf (a magnitude of 65520 and up): the scale is +-65504, the quants
 *    are computed with that scale and clamped, so the group reads back cut off at the largest
 *    values it can hold: 127 * 65504 (q8_0), 8 * 65504 (q4_0), minimum + 15 * 65504 (q4_1);
 *  - q4_1's float16 minimum would be Inf: the minimum is +-65504 and the scale is
 *    max(0, maximum - minimum) / 15 with that minimum, then as above.
 */
#ifndef PAGEDCACHE_GGML_H
#define PAGEDCACHE_GGML_H

#include "groups.h"

#define PC_HALF_MAX 65504.0f
#define PC_HALF_OVERFLOW 65520.0f /* magnitudes from here on round to Inf in float16 */

PC_INLINE float pc_clamp_to_half(float value) {
    if (value >= PC_HALF_OVERFLOW) {
        return PC_HALF_MAX;
    }
    return value <= -PC_HALF_OVERFLOW ? -PC_HALF_MAX : value;
}

/* 1 / scale, and 0 for a zero scale. Inf is left to the callers. */
PC_INLINE float pc_inverse(float scale) {
    return scale != 0.0f ? 1.0f / scale : 0.0f;
}

PC_INLINE int pc_is_infinite(float value) {
    return value > FLT_MAX || value < -FLT_MAX;
}

PC_INLINE void pc_encode_q8_0(const float *PC_RESTRICT x, uint8_t *PC_RESTRICT quants,
                              uint8_t *PC_RESTRICT scale_at) {
    const float scale = pc_clamp_to_half(pc_amax(x, PC_GROUP) / 127.0f);
    const float inverse = pc_inverse(scale);
    pc_store_half(scale_at, pc_float_to_half(scale));
    if (pc_is_infinite(inverse)) {
        memset(quants, 0, PC_GROUP);
        return;
    }
    for (int i = 0; i < PC_GROUP; i++) {
        quants[i] = (uint8_t)pc_round_away(x[i] * inverse, 127.0f);
    }
}

PC_INLINE void pc_decode_q8_0(const uint8_t *PC_RESTRICT quants,
                              const uint8_t *PC_RESTRICT scale_at, float *PC_RESTRICT x) {
    const float scale = pc_load_half(scale_at);
    for (int i = 0; i < PC_GROUP; i++) {
        x[i] = (float)(int8_t)quants[i] * scale;
    }
}

/* The first value of the largest magnitude, with its sign; +0 for a group of zeros. */
PC_INLINE float pc_first_extreme(const float *PC_RESTRICT x) {
    const float amax = pc_amax(x, PC_GROUP);
    for (int i = 0; amax > 0.0f && i < PC_GROUP; i++) {
        if (x[i] == amax || x[i] == -amax) {
            return x[i];
        }
    }
    return 0.0f;
}

PC_INLINE void pc_encode_q4_0(const float *PC_RESTRICT x, uint8_t *PC_RESTRICT quants,
                              uint8_t *PC_RESTRICT scale_at) {
    const float scale = pc_clamp_to_half(pc_first_extreme(x) / -8.0f);
    const float inverse = pc_inverse(scale);
    pc_store_half(scale_at, pc_float_to_half(scale));
    if (pc_is_infinite(inverse)) {
        memset(quants, 0, PC_GROUP / 2);
        return;
    }
    for (int i = 0; i < PC_GROUP / 2; i++) {
        const uint32_t low = pc_trunc_nibble(x[i] * inverse, 8.5f);
        const uint32_t high = pc_trunc_nibble(x[i + PC_GROUP / 2] * inverse, 8.5f);
        quants[i] = (uint8_t)(low | (high << 4));
    }
}

PC_INLINE void pc_decode_q4_0(const uint8_t *PC_RESTRICT quants,
                              const uint8_t *PC_RESTRICT scale_at, float *PC_RESTRICT x) {
    const float scale = pc_load_half(scale_at);
    for (int i = 0; i < PC_GROUP / 2; i++) {
        x[i] = (float)((quants[i] & 0xF) - 8) * scale;
        x[i + PC_GROUP / 2] = (float)((quants[i] >> 4) - 8) * scale;
    }
}

/* What q4_1 does with the least and the greatest value of a group. */
typedef struct {
    float minimum, scale, inverse; /* inverse 0: every quant is 0 */
} pc_affine;

PC_INLINE pc_affine pc_affine_of(float least, float most) {
    pc_affine affine;
    affine.minimum = pc_clamp_to_half(least);
    affine.scale = pc_clamp_to_half((most > affine.minimum ? most - affine.minimum : 0.0f) / 15.0f);
    affine.inverse = pc_inverse(affine.scale);
    if (pc_is_infinite(affine.inverse)) {
        affine.inverse = 0.0f;
    }
    return affine;
}

PC_INLINE uint32_t pc_affine_nibble(float value, float minimum, float inverse) {
    return pc_trunc_nibble((value - minimum) * inverse, 0.5f);
}

/* Two float16: the scale, then the minimum. */
PC_INLINE void pc_store_affine(uint8_t *scale_at, pc_affine affine) {
    pc_store_half(scale_at, pc_float_to_half(affine.scale));
    pc_store_half(scale_at + 2, pc_float_to_half(affine.minimum));
}

PC_INLINE void pc_encode_q4_1(const float *PC_RESTRICT x, uint8_t *PC_RESTRICT quants,
                              uint8_t *PC_RESTRICT scale_at) {
    float least = x[0]; /* the first of equal values: it decides the sign of a zero */
    float most = x[0];
    for (int i = 1; i < PC_GROUP; i++) {
        least = x[i] < least ? x[i] : least;
        most = x[i] > most ? x[i] : most;
    }
    const pc_affine affine = pc_affine_of(least, most);
    pc_store_affine(scale_at, affine);
    for (int i = 0; i < PC_GROUP / 2; i++) {
        const uint32_t low = pc_affine_nibble(x[i], affine.minimum, affine.inverse);
        const uint32_t high = pc_affine_nibble(x[i + PC_GROUP / 2], affine.minimum, affine.inverse);
        quants[i] = (uint8_t)(low | (high << 4));
    }
}

PC_INLINE void pc_decode_q4_1(const uint8_t *PC_RESTRICT quants,
                              const uint8_t *PC_RESTRICT scale_at, float *PC_RESTRICT x) {
    const float scale = pc_load_half(scale_at);
    const float minimum = pc_load_half(scale_at + 2);
    for (int i = 0; i < PC_GROUP / 2; i++) {
        x[i] = (float)(quants[i] & 0xF) * scale + minimum;
        x[i + PC_GROUP / 2] = (float)(quants[i] >> 4) * scale + minimum;
    }
}

#endif
