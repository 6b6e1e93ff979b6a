# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Slot mappings: the slots of prepared write ranges, and whether they may still be written."""
cimport cython
from libc.stdint cimport int32_t, int64_t, uint32_t

import numpy as np

from pagedcache.bookkeeping.alloc cimport pc_calloc, pc_release
from pagedcache.bookkeeping.types cimport *

from pagedcache.errors import CopyRefusedError, InvalidArgumentError


@cython.no_gc_clear           # __dealloc__ needs the pool
cdef class SlotMapping:
    """Slots of a prepared write range: int64, one per token, used for every layer.

    ``slots`` is read-only; ``numpy.asarray(mapping)`` gives it too; ``place_slots`` are the same
    with places for block ids (see Pin). ``epoch`` is the layout epoch it was made in. store()
    refuses it once its blocks were moved, freed, shared, cached, opened or sealed.
    """

    def __init__(self):
        raise InvalidArgumentError("a SlotMapping is made by prepare()")

    def __reduce__(self):
        raise CopyRefusedError(type(self).__name__, "copied or pickled")

    def __dealloc__(self):
        pc_release(self.blocks)
        pc_release(self.generations)

    def __len__(self):
        return len(self.slots)

    def __array__(self, dtype=None, copy=None):
        return np.array(self.slots, dtype=dtype, copy=copy)

    def __repr__(self):
        return f"SlotMapping({len(self.slots)} slots in {self.count} blocks, epoch {self.epoch})"

    cdef int make_slots(self, int64_t n) except -1:
        """Room for n slots. The arrays that users get cannot be made writable again."""
        cdef int64_t[::1] view
        slots = np.empty(n, dtype=np.int64)
        view = slots
        self.raw = &view[0] if n > 0 else NULL
        self.placed = self.raw
        self.slots = np.asarray(memoryview(slots).toreadonly())
        self.place_slots = self.slots
        if self.pool.p.num_open > 0:
            slots = np.empty(n, dtype=np.int64)
            view = slots
            self.placed = &view[0] if n > 0 else NULL
            self.place_slots = np.asarray(memoryview(slots).toreadonly())
        return 0

    cdef bint reserve(self, int64_t room) noexcept nogil:
        self.blocks = <int32_t *> pc_calloc(room, sizeof(int32_t))
        self.generations = <uint32_t *> pc_calloc(room, sizeof(uint32_t))
        self.room = room
        return self.blocks != NULL and self.generations != NULL

    cdef void note(self, int32_t block) noexcept nogil:
        self.blocks[self.count] = block
        self.generations[self.count] = self.pool.p.generation[block]
        self.count += 1

    cdef result_t recheck(self) noexcept nogil:
        """With the lock held: the blocks are still as prepare() left them."""
        cdef pool_t *p = self.pool.p
        cdef int64_t i
        cdef int32_t b
        if self.epoch != p.layout_epoch:
            return answer(E_STALE, self.epoch, p.layout_epoch, 0)
        if self.checked == p.epoch:
            return answer(OK)
        for i in range(self.count):
            b = self.blocks[i]
            if (p.generation[b] != self.generations[i] or p.refs[b] != 1 or p.node[b] != NONE
                    or viewed(p, b)):
                return answer(E_STALE, self.epoch, p.layout_epoch, 1)
            if p.flags[b] & FLAG_PENDING:
                return answer(E_PENDING, b, 1)
        self.checked = p.epoch
        return answer(OK)
