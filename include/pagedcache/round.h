/* Rounding of single values: float32 to float16 and bfloat16 bits and back, and to integers.
 *
 * Where bits are converted no float operation meets a subnormal that matters, so that flush-to-zero
 * modes which other libraries switch on can't change a result. Device code alone has its
 * instruction for float16, which gives the same bits for everything but NaN; the rule keeps NaN.
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

/* yes where the condition (0 or 1) holds, else no; without a branch, which stops vectors. */
PC_INLINE int32_t pc_choose(int condition, int32_t yes, int32_t no) {
    return no ^ ((yes ^ no) & -(int32_t)condition);
}

/* Round to nearest even; overflow gives Inf, subnormals are exact, and a NaN keeps its sign and
 * the top 10 bits of its payload (1 if those are zero, so that it stays a NaN).
 *
 * All cases are computed and one is chosen, so that compilers use vectors. Units of 2^-24, which
 * subnormals have, are the last bits of 0.5 in float32: adding that rounds to them. */
PC_INLINE uint16_t pc_float_to_half(float value) {
    const uint32_t bits = pc_float_bits(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const int32_t magnitude = (int32_t)(bits & 0x7FFFFFFFu);
#if defined(__CUDA_ARCH__)
    if (magnitude <= 0x7F800000) {
        uint16_t rounded;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(rounded) : "f"(value));
        return rounded;
    }
#endif
    const int32_t payload = (magnitude >> 13) & 0x3FF;
    const int32_t nan = 0x7C00 | (payload > 1 ? payload : 1);
    /* a carry may run up to Inf, rightly */
    const int32_t normal = (magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
    const float shifted = pc_bits_float((uint32_t)magnitude) + 0.5f;
    const int32_t subnormal = (int32_t)(pc_float_bits(shifted) - 0x3F000000u);
    const int32_t finite = pc_choose(magnitude >= 0x38800000, normal, subnormal);
    const int32_t infinite = pc_choose(magnitude > 0x7F800000, nan, 0x7C00);
    return (uint16_t)(sign | (uint32_t)pc_choose(magnitude >= 0x47800000, infinite, finite));
}

/* Exact; a NaN keeps its sign and payload. A subnormal is mantissa * 2^-24, normal in float32. */
PC_INLINE float pc_half_to_float(uint16_t half) {
    const uint32_t sign = ((uint32_t)half & 0x8000u) << 16;
    const int32_t magnitude = (int32_t)half & 0x7FFF;
#if defined(__CUDA_ARCH__)
    if (magnitude < 0x7C00) {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
        return value;
    }
#endif
    const int32_t subnormal = (int32_t)pc_float_bits((float)magnitude * 5.9604644775390625e-8f);
    const int32_t normal = (magnitude << 13) + 0x38000000; /* 112 more in the exponent */
    const int32_t infinite = (magnitude << 13) | 0x7F800000;
    const int32_t finite = pc_choose(magnitude >= 0x0400, normal, subnormal);
    return pc_bits_float(sign | (uint32_t)pc_choose(magnitude >= 0x7C00, infinite, finite));
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
