/* What kernels need of CUDA, and the only header that brings it: the toolkit under nvcc, else the
 * emulation of the tests, which runs the same text on the host.
 */
#ifndef PAGEDCACHE_CUDA_DEVICE_H
#define PAGEDCACHE_CUDA_DEVICE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#include <cuda_runtime.h>

/* Before a loop whose arrays must stay in registers, or whose loads are to be started together. */
#define PC_UNROLL _Pragma("unroll")
#define PC_PRAGMA(text) _Pragma(#text)
#define PC_UNROLL_BY(count) PC_PRAGMA(unroll count)

/* Tells the compiler what it cannot see. */
#define PC_ASSUME(condition) __builtin_assume(condition)

/* Tells the compiler that a pointer that it cannot follow is to global memory. */
#define PC_ASSUME_GLOBAL(pointer) __builtin_assume(__isGlobal(pointer))

/* An array in shared memory; the emulation cannot spell it as a storage class. */
#define PC_SHARED(type, name, count) __shared__ type name[count]

/* The shared memory that the launch asked for. */
#define PC_DYN_SHARED(type, name) extern __shared__ type name[]

/* Start a kernel on a stream (NULL: the legacy default stream); returns a CUDA error code. */
template <class... Parameters, class... Arguments>
int pc_launch(void (*kernel)(Parameters...), dim3 grid, dim3 cta, size_t shared_nbytes,
              void *stream, Arguments... arguments) {
    const auto start = [=](Parameters... converted) {
        void *addresses[] = {(void *)&converted...};
        return cudaLaunchKernel((const void *)kernel, grid, cta, addresses, shared_nbytes,
                                (cudaStream_t)stream);
    };
    return (int)start(arguments...);
}

/* CTAs along x, and along y and z: enough to fill any GPU. */
constexpr int64_t PC_MOST_CTAS = 16384, PC_MOST_ROUNDS = 65535;
#else
#include "emulation.h"
#define PC_UNROLL
#define PC_UNROLL_BY(count)
#define PC_ASSUME(condition)
#define PC_ASSUME_GLOBAL(pointer)

/* So few that every loop over the grid takes a second turn in tests. */
constexpr int64_t PC_MOST_CTAS = 5, PC_MOST_ROUNDS = 3;
#endif

#define PC_DEVICE __device__ __forceinline__

constexpr int PC_WARP = 32;
constexpr int PC_CTA = 256; /* threads of a CTA, where a kernel has no reason of its own */
constexpr int PC_CTAS = 3;  /* of them at least on a multiprocessor: 85 registers a thread */

/* Units of a row that a thread takes at once, where a kernel only copies: it starts all loads
 * before it waits for the first of them. */
constexpr int PC_BATCH = 2;

/* CTAs along x for n units of work in a grid-stride loop, and along y or z for a list of n. */
inline unsigned pc_grid(int64_t n, int64_t per_cta) {
    const int64_t wanted = (n + per_cta - 1) / per_cta;
    return (unsigned)(wanted < PC_MOST_CTAS ? wanted : PC_MOST_CTAS);
}

inline unsigned pc_rounds(int64_t n) {
    return (unsigned)(n < PC_MOST_ROUNDS ? n : PC_MOST_ROUNDS);
}

/* Number of this thread along x, and how many there are. */
PC_DEVICE int64_t pc_thread() {
    return (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
}

PC_DEVICE int64_t pc_num_threads() {
    return (int64_t)gridDim.x * blockDim.x;
}

#endif
