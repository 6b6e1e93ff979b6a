/* Hints to the operating system about large memory. Linux: transparent huge pages, where the
 * system leaves the choice to the program; elsewhere nothing. */
#ifndef PAGEDCACHE_MEMORY_H
#define PAGEDCACHE_MEMORY_H

#include <stddef.h>
#include <stdint.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

/* Ask for huge pages in the whole 2 MiB pages inside [p, p + size). Never fails: a hint. */
static inline void pc_advise_huge(void *p, size_t size) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const uintptr_t page = (uintptr_t)2 << 20;
    const uintptr_t start = ((uintptr_t)p + page - 1) & ~(page - 1);
    const uintptr_t stop = ((uintptr_t)p + size) & ~(page - 1);
    if (stop > start) {
        (void)madvise((void *)start, (size_t)(stop - start), MADV_HUGEPAGE);
    }
#else
    (void)p;
    (void)size;
#endif
}

#endif
