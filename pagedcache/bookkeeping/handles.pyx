# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""What the bookkeeping hands out: sequence states and pins.

A handle that is collected only queues what it held; the next call gives it back. So a garbage
collection may happen anywhere, also while another thread holds the pool's lock.
"""
cimport cython
from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.string cimport memcpy

import numpy as np

from pagedcache.bookkeeping.alloc cimport pc_calloc, pc_release
from pagedcache.bookkeeping.block_pool cimport BlockPool
from pagedcache.bookkeeping.blocks cimport pin_next, unpin_block
from pagedcache.bookkeeping.gate cimport drop, enter, fork_generation, leave
from pagedcache.bookkeeping.sequences cimport (
    num_tokens, num_written, outstanding, readable_end, written_end,
)
from pagedcache.bookkeeping.status cimport int_argument, raise_result
from pagedcache.bookkeeping.types cimport *

from pagedcache.errors import CopyRefusedError, InvalidArgumentError, StorageMemoryError


cdef int enter_fast(pool_t *p) except? 99:
    """enter() that keeps the GIL when the lock is free at once."""
    cdef int code
    if (p.fork_generation == fork_generation() and p.dropped == NULL
            and pc_mutex_trylock(&p.lock)):
        if not p.gate:
            pc_atomic_set(&p.owner, pc_thread_id())
            return OK
        pc_mutex_unlock(&p.lock)
    with nogil:
        code = enter(p)
    if code != OK:
        raise_result(answer(code))
    return OK


cdef object int32_array(const int32_t *data, int64_t n):
    out = np.empty(n, dtype=np.int32)
    cdef int32_t[::1] view = out
    if n > 0:
        memcpy(&view[0], data, n * sizeof(int32_t))
    return out


@cython.no_gc_clear           # __dealloc__ needs the pool
cdef class SeqState:
    """Table, tokens and lengths of one sequence; made by a Ledger only.

    The handle stays valid memory after free(); every use then raises FreedHandleError.
    """

    def __init__(self):
        raise InvalidArgumentError("a SeqState is made by Ledger.open() or Ledger.fork()")

    def __dealloc__(self):
        if self.last_will == NULL:
            return
        if self.s == NULL:
            pc_release(self.last_will)
            return
        self.last_will.seq = self.s
        drop(self.pool.p, self.last_will)

    def __reduce__(self):
        raise CopyRefusedError(type(self).__name__, "copied or pickled")

    cdef int _enter(self) except? 99:
        enter_fast(self.pool.p)
        if self.s.freed:
            leave(self.pool.p)
            raise_result(answer(E_FREED, self.s.serial))
        return OK

    @property
    def serial(self):
        """Unique id of the sequence in its pool, never reused."""
        return self.s.serial

    @property
    def freed(self):
        return bool(self.s.freed)

    @property
    def seq_len(self):
        """Computed tokens."""
        self._enter()
        cdef int64_t n = self.s.computed
        leave(self.pool.p)
        return n

    @property
    def num_tokens(self):
        """Tokens known, opened for, computed or written; bounds truncate."""
        self._enter()
        cdef int64_t n = num_tokens(self.pool.p, self.s)
        leave(self.pool.p)
        return n

    @property
    def num_prepared(self):
        """End of the tokens that were named and made writable, at least the computed length: where
        a step() commits to."""
        self._enter()
        cdef int64_t n = self.s.computed + outstanding(self.s)
        leave(self.pool.p)
        return n

    @property
    def num_written(self):
        """Least written end over the layers, at least the computed length."""
        self._enter()
        cdef int64_t n = num_written(self.pool.p, self.s)
        leave(self.pool.p)
        return n

    @property
    def num_cached_tokens(self):
        """Tokens that the prefix cache gave at admission (less what was truncated since)."""
        self._enter()
        cdef int64_t n = self.s.num_cached
        leave(self.pool.p)
        return n

    @property
    def num_blocks(self):
        self._enter()
        cdef int64_t n = self.s.num_blocks
        leave(self.pool.p)
        return n

    @property
    def num_known(self):
        """Tokens of known value from the start."""
        self._enter()
        cdef int64_t n = self.s.known
        leave(self.pool.p)
        return n

    def written(self, layer):
        """Where this layer's next append goes."""
        cdef int64_t i = int_argument(layer, "layer", 0, self.pool.p.num_layers - 1)
        self._enter()
        cdef int64_t n = written_end(self.s, i)
        leave(self.pool.p)
        return n

    def readable(self, layer):
        """End of what may be read of a layer: see readable_end()."""
        cdef int64_t i = int_argument(layer, "layer", 0, self.pool.p.num_layers - 1)
        self._enter()
        cdef int64_t n = readable_end(self.pool.p, self.s, i)
        leave(self.pool.p)
        return n

    def tokens(self, start=0, stop=None):
        """The known tokens start … stop as a uint32 array (a copy)."""
        cdef int64_t known = self.num_known
        cdef int64_t a = int_argument(start, "start", 0, 2**62)
        cdef int64_t b = known if stop is None else int_argument(stop, "stop", 0, 2**62)
        if a > b or b > known:
            raise_result(answer(E_POSITION, b, known))
        out = np.empty(b - a, dtype=np.uint32)
        cdef uint32_t[::1] view = out
        cdef bint shorter
        self._enter()
        shorter = self.s.known < b
        if not shorter and b > a:
            memcpy(&view[0], self.s.tokens + a, (b - a) * sizeof(uint32_t))
        leave(self.pool.p)
        if shorter:
            raise_result(answer(E_POSITION, b, known))
        return out

    def block_table(self):
        """A read-only int32 snapshot of the block ids, in token order."""
        self._enter()
        cdef int64_t n = self.s.num_blocks
        cdef int32_t *copy = <int32_t *> pc_calloc(n, sizeof(int32_t))
        if copy != NULL and n > 0:
            memcpy(copy, self.s.table, n * sizeof(int32_t))
        leave(self.pool.p)
        if copy == NULL:
            raise StorageMemoryError(n * 4, "a block table")
        try:
            out = int32_array(copy, n)
        finally:
            pc_release(copy)
        out.setflags(write=False)
        return out

    def places(self, first=0, last=None):
        """Where the bytes of the blocks number ``first … last - 1`` are, as far as the table goes,
        int32 copy: their ids, or num_blocks + the open slot of open ones."""
        cdef int64_t a = int_argument(first, "first", 0, 2**62)
        cdef int64_t b = 2**62 if last is None else int_argument(last, "last", 0, 2**62)
        cdef int64_t n = min(b, self.num_blocks) - a
        cdef int64_t i, held
        try:
            out = np.empty(max(n, <int64_t> 0), dtype=np.int32)
        except MemoryError:
            raise StorageMemoryError(4 * n, "a part of a block table") from None
        cdef int32_t[::1] view = out
        self._enter()
        held = min(n, self.s.num_blocks - a)      # the table may have shrunk in between
        for i in range(held):
            view[i] = place(self.pool.p, self.s.table[a + i])
        leave(self.pool.p)
        return out[:max(held, <int64_t> 0)]

    def slot_mapping(self, start, stop):
        """int64 slots of positions start … stop, for reading (store() refuses shared ones)."""
        cdef int64_t a = int_argument(start, "start", 0, 2**62)
        cdef int64_t b = int_argument(stop, "stop", 0, 2**62)
        cdef int64_t B = self.pool.p.block_size
        cdef int64_t room = self.num_blocks * B
        cdef int64_t i
        if a > b:
            raise_result(answer(E_POSITION, a, b))
        if b > room:
            raise_result(answer(E_POSITION, b, room, 4))
        out = np.empty(b - a, dtype=np.int64)
        cdef int64_t[::1] view = out
        self._enter()
        room = self.s.num_blocks * B
        if b <= room:
            for i in range(a, b):
                view[i - a] = self.s.table[i // B] * B + i % B
        leave(self.pool.p)
        if b > room:
            raise_result(answer(E_POSITION, b, room, 4))
        return out

    def block_for_position(self, position):
        """Block id that holds a position, for reading."""
        cdef int64_t i = int_argument(position, "position", -(2**62), 2**62)
        cdef int64_t B = self.pool.p.block_size
        cdef int32_t b = NONE
        self._enter()
        cdef int64_t room = self.s.num_blocks * B
        if 0 <= i < room:
            b = self.s.table[i // B]
        leave(self.pool.p)
        if b == NONE:
            raise_result(answer(E_POSITION, i, room, 4))
        return b


cdef SeqState new_state(BlockPool pool):
    """A handle without a sequence yet; everything it needs to be dropped is allocated."""
    cdef SeqState h = SeqState.__new__(SeqState)
    h.pool = pool
    h.last_will = <pin_t *> pc_calloc(1, sizeof(pin_t))
    if h.last_will == NULL:
        raise StorageMemoryError(sizeof(pin_t), "a sequence handle")
    return h


@cython.no_gc_clear           # __dealloc__ needs the pool
cdef class Pin:
    """Keeps blocks where they are and as they are until release() or collection.

    ``block_ids``: int32 snapshot of the pinned ids; ``places``: where their bytes were when they
    were pinned and stay until then (the id, or num_blocks + the open slot of an open block);
    ``slots``: int64 slots in places, or None. Usable as a context manager.
    """

    def __init__(self):
        raise InvalidArgumentError("a Pin is made by a Ledger")

    def __reduce__(self):
        raise CopyRefusedError(type(self).__name__, "copied or pickled")

    def __dealloc__(self):
        if self.pin != NULL:
            drop(self.pool.p, self.pin)

    @property
    def block_ids(self):
        if self.pin == NULL:
            return int32_array(NULL, 0)
        return int32_array(self.pin.blocks, self.pin.count)

    @property
    def places(self):
        if self.pin == NULL:
            return int32_array(NULL, 0)
        return int32_array(self.pin.places, self.pin.count)

    @property
    def released(self):
        return self.pin == NULL

    def part(self, start, stop):
        """A pin of its own of the blocks ``start … stop`` (indices into block_ids)."""
        cdef int64_t first = int_argument(start, "start", 0, 2**31)
        cdef int64_t last = int_argument(stop, "stop", first, 2**31)
        cdef Pin part = new_pin(self.pool, last - first)
        cdef pool_t *p = self.pool.p
        cdef int64_t i, held
        enter_fast(p)
        held = self.pin.count if self.pin != NULL else 0
        if last <= held:
            for i in range(first, last):
                pin_next(p, part.pin, self.pin.blocks[i])
                part.pin.places[i - first] = self.pin.places[i]
        leave(p)
        if last > held:
            raise InvalidArgumentError(f"this pin holds {held} blocks, not {first}…{last}")
        return part

    def release(self):
        """Let the blocks go; a second call does nothing."""
        cdef pin_t *pin
        cdef pool_t *p = self.pool.p
        cdef int64_t i
        if self.pin == NULL:
            return
        if pc_atomic_get(&p.owner) == pc_thread_id():
            pin = self.pin            # a finalizer inside a call: the next call gives it back
            self.pin = NULL
            drop(p, pin)
            return
        enter_fast(p)
        pin = self.pin                # read under the lock: two threads may release one pin
        if pin == NULL:
            leave(p)
            return
        self.pin = NULL
        i = pin.count
        while i > 0:                  # tail first, as a sequence gives its blocks back
            i -= 1
            unpin_block(p, pin.blocks[i])
        leave(p)
        pc_release(pin)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.release()


cdef Pin new_pin(BlockPool pool, int64_t room):
    """A pin with room for block ids and none in it."""
    cdef Pin h = Pin.__new__(Pin)
    h.pool = pool
    cdef int64_t lists = 2 if pool.p.num_open > 0 else 1
    h.pin = <pin_t *> pc_calloc(sizeof(pin_t) + lists * room * sizeof(int32_t), 1)
    if h.pin == NULL:
        raise StorageMemoryError(sizeof(pin_t) + lists * room * 4, "a pin")
    h.pin.blocks = <int32_t *> (h.pin + 1)
    h.pin.places = h.pin.blocks + (lists - 1) * room
    return h
