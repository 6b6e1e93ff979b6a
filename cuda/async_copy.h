/* Copies from global to shared memory that go on while the thread does: it commits what it has
 * started as a group, and waits for groups. Others see the bytes after a barrier behind that wait.
 * Before compute capability 8.0 such a copy is done when it returns.
 */
#ifndef PAGEDCACHE_CUDA_ASYNC_COPY_H
#define PAGEDCACHE_CUDA_ASYNC_COPY_H

#include "units.h"

/* NBYTES (16, 8 or 4), at a multiple of that on both sides. */
template <int NBYTES> PC_DEVICE void pc_copy_async(void *shared, const void *global) {
#if !defined(__CUDACC__)
    __pipeline_memcpy_async(shared, global, NBYTES);
#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    const uint32_t to = (uint32_t)__cvta_generic_to_shared(shared);
    if (NBYTES == 16) { /* past the first cache: nobody reads it twice from there */
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(global)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global), "n"(NBYTES)
                     : "memory");
    }
#else
    pc_store_unit<NBYTES>(shared, pc_load_unit<NBYTES>(global));
#endif
}

PC_DEVICE void pc_commit_copies() {
#if !defined(__CUDACC__)
    __pipeline_commit();
#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/* Wait until at most `newest` (0 … 3) of the thread's groups are still on their way. */
PC_DEVICE void pc_wait_for_copies(int newest) {
#if !defined(__CUDACC__)
    __pipeline_wait_prior((size_t)newest);
#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    switch (newest) {
    case 0: asm volatile("cp.async.wait_group 0;" ::: "memory"); break;
    case 1: asm volatile("cp.async.wait_group 1;" ::: "memory"); break;
    case 2: asm volatile("cp.async.wait_group 2;" ::: "memory"); break;
    default: asm volatile("cp.async.wait_group 3;" ::: "memory"); break;
    }
#else
    (void)newest;
#endif
}

#endif
