/*
 * Threads that share a loop: the calling thread and workers that are kept for the next call.
 *
 * pc_run_tasks(threads, task, context, count) calls task(context, i, who) once for every i below
 * count, from at most `threads` threads at a time; `who` (below threads) names the thread within
 * the call. Several callers may come at once: workers go to whoever has tasks left, and no more
 * than `threads` threads work in all of them together, but for the callers themselves. Workers are
 * made when first needed and wait without using the processor; a forked child starts with none.
 * Where no thread can be made, the caller does it all.
 *
 * One translation unit includes this, as the workers are its own, and hands pc_run_tasks to others.
 */
#ifndef PAGEDCACHE_THREADS_H
#define PAGEDCACHE_THREADS_H

#include <string.h>

#include "sync.h"
#include "tasks.h"

/* One call; it lives on the caller's stack. */
typedef struct pc_job {
    pc_task task;
    void *context;
    int64_t count;
    volatile int64_t next; /* the first index that nobody has taken */
    int threads, joined;   /* joined: threads that ever took part, the caller included */
    int helping;           /* workers that take part now */
    struct pc_job *after;
} pc_job;

typedef struct {
    pc_mutex lock;
    pc_cond work, done; /* there are tasks; a worker has left a job */
    pc_job *jobs;       /* those that workers may join */
    int ready;          /* the lock is there */
    int workers, busy;  /* workers made; threads at work, callers included */
} pc_crew;

static pc_crew pc_the_crew;

static inline void pc_work_on(pc_job *job, int who) {
    int64_t index;
    while ((index = pc_atomic_add(&job->next, 1) - 1) < job->count) {
        job->task(job->context, index, who);
    }
}

/* A job that a worker may join now, or NULL. The lock is held. */
static inline pc_job *pc_find_job(void) {
    pc_job *job;
    for (job = pc_the_crew.jobs; job != NULL; job = job->after) {
        if (job->joined < job->threads && pc_the_crew.busy < job->threads &&
            pc_atomic_get(&job->next) < job->count) {
            return job;
        }
    }
    return NULL;
}

static inline void pc_be_a_worker(void) {
    pc_mutex_lock(&pc_the_crew.lock);
    for (;;) {
        pc_job *const job = pc_find_job();
        int who;
        if (job == NULL) {
            pc_cond_wait(&pc_the_crew.work, &pc_the_crew.lock);
            continue;
        }
        who = job->joined++;
        job->helping++;
        pc_the_crew.busy++;
        pc_mutex_unlock(&pc_the_crew.lock);
        pc_work_on(job, who);
        pc_mutex_lock(&pc_the_crew.lock);
        pc_the_crew.busy--;
        if (--job->helping == 0) {
            pc_cond_broadcast(&pc_the_crew.done);
        }
    }
}

#ifdef _WIN32
static inline void pc_wake_one(pc_cond *c) {
    WakeConditionVariable(c);
}

static DWORD WINAPI pc_worker(void *unused) {
    (void)unused;
    pc_be_a_worker();
    return 0;
}

static inline int pc_make_worker(void) {
    const HANDLE thread = CreateThread(NULL, 0, pc_worker, NULL, 0, NULL);
    if (thread == NULL) {
        return 0;
    }
    CloseHandle(thread);
    return 1;
}
#else
#include <signal.h>

static inline void pc_wake_one(pc_cond *c) {
    pthread_cond_signal(c);
}

static inline void *pc_worker(void *unused) {
    pc_be_a_worker();
    return unused;
}

/* Signals are left to the threads of the program: workers block all of them. */
static inline int pc_make_worker(void) {
    pthread_t thread;
    int failed;
#ifdef SIG_SETMASK /* not there where a compiler is told to know C alone */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
#endif
    failed = pthread_create(&thread, NULL, pc_worker, NULL);
#ifdef SIG_SETMASK
    pthread_sigmask(SIG_SETMASK, &before, NULL);
#endif
    if (!failed) {
        pthread_detach(thread);
    }
    return !failed;
}

/* In a forked child: the workers are gone, and a lock that one of them held is held for ever. */
static inline void pc_forget_crew(void) {
    memset(&pc_the_crew, 0, sizeof pc_the_crew);
    pc_the_crew.ready = pc_mutex_init(&pc_the_crew.lock) == 0 &&
                        pc_cond_init(&pc_the_crew.work) == 0 &&
                        pc_cond_init(&pc_the_crew.done) == 0;
}
#endif

/* Called once, before anything else here. */
static inline void pc_start_threads(void) {
    pc_the_crew.ready = pc_mutex_init(&pc_the_crew.lock) == 0 &&
                        pc_cond_init(&pc_the_crew.work) == 0 &&
                        pc_cond_init(&pc_the_crew.done) == 0;
#ifndef _WIN32
    if (pthread_atfork(NULL, NULL, pc_forget_crew) != 0) {
        pc_the_crew.ready = 0; /* a child could wait for ever: no workers, then */
    }
#endif
}

static inline void pc_run_tasks(int threads, pc_task task, void *context, int64_t count) {
    pc_job job, **link;
    int i;
    memset(&job, 0, sizeof job);
    job.task = task;
    job.context = context;
    job.count = count;
    job.threads = threads < PC_MOST_THREADS ? threads : PC_MOST_THREADS;
    job.joined = 1;
    if (threads <= 1 || count <= 1 || !pc_the_crew.ready) {
        pc_work_on(&job, 0);
        return;
    }
    pc_mutex_lock(&pc_the_crew.lock);
    while (pc_the_crew.workers < job.threads - 1 && pc_make_worker()) {
        pc_the_crew.workers++;
    }
    pc_the_crew.busy++;
    job.after = pc_the_crew.jobs;
    pc_the_crew.jobs = &job;
    for (i = 1; i < job.threads && i < count; i++) {
        pc_wake_one(&pc_the_crew.work);
    }
    pc_mutex_unlock(&pc_the_crew.lock);
    pc_work_on(&job, 0);
    pc_mutex_lock(&pc_the_crew.lock);
    for (link = &pc_the_crew.jobs; *link != &job; link = &(*link)->after) {
    }
    *link = job.after;
    pc_the_crew.busy--;
    while (job.helping > 0) {
        pc_cond_wait(&pc_the_crew.done, &pc_the_crew.lock);
    }
    if (pc_the_crew.jobs != NULL) {
        pc_cond_broadcast(&pc_the_crew.work); /* there is room now for those of another caller */
    }
    pc_mutex_unlock(&pc_the_crew.lock);
}

#endif
