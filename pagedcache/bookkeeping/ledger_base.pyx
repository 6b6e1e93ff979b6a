# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The root of the ledger: its pool, entering it for a sequence, letting bytes move, looking at it.

The operations come in layers above: ``ledger_open``, ``ledger_write``, ``ledger``.
"""
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint32_t

from pagedcache.bookkeeping.alloc cimport pc_calloc, pc_release
from pagedcache.bookkeeping.block_pool cimport BlockPool
from pagedcache.bookkeeping.blocks cimport forget_all
from pagedcache.bookkeeping.gate cimport leave, open_gate, shut_gate
from pagedcache.bookkeeping.handles cimport SeqState, enter_fast, int32_array
from pagedcache.bookkeeping.inspect cimport fragmentation_t, measure
from pagedcache.bookkeeping.opening cimport (
    apply_seals, cancel_seals, opening_init, plan_early_seals,
)
from pagedcache.bookkeeping.status cimport int_argument, raise_result
from pagedcache.bookkeeping.types cimport *

import numpy as np

from pagedcache.errors import InvalidArgumentError, StorageMemoryError


cdef const uint32_t *token_pointer(object tokens, int64_t *n) except? NULL:
    """Pointer into a uint32 array the caller keeps alive."""
    cdef const uint32_t[::1] view = tokens
    n[0] = view.shape[0]
    return &view[0] if n[0] else NULL


cdef class LedgerBase:
    """What every operation of a ledger needs; see ``Ledger``."""

    def __init__(self, num_blocks, block_size, *, num_layers=1, max_seq_len=None,
                 partial_block_reuse=0, mover=None, move_mover=None, deferred_copies=False,
                 queued=False, num_open=0, hash_mask=2**64 - 1):
        cdef int64_t layers = int_argument(num_layers, "num_layers", 1, 2**20)
        cdef int64_t longest = INT64_MAX
        cdef int64_t partial
        if max_seq_len is not None:
            longest = int_argument(max_seq_len, "max_seq_len", 1, 2**62)
        partial = int_argument(partial_block_reuse, "partial_block_reuse", 0, 2**31 - 1)
        self.pool = BlockPool(num_blocks, block_size, hash_mask=hash_mask)
        self.pool.p.loans = <int32_t *> pc_calloc(self.pool.p.num_blocks, sizeof(int32_t))
        if self.pool.p.loans == NULL:
            raise StorageMemoryError(4 * self.pool.p.num_blocks, "the pool's loans")
        self.pool.p.num_layers = layers
        self.pool.p.max_seq_len = longest
        self.pool.p.partial_min = partial
        self.pool.p.deferred = bool(deferred_copies)
        self.pool.p.queued = bool(queued)
        cdef int32_t slots = <int32_t> int_argument(num_open, "num_open", 0,
                                                    2**31 - 1 - self.pool.p.num_blocks)
        if slots > 0 and self.pool.p.deferred:
            raise InvalidArgumentError("num_open: an engine that copies blocks cannot seal them; "
                                       "give deferred_copies or num_open, not both")
        if slots > 0 and not opening_init(self.pool.p, slots):
            raise StorageMemoryError(4 * self.pool.p.num_blocks + 8 * slots, "open slots")
        self.mover = mover
        self.move_mover = move_mover

    cdef pool_t *_of(self, SeqState seq) except NULL:
        """Enter the pool for one sequence: it is this ledger's and not freed."""
        if seq is None or seq.pool is not self.pool:
            raise_result(answer(E_ARGUMENT, 6))
        enter_fast(self.pool.p)
        if seq.s.freed:
            leave(self.pool.p)
            raise_result(answer(E_FREED, seq.s.serial))
        return self.pool.p

    cdef int _move_bytes(self, object call, tuple arguments) except -1:
        """Called with the lock held: shut the gate, let bytes move, come back with the lock."""
        cdef pool_t *p = self.pool.p
        shut_gate(p)
        try:
            call(*arguments)
        finally:
            with nogil:
                open_gate(p)
        return 0

    cdef int _move_seals(self, const int32_t *blocks, int64_t n) except -1:
        """Bring the bytes of planned blocks over and give their slots back, or cancel the plan."""
        cdef pool_t *p = self.pool.p
        cdef int64_t i
        cdef int32_t[::1] source
        if n == 0:
            return 0
        try:
            target = int32_array(blocks, n)
            places = int32_array(blocks, n)
            source = places
            for i in range(n):
                source[i] = place(p, blocks[i])
            if self.mover is not None:
                self._move_bytes(self.mover, (places, target,
                                              np.full(n, p.block_size, dtype=np.int32)))
        except BaseException:
            cancel_seals(p, blocks, n)
            raise
        apply_seals(p, blocks, n)
        return 0

    cdef int64_t _seal_early(self, int64_t wanted) except -1:
        """Seal ``wanted`` full and committed blocks, or none where there are fewer -> how many."""
        cdef int64_t found
        cdef int32_t *blocks = <int32_t *> pc_calloc(wanted, sizeof(int32_t))
        if blocks == NULL:
            raise StorageMemoryError(wanted * 4, "a list of blocks to seal")
        try:
            found = plan_early_seals(self.pool.p, wanted, blocks)
            self._move_seals(blocks, found)
        finally:
            pc_release(blocks)
        return found

    def reset_prefix_cache(self):
        """Forget all cached identities; blocks in use stay valid for their holders."""
        enter_fast(self.pool.p)
        with nogil:
            forget_all(self.pool.p)
            self.pool.p.epoch += 1
            leave(self.pool.p)

    def check(self):
        """Verify the whole bookkeeping; raises CorruptionError naming the block."""
        self.pool.check()

    @property
    def num_open(self):
        """Open slots in all."""
        return self.pool.p.num_open

    @property
    def open_in_use(self):
        """Open slots that blocks have now."""
        return self.pool.p.open_used

    @property
    def layout_epoch(self):
        """Changes with every defragmentation that moved a block."""
        return self.pool.p.layout_epoch

    def stats(self):
        """A consistent snapshot of all counters as a dict (see pagedcache.stats.Stats)."""
        cdef pool_t *p = self.pool.p
        enter_fast(p)
        cdef counters_t c = p.count
        cdef int64_t active = p.num_sequences
        cdef int64_t used = p.num_blocks - num_free(p)
        cdef int64_t pinned = p.num_pinned
        cdef int64_t steps = p.steps
        cdef int64_t opened = p.open_used
        leave(p)
        return {
            "sequences_allocated": c.sequences_allocated, "sequences_freed": c.sequences_freed,
            "sequences_active": active,
            "blocks_allocated": c.blocks_allocated, "blocks_freed": c.blocks_freed,
            "blocks_used": used, "pinned": pinned,
            "cow_copies": c.cow_copies, "partial_copies": c.partial_copies,
            "defragmentations": c.defragmentations, "blocks_moved": c.blocks_moved,
            "prefix_queries": c.prefix_queries, "prefix_hits": c.prefix_hits,
            "query_tokens": c.query_tokens, "hit_tokens": c.hit_tokens,
            "query_blocks": c.query_blocks, "hit_blocks": c.hit_blocks,
            "resumed_queries": c.resumed_queries, "resumed_hit_tokens": c.resumed_hit_tokens,
            "evicted_blocks": c.evicted_blocks, "evicted_tokens": c.evicted_tokens,
            "blocks_sealed": c.blocks_sealed, "blocks_reopened": c.blocks_reopened,
            "open_blocks": opened,
            "steps": steps,
        }

    def fragmentation(self):
        """Holes, waste and free runs as a dict (see pagedcache.stats.Fragmentation)."""
        cdef fragmentation_t f
        cdef result_t r
        cdef pool_t *p = self.pool.p
        enter_fast(p)
        with nogil:
            r = measure(p, &f)
            leave(p)
        if r.code != OK:
            raise_result(r)
        return {
            "holes": f.holes, "wasted_slots": f.wasted,
            "ratio": min(1.0, f.holes / <double> f.used) if f.used else 0.0,
            "largest_free_run": f.largest_free_run,
            "mean_tokens_per_block": f.tokens / <double> f.with_tokens if f.with_tokens else 0.0,
            "used_blocks": f.used, "free_blocks": f.free, "block_size": p.block_size,
        }
