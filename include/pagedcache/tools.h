/* What a bulk operation works with, and how many threads are worth it. */
#ifndef PAGEDCACHE_TOOLS_H
#define PAGEDCACHE_TOOLS_H

#include "codec.h"
#include "tasks.h"

typedef struct {
    const pc_codec *codec;
    pc_runner run; /* not needed for one thread */
    int threads;
    int64_t least_shared; /* PC_LEAST_SHARED_NBYTES, but for tests */
    int streams;          /* whether to write past the caches (streamed.h) */
    float *buffer;        /* [threads][pc_buffer_values()], for rows of slabs */
} pc_tools;

/* Bytes below which waking a thread costs more than it gives (50 us and more where the processor is
 * virtual and sleeps), and from which on they are more than the caches keep. */
#define PC_LEAST_SHARED_NBYTES (2 << 20)
#define PC_LEAST_STREAMED_NBYTES (32 << 20)

/* Threads that moving `nbytes` is worth. */
PC_INLINE int pc_useful_threads(const pc_tools *tools, int64_t nbytes) {
    const int64_t useful = nbytes / tools->least_shared;
    return useful < 1 ? 1 : useful < tools->threads ? (int)useful : tools->threads;
}

PC_INLINE pc_tools pc_tools_for(const pc_tools *tools, int64_t nbytes) {
    pc_tools best = *tools;
    best.threads = pc_useful_threads(tools, nbytes);
    best.streams = nbytes >= PC_LEAST_STREAMED_NBYTES;
    return best;
}

/* Share the parts among threads, or do them all. */
PC_INLINE void pc_run_parts(const pc_tools *tools, pc_task task, void *context, int64_t parts) {
    if (tools->threads > 1) {
        tools->run(tools->threads, task, context, parts);
        return;
    }
    for (int64_t part = 0; part < parts; part++) {
        task(context, part, 0);
    }
}

#endif
