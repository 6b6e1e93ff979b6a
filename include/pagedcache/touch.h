/* Memory that the system has only promised, made to be there, by many threads. */
#ifndef PAGEDCACHE_TOUCH_H
#define PAGEDCACHE_TOUCH_H

#include "tools.h"

#define PC_TOUCH_SHARE (4 << 20) /* bytes that a thread takes at a time */
#define PC_SMALLEST_PAGE 4096

typedef struct {
    volatile uint8_t *at;
    int64_t nbytes;
} pc_touched;

static inline void pc_touch_part(void *context, int64_t part, int who) {
    const pc_touched *const touched = (const pc_touched *)context;
    const int64_t first = part * PC_TOUCH_SHARE, left = touched->nbytes - first;
    const int64_t end = first + (left < PC_TOUCH_SHARE ? left : PC_TOUCH_SHARE);
    (void)who;
    for (int64_t i = first; i < end; i += PC_SMALLEST_PAGE) {
        touched->at[i] = touched->at[i];
    }
    touched->at[end - 1] = touched->at[end - 1];
}

/* Write every page of [p, p + nbytes) without changing it. */
PC_INLINE void pc_touch(const pc_tools *tools, void *p, int64_t nbytes) {
    pc_touched touched = {(volatile uint8_t *)p, nbytes};
    const pc_tools best = pc_tools_for(tools, nbytes);
    pc_run_parts(&best, pc_touch_part, &touched, (nbytes + PC_TOUCH_SHARE - 1) / PC_TOUCH_SHARE);
}

#endif
