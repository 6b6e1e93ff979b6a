# cython: language_level=3, boundscheck=False, wraparound=False
"""C memory of the bookkeeping, through one door that tests can make fail.

``fail_after(n)`` lets the n-th allocation from now (0 = the next) fail once; ``-1`` turns it off.
``count()`` is the number of allocations asked for so far, ``live()`` of those not yet given back.
"""
from libc.stdint cimport int64_t, SIZE_MAX
from libc.stdlib cimport calloc, free, realloc

cdef extern from "pagedcache/sync.h" nogil:
    int64_t pc_atomic_add(int64_t *p, int64_t v)
    int64_t pc_atomic_get(int64_t *p)
    void pc_atomic_set(int64_t *p, int64_t v)

cdef extern from "pagedcache/memory.h" nogil:
    void pc_advise_huge(void *p, size_t size)

cdef enum:
    LARGE = 8 << 20          # from here on random access pays for small pages

cdef int64_t _countdown = -1
cdef int64_t _asked = 0
cdef int64_t _live = 0


cdef bint _refused(int64_t count, int64_t size) noexcept nogil:
    """True when this allocation must fail: injected, negative, or beyond size_t."""
    pc_atomic_add(&_asked, 1)
    if count < 0 or size <= 0 or <size_t> count > SIZE_MAX // <size_t> size:
        return True
    if pc_atomic_get(&_countdown) < 0:
        return False
    return pc_atomic_add(&_countdown, -1) == -1


cdef void *pc_calloc(int64_t count, int64_t size) noexcept nogil:
    """Zeroed memory for count x size bytes, or NULL. Large blocks are taken lazily by the OS."""
    cdef void *p
    if _refused(count, size):
        return NULL
    p = calloc(count if count > 0 else 1, size)
    if p != NULL:
        if count * size >= LARGE:
            pc_advise_huge(p, count * size)
        pc_atomic_add(&_live, 1)
    return p


cdef void *pc_grow(void *old, int64_t count, int64_t size) noexcept nogil:
    """Room for count x size bytes with the old contents kept, or NULL and ``old`` stays valid."""
    cdef void *p
    if _refused(count, size):
        return NULL
    p = realloc(old, (count if count > 0 else 1) * size)
    if p != NULL and old == NULL:
        pc_atomic_add(&_live, 1)
    return p


cdef void pc_release(void *p) noexcept nogil:
    if p != NULL:
        pc_atomic_add(&_live, -1)
        free(p)


def fail_after(int64_t n):
    """Let the n-th allocation from now fail once (0 = the next one); -1 turns it off."""
    pc_atomic_set(&_countdown, n)


def count():
    """Allocations asked for since import."""
    return pc_atomic_get(&_asked)


def live():
    """Allocations not yet given back."""
    return pc_atomic_get(&_live)
