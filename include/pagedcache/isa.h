/*
 * Instruction sets: which one a machine can run, and the names of what is compiled once for each.
 *
 * A file that includes others "once per instruction set" defines PC_ISA, PC_TARGET and PC_WIDTH
 * before and undefines them behind. AMX is never used: a virtual machine may announce it and trap.
 */
#ifndef PAGEDCACHE_ISA_H
#define PAGEDCACHE_ISA_H

#include "config.h"

#if defined(__GNUC__) && defined(__x86_64__)
#define PC_ON_X86 1
#include <cpuid.h>
#include <immintrin.h>
#else
#define PC_ON_X86 0
#endif

#if defined(__GNUC__) && defined(__aarch64__) && defined(__ARM_NEON)
#define PC_ON_NEON 1
#include <arm_neon.h>
#else
#define PC_ON_NEON 0
#endif

#if defined(__GNUC__)
#define PC_VECTOR static inline PC_TARGET __attribute__((always_inline))
#define PC_FUNCTION static PC_TARGET __attribute__((noinline, unused))
#if defined(__clang__)
#define PC_UNROLL _Pragma("unroll")
#else
#define PC_UNROLL _Pragma("GCC unroll 16")
#endif
#else
#define PC_VECTOR static __forceinline
#define PC_FUNCTION static inline
#define PC_UNROLL
#endif

#define PC_JOIN_NAMES(a, b) pc_##a##_##b
#define PC_JOIN(a, b) PC_JOIN_NAMES(a, b)

/* Vectors that fit the registers of every machine the compiler builds for. */
#if PC_ON_NEON || (defined(__GNUC__) && defined(__SSE2__))
#define PC_BASELINE_WIDTH 4
#else
#define PC_BASELINE_WIDTH 1
#endif

#define PC_TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define PC_TARGET_AVX512 __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")))

/* X(name): the instruction sets of this build, the best one last. The first needs no more than the
 * compiler may use anywhere. */
#if PC_ON_X86
#define PC_ISAS(X) X(baseline) X(avx2) X(avx512)
#elif PC_ON_NEON
#define PC_ISAS(X) X(neon)
#else
#define PC_ISAS(X) X(baseline)
#endif

/* How many of them this machine can run, counted from the first. */
PC_INLINE int pc_usable_isas(void) {
#if PC_ON_X86
    unsigned a, b, c = 0, d;
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
        !__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_F16C)) {
        return 1;
    }
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl")) {
        return 2;
    }
    return 3;
#else
    return 1;
#endif
}

#endif
