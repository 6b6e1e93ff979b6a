# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True
"""Attention over slabs, with the GIL released.

What a call means, and the door's checks, are in ``pagedcache.storage.cpu_attention``; what would
let an address leave a slab or an array (layer, shapes, places, lengths) is checked here, by every
call for itself and before it writes a byte.
"""
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release
from libc.stdint cimport int32_t, int64_t

from pagedcache._native.machine cimport PC_MOST_THREADS, pc_runner, runner
from pagedcache._native.rows cimport Slabs, open_rows
from pagedcache._native.space cimport (
    PC_OK, PC_SEALED, pc_geometry, pc_num_places, pc_rows, pc_slab, pc_space,
)
from pagedcache.errors import (
    BlockError, InvalidArgumentError, InvalidPositionError, ShapeError, StorageMemoryError,
)

cdef extern from "pagedcache/attend.h" nogil:
    ctypedef struct pc_kv:
        const pc_space *space
        pc_slab slabs[2]

    ctypedef struct pc_attend_call:
        pc_kv k
        pc_kv v
        const int32_t *places
        const int64_t *indptr
        const int64_t *lengths
        const int64_t *q_lens
        const int64_t *starts
        int64_t num_seqs
        int64_t num_q_heads
        int64_t group
        pc_rows q
        pc_rows out
        float *lse
        const float *sinks
        float scale
        float soft_cap
        int64_t window
        int causal

    ctypedef struct pc_isa:
        const char *name

    const pc_isa *pc_isas(int *count)
    int pc_usable_isas()
    int pc_attend(const pc_attend_call *call, const pc_isa *isa, pc_runner run, int threads,
                  int64_t *wanted)


# Asked once: a virtual machine traps the instruction that asks.
cdef int usable_isas = pc_usable_isas()


cdef int check_sequences(Slabs slabs, const int32_t[::1] places, const int64_t[::1] indptr,
                         const int64_t[::1] lengths, const int64_t[::1] q_lens,
                         const int64_t[::1] starts, int64_t num_queries) except -1:
    cdef int64_t n = lengths.shape[0], total = 0, size = slabs.space.geometry[PC_SEALED].block_size
    cdef int64_t i, room, end = pc_num_places(&slabs.space)
    if indptr.shape[0] != n + 1 or q_lens.shape[0] != n or starts.shape[0] != n:
        raise ShapeError(f"lengths, q_lens and starts of {n} sequences, and indptr of {n + 1}",
                         [q_lens.shape[0], starts.shape[0], indptr.shape[0]], "sequences")
    if indptr[0] < 0 or indptr[n] > places.shape[0]:
        raise InvalidPositionError(indptr[n], places.shape[0], "indptr past the places")
    for i in range(n):
        room = indptr[i + 1] - indptr[i]
        if room < 0 or indptr[i + 1] > places.shape[0]:
            raise InvalidPositionError(indptr[i + 1], places.shape[0], f"indptr[{i + 1}]")
        if lengths[i] < 0 or lengths[i] > room * size:
            raise InvalidPositionError(lengths[i], room * size, f"length of sequence {i}")
        if q_lens[i] < 0 or q_lens[i] > num_queries - total:
            raise InvalidPositionError(q_lens[i], num_queries - total, f"queries of sequence {i}")
        if starts[i] < 0:
            raise InvalidPositionError(starts[i], lengths[i], f"start of sequence {i}")
        total += q_lens[i]
    if total != num_queries:
        raise ShapeError(f"{num_queries} queries in all sequences", total, "q_lens")
    for i in range(indptr[0], indptr[n]):
        if places[i] < 0 or places[i] >= end:
            raise BlockError(places[i], f"outside 0…{end - 1} (index {i})")
    return 0


def attend(Slabs k, Slabs v, int64_t layer, q, out, int dtype, const int32_t[::1] places,
           const int64_t[::1] indptr, const int64_t[::1] lengths, const int64_t[::1] q_lens,
           const int64_t[::1] starts, float scale, bint causal, int64_t window, float soft_cap,
           const float[::1] sinks, float[:, ::1] lse, int isa, int threads):
    """Fill ``out`` (3-D, as integers) with attention of ``q`` over the sequences' places.

    ``window`` and ``soft_cap``: 0 for none. ``sinks`` and ``lse`` may be None. ``isa``: index into
    ``instruction_sets()`` of ``_native.machine``.
    """
    cdef Py_buffer q_view, out_view
    cdef pc_attend_call call
    cdef pc_geometry *geometry = &k.space.geometry[PC_SEALED]
    cdef pc_geometry *other = &v.space.geometry[PC_SEALED]
    cdef int known = 0
    cdef pc_runner run = runner()
    cdef const pc_isa *isas = pc_isas(&known)
    cdef int64_t wanted = 0
    cdef int status = PC_OK
    k.check_layer(layer)
    v.check_layer(layer)
    if (
        geometry.num_heads != other.num_heads or geometry.block_size != other.block_size
        or geometry.head_dim != other.head_dim
        or k.space.num_blocks != v.space.num_blocks or k.space.num_open != v.space.num_open
    ):
        raise InvalidArgumentError("k and v are of two storages")
    if not 0 <= isa < usable_isas:
        raise InvalidArgumentError(f"isa {isa} cannot run on this machine")
    if not 1 <= threads <= PC_MOST_THREADS:
        raise InvalidArgumentError(f"threads must be 1…{PC_MOST_THREADS}, got {threads}")
    if window < 0:
        raise InvalidArgumentError(f"window must not be negative, got {window}")
    open_rows(q, dtype, 0, &q_view, &call.q)
    try:
        open_rows(out, dtype, PyBUF_WRITABLE, &out_view, &call.out)
        try:
            call.num_q_heads = q_view.shape[1]
            if (
                q_view.shape[2] != geometry.head_dim or call.num_q_heads < 1
                or call.num_q_heads % geometry.num_heads != 0
            ):
                raise ShapeError(
                    f"[queries, a multiple of {geometry.num_heads} heads, {geometry.head_dim}]",
                    [q_view.shape[0], q_view.shape[1], q_view.shape[2]], "q")
            if (
                out_view.shape[0] != q_view.shape[0] or out_view.shape[1] != q_view.shape[1]
                or out_view.shape[2] != q_view.shape[2]
            ):
                raise ShapeError([q_view.shape[0], q_view.shape[1], q_view.shape[2]],
                                 [out_view.shape[0], out_view.shape[1], out_view.shape[2]], "out")
            if sinks is not None and sinks.shape[0] != call.num_q_heads:
                raise ShapeError([call.num_q_heads], [sinks.shape[0]], "sinks")
            if lse is not None and (lse.shape[0] != q_view.shape[0]
                                    or lse.shape[1] != call.num_q_heads):
                raise ShapeError([q_view.shape[0], call.num_q_heads],
                                 [lse.shape[0], lse.shape[1]], "lse")
            check_sequences(k, places, indptr, lengths, q_lens, starts, q_view.shape[0])
            if q_view.shape[0] == 0:
                return
            call.k.space = &k.space
            call.k.slabs[0] = k.slabs[2 * layer]
            call.k.slabs[1] = k.slabs[2 * layer + 1]
            call.v.space = &v.space
            call.v.slabs[0] = v.slabs[2 * layer]
            call.v.slabs[1] = v.slabs[2 * layer + 1]
            call.places = &places[0] if places.shape[0] > 0 else NULL
            call.indptr = &indptr[0]
            call.lengths = &lengths[0]
            call.q_lens = &q_lens[0]
            call.starts = &starts[0]
            call.num_seqs = lengths.shape[0]
            call.group = call.num_q_heads // geometry.num_heads
            call.lse = &lse[0, 0] if lse is not None else NULL
            call.sinks = &sinks[0] if sinks is not None else NULL
            call.scale = scale
            call.soft_cap = soft_cap
            call.window = window
            call.causal = causal
            with nogil:
                status = pc_attend(&call, &isas[isa], run, threads, &wanted)
        finally:
            PyBuffer_Release(&out_view)
    finally:
        PyBuffer_Release(&q_view)
    if status != PC_OK:
        raise StorageMemoryError(wanted, "the working memory of attention")
