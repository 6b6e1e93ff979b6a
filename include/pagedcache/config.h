/* What every header of the library needs: one inline macro for gcc, clang, g++ and nvcc, and
 * the assumptions about the machine, checked at compile time.
 *
 * CPU and GPU store the same bytes because they compile this same text. That needs every float
 * operation rounded by itself: build with -ffp-contract=off (gcc, clang) and -fmad=false (nvcc),
 * never with fast-math.
 */
#ifndef PAGEDCACHE_CONFIG_H
#define PAGEDCACHE_CONFIG_H

#include <float.h>
#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#define PC_INLINE static __host__ __device__ __forceinline__
#define PC_FORCE_INLINE static __host__ __device__ __forceinline__
#elif defined(__GNUC__)
#define PC_INLINE static inline
#define PC_FORCE_INLINE static inline __attribute__((always_inline))
#else
#define PC_INLINE static inline
#define PC_FORCE_INLINE static inline
#endif

#if defined(__GNUC__) && !defined(__CUDACC__)
#define PC_PREFETCH(address) __builtin_prefetch(address)
#else
#define PC_PREFETCH(address) (void)(address)
#endif

/* C's restrict has no C++ keyword; all three compilers know this spelling. */
#define PC_RESTRICT __restrict

#ifdef __cplusplus
#define PC_STATIC_ASSERT(condition, text) static_assert(condition, text)
#else
#define PC_STATIC_ASSERT(condition, text) _Static_assert(condition, text)
#endif

#ifdef __FAST_MATH__
#error "pagedcache needs IEEE arithmetic: build without -ffast-math"
#endif
#if defined(FLT_EVAL_METHOD) && !defined(__CUDA_ARCH__) && FLT_EVAL_METHOD != 0
#error "pagedcache needs float32 results after every operation (on x86: SSE, not x87)"
#endif
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "stored formats are little-endian; this library has no big-endian build"
#endif

PC_STATIC_ASSERT(sizeof(float) == 4 && FLT_MANT_DIG == 24 && FLT_MAX_EXP == 128,
                 "float must be IEEE binary32");
PC_STATIC_ASSERT((-1 >> 1) == -1 && (int8_t)-1 == -1, "integers must be two's complement");

#endif
