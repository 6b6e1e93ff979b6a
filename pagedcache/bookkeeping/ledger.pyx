# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The ledger: every operation on sequences, as plan -> check -> (bytes) -> apply.

An operation enters the pool once, plans and checks, and applies what cannot fail. Where bytes
must move first (copy-on-write, partial hits, defragmentation) it shuts the gate, so that every
other call waits, calls the mover it was given, and applies afterwards, or undoes its plan when
the mover failed. With ``deferred_copies`` the engine moves the bytes: the copies are queued and
their blocks stay pinned until it says that they are done.
"""
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint8_t, uint32_t
from libc.string cimport memcpy

import numpy as np

from pagedcache.bookkeeping.admission cimport (
    apply_open, count_open, match_t, plan_open, scratch_size,
)
from pagedcache.bookkeeping.alloc cimport pc_calloc, pc_release
from pagedcache.bookkeeping.block_pool cimport (
    BlockPool, drop, forget_all, leave, open_gate, pin_block, release_block, shut_gate, take,
    unpin_block,
)
from pagedcache.bookkeeping.copies cimport (
    copies_reserve, finish_copies, queue_copy, take_copies,
)
from pagedcache.bookkeeping.defragment cimport (
    apply_relocation, plan_compact, plan_defragment, relocation_release, relocation_t,
)
from pagedcache.bookkeeping.exports cimport (
    export_pages, export_tables, seq_pointers, unique_and_live,
)
from pagedcache.bookkeeping.handles cimport (
    Pin, SeqState, SlotMapping, enter_fast, new_pin, new_state,
)
from pagedcache.bookkeeping.inspect cimport fragmentation_t, measure
from pagedcache.bookkeeping.sequences cimport (
    append_tokens, commit, fork, identity_drop, identity_new, num_tokens,
    seq_destroy, seq_free, seq_link, seq_new, table_reserve, tokens_reserve, truncate,
    written_end,
)
from pagedcache.bookkeeping.slots cimport check_slots
from pagedcache.bookkeeping.steps cimport append_many, commit_many
from pagedcache.bookkeeping.status cimport int_argument, raise_result
from pagedcache.bookkeeping.types cimport *
from pagedcache.bookkeeping.writing cimport (
    apply_writes, cancel_privates, plan_t, plan_writes, private_t, take_privates,
    write_t,
)

from pagedcache.errors import InvalidArgumentError, StorageMemoryError

cdef int64_t HUGE = 2**62


cdef const uint32_t *token_pointer(object tokens, int64_t *n) except? NULL:
    """Pointer into a uint32 array the caller keeps alive."""
    cdef const uint32_t[::1] view = tokens
    n[0] = view.shape[0]
    return &view[0] if n[0] else NULL


cdef identity_t *make_identity(bytes root, list extra_keys) except NULL:
    """``extra_keys`` is sorted by start and validated by the caller (hashing.py)."""
    cdef const uint8_t *raw = root
    cdef identity_t *who = identity_new(raw, len(root), len(extra_keys))
    cdef const uint8_t *key_raw
    cdef bytes key
    cdef int64_t i
    if who == NULL:
        raise StorageMemoryError(sizeof(identity_t) + len(root), "a sequence's identity")
    for i in range(who.num_extras):
        start, stop, key = extra_keys[i]
        who.extras[i].start = min(start, HUGE)
        who.extras[i].stop = min(stop, HUGE)
        who.extras[i].size = len(key)
        who.extras[i].data = <uint8_t *> pc_calloc(len(key), 1)
        if who.extras[i].data == NULL:
            identity_drop(who)
            raise StorageMemoryError(max(len(key), 1), "an extra key")
        key_raw = key
        memcpy(who.extras[i].data, key_raw, len(key))
    return who


cdef class Ledger:
    """Sequences over a BlockPool: admission, writing, sharing, eviction, defragmentation.

    Parameters
    ----------
    num_blocks, block_size : int
        As for BlockPool.
    num_layers : int
        Layers whose written ends are tracked.
    max_seq_len : int or None
        Longest sequence in tokens.
    partial_block_reuse : int
        Fewest tokens worth copying from a partly matching block; 0 turns it off.
    mover : callable(src, dst, rows)
        Copies the first ``rows[i]`` token rows of block ``src[i]`` to ``dst[i]``, all layers.
    move_mover : callable(moves)
        Makes block moves [m, 2] in order; id -1 is the storage's spare block.
    deferred_copies : bool
        The engine copies: see take_block_copies().
    """

    def __init__(self, num_blocks, block_size, *, num_layers=1, max_seq_len=None,
                 partial_block_reuse=0, mover=None, move_mover=None, deferred_copies=False,
                 hash_mask=2**64 - 1):
        cdef int64_t layers = int_argument(num_layers, "num_layers", 1, 2**20)
        cdef int64_t longest = INT64_MAX
        cdef int64_t partial
        if max_seq_len is not None:
            longest = int_argument(max_seq_len, "max_seq_len", 1, 2**62)
        partial = int_argument(partial_block_reuse, "partial_block_reuse", 0, 2**31 - 1)
        self.pool = BlockPool(num_blocks, block_size, hash_mask=hash_mask)
        self.pool.p.num_layers = layers
        self.pool.p.max_seq_len = longest
        self.pool.p.partial_min = partial
        self.pool.p.deferred = bool(deferred_copies)
        self.mover = mover
        self.move_mover = move_mover

    # ------------------------------------------------------------ helpers
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

    # ------------------------------------------------------------ admission
    cdef int _admit(self, seq_t *s, const uint32_t *tokens, int64_t n, int64_t upto,
                    bint resumed) except -1:
        """Match, hold and take the blocks of a prompt for a sequence without any."""
        cdef pool_t *p = self.pool.p
        cdef int64_t size = scratch_size(p, n, s.identity)
        cdef uint8_t *scratch = <uint8_t *> pc_calloc(size, 1)
        cdef match_t m
        cdef result_t r
        cdef int32_t target = NONE
        if (scratch == NULL or not tokens_reserve(s, n)
                or not table_reserve(s, blocks_for(max(n, upto), p.block_size))):
            pc_release(scratch)
            raise StorageMemoryError(size + max(n, upto) * 4, "a sequence")
        if n > 0:                     # matched and kept: the same bytes, whatever the caller does
            memcpy(s.tokens, tokens, n * sizeof(uint32_t))
        try:
            enter_fast(p)
            try:
                with nogil:
                    r = plan_open(p, s.tokens, n, s.identity, upto, scratch, &m)
                    if (r.code == OK and m.source != NONE and p.deferred
                            and not copies_reserve(p, 1)):
                        r = answer(E_MEMORY, sizeof(copy_t))
                    if r.code == OK:
                        if m.source != NONE:
                            pin_block(p, m.source)
                        apply_open(p, s, &m, &target)
                if r.code == OK and target != NONE:
                    if p.deferred:
                        pin_block(p, target)
                        queue_copy(p, m.source, target)
                    else:
                        try:
                            self._move_bytes(self._copy_one, (m.source, target, m.rows))
                        except BaseException:
                            while s.num_blocks > 0:
                                s.num_blocks -= 1
                                release_block(p, s.table[s.num_blocks])
                            s.computed = 0
                            s.vouched = 0
                            s.num_cached = 0
                            raise
                        finally:
                            unpin_block(p, m.source)
                    p.count.partial_copies += 1
                if r.code == OK:
                    s.known = n
                    s.history = n
                    s.opened = max(s.opened, n, upto)
                    count_open(p, &m, n, resumed)
                    if s.serial == 0:
                        seq_link(p, s)
                    p.epoch += 1
            finally:
                leave(p)
        finally:
            pc_release(scratch)
        if r.code != OK:
            raise_result(r)
        return 0

    def _copy_one(self, src, dst, rows):
        if self.mover is not None:
            self.mover(np.array([src], dtype=np.int32), np.array([dst], dtype=np.int32),
                       np.array([rows], dtype=np.int32))

    def _checked_prompt(self, int64_t n, allocate_upto):
        cdef pool_t *p = self.pool.p
        cdef int64_t upto = int_argument(allocate_upto, "allocate_upto", -1, HUGE)
        if n > p.max_seq_len:
            raise_result(answer(E_TOO_LONG, n, p.max_seq_len))
        if upto == -1:
            return n
        if upto > n or upto == 0:
            raise_result(answer(E_ARGUMENT, 4, upto, n))
        return upto

    def open(self, tokens, bytes root=b"", list extra_keys=None, allocate_upto=-1,
             bint resumed=False, room=0):
        """Admit a prompt (uint32 array): hits are shared, the rest is allocated. -> SeqState.

        ``room``: blocks for at least so many tokens, known or not (at most the pool's size).
        Raises OutOfBlocksError when even a cold prompt would not fit; nothing has changed then.
        """
        cdef int64_t n = 0
        cdef const uint32_t *raw = token_pointer(tokens, &n)
        cdef int64_t longest = <int64_t> self.pool.p.num_blocks * self.pool.p.block_size
        cdef int64_t upto = max(self._checked_prompt(n, allocate_upto),
                                int_argument(room, "room", 0, longest))
        cdef SeqState handle = new_state(self.pool)
        cdef identity_t *who = make_identity(root, extra_keys or [])
        cdef seq_t *s = seq_new(self.pool.p, who)
        if s == NULL:
            identity_drop(who)
            raise StorageMemoryError(sizeof(seq_t), "a sequence")
        try:
            self._admit(s, raw, n, upto, resumed)
        except BaseException:
            seq_destroy(s)
            raise
        handle.s = s
        return handle

    def allocate_tokens(self, SeqState seq, tokens, allocate_upto=-1, bint resumed=False):
        """Admit a prompt for a sequence that has no blocks and no tokens yet."""
        cdef int64_t n = 0
        cdef const uint32_t *raw = token_pointer(tokens, &n)
        cdef int64_t upto = self._checked_prompt(n, allocate_upto)
        cdef pool_t *p = self._of(seq)
        cdef int64_t blocks = seq.s.num_blocks
        cdef int64_t known = num_tokens(p, seq.s)
        leave(p)
        if blocks > 0 or known > 0:
            raise_result(answer(E_ARGUMENT, 2, blocks, known))
        self._admit(seq.s, raw, n, upto, resumed)

    def _plan(self, tokens, bytes root, list extra_keys, allocate_upto):
        """(hit tokens, fresh blocks) of a prompt; counts and touches nothing."""
        cdef pool_t *p = self.pool.p
        cdef int64_t n = 0
        cdef const uint32_t *raw = token_pointer(tokens, &n)
        cdef int64_t upto = self._checked_prompt(n, allocate_upto)
        cdef identity_t *who = make_identity(root, extra_keys or [])
        cdef uint8_t *scratch = <uint8_t *> pc_calloc(scratch_size(p, n, who), 1)
        cdef match_t m
        if scratch == NULL:
            identity_drop(who)
            raise StorageMemoryError(n * 4, "a prefix look-up")
        try:
            enter_fast(p)
            with nogil:
                plan_open(p, raw, n, who, upto, scratch, &m)
                leave(p)
        finally:
            identity_drop(who)
            pc_release(scratch)
        return m.cached_tokens, m.fresh

    def probe(self, tokens, bytes root=b"", list extra_keys=None):
        """Tokens of a prompt that would hit now; counts nothing, touches no recency."""
        return self._plan(tokens, root, extra_keys, -1)[0]

    def blocks_needed(self, tokens, bytes root=b"", list extra_keys=None, allocate_upto=-1):
        """Blocks that open() would take beyond hits, copies included."""
        return self._plan(tokens, root, extra_keys, allocate_upto)[1]

    # ------------------------------------------------------------ life of a sequence
    def fork(self, SeqState seq):
        """A child that shares every block of ``seq``; O(blocks), no bytes move."""
        cdef SeqState handle = new_state(self.pool)
        cdef seq_t *child = NULL
        cdef result_t r
        cdef pool_t *p = self._of(seq)
        with nogil:
            r = fork(p, seq.s, &child)
            leave(p)
        if r.code != OK:
            raise_result(r)
        handle.s = child
        return handle

    def extend(self, SeqState seq, n):
        """Room for ``n`` more tokens than the sequence has or was opened for."""
        cdef int64_t more = int_argument(n, "num_tokens", 0, HUGE)
        cdef pool_t *p = self._of(seq)
        cdef int64_t end = num_tokens(p, seq.s) + more
        cdef int64_t need = blocks_for(end, p.block_size) - seq.s.num_blocks
        cdef result_t r = answer(OK)
        if end > p.max_seq_len:
            r = answer(E_TOO_LONG, end, p.max_seq_len)
        elif need > num_free(p):
            r = answer(E_BLOCKS, need, num_free(p), p.num_blocks)
        elif not table_reserve(seq.s, seq.s.num_blocks + max(need, <int64_t> 0)):
            r = answer(E_MEMORY, need * 4)
        else:
            while need > 0:
                seq.s.table[seq.s.num_blocks] = take(p)
                seq.s.num_blocks += 1
                need -= 1
            seq.s.opened = max(seq.s.opened, end)
            p.epoch += 1
        leave(p)
        if r.code != OK:
            raise_result(r)

    def free(self, SeqState seq):
        """Give everything back, the tail first. A second call does nothing."""
        cdef pool_t *p = self.pool.p
        cdef pin_t *will
        if seq is None or seq.pool is not self.pool:
            raise_result(answer(E_ARGUMENT, 6))
        if pc_atomic_get(&p.owner) == pc_thread_id():
            will = <pin_t *> pc_calloc(1, sizeof(pin_t))   # a finalizer inside a call
            if will == NULL:
                raise StorageMemoryError(sizeof(pin_t), "a sequence to be freed later")
            will.seq = seq.s
            will.keep = True
            drop(p, will)
            return
        enter_fast(p)
        with nogil:
            seq_free(p, seq.s)
            leave(p)

    def truncate(self, SeqState seq, n):
        """Rewind to ``n`` tokens and release the blocks past them."""
        cdef int64_t length = int_argument(n, "n", -HUGE, HUGE)
        cdef pool_t *p = self._of(seq)
        cdef result_t r
        with nogil:
            r = truncate(p, seq.s, length, False)
            leave(p)
        if r.code != OK:
            raise_result(r)

    def set_computed(self, SeqState seq, n):
        """Set the computed length: growing commits, shrinking forgets tokens and keeps blocks."""
        cdef int64_t length = int_argument(n, "n", -HUGE, HUGE)
        cdef pool_t *p = self._of(seq)
        cdef result_t r
        if length > seq.s.computed:
            r = commit(p, seq.s, length - seq.s.computed)
        else:
            r = truncate(p, seq.s, length, True)
        leave(p)
        if r.code != OK:
            raise_result(r)

    def commit(self, SeqState seq, n):
        """Mark the next ``n`` tokens computed; newly full blocks of known tokens are cached."""
        cdef int64_t count = int_argument(n, "n", 0, HUGE)
        cdef pool_t *p = self._of(seq)
        cdef result_t r
        with nogil:
            r = commit(p, seq.s, count)
            leave(p)
        if r.code != OK:
            raise_result(r)

    def append_tokens(self, SeqState seq, tokens):
        """Extend the token history (uint32 array)."""
        cdef int64_t n = 0
        cdef const uint32_t *raw = token_pointer(tokens, &n)
        cdef pool_t *p = self._of(seq)
        cdef result_t r = append_tokens(p, seq.s, raw, n)
        leave(p)
        if r.code != OK:
            raise_result(r)

    def append_token(self, SeqState seq, token):
        """Extend the token history by one token, 0 … 2**32 - 1."""
        cdef uint32_t value = <uint32_t> int_argument(token, "token", 0, 2**32 - 1)
        cdef pool_t *p = self._of(seq)
        cdef result_t r = append_tokens(p, seq.s, &value, 1)
        leave(p)
        if r.code != OK:
            raise_result(r)

    # ------------------------------------------------------------ one step of a batch
    def commit_many(self, list seqs, list counts):
        """commit() of ``counts[i]`` tokens for every ``seqs[i]``, all or nothing."""
        self._step(seqs, counts, None)

    def append_many(self, list seqs, tokens, list counts=None):
        """Extend the histories: ``counts[i]`` of the tokens (uint32 array) for ``seqs[i]``, one
        behind the other; one token each by default. All or nothing."""
        self._step(seqs, counts, tokens)

    def _step(self, list seqs, list counts, tokens):
        cdef pool_t *p = self.pool.p
        cdef int64_t i, n = len(seqs), total = 0, given = 0
        cdef const uint32_t *raw = NULL
        cdef int64_t *amounts
        cdef seq_t **pointers
        cdef result_t r
        cdef bint committing = tokens is None
        if counts is not None and len(counts) != n:
            raise InvalidArgumentError(f"counts: expected one per sequence ({n}), "
                                       f"got {len(counts)}")
        if tokens is not None:
            raw = token_pointer(tokens, &given)
        pointers = seq_pointers(self.pool, seqs)
        amounts = <int64_t *> pc_calloc(n, sizeof(int64_t))
        try:
            if amounts == NULL:
                raise StorageMemoryError(n * 8, "a batch step")
            for i in range(n):
                amounts[i] = 1 if counts is None else int_argument(counts[i], "counts", 0, 2**40)
                total += amounts[i]
            if tokens is not None and total != given:
                raise InvalidArgumentError(f"tokens: expected {total} for these sequences, "
                                           f"got {given}")
            enter_fast(p)
            with nogil:
                r = unique_and_live(p, pointers, n, True)
                if r.code == OK and committing:
                    r = commit_many(p, pointers, amounts, n)
                elif r.code == OK:
                    r = append_many(p, pointers, raw, amounts, n)
                leave(p)
        finally:
            pc_release(amounts)
            pc_release(pointers)
        if r.code != OK:
            raise_result(r)

    # ------------------------------------------------------------ writing
    cdef int _execute(self, plan_t *plan) except -1:
        """Carry out a checked plan, copies first. Entered and left with the lock held."""
        cdef pool_t *p = self.pool.p
        cdef int64_t i
        if plan.num_privates > 0:
            if p.deferred and not copies_reserve(p, plan.num_copies):
                raise StorageMemoryError(plan.num_copies * sizeof(copy_t), "block copies")
            take_privates(p, plan)
            if plan.num_copies > 0 and not p.deferred:
                try:
                    self._move_bytes(self._copy_privates, (<size_t> plan,))
                except BaseException:
                    cancel_privates(p, plan)
                    raise
            elif p.deferred:
                for i in range(plan.num_privates):
                    if plan.privates[i].copy:
                        pin_block(p, plan.privates[i].old)
                        pin_block(p, plan.privates[i].new)
                        queue_copy(p, plan.privates[i].old, plan.privates[i].new)
        apply_writes(p, plan)
        return 0

    def _copy_privates(self, size_t address):
        """Copy the old blocks of a plan to the new ones (the gate is shut)."""
        cdef plan_t *plan = <plan_t *> address
        cdef int64_t i, n = 0
        if self.mover is None:
            return
        src = np.empty(plan.num_copies, dtype=np.int32)
        dst = np.empty(plan.num_copies, dtype=np.int32)
        cdef int32_t[::1] s = src
        cdef int32_t[::1] d = dst
        for i in range(plan.num_privates):
            if plan.privates[i].copy:
                s[n] = plan.privates[i].old
                d[n] = plan.privates[i].new
                n += 1
        self.mover(src, dst, np.full(n, self.pool.p.block_size, dtype=np.int32))

    def prepare(self, list seqs, list counts):
        """Make the next ``counts[i]`` tokens of each sequence writable -> SlotMapping.

        Grows tables and copies shared or cached blocks of the write ranges, all or nothing.
        """
        cdef int64_t i, j, n = len(seqs), total = 0, bound = 0, at = 0
        cdef int64_t B = self.pool.p.block_size
        cdef int64_t count
        cdef list checked = []
        if len(counts) != n:
            raise InvalidArgumentError(f"counts: expected one per sequence ({n}), "
                                       f"got {len(counts)}")
        for i in range(n):
            item = counts[i]
            if type(item) is not int or not 0 <= item <= 2**40:
                # the name is formatted only for what is no plain count: this loop is hot
                item = int_argument(item, f"counts[{i}]", 0, 2**40)
            count = item
            checked.append(count)     # read once: the caller's list and its numbers may change
            total += count
            bound += count // B + 2
        if total > 2**40:
            raise InvalidArgumentError(f"counts: {total} tokens in one step are too many")
        cdef SlotMapping mapping = SlotMapping.__new__(SlotMapping)
        cdef int64_t[::1] slots
        cdef pool_t *p = self.pool.p
        cdef plan_t plan
        cdef result_t r
        cdef write_t *w
        cdef seq_t **pointers = seq_pointers(self.pool, seqs)
        mapping.pool = self.pool
        # as many slots as the pool has at most: a larger step is refused before it is allocated
        if total > <int64_t> p.num_blocks * B:
            pc_release(pointers)
            raise_result(answer(E_BLOCKS, blocks_for(total, B), num_free(p), p.num_blocks))
        plan.num_writes = n
        plan.privates = <private_t *> pc_calloc(bound, sizeof(private_t))
        plan.writes = <write_t *> pc_calloc(n, sizeof(write_t))
        try:
            if plan.privates == NULL or plan.writes == NULL or not mapping.reserve(bound):
                raise StorageMemoryError(bound * 48, "a slot mapping")
            out = np.empty(total, dtype=np.int64)
            slots = out
            for i in range(n):
                plan.writes[i].count = checked[i]
                plan.writes[i].seq = pointers[i]
            enter_fast(p)
            try:
                r = unique_and_live(p, pointers, n, True)
                if r.code == OK:
                    for i in range(n):
                        plan.writes[i].start = pointers[i].computed
                        plan.writes[i].settled = high_water(p, pointers[i])
                    r = plan_writes(p, &plan)
                if r.code == OK:
                    self._execute(&plan)
                    for i in range(n):
                        w = &plan.writes[i]
                        for j in range(w.start, w.start + w.count):
                            if j == w.start or j % B == 0:
                                mapping.note(w.seq.table[j // B])
                            slots[at] = w.seq.table[j // B] * B + j % B
                            at += 1
                    mapping.epoch = p.layout_epoch
                    mapping.checked = p.epoch
            finally:
                leave(p)
        finally:
            pc_release(plan.privates)
            pc_release(plan.writes)
            pc_release(pointers)
        if r.code != OK:
            raise_result(r)
        out.setflags(write=False)
        mapping.slots = out
        return mapping

    def prepare_blocks_needed(self, SeqState seq, n):
        """Blocks that preparing the next ``n`` tokens would take, copies included."""
        cdef write_t w
        cdef plan_t plan
        cdef result_t r
        cdef pool_t *p = self.pool.p
        w.count = int_argument(n, "n", 0, HUGE)
        plan.writes = &w
        plan.num_writes = 1
        plan.fresh = 0
        plan.privates = <private_t *> pc_calloc(
            min(w.count // p.block_size, <int64_t> p.num_blocks) + 2, sizeof(private_t))
        if plan.privates == NULL:
            raise StorageMemoryError(sizeof(private_t), "a plan")
        try:
            self._of(seq)
            w.seq = seq.s
            w.start = seq.s.computed
            w.settled = high_water(p, seq.s)
            r = plan_writes(p, &plan)
            leave(p)
        finally:
            pc_release(plan.privates)
        if r.code != OK and r.code != E_BLOCKS:
            raise_result(r)
        return plan.fresh

    cdef int _write_one(self, write_t *w, int64_t layer, Pin pin, object out) except -1:
        """Plan and apply one range; pins its blocks and lists its slots when asked.

        ``layer`` >= 0: w.start may be -1 for that layer's written end; w.settled is that end.
        """
        cdef pool_t *p = self.pool.p
        cdef int64_t B = p.block_size
        cdef plan_t plan
        cdef result_t r = answer(OK)
        cdef int64_t[::1] slots
        cdef int64_t j, end
        plan.writes = w
        plan.num_writes = 1
        plan.privates = <private_t *> pc_calloc(w.count // B + 2, sizeof(private_t))
        if plan.privates == NULL:
            raise StorageMemoryError(sizeof(private_t) * (w.count // B + 2), "a plan")
        if out is not None:
            slots = out
        try:
            enter_fast(p)
            try:
                if w.seq.freed:
                    r = answer(E_FREED, w.seq.serial)
                elif layer >= 0:
                    w.settled = written_end(w.seq, layer)
                    if w.start == -1:
                        w.start = w.settled
                    elif w.start > w.settled:
                        r = answer(E_POSITION, w.start, w.settled, 3)
                else:
                    w.settled = high_water(p, w.seq)
                    end = w.seq.num_blocks * B
                    if w.start < 0 or w.start >= end:
                        r = answer(E_POSITION, w.start, end, 4)
                if r.code == OK:
                    r = plan_writes(p, &plan)
                if r.code == OK:
                    self._execute(&plan)
                    for j in range(w.start, w.start + w.count):
                        if pin is not None:
                            if j == w.start or j % B == 0:
                                pin.pin.blocks[pin.pin.count] = w.seq.table[j // B]
                                pin.pin.count += 1
                                pin_block(p, w.seq.table[j // B])
                            slots[j - w.start] = w.seq.table[j // B] * B + j % B
            finally:
                leave(p)
        finally:
            pc_release(plan.privates)
        if r.code != OK:
            raise_result(r)
        return 0

    def begin_append(self, SeqState seq, layer, n, start=-1):
        """Make the range of an append writable and pin it -> (start position, Pin with slots).

        ``start`` -1 is the layer's written end. Call end_append() once the bytes are written, or
        release the pin to give up (the table stays grown, no length changes).
        """
        cdef write_t w
        cdef int64_t i = int_argument(layer, "layer", 0, self.pool.p.num_layers - 1)
        cdef int64_t longest = <int64_t> self.pool.p.num_blocks * self.pool.p.block_size
        if seq is None or seq.pool is not self.pool:
            raise_result(answer(E_ARGUMENT, 6))
        w.seq = seq.s
        w.count = int_argument(n, "new_tokens", 0, HUGE)
        w.start = int_argument(start, "start_pos", -HUGE, HUGE)
        if w.start < -1:
            raise_result(answer(E_POSITION, w.start, seq.num_tokens))
        if w.count > longest:
            raise_result(answer(E_BLOCKS, blocks_for(w.count, self.pool.p.block_size),
                                num_free(self.pool.p), self.pool.p.num_blocks))
        cdef Pin pin = new_pin(self.pool, w.count // self.pool.p.block_size + 2)
        pin.slots = np.empty(w.count, dtype=np.int64)
        self._write_one(&w, i, pin, pin.slots)
        return w.start, pin

    def end_append(self, SeqState seq, layer, start, n, Pin pin):
        """The bytes of begin_append() are written: advance the layer's written end, unpin."""
        cdef int64_t i = int_argument(layer, "layer", 0, self.pool.p.num_layers - 1)
        cdef int64_t first = int_argument(start, "start", 0, HUGE)
        cdef int64_t end = first + int_argument(n, "n", 0, HUGE)
        cdef pool_t *p = self._of(seq)
        if first <= written_end(seq.s, i):      # not truncated meanwhile by another thread
            seq.s.written[i] = max(seq.s.written[i], end)
        leave(p)
        pin.release()

    def make_writable(self, SeqState seq, position):
        """The id of the block that holds ``position``, copied first if shared or cached."""
        cdef write_t w
        if seq is None or seq.pool is not self.pool:
            raise_result(answer(E_ARGUMENT, 6))
        w.seq = seq.s
        w.start = int_argument(position, "position", -HUGE, HUGE)
        w.count = 1
        self._write_one(&w, -1, None, None)
        return seq.block_for_position(position)

    # ------------------------------------------------------------ pins
    def pin_range(self, SeqState seq, start, stop):
        """Pin the blocks of positions start … stop -> Pin (block_ids from start's block on)."""
        cdef int64_t a = int_argument(start, "start", -HUGE, HUGE)
        cdef int64_t b = int_argument(stop, "stop", -HUGE, HUGE)
        cdef pool_t *p = self.pool.p
        cdef int64_t B = p.block_size
        cdef int64_t longest = <int64_t> p.num_blocks * B
        cdef int64_t i, room
        if a < 0 or a > b:
            raise_result(answer(E_POSITION, a, max(b, <int64_t> 0)))
        if b > longest:
            raise_result(answer(E_POSITION, b, longest, 4))
        cdef Pin pin = new_pin(self.pool, (b - a) // B + 2)
        self._of(seq)
        room = seq.s.num_blocks * B
        if b <= room and b > a:
            for i in range(a // B, blocks_for(b, B)):
                pin.pin.blocks[pin.pin.count] = seq.s.table[i]
                pin.pin.count += 1
                pin_block(p, seq.s.table[i])
        leave(p)
        if b > room:
            raise_result(answer(E_POSITION, b, room, 4))
        return pin

    def pin_mapping(self, SlotMapping mapping):
        """Verify that a mapping may still be written and pin its blocks -> Pin."""
        cdef pool_t *p = self.pool.p
        cdef int64_t i
        cdef result_t r
        if mapping is None or mapping.pool is not self.pool:
            raise_result(answer(E_ARGUMENT, 6))
        cdef Pin pin = new_pin(self.pool, mapping.count)
        pin.slots = mapping.slots
        enter_fast(p)
        r = mapping.recheck()
        if r.code == OK:
            for i in range(mapping.count):
                pin.pin.blocks[i] = mapping.blocks[i]
                pin_block(p, mapping.blocks[i])
            pin.pin.count = mapping.count
        leave(p)
        if r.code != OK:
            raise_result(r)
        return pin

    def pin_slots(self, slots):
        """Verify raw slots (int64 array, -1 = skip) as writable and pin their blocks -> Pin."""
        cdef const int64_t[::1] view = slots
        cdef int64_t n = view.shape[0]
        cdef const int64_t *raw = &view[0] if n else NULL
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

    # ------------------------------------------------------------ copies left to the engine
    def take_block_copies(self):
        """(int32 [n, 2] of (src, dst), ticket): copies to make now, right in any order.

        Longer chains come in the next call, after copies_done(ticket). Ticket 0: nothing to do.
        """
        cdef pool_t *p = self.pool.p
        cdef int64_t n, ticket = 0
        cdef int32_t[:, ::1] view
        enter_fast(p)
        n = p.num_copies
        leave(p)
        out = np.empty((n, 2), dtype=np.int32)
        if n == 0:
            return out, 0
        view = out
        enter_fast(p)
        n = take_copies(p, &view[0, 0], n, &ticket)
        leave(p)
        return out[:n].copy(), ticket

    def copies_done(self, ticket):
        """The copies of this ticket are made (or ordered before every later use)."""
        cdef int64_t t = int_argument(ticket, "ticket", 0, HUGE)
        cdef result_t r
        if t == 0:
            return
        enter_fast(self.pool.p)
        r = finish_copies(self.pool.p, t)
        leave(self.pool.p)
        if r.code != OK:
            raise_result(r)

    # ------------------------------------------------------------ defragmentation
    cdef int _relocate(self, relocation_t *r) except -1:
        """Move the bytes of a plan, then the ids. Entered and left with the lock held."""
        cdef pool_t *p = self.pool.p
        if r.num_blocks > 0:
            if not p.deferred:
                self._move_bytes(self._copy_moves, (<size_t> r,))
            apply_relocation(p, r)
        return 0

    def _copy_moves(self, size_t address):
        cdef relocation_t *r = <relocation_t *> address
        cdef int32_t[:, ::1] view
        if self.move_mover is None:
            return
        out = np.empty((r.num_moves, 2), dtype=np.int32)
        view = out
        memcpy(&view[0, 0], r.moves, r.num_moves * 2 * sizeof(int32_t))
        self.move_mover(out)

    def defragment(self):
        """Pack used and cached-free blocks into the lowest ids -> blocks moved."""
        cdef relocation_t r
        cdef result_t a
        cdef pool_t *p = self.pool.p
        cdef int64_t moved = 0
        enter_fast(p)
        try:
            with nogil:
                a = plan_defragment(p, &r)
            if a.code == OK:
                try:
                    self._relocate(&r)
                    p.count.defragmentations += 1
                    moved = r.num_blocks
                finally:
                    relocation_release(&r)
        finally:
            leave(p)
        if a.code != OK:
            raise_result(a)
        return moved

    def compact_sequence(self, SeqState seq):
        """Bring one sequence's blocks into one run of ids, if there is room -> blocks moved."""
        cdef relocation_t r
        cdef result_t a
        cdef int64_t moved = 0
        cdef pool_t *p = self._of(seq)
        try:
            with nogil:
                a = plan_compact(p, seq.s, &r)
            if a.code == OK:
                try:
                    self._relocate(&r)
                    moved = r.num_blocks
                finally:
                    relocation_release(&r)
        finally:
            leave(p)
        if a.code != OK:
            raise_result(a)
        return moved

    def contiguity(self, SeqState seq):
        """Share of neighbouring block pairs whose ids are adjacent; 1.0 for one block or none."""
        cdef int64_t i, n, adjacent = 0
        cdef pool_t *p = self._of(seq)
        n = seq.s.num_blocks
        for i in range(1, n):
            adjacent += seq.s.table[i] == seq.s.table[i - 1] + 1
        leave(p)
        return adjacent / (n - 1.0) if n > 1 else 1.0

    # ------------------------------------------------------------ exports and inspection
    def block_tables(self, list seqs, lengths=None):
        """int32 [num_seqs, max_blocks], padded with id 0; exactly ceil(length / block_size)."""
        return export_tables(self.pool, seqs, lengths)

    def page_table(self, list seqs, lengths=None, bint allow_empty=False):
        """(kv_indptr, kv_indices, kv_last_page_len), int32 CSR as FlashInfer reads it."""
        return export_pages(self.pool, seqs, lengths, allow_empty)

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
