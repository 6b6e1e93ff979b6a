# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The prefix index: which block holds which tokens behind which prefix.

A node is one cached identity: the parent node's serial, the block's tokens and its tagged extra
keys, all compared exactly. The hash only picks a bucket; it is a multilinear hash with
per-process random keys (Carter & Wegman 1979: two different inputs collide with a chance of about
2^-32 whatever an attacker chooses), so prompts cannot be chosen to make a bucket long, and
chains are bounded anyway. A node links to its parent by a serial that is never reused, so a
reused block or slot can not re-attach another's children.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

from pagedcache.bookkeeping.alloc cimport pc_calloc, pc_release
from pagedcache.bookkeeping.types cimport (
    MAX_CANDIDATES, MAX_PROBES, NODE_CHUNK, NONE, in_use, index_t, node_t, pool_t,
)


cdef int index_init(pool_t *p, uint64_t hash_mask, const uint64_t *keys) noexcept nogil:
    """Take the index's memory (zeroed, so touched lazily); 0 when it can't be had."""
    cdef index_t *x = &p.index
    cdef uint64_t buckets = 16
    cdef int64_t num_keys = <int64_t> p.block_size + 4
    while buckets < <uint64_t> p.num_blocks:
        buckets *= 2
    x.mask = buckets - 1
    x.hash_mask = hash_mask
    x.free_slot = NONE
    x.nodes = <node_t *> pc_calloc(p.num_blocks, sizeof(node_t))
    x.chunks = <uint32_t **> pc_calloc(p.num_blocks // NODE_CHUNK + 1, sizeof(uint32_t *))
    x.exact = <int32_t *> pc_calloc(buckets, sizeof(int32_t))
    x.partial = <int32_t *> pc_calloc(buckets, sizeof(int32_t))
    x.keys = <uint64_t *> pc_calloc(num_keys, sizeof(uint64_t))
    if (x.nodes == NULL or x.chunks == NULL or x.exact == NULL or x.partial == NULL
            or x.keys == NULL):
        return 0
    memcpy(x.keys, keys, num_keys * sizeof(uint64_t))
    return 1


cdef void index_destroy(pool_t *p) noexcept nogil:
    cdef index_t *x = &p.index
    cdef int64_t i
    if x.nodes != NULL:
        for i in range(x.fresh):
            pc_release(x.nodes[i].extra)
    if x.chunks != NULL:
        for i in range(p.num_blocks // NODE_CHUNK + 1):
            pc_release(x.chunks[i])
    pc_release(x.nodes)
    pc_release(x.chunks)
    pc_release(x.exact)
    pc_release(x.partial)
    pc_release(x.keys)


cdef uint64_t serial_of(pool_t *p, int32_t slot) noexcept nogil:
    return (<uint64_t> p.index.nodes[slot].generation << 32) | <uint64_t> (<uint32_t> slot + 1)


cdef int32_t alive(pool_t *p, uint64_t serial) noexcept nogil:
    """Slot of the living node with this serial, else NONE."""
    cdef int64_t slot = <int64_t> (serial & 0xffffffffu) - 1
    if slot < 0 or slot >= p.index.fresh:
        return NONE
    if p.index.nodes[slot].block == NONE or p.index.nodes[slot].generation != serial >> 32:
        return NONE
    return <int32_t> slot


cdef uint32_t *tokens_of(pool_t *p, int32_t slot) noexcept nogil:
    return (p.index.chunks[slot // NODE_CHUNK]
            + <int64_t> (slot % NODE_CHUNK) * p.block_size)


cdef inline uint64_t finish(index_t *x, uint64_t h) noexcept nogil:
    h ^= h >> 32
    h *= x.keys[2] | 1
    h ^= h >> 29
    h *= x.keys[3] | 1
    h ^= h >> 32
    return h & x.hash_mask


cdef uint64_t hash_extra(index_t *x, const uint8_t *data, int64_t size) noexcept nogil:
    """Keyed hash of the tagged bytes, eight at a time."""
    cdef uint64_t h = x.keys[0] ^ <uint64_t> size
    cdef uint64_t word
    cdef int64_t i = 0
    while i < size:
        word = 0
        memcpy(&word, data + i, 8 if size - i >= 8 else size - i)
        h = (h ^ word) * (x.keys[1] | 1)
        h ^= h >> 31
        i += 8
    return h


cdef inline uint64_t exact_hash(pool_t *p, uint64_t parent, const uint32_t *tokens,
                                uint64_t extra_hash) noexcept nogil:
    cdef uint64_t *keys = p.index.keys + 4
    cdef uint64_t h = parent * (p.index.keys[0] | 1) + extra_hash
    cdef int32_t i
    for i in range(p.block_size):
        h += keys[i] * <uint64_t> tokens[i]
    return finish(&p.index, h)


cdef inline uint64_t partial_hash(pool_t *p, uint64_t parent, uint32_t first,
                                  uint64_t extra_hash) noexcept nogil:
    cdef index_t *x = &p.index
    return finish(x, parent * (x.keys[0] | 1) + extra_hash + x.keys[4] * <uint64_t> first)


cdef inline bint same_extra(node_t *n, const uint8_t *extra, int64_t size) noexcept nogil:
    cdef uint32_t have
    if n.extra == NULL:
        return size == 0
    memcpy(&have, n.extra, 4)
    return have == size and memcmp(n.extra + 4, extra, size) == 0


cdef inline uint64_t hash_of_extra(index_t *x, node_t *n) noexcept nogil:
    cdef uint32_t size
    if n.extra == NULL:
        return 0
    memcpy(&size, n.extra, 4)
    return hash_extra(x, n.extra + 4, size)


cdef int32_t find(pool_t *p, uint64_t h, uint64_t parent, const uint32_t *tokens,
                  const uint8_t *extra, int64_t extra_size, int32_t *length) noexcept nogil:
    cdef index_t *x = &p.index
    cdef node_t *n
    cdef int32_t slot = x.exact[h & x.mask] - 1
    cdef int32_t probes = 0
    while slot != NONE and probes < MAX_PROBES:
        n = &x.nodes[slot]
        probes += 1
        if (n.hash == <uint32_t> (h >> 32) and n.parent == parent
                and memcmp(tokens_of(p, slot), tokens, p.block_size * sizeof(uint32_t)) == 0
                and same_extra(n, extra, extra_size)):
            break
        slot = NONE if probes == MAX_PROBES else n.next
    p.steps += 1 + probes
    length[0] = probes
    return slot


cdef int32_t index_find(pool_t *p, uint64_t parent, const uint32_t *tokens, const uint8_t *extra,
                        int64_t extra_size) noexcept nogil:
    """Slot of the node with exactly this parent, tokens[block_size] and extra bytes, or NONE."""
    cdef uint64_t eh = hash_extra(&p.index, extra, extra_size) if extra_size else 0
    cdef int32_t length
    return find(p, exact_hash(p, parent, tokens, eh), parent, tokens, extra, extra_size, &length)


cdef int32_t index_find_partial(pool_t *p, uint64_t parent, const uint32_t *tokens, int64_t count,
                                const uint8_t *extra, int64_t extra_size,
                                int64_t *matched) noexcept nogil:
    """The node behind ``parent`` that shares most leading tokens with tokens[count], or NONE.

    At most MAX_CANDIDATES nodes with the same first token are compared; ``matched`` gets the
    number of equal tokens (at most ``count`` and block_size).
    """
    cdef index_t *x = &p.index
    cdef uint64_t eh = hash_extra(x, extra, extra_size) if extra_size else 0
    cdef int32_t slot, best = NONE
    cdef int32_t candidates = 0, probes = 0
    cdef int64_t same
    cdef node_t *n
    cdef uint32_t *have
    matched[0] = 0
    if count <= 0:
        return NONE
    slot = x.partial[partial_hash(p, parent, tokens[0], eh) & x.mask] - 1
    while slot != NONE and candidates < MAX_CANDIDATES and probes < MAX_PROBES:
        n = &x.nodes[slot]
        probes += 1
        have = tokens_of(p, slot)
        if n.parent == parent and have[0] == tokens[0] and same_extra(n, extra, extra_size):
            candidates += 1
            same = 1
            while same < count and same < p.block_size and have[same] == tokens[same]:
                same += 1
            if same > matched[0]:
                matched[0] = same
                best = slot
        slot = n.partial_next
    p.steps += 1 + probes
    return best


cdef int32_t take_slot(pool_t *p) noexcept nogil:
    """A dead slot with room for its tokens, or NONE when there is no memory."""
    cdef index_t *x = &p.index
    cdef int32_t slot = x.free_slot
    if slot != NONE:
        x.free_slot = x.nodes[slot].next
        return slot
    slot = x.fresh
    if slot >= p.num_blocks:
        return NONE
    if x.chunks[slot // NODE_CHUNK] == NULL:
        x.chunks[slot // NODE_CHUNK] = <uint32_t *> pc_calloc(
            <int64_t> NODE_CHUNK * p.block_size, sizeof(uint32_t))
        if x.chunks[slot // NODE_CHUNK] == NULL:
            return NONE
    x.nodes[slot].block = NONE
    x.fresh += 1
    return slot


cdef bint index_register(pool_t *p, int32_t block, uint64_t parent, const uint32_t *tokens,
                         const uint8_t *extra, int64_t extra_size,
                         int32_t *displaced) noexcept nogil:
    """Make a used block a resident copy of its identity. False: not cached (a later miss).

    A node is created when there is none. Where its only copy is idle, the new copy takes that
    one's place and ``displaced`` gets the idle block, which holds nothing cached any more.
    """
    cdef index_t *x = &p.index
    cdef uint64_t eh = hash_extra(x, extra, extra_size) if extra_size else 0
    cdef uint64_t h = exact_hash(p, parent, tokens, eh)
    cdef uint64_t ph
    cdef int32_t length = 0
    cdef int32_t slot = find(p, h, parent, tokens, extra, extra_size, &length)
    cdef uint8_t *kept = NULL
    cdef uint32_t size = <uint32_t> extra_size
    cdef node_t *n
    cdef int32_t bucket, parent_slot
    if slot == NONE:
        if length >= MAX_PROBES:
            x.refused += 1
            return False
        if extra_size:
            kept = <uint8_t *> pc_calloc(extra_size + 4, 1)
            if kept == NULL:
                x.refused += 1
                return False
            memcpy(kept, &size, 4)
            memcpy(kept + 4, extra, extra_size)
        slot = take_slot(p)
        if slot == NONE:
            pc_release(kept)
            x.refused += 1
            return False
        n = &x.nodes[slot]
        n.parent = parent
        n.children = 0
        parent_slot = alive(p, parent)
        if parent_slot != NONE:
            x.nodes[parent_slot].children += 1
        n.extra = kept
        n.hash = <uint32_t> (h >> 32)
        memcpy(tokens_of(p, slot), tokens, p.block_size * sizeof(uint32_t))
        n.bucket = <int32_t> (h & x.mask)
        n.next = x.exact[n.bucket] - 1
        x.exact[n.bucket] = slot + 1
        ph = partial_hash(p, parent, tokens[0], eh)
        bucket = <int32_t> (ph & x.mask)
        n.partial_next = x.partial[bucket] - 1
        n.partial_prev = ~bucket
        if n.partial_next != NONE:
            x.nodes[n.partial_next].partial_prev = slot
        x.partial[bucket] = slot + 1
        p.prev[block] = NONE
        p.next[block] = NONE
        n.block = block
    elif not in_use(p, x.nodes[slot].block):
        n = &x.nodes[slot]
        displaced[0] = n.block
        p.node[n.block] = NONE
        p.num_cached -= 1
        p.prev[block] = NONE
        p.next[block] = NONE
        n.block = block
    else:
        # behind the first copy, which stays the canonical one
        n = &x.nodes[slot]
        p.prev[block] = n.block
        p.next[block] = p.next[n.block]
        if p.next[block] != NONE:
            p.prev[p.next[block]] = block
        p.next[n.block] = block
    p.node[block] = slot
    p.num_cached += 1
    return True


cdef void bury(pool_t *p, int32_t slot) noexcept nogil:
    """The node's last copy is gone: take it out of both indexes."""
    cdef index_t *x = &p.index
    cdef node_t *n = &x.nodes[slot]
    cdef int32_t at = x.exact[n.bucket] - 1
    if at == slot:
        x.exact[n.bucket] = n.next + 1
    else:
        while x.nodes[at].next != slot:
            at = x.nodes[at].next
        x.nodes[at].next = n.next
    if n.partial_prev < 0:
        x.partial[~n.partial_prev] = n.partial_next + 1
    else:
        x.nodes[n.partial_prev].partial_next = n.partial_next
    if n.partial_next != NONE:
        x.nodes[n.partial_next].partial_prev = n.partial_prev
    pc_release(n.extra)
    n.extra = NULL
    at = alive(p, n.parent)
    if at != NONE:
        x.nodes[at].children -= 1
    n.block = NONE
    n.generation += 1
    if n.generation != 0xffffffffu:     # a slot whose generations are used up stays dead
        n.next = x.free_slot
        x.free_slot = slot


cdef bint index_unregister(pool_t *p, int32_t block) noexcept nogil:
    """Forget a used block as a copy of its node (its links are the list of copies).

    True: the node is dead now and left living nodes behind it, which nothing can reach any more.
    """
    cdef int32_t slot = p.node[block]
    cdef node_t *n = &p.index.nodes[slot]
    if p.prev[block] != NONE:
        p.next[p.prev[block]] = p.next[block]
    else:
        n.block = p.next[block]
    if p.next[block] != NONE:
        p.prev[p.next[block]] = p.prev[block]
    p.node[block] = NONE
    p.num_cached -= 1
    p.steps += 1
    if n.block != NONE:
        return False
    bury(p, slot)
    return n.children > 0


cdef int32_t index_check(pool_t *p, int32_t *children) noexcept nogil:
    """Slot of a living node that its own chains do not lead to, or whose children are miscounted;
    NONE when all agree. ``children``: zeroed scratch, one per slot ever used."""
    cdef index_t *x = &p.index
    cdef node_t *n
    cdef uint64_t h
    cdef int32_t slot, at, steps
    for slot in range(x.fresh):
        n = &x.nodes[slot]
        if n.block == NONE:
            continue
        at = alive(p, n.parent)
        if at != NONE:
            children[at] += 1
        h = exact_hash(p, n.parent, tokens_of(p, slot), hash_of_extra(x, n))
        if <uint64_t> n.bucket != h & x.mask or n.hash != <uint32_t> (h >> 32):
            return slot
        at = x.exact[n.bucket] - 1
        steps = 0
        while at != slot and at != NONE and steps < MAX_PROBES:
            at = x.nodes[at].next
            steps += 1
        if at != slot:
            return slot
        if n.partial_prev < 0:
            at = x.partial[~n.partial_prev] - 1
        else:
            at = x.nodes[n.partial_prev].partial_next
        if at != slot or (n.partial_next != NONE
                          and x.nodes[n.partial_next].partial_prev != slot):
            return slot
    for slot in range(x.fresh):
        if x.nodes[slot].block != NONE and x.nodes[slot].children != children[slot]:
            return slot
    return NONE
