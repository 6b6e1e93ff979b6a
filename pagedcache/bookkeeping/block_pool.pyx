# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The block pool as Python sees it: ids and reference counts. What happens to a block is in
``blocks``, the lock in ``gate``."""
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t

import os

import numpy as np

from pagedcache.bookkeeping.alloc cimport pc_calloc, pc_release
from pagedcache.bookkeeping.blocks cimport (
    release_block, release_many, take, take_many, touch_block,
)
from pagedcache.bookkeeping.gate cimport drain, enter, fork_generation, leave
from pagedcache.bookkeeping.inspect cimport check_pool
from pagedcache.bookkeeping.opening cimport opening_destroy
from pagedcache.bookkeeping.prefix_index cimport index_destroy, index_init
from pagedcache.bookkeeping.releasing cimport chain_plain, chain_t, keep_chain, undo_chain
from pagedcache.bookkeeping.status cimport int_argument, raise_result
from pagedcache.bookkeeping.types cimport *

from pagedcache.errors import (
    CopyRefusedError, DeviceError, InvalidArgumentError, StorageMemoryError,
)
from pagedcache.foreign import as_ndarray


cdef void destroy(pool_t *p) noexcept nogil:
    if p == NULL:
        return
    if p.fork_generation == fork_generation():
        drain(p)
    index_destroy(p)
    pc_release(p.refs)
    pc_release(p.pins)
    pc_release(p.generation)
    pc_release(p.loans)
    pc_release(p.flags)
    pc_release(p.node)
    pc_release(p.prev)
    pc_release(p.next)
    pc_release(p.copies)
    opening_destroy(p)
    if p.watched:
        pc_mutex_destroy(&p.lock)
        pc_mutex_destroy(&p.drop_lock)
        pc_cond_destroy(&p.open)
    pc_release(p)


cdef pool_t *create(int32_t num_blocks, int32_t block_size, uint64_t hash_mask,
                    const uint64_t *keys) noexcept nogil:
    cdef pool_t *p = <pool_t *> pc_calloc(1, sizeof(pool_t))
    if p == NULL:
        return NULL
    p.num_blocks = num_blocks
    p.block_size = block_size
    p.fork_generation = fork_generation()
    p.blank = NONE
    p.oldest = NONE
    p.newest = NONE
    p.max_seq_len = INT64_MAX
    p.next_ticket = 1
    if pc_mutex_init(&p.lock) or pc_mutex_init(&p.drop_lock) or pc_cond_init(&p.open):
        destroy(p)
        return NULL
    p.watched = True
    p.refs = <int32_t *> pc_calloc(num_blocks, sizeof(int32_t))
    p.pins = <int32_t *> pc_calloc(num_blocks, sizeof(int32_t))
    p.generation = <uint32_t *> pc_calloc(num_blocks, sizeof(uint32_t))
    p.flags = <uint8_t *> pc_calloc(num_blocks, 1)
    p.node = <int32_t *> pc_calloc(num_blocks, sizeof(int32_t))
    p.prev = <int32_t *> pc_calloc(num_blocks, sizeof(int32_t))
    p.next = <int32_t *> pc_calloc(num_blocks, sizeof(int32_t))
    if (p.refs == NULL or p.pins == NULL or p.generation == NULL or p.flags == NULL
            or p.node == NULL or p.prev == NULL or p.next == NULL
            or not index_init(p, hash_mask, keys)):
        destroy(p)
        return NULL
    return p


cdef result_t allocate_many(pool_t *p, int32_t *out, int64_t n) noexcept nogil:
    cdef result_t r = answer(enter(p))
    if r.code != OK:
        return r
    if n > num_free(p):
        r = answer(E_BLOCKS, n, num_free(p), p.num_blocks)
    else:
        take_many(p, out, n)
        lend(p, out, n, 1)
        p.epoch += 1
    leave(p)
    return r


cdef void lend(pool_t *p, const int32_t *ids, int64_t n, int32_t by) noexcept nogil:
    """Count what users of the pool itself hold, where sequences hold blocks of it too."""
    cdef int64_t i
    if p.loans != NULL:
        for i in range(n):
            p.loans[ids[i]] += by


cdef result_t check_ids(pool_t *p, const int32_t *ids, int64_t n, bint freeing) noexcept nogil:
    """Every id may be freed (as often as it is named) or touched. The counts are the scratch: they
    are lowered while checking and put back before returning."""
    cdef int64_t i, done = n
    cdef int32_t b
    cdef result_t r = answer(OK)
    for i in range(n):
        b = ids[i]
        if b < 0 or b >= p.num_blocks:
            r = answer(E_BLOCK, b, 0)
        elif b >= p.fresh:
            r = answer(E_BLOCK, b, 1)
        elif freeing and p.refs[b] == 0:
            r = answer(E_BLOCK, b, 2)
        elif freeing and p.loans != NULL and p.loans[b] == 0:
            r = answer(E_BLOCK, b, 5)
        elif not freeing and not in_use(p, b) and p.node[b] == NONE:
            r = answer(E_BLOCK, b, 3)
        elif not freeing and p.refs[b] > 0x7fffff00:
            r = answer(E_BLOCK, b, 4)
        if r.code != OK:
            done = i
            break
        if freeing:
            p.refs[b] -= 1
            if p.loans != NULL:
                p.loans[b] -= 1
    if freeing:
        for i in range(done):
            p.refs[ids[i]] += 1
        lend(p, ids, done, 1)
    return r


cdef result_t free_many(pool_t *p, const int32_t *ids, int64_t n) noexcept nogil:
    cdef chain_t chain
    cdef int64_t plain
    cdef result_t r = answer(enter(p))
    if r.code != OK:
        return r
    plain = chain_plain(p, ids, n, &chain)
    r = check_ids(p, ids + plain, n - plain, True)
    if r.code == OK:
        keep_chain(p, &chain)
        lend(p, ids + plain, n - plain, -1)
        release_many(p, ids + plain, n - plain)
        p.epoch += 1
    else:
        undo_chain(p, ids, plain)
    leave(p)
    return r


cdef result_t touch_many(pool_t *p, const int32_t *ids, int64_t n) noexcept nogil:
    cdef int64_t i
    cdef result_t r = answer(enter(p))
    if r.code != OK:
        return r
    r = check_ids(p, ids, n, False)
    if r.code == OK:
        for i in range(n):
            touch_block(p, ids[i])
        lend(p, ids, n, 1)
        p.epoch += 1
    leave(p)
    return r


def _ids(ids):
    """A contiguous int32 copy of block ids, which nobody else can change between their check and
    their use; typed errors for anything else."""
    try:
        a = as_ndarray(ids, "block ids")
    except DeviceError:
        raise
    except (TypeError, ValueError, RuntimeError, OverflowError, MemoryError) as why:
        raise InvalidArgumentError(f"block ids: {why}") from None
    if a.ndim == 0:
        a = a.reshape(1)
    if a.ndim != 1 or (a.size and a.dtype.kind not in "iu"):
        raise InvalidArgumentError(
            f"block ids: expected integers in one dimension, got {a.dtype} of shape {a.shape}")
    if a.size and a.dtype != np.int32 and (a.min() < -(2**31) or a.max() >= 2**31):
        bad = a[(a < -(2**31)) | (a >= 2**31)][0]
        raise InvalidArgumentError(f"block id {bad} is outside int32; ids come from allocate()")
    return np.array(a, dtype=np.int32, order="C")


cdef class BlockPool:
    """Block ids with reference counts; no bytes, no sequences.

    Parameters
    ----------
    num_blocks : int
        Ids 0 … num_blocks - 1 (at most 2**31 - 1). Memory is taken lazily.
    block_size : int
        Tokens per block, at least 1.

    Raises
    ------
    InvalidArgumentError
        A count is not an integer, below 1 or too large.
    StorageMemoryError
        The bookkeeping's memory could not be had.
    """

    def __cinit__(self, num_blocks, block_size, *, hash_mask=2**64 - 1):
        cdef int64_t n = int_argument(num_blocks, "num_blocks", 1, 2**31 - 1)
        cdef int64_t size = int_argument(block_size, "block_size", 1, 2**20)
        cdef uint64_t mask = hash_mask
        cdef bytes secret = os.urandom(8 * (size + 4))
        cdef const uint8_t *raw = secret
        self.p = create(<int32_t> n, <int32_t> size, mask, <const uint64_t *> raw)
        if self.p == NULL:
            raise StorageMemoryError(n * 40 + 8 * size, f"bookkeeping of {n} blocks")

    def __dealloc__(self):
        destroy(self.p)

    def __repr__(self):
        return (f"BlockPool(num_blocks={self.num_blocks}, block_size={self.block_size}, "
                f"free={self.num_free_blocks}, cached={self.num_cached_blocks})")

    def __reduce__(self):
        raise CopyRefusedError(type(self).__name__, "copied or pickled")

    @property
    def num_blocks(self):
        """Blocks in the pool."""
        return self.p.num_blocks

    @property
    def block_size(self):
        """Tokens per block."""
        return self.p.block_size

    @property
    def num_free_blocks(self):
        """Blocks that can be handed out: free and cached-free."""
        return num_free(self.p)

    @property
    def num_cached_blocks(self):
        """Blocks registered in the prefix index, used or free."""
        return self.p.num_cached

    @property
    def num_idle_blocks(self):
        """Cached-free blocks: free, and still matchable until their storage is needed."""
        return self.p.num_idle

    @property
    def num_used_blocks(self):
        """Blocks held by sequences, pool users or views."""
        return self.p.num_blocks - num_free(self.p)

    @property
    def steps(self):
        """Units of bookkeeping work done so far (blocks handled, index probes)."""
        return self.p.steps

    def allocate(self, n):
        """Take ``n`` blocks, each with one reference: int32 ids, all or nothing.

        Raises OutOfBlocksError when fewer than ``n`` are free; nothing has changed then.
        """
        cdef int64_t count = int_argument(n, "n", 0, 2**62)
        cdef result_t r
        if count > self.p.num_blocks:
            raise_result(answer(E_BLOCKS, count, num_free(self.p), self.p.num_blocks))
        out = np.empty(count, dtype=np.int32)
        cdef int32_t[::1] view = out
        cdef int32_t *ids = &view[0] if count else NULL
        with nogil:
            r = allocate_many(self.p, ids, count)
        if r.code != OK:
            raise_result(r)
        return out

    def allocate_one(self):
        """Take one block with one reference and return its id as an int."""
        cdef int32_t b = 0
        cdef pool_t *p = self.p
        cdef result_t r
        if (p.fork_generation == fork_generation() and p.dropped == NULL
                and pc_mutex_trylock(&p.lock)):
            if not p.gate and num_free(p) > 0:
                b = take(p)
                lend(p, &b, 1, 1)
                p.epoch += 1
                pc_mutex_unlock(&p.lock)
                return b
            pc_mutex_unlock(&p.lock)
        with nogil:
            r = allocate_many(p, &b, 1)
        if r.code != OK:
            raise_result(r)
        return b

    cdef int _each(self, ids, bint freeing) except -1:
        cdef const int32_t[::1] view = _ids(ids)
        cdef int64_t n = view.shape[0]
        cdef const int32_t *raw = &view[0] if n else NULL
        cdef result_t r
        with nogil:
            r = free_many(self.p, raw, n) if freeing else touch_many(self.p, raw, n)
        if r.code != OK:
            raise_result(r)
        return 0

    def free(self, ids):
        """Give back one reference of each id (an id may be named once per reference held).

        A block is free when its last reference goes. Raises BlockError for an id out of range,
        never allocated, freed too often, or held by sequences alone; nothing has changed then.
        """
        self._each(ids, True)

    def free_one(self, block_id):
        """Give back one reference of one block; see free()."""
        cdef int64_t wide
        cdef int32_t b
        cdef pool_t *p = self.p
        cdef result_t r
        wide = int_argument(block_id, "block_id", -(2**31), 2**31 - 1)
        b = <int32_t> wide
        if (p.fork_generation == fork_generation() and p.dropped == NULL
                and pc_mutex_trylock(&p.lock)):
            if (not p.gate and 0 <= b < p.fresh and p.refs[b] > 0
                    and (p.loans == NULL or p.loans[b] > 0)):
                lend(p, &b, 1, -1)
                release_block(p, b)
                p.epoch += 1
                pc_mutex_unlock(&p.lock)
                return
            pc_mutex_unlock(&p.lock)
        with nogil:
            r = free_many(p, &b, 1)
        if r.code != OK:
            raise_result(r)

    def touch(self, ids):
        """Take one more reference of each id; a cached-free block is used again.

        Raises BlockError for a free block that holds nothing cached; nothing has changed then.
        """
        self._each(ids, False)

    def _known(self, block_id):
        cdef int64_t b = int_argument(block_id, "block_id", -(2**31), 2**31 - 1)
        if b < 0 or b >= self.p.num_blocks:
            raise_result(answer(E_BLOCK, b, 0))
        return b

    def ref_count(self, block_id):
        """References held on a block (pins by views not counted); 0 when free."""
        cdef int32_t b = self._known(block_id)
        return self.p.refs[b]

    def is_cached(self, block_id):
        """Whether the block is registered in the prefix index."""
        cdef int32_t b = self._known(block_id)
        return b < self.p.fresh and self.p.node[b] != NONE

    def check(self):
        """Verify that counts, lists and index agree; raises CorruptionError naming the block."""
        cdef result_t r
        with nogil:
            r = answer(enter(self.p))
            if r.code == OK:
                r = check_pool(self.p)
                leave(self.p)
        if r.code != OK:
            raise_result(r)

    def stats(self):
        """A consistent snapshot of the counters, as a dict of ints."""
        cdef counters_t c = self.p.count
        cdef int64_t free = 0, cached = 0, pinned = 0, idle = 0
        cdef result_t r
        with nogil:
            r = answer(enter(self.p))
            if r.code == OK:
                c = self.p.count
                free = num_free(self.p)
                cached = self.p.num_cached
                idle = self.p.num_idle
                pinned = self.p.num_pinned
                leave(self.p)
        if r.code != OK:
            raise_result(r)
        return {
            "blocks_allocated": c.blocks_allocated, "blocks_freed": c.blocks_freed,
            "blocks_used": self.p.num_blocks - free, "blocks_free": free,
            "blocks_cached": cached, "blocks_idle": idle, "pinned": pinned,
            "evicted_blocks": c.evicted_blocks, "evicted_tokens": c.evicted_tokens,
        }
