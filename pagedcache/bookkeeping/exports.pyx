# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Block tables of many sequences as the arrays that attention kernels read.

Both forms export exactly ceil(length / block_size) blocks of each sequence. The ids are copied in
one critical section, so all rows belong to one moment.
"""
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

import numpy as np

from pagedcache.bookkeeping.alloc cimport pc_calloc, pc_release
from pagedcache.bookkeeping.block_pool cimport BlockPool
from pagedcache.bookkeeping.gate cimport leave
from pagedcache.bookkeeping.handles cimport SeqState, enter_fast
from pagedcache.bookkeeping.status cimport int_argument, raise_result
from pagedcache.bookkeeping.types cimport *

from pagedcache.errors import InvalidArgumentError, StorageMemoryError

cdef struct rows_t:
    int64_t n
    seq_t **seqs
    int64_t *lengths
    int64_t *blocks
    int32_t *ids             # all rows, one behind the other
    int64_t total
    int64_t widest


cdef seq_t **seq_pointers(BlockPool pool, list seqs) except NULL:
    """The C sequences of a list of handles, in memory the caller releases."""
    cdef int64_t i, n = len(seqs)
    cdef SeqState h
    cdef seq_t **out = <seq_t **> pc_calloc(n, sizeof(seq_t *))
    if out == NULL:
        raise StorageMemoryError(n * sizeof(seq_t *), "a list of sequences")
    for i in range(n):
        item = seqs[i]
        if not isinstance(item, SeqState):
            pc_release(out)
            raise InvalidArgumentError(
                f"sequences[{i}]: expected a sequence, got {type(item).__name__}")
        h = item
        if h.pool is not pool:
            pc_release(out)
            raise_result(answer(E_ARGUMENT, 6))
        out[i] = h.s
    return out


cdef result_t unique_and_live(pool_t *p, seq_t **seqs, int64_t n, bint unique) noexcept nogil:
    """With the lock held: no handle is freed, none is named twice (when asked)."""
    cdef int64_t i
    p.next_mark += 1
    for i in range(n):
        if seqs[i].freed:
            return answer(E_FREED, seqs[i].serial)
        if unique and seqs[i].mark == p.next_mark:
            return answer(E_ARGUMENT, 1)
        seqs[i].mark = p.next_mark
    return answer(OK)


cdef void rows_release(rows_t *r) noexcept nogil:
    pc_release(r.seqs)
    pc_release(r.lengths)
    pc_release(r.blocks)
    pc_release(r.ids)


cdef result_t copy_rows(pool_t *p, rows_t *r, bint given) noexcept nogil:
    cdef int64_t i, at = 0
    cdef result_t a = unique_and_live(p, r.seqs, r.n, False)
    if a.code != OK:
        return a
    r.total = 0
    r.widest = 0
    for i in range(r.n):
        if not given:
            r.lengths[i] = r.seqs[i].computed
        r.blocks[i] = blocks_for(r.lengths[i], p.block_size)
        if r.blocks[i] > r.seqs[i].num_blocks:
            return answer(E_POSITION, r.lengths[i], r.seqs[i].num_blocks * p.block_size, 5)
        r.total += r.blocks[i]
        r.widest = max(r.widest, r.blocks[i])
    r.ids = <int32_t *> pc_calloc(r.total, sizeof(int32_t))
    if r.ids == NULL:
        return answer(E_MEMORY, r.total * 4)
    for i in range(r.n):
        if r.blocks[i] > 0:
            memcpy(r.ids + at, r.seqs[i].table, r.blocks[i] * sizeof(int32_t))
        at += r.blocks[i]
    return answer(OK)


cdef int rows_snapshot(BlockPool pool, list seqs, object lengths, rows_t *r) except -1:
    cdef int64_t i
    cdef result_t a
    r.n = len(seqs)
    r.ids = NULL
    r.lengths = NULL
    r.blocks = NULL
    r.seqs = NULL
    if lengths is not None:
        lengths = list(lengths)
        if len(lengths) != r.n:
            raise InvalidArgumentError(
                f"lengths: expected one per sequence ({r.n}), got {len(lengths)}")
    r.seqs = seq_pointers(pool, seqs)
    r.lengths = <int64_t *> pc_calloc(r.n, sizeof(int64_t))
    r.blocks = <int64_t *> pc_calloc(r.n, sizeof(int64_t))
    if r.lengths == NULL or r.blocks == NULL:
        raise StorageMemoryError(16 * r.n, "an export")
    if lengths is not None:
        for i in range(r.n):
            r.lengths[i] = int_argument(lengths[i], f"lengths[{i}]", 0, 2**62)
    enter_fast(pool.p)
    a = copy_rows(pool.p, r, lengths is not None)
    leave(pool.p)
    if a.code != OK:
        raise_result(a)
    return 0


cdef object export_tables(BlockPool pool, list seqs, object lengths):
    """int32 [num_seqs, max_blocks], rows padded with id 0."""
    cdef rows_t r
    cdef int64_t i, at = 0
    cdef int32_t[:, ::1] view
    try:
        rows_snapshot(pool, seqs, lengths, &r)
        out = np.zeros((r.n, r.widest), dtype=np.int32)
        if r.total > 0:
            view = out
            for i in range(r.n):
                if r.blocks[i] > 0:
                    memcpy(&view[i, 0], r.ids + at, r.blocks[i] * sizeof(int32_t))
                at += r.blocks[i]
        return out
    finally:
        rows_release(&r)


cdef object export_pages(BlockPool pool, list seqs, object lengths, bint allow_empty):
    """CSR: kv_indptr [n + 1], kv_indices [total], kv_last_page_len [n], all int32."""
    cdef rows_t r
    cdef int64_t i, at = 0
    cdef int64_t B = pool.p.block_size
    cdef int32_t[::1] ptr
    cdef int32_t[::1] ids
    cdef int32_t[::1] last
    try:
        rows_snapshot(pool, seqs, lengths, &r)
        for i in range(r.n):
            if r.lengths[i] == 0 and not allow_empty:
                raise_result(answer(E_ARGUMENT, 3, r.seqs[i].serial))
        indptr = np.zeros(r.n + 1, dtype=np.int32)
        indices = np.empty(r.total, dtype=np.int32)
        last_len = np.zeros(r.n, dtype=np.int32)
        ptr = indptr
        ids = indices
        last = last_len
        if r.total > 0:
            memcpy(&ids[0], r.ids, r.total * sizeof(int32_t))
        for i in range(r.n):
            at += r.blocks[i]
            ptr[i + 1] = <int32_t> at
            if r.lengths[i] > 0:
                last[i] = <int32_t> ((r.lengths[i] - 1) % B + 1)
        return indptr, indices, last_len
    finally:
        rows_release(&r)
