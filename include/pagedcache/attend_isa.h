/*
 * The attention kernels, once per instruction set, from one text; and which of them this machine
 * can run. AMX is never used: a virtual machine may announce it and trap.
 */
#ifndef PAGEDCACHE_ATTEND_ISA_H
#define PAGEDCACHE_ATTEND_ISA_H

#include "attend_work.h"
#include "threads.h"

#if defined(__GNUC__) && defined(__x86_64__)
#define PC_ON_X86 1
#include <cpuid.h>
#include <immintrin.h>
#else
#define PC_ON_X86 0
#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif
#endif

#if defined(__GNUC__)
#define PC_VECTOR static inline PC_TARGET __attribute__((always_inline))
#define PC_FUNCTION static PC_TARGET __attribute__((noinline, unused))
#define PC_UNROLL _Pragma("GCC unroll 16")
#define PC_PREFETCH(address) __builtin_prefetch(address)
#else
#define PC_VECTOR static __forceinline
#define PC_FUNCTION static inline
#define PC_UNROLL
#define PC_PREFETCH(address) (void)(address)
#endif

#define PC_JOIN_NAMES(a, b) pc_##a##_##b
#define PC_JOIN(a, b) PC_JOIN_NAMES(a, b)
#define V(name) PC_JOIN(name, PC_ISA)
#define vf PC_JOIN(vf, PC_ISA)
#define vi PC_JOIN(vi, PC_ISA)

/* Vectors that fit the registers of every machine the compiler builds for. */
#define PC_ISA baseline
#define PC_TARGET
#if defined(__SSE2__) || (defined(__ARM_NEON) && defined(__aarch64__) && defined(__GNUC__))
#define PC_WIDTH 4
#else
#define PC_WIDTH 1
#endif
#define PC_COLUMNS 2
#include "attend_all.h"
#undef PC_ISA
#undef PC_TARGET
#undef PC_WIDTH
#undef PC_COLUMNS

#if PC_ON_X86
#define PC_ISA avx2
#define PC_TARGET __attribute__((target("avx2,fma,f16c")))
#define PC_WIDTH 8
#define PC_COLUMNS 2
#include "attend_all.h"
#undef PC_ISA
#undef PC_TARGET
#undef PC_WIDTH
#undef PC_COLUMNS

#define PC_ISA avx512
#define PC_TARGET __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")))
#define PC_WIDTH 16
#define PC_COLUMNS 4
#include "attend_all.h"
#undef PC_ISA
#undef PC_TARGET
#undef PC_WIDTH
#undef PC_COLUMNS
#endif

#undef V
#undef vf
#undef vi

/* ---- choice ------------------------------------------------------------------------------ */

typedef struct {
    const char *name;
    int width;
    void (*attend_unit)(const pc_attend_plan *plan, int64_t number, pc_work *work);
    int64_t (*padded)(int64_t values);
    int64_t (*value_at)(int reading, int64_t i, int64_t whole);
} pc_isa;

/* What this build knows, the best one last. */
PC_INLINE const pc_isa *pc_isas(int *count) {
#define PC_ISA_ROW(name)                                                                    \
    {                                                                                       \
        #name, pc_width_##name, pc_attend_unit_##name, pc_padded_##name, pc_value_at_##name \
    }
    static const pc_isa known[] = {
        PC_ISA_ROW(baseline),
#if PC_ON_X86
        PC_ISA_ROW(avx2),
        PC_ISA_ROW(avx512),
#endif
    };
#undef PC_ISA_ROW
    *count = (int)(sizeof known / sizeof known[0]);
    return known;
}

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
