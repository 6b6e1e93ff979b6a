# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Sequences: block table, token history, lengths; fork and truncate.

All functions run with the pool's lock held. They check first and then apply what cannot fail.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from pagedcache.bookkeeping.alloc cimport pc_calloc, pc_grow, pc_release
from pagedcache.bookkeeping.copies cimport cancel_copies
from pagedcache.bookkeeping.gate cimport set_reaper
from pagedcache.bookkeeping.opening cimport promise, renew_promise
from pagedcache.bookkeeping.releasing cimport release_tail
from pagedcache.bookkeeping.types cimport *


# ---------------------------------------------------------------- who the tokens belong to
cdef identity_t *identity_new(const uint8_t *root, int64_t root_size,
                              int64_t num_extras) noexcept nogil:
    cdef identity_t *who = <identity_t *> pc_calloc(1, sizeof(identity_t))
    if who == NULL:
        return NULL
    who.holders = 1
    who.root = <uint8_t *> pc_calloc(root_size, 1)
    who.extras = <extra_t *> pc_calloc(num_extras, sizeof(extra_t))
    if who.root == NULL or who.extras == NULL:
        identity_drop(who)
        return NULL
    memcpy(who.root, root, root_size)
    who.root_size = root_size
    who.num_extras = num_extras
    return who


cdef void identity_drop(identity_t *who) noexcept nogil:
    cdef int64_t i
    if who == NULL:
        return
    who.holders -= 1
    if who.holders > 0:
        return
    if who.extras != NULL:
        for i in range(who.num_extras):
            pc_release(who.extras[i].data)
    pc_release(who.extras)
    pc_release(who.root)
    pc_release(who)


cdef int64_t extra_size(identity_t *who, int64_t start, int64_t stop) noexcept nogil:
    """Bytes that the block of positions start … stop adds to its tokens' identity."""
    cdef int64_t i, n = 0
    if start == 0:
        n += who.root_size
    for i in range(who.num_extras):
        if who.extras[i].start >= stop:
            break
        if who.extras[i].stop > start:
            n += 13 + who.extras[i].size
    return n


cdef void put32(uint8_t *out, uint64_t v) noexcept nogil:
    out[0] = v & 255
    out[1] = (v >> 8) & 255
    out[2] = (v >> 16) & 255
    out[3] = (v >> 24) & 255


cdef void extra_bytes(identity_t *who, int64_t start, int64_t stop, uint8_t *out) noexcept nogil:
    """The same bytes as hashing.encode_extra: tag 3, length, range within the block, key."""
    cdef int64_t i
    cdef extra_t *e
    if start == 0:
        memcpy(out, who.root, who.root_size)
        out += who.root_size
    for i in range(who.num_extras):
        e = &who.extras[i]
        if e.start >= stop:
            break
        if e.stop <= start:
            continue
        out[0] = 3
        put32(out + 1, 8 + e.size)
        put32(out + 5, max(e.start, start) - start)
        put32(out + 9, min(e.stop, stop) - start)
        memcpy(out + 13, e.data, e.size)
        out += 13 + e.size


# ---------------------------------------------------------------- life of a sequence
cdef seq_t *seq_new(pool_t *p, identity_t *identity) noexcept nogil:
    """A sequence that is not in the pool's list yet. Takes over the caller's identity."""
    cdef seq_t *s = <seq_t *> pc_calloc(1, sizeof(seq_t))
    if s == NULL:
        return NULL
    s.written = <int64_t *> pc_calloc(p.num_layers, sizeof(int64_t))
    if s.written == NULL:
        pc_release(s)
        return NULL
    s.identity = identity
    return s


cdef void seq_link(pool_t *p, seq_t *s) noexcept nogil:
    p.next_serial += 1
    s.serial = p.next_serial
    s.prev = p.last
    s.next = NULL
    if p.last != NULL:
        p.last.next = s
    else:
        p.first = s
    p.last = s
    p.num_sequences += 1
    p.count.sequences_allocated += 1


cdef void seq_free(pool_t *p, seq_t *s) noexcept nogil:
    """Give back every block, the tail first, and leave the list. Idempotent."""
    if s.freed:
        return
    release_tail(p, s.table, 0, s.num_blocks)
    s.num_blocks = 0
    s.freed = True
    if s.prev != NULL:
        s.prev.next = s.next
    else:
        p.first = s.next
    if s.next != NULL:
        s.next.prev = s.prev
    else:
        p.last = s.prev
    promise(p, s, 0)
    p.num_sequences -= 1
    p.count.sequences_freed += 1
    p.epoch += 1
    if p.num_copies > 0:
        cancel_copies(p)


cdef void seq_destroy(seq_t *s) noexcept nogil:
    """Release the memory of a sequence that holds no blocks."""
    if s == NULL:
        return
    identity_drop(s.identity)
    pc_release(s.table)
    pc_release(s.tokens)
    pc_release(s.written)
    pc_release(s)


cdef void reap(pool_t *p, void *s, bint keep) noexcept nogil:
    seq_free(p, <seq_t *> s)
    if not keep:
        seq_destroy(<seq_t *> s)


set_reaper(reap)


cdef bint reserve(void **data, int64_t *room, int64_t need, int64_t size,
                  int64_t least) noexcept nogil:
    """Room for ``need`` items, growing by half so that appending stays O(1) each."""
    cdef int64_t more
    cdef void *p
    if need <= room[0]:
        return True
    more = max(need, room[0] + room[0] // 2, least)
    p = pc_grow(data[0], more, size)
    if p == NULL:
        return False
    data[0] = p
    room[0] = more
    return True


cdef bint table_reserve(seq_t *s, int64_t blocks) noexcept nogil:
    return reserve(<void **> &s.table, &s.table_room, blocks, sizeof(int32_t), 8)


cdef bint tokens_reserve(seq_t *s, int64_t tokens) noexcept nogil:
    return reserve(<void **> &s.tokens, &s.token_room, tokens, sizeof(uint32_t), 64)


# ---------------------------------------------------------------- lengths
cdef int64_t written_end(seq_t *s, int64_t layer) noexcept nogil:
    """Where the layer's next append goes: its own written end, at least the computed length."""
    return max(s.written[layer], s.computed)


cdef int64_t num_written(pool_t *p, seq_t *s) noexcept nogil:
    cdef int64_t i, least
    if s.appended <= s.computed:
        return s.computed
    least = written_end(s, 0)
    for i in range(1, p.num_layers):
        least = min(least, written_end(s, i))
    return least


cdef int64_t readable_end(pool_t *p, seq_t *s, int64_t layer) noexcept nogil:
    """End of what may be read of a layer: its written end; where the sequence appends nothing
    itself (store), the end of what was prepared for writing."""
    if high_water(p, s) == s.computed:
        return max(written_end(s, layer), s.vouched)
    return written_end(s, layer)


cdef int64_t outstanding(seq_t *s) noexcept nogil:
    """Tokens that were named and made writable, and are not computed yet."""
    return max(<int64_t> 0, min(s.history, s.vouched) - s.computed)


cdef int64_t num_tokens(pool_t *p, seq_t *s) noexcept nogil:
    """Known, opened for, computed or written: what truncate may be asked for."""
    return max(max(s.history, s.opened), high_water(p, s))


# ---------------------------------------------------------------- operations
cdef result_t fork(pool_t *p, seq_t *s, seq_t **child) noexcept nogil:
    """A child that shares every block; its lengths and tokens are its own from now on."""
    cdef seq_t *c = seq_new(p, NULL)
    cdef int64_t i
    if c == NULL:
        return answer(E_MEMORY, sizeof(seq_t))
    if not table_reserve(c, s.num_blocks) or not tokens_reserve(c, s.known):
        seq_destroy(c)
        return answer(E_MEMORY, s.num_blocks * 4 + s.known * 4)
    s.identity.holders += 1
    c.identity = s.identity
    if s.num_blocks > 0:  # NULL is no argument of memcpy, even for nothing
        memcpy(c.table, s.table, s.num_blocks * sizeof(int32_t))
    if s.known > 0:
        memcpy(c.tokens, s.tokens, s.known * sizeof(uint32_t))
    memcpy(c.written, s.written, p.num_layers * sizeof(int64_t))
    for i in range(s.num_blocks):
        p.refs[s.table[i]] += 1
    p.steps += s.num_blocks
    c.num_blocks = s.num_blocks
    c.known = s.known
    c.history = s.history
    c.opened = s.opened
    c.computed = s.computed
    c.vouched = s.vouched
    c.appended = s.appended
    c.outdated = s.outdated
    c.granted = s.granted
    c.indexed = s.indexed
    c.unsealed = s.unsealed
    c.num_cached = s.num_cached
    seq_link(p, c)
    p.epoch += 1
    child[0] = c
    return answer(OK)


cdef result_t truncate(pool_t *p, seq_t *s, int64_t n, bint keep_blocks) noexcept nogil:
    """Rewind to n tokens. Without keep_blocks, blocks past the end are released, tail first."""
    cdef int64_t i, keep
    if n < 0 or n > num_tokens(p, s):
        return answer(E_POSITION, n, num_tokens(p, s))
    s.computed = min(s.computed, n)
    s.history = min(s.history, n)
    s.known = min(s.known, n)
    s.vouched = min(s.vouched, n)
    s.outdated = min(s.outdated, n)
    s.granted = min(s.granted, n)
    s.num_cached = min(s.num_cached, n)
    s.indexed = min(s.indexed, n // p.block_size)
    s.unsealed = min(s.unsealed, n // p.block_size)
    if s.appended > n:
        s.appended = n
        for i in range(p.num_layers):
            s.written[i] = min(s.written[i], n)
    if not keep_blocks:
        s.opened = min(s.opened, n)
        keep = blocks_for(n, p.block_size)
        if s.num_blocks > keep:
            release_tail(p, s.table, keep, s.num_blocks)
            s.num_blocks = keep
    # a view of the given up tokens keeps its values: writing there copies the block first
    for i in range(n // p.block_size, s.num_blocks):
        p.flags[s.table[i]] &= ~FLAG_FULL
        if i * p.block_size >= n and p.refs[s.table[i]] == 1:
            p.flags[s.table[i]] &= ~FLAG_REWRITTEN
        if p.pins[s.table[i]] > 0:
            p.flags[s.table[i]] |= FLAG_MUST_COPY
    renew_promise(p, s)
    p.epoch += 1
    if p.num_copies > 0:
        cancel_copies(p)
    return answer(OK)


cdef result_t append_tokens(pool_t *p, seq_t *s, const uint32_t *tokens,
                            int64_t n) noexcept nogil:
    """Extend the history. Behind a token of unknown value the values no longer matter."""
    if s.history + n > p.max_seq_len:
        return answer(E_TOO_LONG, s.history + n, p.max_seq_len)
    if not tokens_fit(s, n):
        return answer(E_MEMORY, (s.known + n) * 4)
    name_tokens(s, tokens, n)
    return answer(OK)


cdef bint tokens_fit(seq_t *s, int64_t n) noexcept nogil:
    """Make room for n more tokens of the history."""
    return s.known != s.history or tokens_reserve(s, s.known + n)


cdef void name_tokens(seq_t *s, const uint32_t *tokens, int64_t n) noexcept nogil:
    """Extend the history; the room is there."""
    if s.known == s.history:
        if n > 0:
            memcpy(s.tokens + s.known, tokens, n * sizeof(uint32_t))
        s.known += n
    s.history += n
