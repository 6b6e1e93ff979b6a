/* Rounding of single values: float32 to float16 and bfloat16 bits and back, and to integers.
 *
 * Integer arithmetic only where bits are converted, so that flush-to-zero modes which other
 * libraries switch on can't change a result. Device code alone has its instruction for float16,
 * which gives the same bits for everything but NaN; the integer rule keeps NaN.
 */
#ifndef PAGEDCACHE_ROUND_H
#define PAGEDCACHE_ROUND_H

#include "config.h"

PC_INLINE uint32_t pc_float_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

PC_INLINE float pc_bits_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Round to nearest even; overflow gives Inf, subnormals are exact, and a NaN keeps its sign and
 * the top 10 bits of its payload (1 if those are zero, so that it stays a NaN). */
PC_INLINE uint16_t pc_float_to_half(float value) {
    const uint32_t bits = pc_float_bits(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    uint32_t half;
#if defined(__CUDA_ARCH__)
    if (magnitude <= 0x7F800000u) {
        uint16_t rounded;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(rounded) : "f"(value));
        return rounded;
    }
#endif
    if (magnitude >= 0x47800000u) { /* 65536 and up, Inf, NaN */
        const uint32_t payload = (magnitude >> 13) & 0x3FFu;
        half = magnitude <= 0x7F800000u ? 0x7C00u : 0x7C00u | (payload ? payload : 1u);
    } else if (magnitude >= 0x38800000u) { /* normal: a carry may run up to Inf, rightly */
        half = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
    } else if (magnitude > 0x33000000u) { /* subnormal: units of 2^-24 */
        const uint32_t shift = 126u - (magnitude >> 23);
        const uint32_t mantissa = (magnitude & 0x7FFFFFu) | 0x800000u;
        const uint32_t below = (1u << (shift - 1u)) - 1u;
        half = (mantissa + below + ((mantissa >> shift) & 1u)) >> shift;
    } else { /* up to 2^-25, which is a tie and goes to even */
        half = 0u;
    }
    return (uint16_t)(sign | half);
}

PC_INLINE float pc_half_to_float(uint16_t half) {
    const uint32_t sign = ((uint32_t)half & 0x8000u) << 16;
    const uint32_t exponent = ((uint32_t)half >> 10) & 0x1Fu;
    const uint32_t mantissa = (uint32_t)half & 0x3FFu;
    uint32_t magnitude;
#if defined(__CUDA_ARCH__)
    if (exponent != 0x1Fu) {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
        return value;
    }
#endif
    if (exponent == 0x1Fu) {
        magnitude = 0x7F800000u | (mantissa << 13);
    } else if (exponent != 0u) {
        magnitude = ((exponent + 112u) << 23) | (mantissa << 13);
    } else { /* subnormal or zero: mantissa * 2^-24 is exact and normal in float32 */
        magnitude = pc_float_bits((float)mantissa * 5.9604644775390625e-8f);
    }
    return pc_bits_float(sign | magnitude);
}

/* Round to nearest even, subnormals kept; every NaN becomes the quiet NaN of its sign (adding
 * and shifting alone would turn some NaNs into Inf or -0). */
PC_INLINE uint16_t pc_float_to_bfloat(float value) {
    const uint32_t bits = pc_float_bits(value);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t nan = ((bits >> 16) & 0x8000u) | 0x7FC0u;
    return (uint16_t)((bits & 0x7FFFFFFFu) > 0x7F800000u ? nan : rounded);
}

PC_INLINE float pc_bfloat_to_float(uint16_t bfloat) {
    return pc_bits_float((uint32_t)bfloat << 16);
}

#if defined(__CUDA_ARCH__)
/* The integer part of a value from 0 to 2^22, by an addition: conversions are slow on GPUs. */
static __device__ __forceinline__ int32_t pc_integer_part(float value) {
    return (int32_t)(pc_float_bits(__fadd_rz(value, 8388608.0f)) - 0x4B000000u);
}
#endif

/* Rounded to the nearest integer, halves away from zero, magnitudes cut at `limit` (a small
 * positive integer; Inf is cut too).
 *
 * Adding 2^23 rounds to the nearest integer, halves to even, and leaves that integer in the low
 * bits; a half that was rounded down is told by what is left over, which is exact. Comparing bits
 * as integers instead of floats lets gcc vectorise. Device code adds the largest float below a half
 * and cuts: that carries exactly the values from the half on. */
PC_INLINE int32_t pc_round_away(float value, float limit) {
    const int32_t bits = (int32_t)pc_float_bits(value);
    const int32_t most = (int32_t)pc_float_bits(limit);
    const int32_t magnitude = bits & 0x7FFFFFFF;
    const int32_t sign = bits >> 31;
    const float cut = pc_bits_float((uint32_t)(magnitude < most ? magnitude : most));
#if defined(__CUDA_ARCH__)
    const int32_t rounded = pc_integer_part(cut + 0.49999997f);
#else
    const float shifted = cut + 8388608.0f;
    const float left = cut - (shifted - 8388608.0f);
    const int32_t even = (int32_t)(pc_float_bits(shifted) - 0x4B000000u);
    const int32_t rounded = even + (pc_float_bits(left) == 0x3F000000u); /* 0.5 */
#endif
    return (rounded ^ sign) - sign;
}

/* value + bias clamped to 0..15 and cut to an integer: ggml's way to a nibble. */
PC_INLINE uint32_t pc_trunc_nibble(float value, float bias) {
    const int32_t bits = (int32_t)pc_float_bits(value + bias);
    const int32_t most = (int32_t)pc_float_bits(15.0f);
    const int32_t above = bits > 0 ? bits : 0; /* negative floats are negative integers */
    const float cut = pc_bits_float((uint32_t)(above < most ? above : most));
#if defined(__CUDA_ARCH__)
    return (uint32_t)pc_integer_part(cut);
#else
    return (uint32_t)(int32_t)cut;
#endif
}

#endif
