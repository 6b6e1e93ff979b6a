# cython: language_level=3, boundscheck=False, wraparound=False
"""For tests only: spoil one field of a pool, so that check() has something to find.

Nothing else imports this module. A spoiled pool must be thrown away.
"""
from libc.stdint cimport int32_t

from pagedcache.bookkeeping.block_pool cimport BlockPool
from pagedcache.bookkeeping.handles cimport SeqState
from pagedcache.bookkeeping.prefix_index cimport tokens_of
from pagedcache.bookkeeping.types cimport *

KINDS = ("refs up", "refs down", "negative pin", "lost from the free list", "free list cut",
         "recency list cut", "uncounted", "forgotten by its node", "other tokens", "bucket",
         "children", "double in the free list", "open slot of another", "open slots cut",
         "open and cached", "promised to nobody", "promised and not free")


def spoil(BlockPool pool, str kind, int32_t block):
    """Damage what ``kind`` says about ``block``."""
    cdef pool_t *p = pool.p
    if kind == "refs up":
        p.refs[block] += 1
    elif kind == "refs down":
        p.refs[block] -= 1
    elif kind == "negative pin":
        p.pins[block] = -1
    elif kind == "lost from the free list":
        p.blank = p.next[p.blank]
    elif kind == "free list cut":
        p.next[p.blank] = NONE
    elif kind == "double in the free list":
        p.next[p.next[p.blank]] = p.blank
    elif kind == "recency list cut":
        p.next[p.oldest] = NONE
    elif kind == "uncounted":
        p.num_cached += 1
    elif kind == "forgotten by its node":
        p.index.nodes[p.node[block]].block = (block + 1) % p.fresh
    elif kind == "other tokens":
        tokens_of(p, p.node[block])[0] ^= 1
    elif kind == "bucket":
        p.index.nodes[p.node[block]].partial_prev = p.node[block]
    elif kind == "children":
        p.index.nodes[p.node[block]].children += 1
    elif kind == "open slot of another":
        p.open_owner[p.open_of[block]] = (block + 1) % p.fresh
    elif kind == "open slots cut":
        p.open_next[p.open_free] = NONE
    elif kind == "open and cached":
        p.open_of[block] = p.open_free
    elif kind == "promised to nobody":
        p.open_promised += 1
    elif kind == "promised and not free":
        p.open_promised = p.num_open
    else:
        raise ValueError(kind)


def spoil_sequence(SeqState seq, str kind):
    """Damage a sequence's table ("table") or length ("length")."""
    if kind == "table":
        seq.s.table[0] = seq.s.table[seq.s.num_blocks - 1]
    elif kind == "length":
        seq.s.computed = (seq.s.num_blocks + 1) * seq.pool.p.block_size
    else:
        raise ValueError(kind)
