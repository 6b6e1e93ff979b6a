# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Defragmentation: give blocks new ids and say which bytes move where.

plan_*() decides the new ids and the order of the moves and changes nothing; apply_relocation()
rewrites counts, lists, index and tables and cannot fail. A block that is pinned, or held by
somebody who is not a sequence (and so could not be told), keeps its id.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport qsort
from libc.string cimport memset

from pagedcache.bookkeeping.alloc cimport pc_calloc, pc_release
from pagedcache.bookkeeping.blocks cimport pin_block
from pagedcache.bookkeeping.copies cimport copies_reserve, queue_copy
from pagedcache.bookkeeping.types cimport *

cdef struct keyed_t:
    int64_t key
    seq_t *seq


cdef int by_key(const void *a, const void *b) noexcept nogil:
    cdef int64_t x = (<const keyed_t *> a).key
    cdef int64_t y = (<const keyed_t *> b).key
    return (x > y) - (x < y)


cdef void relocation_release(relocation_t *r) noexcept nogil:
    pc_release(r.to)
    pc_release(r.back)
    pc_release(r.moves)
    pc_release(r.scratch)
    memset(r, 0, sizeof(relocation_t))


cdef bint relocation_init(relocation_t *r, int64_t size) noexcept nogil:
    """Memory for ids below ``size``; moves need at most 3 entries per 2 blocks (2-cycles)."""
    memset(r, 0, sizeof(relocation_t))
    r.size = size
    r.to = <int32_t *> pc_calloc(size, sizeof(int32_t))
    r.back = <int32_t *> pc_calloc(size, sizeof(int32_t))
    r.moves = <int32_t *> pc_calloc(size + size // 2 + 2, 2 * sizeof(int32_t))
    r.scratch = <int32_t *> pc_calloc(size, 6 * sizeof(int32_t))
    if r.to == NULL or r.back == NULL or r.moves == NULL or r.scratch == NULL:
        relocation_release(r)
        return False
    return True


cdef inline bint hosts(pool_t *p, int32_t b) noexcept nogil:
    """Whether an id holds something: used or idle."""
    return b < p.fresh and (in_use(p, b) or p.node[b] != NONE)


cdef void find_fixed(pool_t *p, int32_t *held, uint8_t *fixed) noexcept nogil:
    """Blocks that must keep their id: pinned, or with holders other than the tables."""
    cdef seq_t *s = p.first
    cdef int64_t i
    cdef int32_t b
    while s != NULL:
        for i in range(s.num_blocks):
            held[s.table[i]] += 1
        s = s.next
    for b in range(p.fresh):
        fixed[b] = in_use(p, b) and (p.pins[b] > 0 or p.refs[b] != held[b])


cdef inline void emit(relocation_t *r, int32_t src, int32_t dst) noexcept nogil:
    r.moves[2 * r.num_moves] = src
    r.moves[2 * r.num_moves + 1] = dst
    r.num_moves += 1


cdef void order_moves(pool_t *p, relocation_t *r) noexcept nogil:
    """Chains from their free end; cycles through a spare place: an id that stays free where the
    engine copies (a cycle is given up when there is none), else the storage's own (NONE)."""
    cdef int64_t i
    cdef int32_t t, s, start, spare = NONE
    for i in range(r.size):
        r.back[i] = NONE
    for i in range(r.size):
        if r.to[i] != NONE and r.to[i] != i:
            r.back[r.to[i]] = <int32_t> i
    r.num_moves = 0
    r.num_blocks = 0
    if p.deferred:
        for i in range(r.size):       # an id that holds nothing and gets nothing
            if not hosts(p, <int32_t> i) and r.back[i] == NONE:
                spare = <int32_t> i
                break
    for i in range(r.size):
        t = <int32_t> i
        if r.to[t] != NONE or r.back[t] == NONE:
            continue
        while r.back[t] != NONE:      # t holds nothing (any more): fill it, then its source
            s = r.back[t]
            r.back[t] = NONE
            emit(r, s, t)
            r.num_blocks += 1
            t = s
    for i in range(r.size):
        if r.back[i] == NONE:
            continue
        start = <int32_t> i
        if p.deferred and spare == NONE:
            t = start                 # leave this cycle as it is
            while r.back[t] != NONE:
                s = r.back[t]
                r.back[t] = NONE
                r.to[s] = s
                t = s
            continue
        emit(r, start, spare)
        t = start
        while r.back[t] != start:
            s = r.back[t]
            r.back[t] = NONE
            emit(r, s, t)
            r.num_blocks += 1
            t = s
        r.back[t] = NONE
        emit(r, spare, t)
        r.num_blocks += 1


cdef int64_t place_of(pool_t *p, seq_t *s) noexcept nogil:
    """Where a sequence stands in the pool: the lowest id that it alone holds, so that packing a
    packed pool moves nothing; the lowest id of all when it shares every block."""
    cdef int64_t i, own = p.num_blocks, any = p.num_blocks
    for i in range(s.num_blocks):
        any = min(any, <int64_t> s.table[i])
        if p.refs[s.table[i]] == 1:
            own = min(own, <int64_t> s.table[i])
    return own if own < p.num_blocks else any


cdef result_t plan_defragment(pool_t *p, relocation_t *r) noexcept nogil:
    """Pack used and idle blocks into the lowest ids; each sequence's blocks in a row, in the order
    of their present first blocks, a shared block with its first holder."""
    cdef int64_t size = p.fresh + (1 if p.fresh < p.num_blocks else 0)
    cdef int32_t *held = <int32_t *> pc_calloc(size, sizeof(int32_t))
    cdef uint8_t *fixed = <uint8_t *> pc_calloc(size, 1)
    cdef keyed_t *order = <keyed_t *> pc_calloc(p.num_sequences, sizeof(keyed_t))
    cdef int64_t i, j, cursor = 0, n = 0
    cdef seq_t *s
    cdef int32_t b
    if held == NULL or fixed == NULL or order == NULL or not relocation_init(r, size):
        pc_release(held)
        pc_release(fixed)
        pc_release(order)
        return answer(E_MEMORY, size * 50)
    find_fixed(p, held, fixed)
    for i in range(size):
        r.to[i] = NONE
        r.back[i] = NONE
        if fixed[i]:
            r.to[i] = <int32_t> i
            r.back[i] = <int32_t> i
    s = p.first
    while s != NULL:
        order[n].seq = s
        order[n].key = place_of(p, s)
        n += 1
        s = s.next
    qsort(order, n, sizeof(keyed_t), by_key)
    for i in range(n):
        s = order[i].seq
        for j in range(s.num_blocks):
            b = s.table[j]
            if r.to[b] != NONE:
                continue
            while fixed[cursor]:
                cursor += 1
            r.to[b] = <int32_t> cursor
            r.back[cursor] = b
            cursor += 1
    # idle blocks: the lowest ids that are left, staying where they are if they can
    cursor = 0
    i = p.num_idle
    while i > 0:                      # ids 0 ... cursor-1 will be full
        if r.back[cursor] == NONE:
            i -= 1
        cursor += 1
    for b in range(<int32_t> cursor):
        if r.back[b] == NONE and r.to[b] == NONE and hosts(p, b):
            r.to[b] = b
            r.back[b] = b
    cursor = 0
    for b in range(p.fresh):
        if hosts(p, b) and r.to[b] == NONE:
            while r.back[cursor] != NONE:
                cursor += 1
            r.to[b] = <int32_t> cursor
            r.back[cursor] = b
    pc_release(held)
    pc_release(fixed)
    pc_release(order)
    order_moves(p, r)
    return finish_plan(p, r)


cdef result_t finish_plan(pool_t *p, relocation_t *r) noexcept nogil:
    cdef int64_t moves = r.num_moves
    if p.deferred and not copies_reserve(p, moves):
        relocation_release(r)
        return answer(E_MEMORY, moves * sizeof(copy_t))
    return answer(OK)


cdef result_t plan_compact(pool_t *p, seq_t *s, relocation_t *r) noexcept nogil:
    """Bring one sequence's blocks into the first run of ids that are blank or its own. Nothing
    moves when it is contiguous, has a block that must stay, or there is no such run."""
    cdef int64_t n = s.num_blocks
    cdef int32_t *held = <int32_t *> pc_calloc(p.fresh, sizeof(int32_t))
    cdef uint8_t *fixed = <uint8_t *> pc_calloc(p.fresh, 1)
    cdef uint8_t *own = <uint8_t *> pc_calloc(p.fresh, 1)
    cdef int64_t i, run = 0, first = NONE, size
    cdef bint contiguous = True
    memset(r, 0, sizeof(relocation_t))
    if held == NULL or fixed == NULL or own == NULL:
        pc_release(held)
        pc_release(fixed)
        pc_release(own)
        return answer(E_MEMORY, <int64_t> p.fresh * 6)
    find_fixed(p, held, fixed)
    for i in range(n):
        own[s.table[i]] = 1
        contiguous = contiguous and s.table[i] == s.table[0] + i
        if fixed[s.table[i]]:
            n = 0
            break
    if not contiguous:
        for i in range(p.num_blocks):
            if i >= p.fresh or own[i] or not hosts(p, <int32_t> i):
                run += 1
            else:
                run = 0
            if run == n and n > 0:
                first = i - n + 1
                break
    pc_release(held)
    pc_release(fixed)
    pc_release(own)
    if first == NONE:
        return answer(OK)
    size = min(max(<int64_t> p.fresh, first + n) + 1, <int64_t> p.num_blocks)
    if not relocation_init(r, size):
        return answer(E_MEMORY, size * 50)
    for i in range(size):
        r.to[i] = <int32_t> i if hosts(p, <int32_t> i) else NONE
    for i in range(n):
        r.to[s.table[i]] = <int32_t> (first + i)
    order_moves(p, r)
    return finish_plan(p, r)


cdef void move_state(pool_t *p, relocation_t *r) noexcept nogil:
    """Rewrite the per-block arrays; links between blocks are ids and are mapped too."""
    cdef int32_t *refs = r.scratch
    cdef int32_t *node = refs + r.size
    cdef int32_t *prev = node + r.size
    cdef int32_t *next = prev + r.size
    cdef int32_t *flags = next + r.size
    cdef int32_t *open_of = flags + r.size
    cdef int64_t i
    cdef int32_t t
    for i in range(r.size):
        node[i] = NONE
        open_of[i] = NONE
    for i in range(r.size):
        t = r.to[i]
        if t == NONE:
            continue
        refs[t] = p.refs[i]
        flags[t] = p.flags[i]
        node[t] = p.node[i]
        if is_open(p, <int32_t> i):   # its bytes stay in their slot
            open_of[t] = p.open_of[i]
            p.open_owner[open_of[t]] = t
        if p.node[i] != NONE:         # only then the links mean something
            prev[t] = NONE if p.prev[i] == NONE else r.to[p.prev[i]]
            next[t] = NONE if p.next[i] == NONE else r.to[p.next[i]]
            if p.index.nodes[p.node[i]].block == i:
                r.back[t] = p.node[i]         # settled below: two nodes may swap ids
        if t != i:
            p.generation[i] += 1
            p.generation[t] += 1
    for i in range(r.size):
        p.refs[i] = refs[i]
        p.flags[i] = <uint8_t> flags[i]
        p.node[i] = node[i]
        if p.num_open > 0:
            p.open_of[i] = open_of[i]
        p.prev[i] = prev[i]
        p.next[i] = next[i]
        if r.back[i] != NONE:
            p.index.nodes[r.back[i]].block = <int32_t> i
    p.oldest = NONE if p.oldest == NONE else r.to[p.oldest]
    p.newest = NONE if p.newest == NONE else r.to[p.newest]


cdef void rebuild_free(pool_t *p, relocation_t *r) noexcept nogil:
    """The free list in rising order, so that the pool stays packed."""
    cdef int32_t b = <int32_t> max(r.size, <int64_t> p.fresh)
    p.fresh = b
    while p.fresh > 0 and not hosts(p, p.fresh - 1):
        p.fresh -= 1
    p.blank = NONE
    p.num_blank = 0
    b = p.fresh
    while b > 0:
        b -= 1
        if not hosts(p, b):
            p.next[b] = p.blank
            if p.blank == NONE:
                p.last_blank = b
            p.blank = b
            p.num_blank += 1


cdef void apply_relocation(pool_t *p, relocation_t *r) noexcept nogil:
    """Give the blocks their new ids everywhere. Where the engine copies, the moves are queued and
    their ends pinned, so a place that is left stays in use until the copies are done."""
    cdef seq_t *s = p.first
    cdef int64_t i
    cdef int32_t b, k
    if r.num_blocks == 0:
        return
    for i in range(r.size):
        r.back[i] = NONE
    move_state(p, r)
    while s != NULL:
        for i in range(s.num_blocks):
            s.table[i] = r.to[s.table[i]]
        s = s.next
    if p.deferred:
        for i in range(r.num_moves):
            for k in range(2):
                b = r.moves[2 * i + k]
                if in_use(p, b) or p.node[b] != NONE:
                    pin_block(p, b)
                else:                 # left, or the detour: in no list at the moment
                    p.count.blocks_allocated += 1
                    p.num_pinned += 1
                    p.pins[b] = 1
            queue_copy(p, r.moves[2 * i], r.moves[2 * i + 1])
    rebuild_free(p, r)
    p.layout_epoch += 1
    p.epoch += 1
    p.count.blocks_moved += r.num_blocks
