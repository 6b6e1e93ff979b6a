/* A loop that threads share: what it is, apart from who they are (threads.h). */
#ifndef PAGEDCACHE_TASKS_H
#define PAGEDCACHE_TASKS_H

#include <stdint.h>

/* index: which turn of the loop; who: which thread of the call, from 0 on. */
typedef void (*pc_task)(void *context, int64_t index, int who);

/* Calls the task once for every index below count, from at most `threads` threads at a time, who
 * being below threads; returns when all are done. pc_run_tasks of threads.h is one. */
typedef void (*pc_runner)(int threads, pc_task task, void *context, int64_t count);

enum { PC_MOST_THREADS = 1024 };

#endif
