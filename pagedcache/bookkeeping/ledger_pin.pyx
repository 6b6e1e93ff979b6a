# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Blocks are pinned while their bytes move: for readers, and for writers of slots given before."""
from libc.stdint cimport int64_t

import numpy as np

from pagedcache.bookkeeping.alloc cimport pc_release
from pagedcache.bookkeeping.blocks cimport pin_next
from pagedcache.bookkeeping.exports cimport seq_pointers, unique_and_live
from pagedcache.bookkeeping.gate cimport leave
from pagedcache.bookkeeping.handles cimport Pin, SeqState, enter_fast, new_pin
from pagedcache.bookkeeping.ledger_base cimport HUGE
from pagedcache.bookkeeping.ledger_write cimport LedgerWrite
from pagedcache.bookkeeping.mapping cimport SlotMapping
from pagedcache.bookkeeping.sequences cimport readable_end, written_end
from pagedcache.bookkeeping.slots cimport check_slots
from pagedcache.bookkeeping.status cimport int_argument, raise_result
from pagedcache.bookkeeping.types cimport *

from pagedcache.errors import InvalidArgumentError, InvalidPositionError


cdef class LedgerPin(LedgerWrite):
    """The ledger's operations that pin blocks; see ``Ledger``."""

    def pin_range(self, SeqState seq, start, stop, layer=-1):
        """Pin the blocks of positions start … stop -> Pin (block_ids from start's block on).

        ``layer`` >= 0: refused past what may be read of it (``SeqState.readable``), which is asked
        here as the writer may have cut it since the caller did.
        """
        cdef int64_t of_layer = int_argument(layer, "layer", -1, self.pool.p.num_layers - 1)
        cdef int64_t a = int_argument(start, "start", -HUGE, HUGE)
        cdef int64_t b = int_argument(stop, "stop", -HUGE, HUGE)
        cdef pool_t *p = self.pool.p
        cdef int64_t B = p.block_size
        cdef int64_t longest = <int64_t> p.num_blocks * B
        cdef int64_t i, room
        cdef int why = 4
        if a < 0 or a > b:
            raise_result(answer(E_POSITION, a, max(b, <int64_t> 0)))
        if b > longest:
            raise_result(answer(E_POSITION, b, longest, 4))
        cdef Pin pin = new_pin(self.pool, (b - a) // B + 2)
        self._of(seq)
        room = seq.s.num_blocks * B
        if of_layer >= 0:
            room = readable_end(p, seq.s, of_layer)
            why = 6
        if b <= room and b > a:
            for i in range(a // B, blocks_for(b, B)):
                pin_next(p, pin.pin, seq.s.table[i])
        leave(p)
        if b > room:
            raise_result(answer(E_POSITION, b, room, why))
        return pin

    def read_ends(self, list seqs, given, const int64_t[::1] counts, layer):
        """How many tokens to read of each sequence, int64 ``[n]``: ``given`` (int64 ``[n]``), or
        where it is None all that is written of the layer.

        ``counts[i]`` of them, the last ones, are wanted at least. Raises InvalidPositionError, and
        InvalidArgumentError where tokens were prepared and only the engine knows what is written.
        """
        cdef int64_t of_layer = int_argument(layer, "layer", 0, self.pool.p.num_layers - 1)
        cdef pool_t *p = self.pool.p
        cdef int64_t i, n = len(seqs), readable = 0, written = 0
        cdef bint ask = given is None, wrong = False
        cdef result_t r
        ends = np.empty(n, dtype=np.int64) if ask else given
        cdef int64_t[::1] end = ends
        if end.shape[0] != n or counts.shape[0] != n:
            raise InvalidArgumentError(f"lengths and counts: expected one per sequence ({n}), "
                                       f"got {end.shape[0]} and {counts.shape[0]}")
        cdef seq_t **pointers = seq_pointers(self.pool, seqs)
        try:
            enter_fast(p)
            r = unique_and_live(p, pointers, n, False)
            i = 0
            while r.code == OK and i < n:
                readable = readable_end(p, pointers[i], of_layer)
                if ask:
                    written = end[i] = written_end(pointers[i], of_layer)
                    wrong = readable > written
                else:
                    wrong = not 0 <= end[i] <= readable
                if wrong:
                    break
                i += 1
            leave(p)
        finally:
            pc_release(pointers)
        if r.code != OK:
            raise_result(r)
        if wrong and ask:
            raise InvalidArgumentError(
                f"lengths: {readable - written} tokens of sequence {i} were prepared and are not "
                "committed; say how many keys are written")
        if wrong:
            raise InvalidPositionError(
                end[i], readable, f"lengths[{i}]: only what was written can be attended to")
        for i in range(n):
            if counts[i] > end[i]:
                raise InvalidPositionError(
                    counts[i], end[i], f"queries of sequence {i}: they are its last positions")
        return ends

    def pin_reads(self, list seqs, ends, layer=-1):
        """Pin the blocks of the first ``ends[i]`` tokens of each sequence -> (Pin, indptr).

        ``ends``: int64 ``[n]``, or a list. The pin's ``block_ids`` and ``places`` hold those of all
        sequences, one after the other; int64 ``indptr[i]`` … ``indptr[i + 1]`` are the i-th's. A
        sequence may come twice. ``layer`` as for pin_range().
        """
        cdef int64_t of_layer = int_argument(layer, "layer", -1, self.pool.p.num_layers - 1)
        seqs = list(seqs)                         # an __index__ may change the caller's list
        if type(ends) is list:
            ends = np.array([int_argument(x, "lengths", 0, HUGE) for x in ends], np.int64)
        cdef const int64_t[::1] end = ends
        cdef pool_t *p = self.pool.p
        cdef int64_t B = p.block_size
        cdef int64_t longest = <int64_t> p.num_blocks * B
        cdef int64_t i, j, n = len(seqs)
        cdef int64_t[::1] bounds
        cdef result_t r
        cdef Pin pin
        if end.shape[0] != n:
            raise InvalidArgumentError(f"lengths: expected one per sequence ({n}), "
                                       f"got {end.shape[0]}")
        indptr = np.empty(n + 1, dtype=np.int64)
        bounds = indptr
        bounds[0] = 0
        for i in range(n):
            if not 0 <= end[i] <= longest:
                raise_result(answer(E_POSITION, end[i], longest, 4))
            bounds[i + 1] = bounds[i] + blocks_for(end[i], B)
        cdef seq_t **pointers = seq_pointers(self.pool, seqs)
        try:
            pin = new_pin(self.pool, bounds[n])
            enter_fast(p)
            r = unique_and_live(p, pointers, n, False)
            for i in range(n):
                if r.code != OK:
                    break
                # By the bounds, which are ours: what is pinned lies in the table for sure.
                if bounds[i + 1] - bounds[i] > pointers[i].num_blocks:
                    r = answer(E_POSITION, end[i], pointers[i].num_blocks * B, 4)
                elif of_layer >= 0 and end[i] > readable_end(p, pointers[i], of_layer):
                    r = answer(E_POSITION, end[i], readable_end(p, pointers[i], of_layer), 6)
            if r.code == OK:
                for i in range(n):
                    for j in range(bounds[i + 1] - bounds[i]):
                        pin_next(p, pin.pin, pointers[i].table[j])
            leave(p)
        finally:
            pc_release(pointers)
        if r.code != OK:
            raise_result(r)
        return pin, indptr

    def pin_mapping(self, SlotMapping mapping):
        """Verify that a mapping may still be written and pin its blocks -> Pin."""
        cdef pool_t *p = self.pool.p
        cdef int64_t i
        cdef result_t r
        if mapping is None or mapping.pool is not self.pool:
            raise_result(answer(E_ARGUMENT, 6))
        cdef Pin pin = new_pin(self.pool, mapping.count)
        pin.slots = mapping.place_slots
        enter_fast(p)
        r = mapping.recheck()
        if r.code == OK:
            for i in range(mapping.count):
                pin_next(p, pin.pin, mapping.blocks[i])
                note_rewrite(p, mapping.blocks[i])
        leave(p)
        if r.code != OK:
            raise_result(r)
        return pin

    def pin_slots(self, slots):
        """Verify raw slots (int64 array, -1 = skip) as writable and pin their blocks -> Pin.

        The pin's slots are a copy: what was checked is what will be written. Those of open blocks
        become the slots of their places.
        """
        slots = np.array(slots, dtype=np.int64, order="C")
        cdef int64_t[::1] view = slots
        cdef int64_t n = view.shape[0]
        cdef int64_t *raw = &view[0] if n else NULL
        cdef pool_t *p = self.pool.p
        cdef Pin pin = new_pin(self.pool, n)
        cdef result_t r
        pin.slots = slots
        enter_fast(p)
        with nogil:
            r = check_slots(p, raw, n, pin.pin)
            leave(p)
        if r.code != OK:
            raise_result(r)
        return pin
