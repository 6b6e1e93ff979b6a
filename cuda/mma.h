/* Products of small matrices by a whole warp, on tensor cores where the GPU has them for tf32
 * (since compute capability 8.0), else by shuffles.
 *
 * Tensor cores see the upper 11 bits of a significand. A float that is to count in full is given as
 * two operands, pc_halves: 22 bits of it. What float16, bfloat16 and quants hold fits one operand.
 */
#ifndef PAGEDCACHE_CUDA_MMA_H
#define PAGEDCACHE_CUDA_MMA_H

#include "device.h"
#include "pagedcache/round.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
/* The product below. Not inlined: its instructions would be there a hundred times. */
static __device__ __noinline__ float4 pc_mma_by_shuffles(float4 c, float4 a, float2 b) {
    const int lane = (int)threadIdx.x % PC_WARP;
    PC_UNROLL
    for (int k = 0; k < 8; k++) {
        const int in_row = lane / 4 * 4 + k % 4, in_column = lane % 4 * 8 + k % 4;
        const float upper = __shfl_sync(~0u, k < 4 ? a.x : a.z, in_row);
        const float lower = __shfl_sync(~0u, k < 4 ? a.y : a.w, in_row);
        const float left = __shfl_sync(~0u, k < 4 ? b.x : b.y, in_column);
        const float right = __shfl_sync(~0u, k < 4 ? b.x : b.y, in_column + 4);
        c.x = fmaf(upper, left, c.x);
        c.y = fmaf(upper, right, c.y);
        c.z = fmaf(lower, left, c.z);
        c.w = fmaf(lower, right, c.w);
    }
    return c;
}
#endif

/* c[16][8] += a[16][8] * b[8][8], by all lanes of a warp. Lane 4 g + t holds
 *     a[g][t], a[g + 8][t], a[g][t + 4], a[g + 8][t + 4];  b[t][g], b[t + 4][g];
 *     c[g][2 t], c[g][2 t + 1], c[g + 8][2 t], c[g + 8][2 t + 1]. */
PC_DEVICE void pc_mma(float (&c)[4], const float (&a)[4], const float (&b)[2]) {
#if !defined(__CUDACC__)
    pc_emulated_mma(c, a, b);
#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(pc_float_bits(a[0])), "r"(pc_float_bits(a[1])), "r"(pc_float_bits(a[2])),
                   "r"(pc_float_bits(a[3])), "r"(pc_float_bits(b[0])), "r"(pc_float_bits(b[1])));
#else
    const float4 sum =
        pc_mma_by_shuffles(make_float4(c[0], c[1], c[2], c[3]), make_float4(a[0], a[1], a[2], a[3]),
                           make_float2(b[0], b[1]));
    c[0] = sum.x;
    c[1] = sum.y;
    c[2] = sum.z;
    c[3] = sum.w;
#endif
}

/* A float as the sum of what tensor cores see of it, and the rest. */
struct pc_halves {
    float high, low;
};

PC_DEVICE pc_halves pc_split(float value) {
    pc_halves halves;
    halves.high = pc_bits_float(pc_float_bits(value) & 0xFFFFE000u);
    halves.low = value - halves.high;
    return halves;
}

#endif
