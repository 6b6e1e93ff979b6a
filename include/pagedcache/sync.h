/* Locks, condition variables, 64-bit atomic counters and the fork generation.
 *
 * A thin layer over pthreads and Win32, because a Python lock cannot be taken with the GIL
 * released, and the bookkeeping holds its lock without the GIL.
 */
#ifndef PAGEDCACHE_SYNC_H
#define PAGEDCACHE_SYNC_H

#include <stdint.h>

#ifdef _WIN32
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#include <windows.h>
typedef SRWLOCK pc_mutex;
typedef CONDITION_VARIABLE pc_cond;
static inline int pc_mutex_init(pc_mutex *m) {
    InitializeSRWLock(m);
    return 0;
}
static inline void pc_mutex_destroy(pc_mutex *m) {
    (void)m;
}
static inline void pc_mutex_lock(pc_mutex *m) {
    AcquireSRWLockExclusive(m);
}
static inline int pc_mutex_trylock(pc_mutex *m) {
    return TryAcquireSRWLockExclusive(m) ? 1 : 0;
}
static inline void pc_mutex_unlock(pc_mutex *m) {
    ReleaseSRWLockExclusive(m);
}
static inline int pc_cond_init(pc_cond *c) {
    InitializeConditionVariable(c);
    return 0;
}
static inline void pc_cond_destroy(pc_cond *c) {
    (void)c;
}
static inline void pc_cond_wait(pc_cond *c, pc_mutex *m) {
    SleepConditionVariableSRW(c, m, INFINITE, 0);
}
static inline void pc_cond_broadcast(pc_cond *c) {
    WakeAllConditionVariable(c);
}
static inline int64_t pc_atomic_add(volatile int64_t *p, int64_t v) {
    return InterlockedExchangeAdd64((volatile LONG64 *)p, v) + v;
}
static inline int64_t pc_atomic_get(volatile int64_t *p) {
    return pc_atomic_add(p, 0);
}
static inline void pc_atomic_set(volatile int64_t *p, int64_t v) {
    InterlockedExchange64((volatile LONG64 *)p, v);
}
static inline void pc_watch_forks(volatile int64_t *generation) {
    (void)generation;
}
static inline int64_t pc_thread_id(void) {
    return (int64_t)GetCurrentThreadId();
}
#else
#include <pthread.h>
typedef pthread_mutex_t pc_mutex;
typedef pthread_cond_t pc_cond;
static inline int pc_mutex_init(pc_mutex *m) {
    return pthread_mutex_init(m, 0);
}
static inline void pc_mutex_destroy(pc_mutex *m) {
    pthread_mutex_destroy(m);
}
static inline void pc_mutex_lock(pc_mutex *m) {
    pthread_mutex_lock(m);
}
static inline int pc_mutex_trylock(pc_mutex *m) {
    return pthread_mutex_trylock(m) == 0;
}
static inline void pc_mutex_unlock(pc_mutex *m) {
    pthread_mutex_unlock(m);
}
static inline int pc_cond_init(pc_cond *c) {
    return pthread_cond_init(c, 0);
}
static inline void pc_cond_destroy(pc_cond *c) {
    pthread_cond_destroy(c);
}
static inline void pc_cond_wait(pc_cond *c, pc_mutex *m) {
    pthread_cond_wait(c, m);
}
static inline void pc_cond_broadcast(pc_cond *c) {
    pthread_cond_broadcast(c);
}
static inline int64_t pc_atomic_add(volatile int64_t *p, int64_t v) {
    return __atomic_add_fetch(p, v, __ATOMIC_RELAXED);
}
static inline int64_t pc_atomic_get(volatile int64_t *p) {
    return __atomic_load_n(p, __ATOMIC_RELAXED);
}
static inline void pc_atomic_set(volatile int64_t *p, int64_t v) {
    __atomic_store_n(p, v, __ATOMIC_RELAXED);
}
/* Names the calling thread among the living ones; never 0. */
static inline int64_t pc_thread_id(void) {
    return (int64_t)(intptr_t)pthread_self();
}
/* The generation is counted up in every forked child, so that a lock that another thread of the
 * parent may have held is never waited for. One translation unit registers it. */
static volatile int64_t *pc_watched_generation;
static inline void pc_count_fork(void) {
    pc_atomic_add(pc_watched_generation, 1);
}
static inline void pc_watch_forks(volatile int64_t *generation) {
    pc_watched_generation = generation;
    pthread_atfork(0, 0, pc_count_fork);
}
#endif

/* Subtract one and return what is left; what other threads did before they subtracted is seen by
 * the one that is told 0. */
static inline int64_t pc_count_down(volatile int64_t *left) {
#if defined(_WIN32)
    return InterlockedExchangeAdd64((volatile LONG64 *)left, -1) - 1;
#else
    return __atomic_sub_fetch(left, 1, __ATOMIC_ACQ_REL);
#endif
}

#endif
