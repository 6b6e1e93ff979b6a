# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The pool's lock, the gate, and what dropped handles leave behind.

The lock guards all of a pool_t and is held for bookkeeping only. While bytes move, the gate is shut
instead: nobody holds the lock, and every other call waits. A handle that is collected must wait
for neither, so it only queues what it held.
"""
from libc.stdint cimport int64_t

from pagedcache.bookkeeping.alloc cimport pc_release
from pagedcache.bookkeeping.blocks cimport unpin_block
from pagedcache.bookkeeping.types cimport *

cdef extern from "pagedcache/sync.h" nogil:
    void pc_watch_forks(int64_t *generation)

cdef int64_t _forks = 0
pc_watch_forks(&_forks)

cdef reaper_t _reaper = NULL


cdef void set_reaper(reaper_t reaper) noexcept:
    """How a dropped sequence is freed; the sequence layer above registers it."""
    global _reaper
    _reaper = reaper


cdef int64_t fork_generation() noexcept nogil:
    return pc_atomic_get(&_forks)


cdef void drop(pool_t *p, pin_t *pin) noexcept nogil:
    """Queue what a collected handle held. Never waits for the pool: it may run inside a call."""
    if p.fork_generation != fork_generation():
        return                        # the parent process owns these blocks
    pc_mutex_lock(&p.drop_lock)
    pin.next = p.dropped
    p.dropped = pin
    pc_mutex_unlock(&p.drop_lock)


cdef void drain(pool_t *p) noexcept nogil:
    cdef pin_t *pin = NULL
    cdef pin_t *following
    cdef pin_t *queued
    cdef int64_t i
    if p.dropped == NULL:
        return
    pc_mutex_lock(&p.drop_lock)
    queued = p.dropped
    p.dropped = NULL
    pc_mutex_unlock(&p.drop_lock)
    while queued != NULL:             # oldest first: a free() comes before the handle's end
        following = queued.next
        queued.next = pin
        pin = queued
        queued = following
    while pin != NULL:
        following = pin.next
        i = pin.count
        while i > 0:
            i -= 1
            unpin_block(p, pin.blocks[i])
        if pin.seq != NULL:
            _reaper(p, pin.seq, pin.keep)
        pc_release(pin)
        pin = following


cdef int enter(pool_t *p) noexcept nogil:
    """Lock the pool once no bytes are being moved, and give back what was dropped.

    E_REENTRANT: this very thread is inside a call (a finalizer ran while it moved bytes or raised),
    so waiting would never end.
    """
    cdef int64_t me = pc_thread_id()
    if p.fork_generation != fork_generation():
        return E_FORKED
    if pc_atomic_get(&p.owner) == me:
        return E_REENTRANT
    pc_mutex_lock(&p.lock)
    while p.gate:
        pc_cond_wait(&p.open, &p.lock)
    pc_atomic_set(&p.owner, me)
    drain(p)
    return OK


cdef void leave(pool_t *p) noexcept nogil:
    pc_atomic_set(&p.owner, 0)
    pc_mutex_unlock(&p.lock)


cdef void shut_gate(pool_t *p) noexcept nogil:
    """Let bytes move without the lock: every other call waits, this thread stays the owner."""
    p.gate = True
    pc_mutex_unlock(&p.lock)


cdef void open_gate(pool_t *p) noexcept nogil:
    """Take the lock back after shut_gate()."""
    pc_mutex_lock(&p.lock)
    p.gate = False
    pc_cond_broadcast(&p.open)
