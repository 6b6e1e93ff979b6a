# The structures of the bookkeeping. One pool_t holds everything that its lock guards; a sequence
# is a seq_t in the pool's list. Ids, counts, tokens and hashes only: no bytes of keys or values.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

cdef extern from "pagedcache/sync.h" nogil:
    ctypedef struct pc_mutex:
        pass
    ctypedef struct pc_cond:
        pass
    int pc_mutex_init(pc_mutex *m)
    void pc_mutex_destroy(pc_mutex *m)
    void pc_mutex_lock(pc_mutex *m)
    int pc_mutex_trylock(pc_mutex *m)
    void pc_mutex_unlock(pc_mutex *m)
    int pc_cond_init(pc_cond *c)
    void pc_cond_destroy(pc_cond *c)
    void pc_cond_wait(pc_cond *c, pc_mutex *m)
    void pc_cond_broadcast(pc_cond *c)
    int64_t pc_thread_id()
    int64_t pc_atomic_get(int64_t *p)
    void pc_atomic_set(int64_t *p, int64_t v)

cdef enum:
    NONE = -1
    NODE_CHUNK = 1024        # nodes whose tokens are allocated together
    MAX_PROBES = 32          # longest bucket chain; a longer one refuses to cache
    MAX_CANDIDATES = 8       # blocks looked at for a partial hit
    FLAG_MUST_COPY = 1       # pinned, and a holder gave up tokens that a view may show: see below
    FLAG_PENDING = 2         # an end of a block copy the engine has not finished
    FLAG_LATE = 4            # in use when a child of its prefix became idle
    FLAG_SEALING = 8         # named in the plan of a seal that is being carried out
    FLAG_FULL = 16           # full and committed: where it is open, may be sealed before its time
    FLAG_REWRITTEN = 32      # written to when it was full and committed: never cached any more

cdef enum:                   # what an operation answers; status.pyx turns it into an exception
    OK = 0
    E_MEMORY
    E_BLOCKS                 # a needed, b available, c total
    E_BLOCK                  # a block id; b reason
    E_FREED
    E_FORKED
    E_POSITION               # a position, b length; c reason
    E_TOO_LONG               # a needed, b max_seq_len
    E_PENDING                # a block id; b operation
    E_STALE                  # a made, b now; c reason
    E_SLOT                   # a slot; b reason
    E_ARGUMENT               # a reason; b, c numbers
    E_REENTRANT              # called from a finalizer inside a call of the same thread
    E_CORRUPT                # a block id; b reason
    E_OPEN                   # a needed, b available, c total: open slots

cdef struct result_t:
    int code
    int64_t a
    int64_t b
    int64_t c

# One cached identity: (parent's identity, the block's tokens, its tagged extra keys).
# A node's 64-bit serial is (generation << 32 | slot + 1): never reused, and it finds its slot.
cdef struct node_t:
    uint64_t parent          # serial of the parent node, 0 at the root
    uint8_t *extra           # uint32 length, then the root fields / extra keys; NULL when none
    uint32_t generation
    uint32_t hash
    int32_t next             # bucket chain of the exact index; free list when dead
    int32_t partial_next     # bucket chain of the (parent, first token) index
    int32_t partial_prev     # ~bucket for the first of the chain
    int32_t block            # first resident copy; NONE when the node is dead
    int32_t children         # living nodes behind this one
    int32_t bucket           # of the exact index, so that burying it hashes nothing

cdef struct index_t:
    node_t *nodes            # [num_blocks]
    uint32_t **chunks        # tokens, NODE_CHUNK x block_size each, allocated when first needed
    int32_t *exact           # bucket heads, slot + 1
    int32_t *partial         # bucket heads, slot + 1
    uint64_t mask
    uint64_t *keys           # [block_size + 4] per-process random words
    uint64_t hash_mask       # tests inject a poor hash through it
    int32_t fresh            # slots from here on were never used
    int32_t free_slot        # list of dead slots
    int64_t refused          # blocks not cached: bucket full or no memory

cdef struct counters_t:
    int64_t sequences_allocated, sequences_freed
    int64_t blocks_allocated, blocks_freed
    int64_t cow_copies, partial_copies, defragmentations, blocks_moved
    int64_t prefix_queries, prefix_hits, query_tokens, hit_tokens, query_blocks, hit_blocks
    int64_t resumed_queries, resumed_hit_tokens
    int64_t evicted_blocks, evicted_tokens
    int64_t blocks_sealed, blocks_reopened

# Who the tokens belong to, shared by the forks of a sequence.
cdef struct extra_t:
    int64_t start
    int64_t stop
    uint8_t *data
    int64_t size

cdef struct identity_t:
    int64_t holders
    uint8_t *root
    int64_t root_size
    extra_t *extras          # sorted by start
    int64_t num_extras

cdef struct seq_t:
    seq_t *prev
    seq_t *next
    uint64_t serial
    bint freed
    int64_t mark             # finds a sequence named twice in one call
    int32_t *table
    int64_t num_blocks, table_room
    uint32_t *tokens         # the known tokens from the start
    int64_t known, token_room
    int64_t history          # tokens named or committed; beyond `known` their values are unknown
    int64_t opened           # room asked for
    int64_t computed
    int64_t vouched          # end of the ranges prepared for writing
    int64_t granted          # end of the room given to writers that vouch: prepare(), extend()
    int64_t outdated         # tokens computed before the last reset: never cached again
    int64_t indexed          # blocks before it were offered to the prefix index
    int64_t unsealed         # blocks before it are sealed (full and computed, where none open)
    int32_t promised         # open slots kept back for it: see opening.pyx
    int64_t *written         # per layer: end of the sequence's own appends
    int64_t appended         # the furthest of them, so that engines with `store` walk no layers
    int64_t num_cached
    identity_t *identity

# What a dropped handle leaves for the next call to give back: a pin's blocks or a sequence.
cdef struct pin_t:
    pin_t *next
    seq_t *seq
    bint keep                # free the sequence, but its handle still needs the memory
    int64_t count
    int32_t *blocks
    int32_t *places          # where their bytes were when they were pinned; may be `blocks`

cdef struct copy_t:
    int32_t src
    int32_t dst
    int64_t ticket           # 0: not taken yet

cdef struct pool_t:
    pc_mutex lock
    pc_cond open
    int64_t owner            # thread that holds the lock or has shut the gate, 0: none
    bint gate                # bytes are being moved: every call waits
    bint watched             # mutex and condition exist
    int64_t fork_generation
    int32_t num_blocks
    int32_t block_size
    int32_t *refs            # holders among sequences and pool users
    int32_t *pins            # views and byte movers at work
    uint32_t *generation     # counts the times a block was handed out or moved
    int32_t *loans           # references handed out by the pool itself; NULL: all of them
    uint8_t *flags
    int32_t *node            # slot in the index, NONE when not cached
    int32_t *prev            # idle: recency list; used and cached: the node's resident copies
    int32_t *next            # ... ; blank: free list
    int32_t fresh            # ids from here on were never handed out
    int32_t blank            # list of free blocks that hold nothing cached
    int32_t last_blank       # its end, where it is a queue
    bint queued              # blocks are reused in the order they were freed: see blocks.pyx
    int32_t oldest           # recency list of idle (cached-free) blocks
    int32_t newest
    int32_t num_blank        # without the never used ones
    int32_t num_idle
    int32_t num_cached
    int32_t num_pinned
    int64_t steps            # work counter
    # open slots: see open.pyx
    int32_t num_open         # 0: every block is always sealed
    int32_t open_used
    int32_t open_promised    # slots kept back for sequences, all of them free
    int32_t *open_of         # [num_blocks] slot of an open block, NONE when sealed
    int32_t *open_owner      # [num_open] block that has the slot, NONE when free
    int32_t *open_next       # free list of slots, in the order they were freed
    int32_t open_free
    int32_t open_last
    index_t index
    counters_t count
    pc_mutex drop_lock
    pin_t *dropped
    # sequences
    seq_t *first
    seq_t *last
    int64_t num_sequences
    uint64_t next_serial
    int64_t num_layers
    int64_t max_seq_len      # INT64_MAX: none
    int64_t partial_min      # 0: off
    int64_t layout_epoch
    int64_t next_mark
    int64_t epoch            # counts every change that may make a slot mapping wrong
    # copies left to the engine (storage=None)
    bint deferred
    copy_t *copies
    int64_t num_copies, copies_room
    int64_t next_ticket


cdef inline result_t answer(int code, int64_t a=0, int64_t b=0, int64_t c=0) noexcept nogil:
    cdef result_t r
    r.code = code
    r.a = a
    r.b = b
    r.c = c
    return r


cdef inline int32_t num_free(pool_t *p) noexcept nogil:
    """Blocks that can be handed out: blank, never used, and idle (cached-free)."""
    return p.num_blank + (p.num_blocks - p.fresh) + p.num_idle


cdef inline bint in_use(pool_t *p, int32_t block) noexcept nogil:
    return p.refs[block] > 0 or p.pins[block] > 0


cdef inline bint viewed(pool_t *p, int32_t block) noexcept nogil:
    """A view may show tokens here that its sequence gave up: copy before writing."""
    return p.pins[block] > 0 and p.flags[block] & FLAG_MUST_COPY


cdef inline bint is_open(pool_t *p, int32_t block) noexcept nogil:
    return p.num_open > 0 and p.open_of[block] != NONE


cdef inline int32_t place(pool_t *p, int32_t block) noexcept nogil:
    """Where a block's bytes are: its id, or num_blocks + its open slot."""
    return p.num_blocks + p.open_of[block] if is_open(p, block) else block


cdef inline int32_t free_slots(pool_t *p) noexcept nogil:
    """Open slots that are neither a block's nor promised to a sequence."""
    return p.num_open - p.open_used - p.open_promised


cdef inline void note_rewrite(pool_t *p, int32_t block) noexcept nogil:
    """Somebody is about to write to slots of it: what was committed there may change."""
    if p.flags[block] & FLAG_FULL:
        p.flags[block] |= FLAG_REWRITTEN


cdef inline int64_t high_water(pool_t *p, seq_t *s) noexcept nogil:
    """End of the positions that any layer may hold bytes for."""
    return max(s.computed, s.appended)


cdef inline int64_t blocks_for(int64_t tokens, int64_t block_size) noexcept nogil:
    return (tokens + block_size - 1) // block_size
