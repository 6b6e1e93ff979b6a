# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The block pool: ids, reference counts, pins and the order of eviction. O(1) per block, in C.

A block is exactly one of

* used: held by sequences or pool users (``refs``) or pinned by views and byte movers (``pins``);
* idle (cached-free): free, but its prefix can still be hit; kept in order of recency;
* blank: free and holding nothing that could be hit. Ids from ``fresh`` on were never handed out.

Blank blocks are handed out first, then never used ones, then the least recently used idle block.
Sequences give back their tail first, so a prefix is evicted from its tail.
"""
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t

import os

import numpy as np

from pagedcache.bookkeeping.alloc cimport pc_calloc, pc_release
from pagedcache.bookkeeping.inspect cimport check_pool
from pagedcache.bookkeeping.prefix_index cimport (
    alive, index_destroy, index_init, index_register, index_unregister,
)
from pagedcache.bookkeeping.status cimport int_argument, raise_result
from pagedcache.bookkeeping.types cimport *

from pagedcache.errors import InvalidArgumentError, StorageMemoryError

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


# ---------------------------------------------------------------- the lock and dropped handles
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


# ---------------------------------------------------------------- recency list
cdef inline void unlink_idle(pool_t *p, int32_t b) noexcept nogil:
    if p.prev[b] != NONE:
        p.next[p.prev[b]] = p.next[b]
    else:
        p.oldest = p.next[b]
    if p.next[b] != NONE:
        p.prev[p.next[b]] = p.prev[b]
    else:
        p.newest = p.prev[b]
    p.prev[b] = NONE
    p.next[b] = NONE


cdef inline void link_newest(pool_t *p, int32_t b) noexcept nogil:
    p.prev[b] = p.newest
    p.next[b] = NONE
    if p.newest != NONE:
        p.next[p.newest] = b
    else:
        p.oldest = b
    p.newest = b


cdef inline void link_before(pool_t *p, int32_t b, int32_t at) noexcept nogil:
    """Enter ``b`` as just older than ``at``."""
    p.prev[b] = p.prev[at]
    p.next[b] = at
    if p.prev[at] != NONE:
        p.next[p.prev[at]] = b
    else:
        p.oldest = b
    p.prev[at] = b


cdef inline void to_blank(pool_t *p, int32_t b) noexcept nogil:
    p.next[b] = p.blank
    p.blank = b
    p.num_blank += 1


cdef void forget_block(pool_t *p, int32_t b) noexcept nogil:
    """Take a block (in no list) out of the index.

    A block outlives its parent only where a view kept it longer; then the idle blocks that nothing
    can reach any more become blank, so that they are reused before any that can be hit.
    """
    cdef int32_t at, following
    cdef bint again = index_unregister(p, b)
    while again:
        again = False
        at = p.oldest
        while at != NONE:
            following = p.next[at]
            p.steps += 1
            if (p.index.nodes[p.node[at]].parent != 0
                    and alive(p, p.index.nodes[p.node[at]].parent) == NONE):
                unlink_idle(p, at)
                p.num_idle -= 1
                again = index_unregister(p, at) or again
                to_blank(p, at)
            at = following


# ---------------------------------------------------------------- one block
cdef int32_t take(pool_t *p) noexcept nogil:
    """Hand out one block with one reference. The caller has checked that there is one."""
    cdef int32_t b = p.blank
    if b != NONE:
        p.blank = p.next[b]
        p.num_blank -= 1
    elif p.fresh < p.num_blocks:
        b = p.fresh
        p.fresh += 1
        p.node[b] = NONE
    else:
        b = p.oldest
        unlink_idle(p, b)
        p.num_idle -= 1
        forget_block(p, b)
        p.count.evicted_blocks += 1
        p.count.evicted_tokens += p.block_size
    p.refs[b] = 1
    p.generation[b] += 1
    p.flags[b] = 0
    p.count.blocks_allocated += 1
    p.steps += 1
    return b


cdef void retire(pool_t *p, int32_t b) noexcept nogil:
    """The last holder and the last pin of a used block are gone."""
    cdef node_t *n
    cdef int32_t parent, at
    p.count.blocks_freed += 1
    p.flags[b] = 0
    if p.node[b] != NONE:
        n = &p.index.nodes[p.node[b]]
        parent = alive(p, n.parent)
        if p.prev[b] != NONE or p.next[b] != NONE or (n.parent != 0 and parent == NONE):
            forget_block(p, b)        # another copy is resident, or nothing can reach this one
        else:
            p.num_idle += 1
            # An ancestor must not be evicted before its descendant. The parent is idle already
            # only when this block was held longer than it, by a view.
            at = NONE if parent == NONE else p.index.nodes[parent].block
            if at == NONE or in_use(p, at):
                link_newest(p, b)
            else:
                link_before(p, b, at)
            return
    to_blank(p, b)


cdef void touch_block(pool_t *p, int32_t b) noexcept nogil:
    """One more holder of a used or idle block."""
    if not in_use(p, b):
        unlink_idle(p, b)
        p.num_idle -= 1
        p.count.blocks_allocated += 1
    p.refs[b] += 1
    p.steps += 1


cdef void release_block(pool_t *p, int32_t b) noexcept nogil:
    p.refs[b] -= 1
    p.steps += 1
    if not in_use(p, b):
        retire(p, b)
    elif p.pins[b] > 0:
        p.flags[b] |= FLAG_MUST_COPY  # who leaves may have been the one whose tokens are viewed


cdef void pin_block(pool_t *p, int32_t b) noexcept nogil:
    if not in_use(p, b):
        unlink_idle(p, b)
        p.num_idle -= 1
        p.count.blocks_allocated += 1
    if p.pins[b] == 0:
        p.num_pinned += 1
    p.pins[b] += 1


cdef void unpin_block(pool_t *p, int32_t b) noexcept nogil:
    p.pins[b] -= 1
    if p.pins[b] == 0:
        p.num_pinned -= 1
        if p.refs[b] == 0:
            retire(p, b)


cdef void register_block(pool_t *p, int32_t block, uint64_t parent, const uint32_t *tokens,
                         const uint8_t *extra, int64_t extra_size) noexcept nogil:
    """Cache a used block. An idle copy of the same identity gives way to it: an idle block is
    always the only copy of its node."""
    cdef int32_t displaced = NONE
    index_register(p, block, parent, tokens, extra, extra_size, &displaced)
    if displaced != NONE:
        unlink_idle(p, displaced)
        p.num_idle -= 1
        to_blank(p, displaced)


cdef void forget_all(pool_t *p) noexcept nogil:
    """Forget every cached identity; used blocks stay with their holders, and what is computed now
    is never cached again."""
    cdef int32_t b, following
    cdef seq_t *s = p.first
    while s != NULL:
        s.outdated = s.computed
        s = s.next
    b = p.oldest
    while b != NONE:
        following = p.next[b]
        unlink_idle(p, b)
        index_unregister(p, b)
        to_blank(p, b)
        b = following
    p.num_idle = 0
    for b in range(p.fresh):
        if p.node[b] != NONE:
            index_unregister(p, b)


# ---------------------------------------------------------------- life of a pool
cdef void destroy(pool_t *p) noexcept nogil:
    if p == NULL:
        return
    if p.fork_generation == fork_generation():
        drain(p)
    index_destroy(p)
    pc_release(p.refs)
    pc_release(p.pins)
    pc_release(p.generation)
    pc_release(p.flags)
    pc_release(p.node)
    pc_release(p.prev)
    pc_release(p.next)
    pc_release(p.copies)
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
    cdef int64_t i
    cdef result_t r = answer(enter(p))
    if r.code != OK:
        return r
    if n > num_free(p):
        r = answer(E_BLOCKS, n, num_free(p), p.num_blocks)
    else:
        for i in range(n):
            out[i] = take(p)
        p.epoch += 1
    leave(p)
    return r


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
        elif not freeing and not in_use(p, b) and p.node[b] == NONE:
            r = answer(E_BLOCK, b, 3)
        elif not freeing and p.refs[b] > 0x7fffff00:
            r = answer(E_BLOCK, b, 4)
        if r.code != OK:
            done = i
            break
        if freeing:
            p.refs[b] -= 1
    if freeing:
        for i in range(done):
            p.refs[ids[i]] += 1
    return r


cdef result_t free_many(pool_t *p, const int32_t *ids, int64_t n) noexcept nogil:
    cdef int64_t i
    cdef result_t r = answer(enter(p))
    if r.code != OK:
        return r
    r = check_ids(p, ids, n, True)
    if r.code == OK:
        for i in range(n):
            release_block(p, ids[i])
        p.epoch += 1
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
        p.epoch += 1
    leave(p)
    return r


def _ids(ids):
    """A contiguous int32 copy of block ids; typed errors for anything else."""
    try:
        a = np.asarray(ids)
    except (ValueError, OverflowError) as why:
        raise InvalidArgumentError(f"block ids: {why}") from None
    if a.ndim == 0:
        a = a.reshape(1)
    if a.ndim != 1 or (a.size and a.dtype.kind not in "iu"):
        raise InvalidArgumentError(
            f"block ids: expected integers in one dimension, got {a.dtype} of shape {a.shape}")
    if a.dtype == np.int32 and a.flags.c_contiguous:
        return a
    if a.size and (a.min() < -(2**31) or a.max() >= 2**31):
        bad = a[(a < -(2**31)) | (a >= 2**31)][0]
        raise InvalidArgumentError(f"block id {bad} is outside int32; ids come from allocate()")
    return np.ascontiguousarray(a, dtype=np.int32)


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
        raise InvalidArgumentError("a BlockPool cannot be copied or pickled; make a new one")

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
                p.epoch += 1
                pc_mutex_unlock(&p.lock)
                return b
            pc_mutex_unlock(&p.lock)
        with nogil:
            r = allocate_many(p, &b, 1)
        if r.code != OK:
            raise_result(r)
        return b

    def free(self, ids):
        """Give back one reference of each id (an id may be named once per reference held).

        A block is free when its last reference goes. Raises BlockError for an id out of range,
        never allocated or freed too often; nothing has changed then.
        """
        a = _ids(ids)
        cdef const int32_t[::1] view = a
        cdef int64_t n = view.shape[0]
        cdef const int32_t *raw = &view[0] if n else NULL
        cdef result_t r
        with nogil:
            r = free_many(self.p, raw, n)
        if r.code != OK:
            raise_result(r)

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
            if not p.gate and 0 <= b < p.fresh and p.refs[b] > 0:
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
        a = _ids(ids)
        cdef const int32_t[::1] view = a
        cdef int64_t n = view.shape[0]
        cdef const int32_t *raw = &view[0] if n else NULL
        cdef result_t r
        with nogil:
            r = touch_many(self.p, raw, n)
        if r.code != OK:
            raise_result(r)

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
