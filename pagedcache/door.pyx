# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True
"""The short way through ``store``, ``gather`` and ``attend``, for calls in which all is plain.

A step of a small model moves a few hundred bytes a layer, and checks in Python would take longer
than the bytes. The door looks at all arguments in one pass and answers one question: is every one
of them of the kind that needs no conversion? Then the ledger pins and the native loops run, as on
the long way. Anything else it declines before it changes anything, and the long way does, or
refuses, what it is. So the door words no errors of its own.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.float cimport FLT_MAX, FLT_MIN
from libc.stdint cimport int64_t

import math

import numpy as np

from pagedcache._native.rows cimport Slabs, find_nonfinite_at
from pagedcache._native.space cimport pc_rows
from pagedcache.bookkeeping import SlotMapping
from pagedcache.formats import FORMATS, get_policy
from pagedcache.plain cimport PlainArrays, close_plain, overlap, plain_t
from pagedcache.sequence import Sequence
from pagedcache.storage.base import RAISE
from pagedcache.storage.cpu import empty_rows
from pagedcache.storage.cpu_attention import run

cdef extern from "Python.h":
    bint PyLong_CheckExact(object x)
    long long PyLong_AsLongLongAndOverflow(object x, int *overflow) except? -1

cdef object ndarray = np.ndarray, int64 = np.int64, empty = np.empty
cdef list formats = list(FORMATS.values())


cdef int64_t plain_int(object x, int64_t least, int64_t most) except? -9:
    """An int in a range as it is; -9, which is in none, for all else."""
    cdef int overflow = 0
    cdef long long value
    if not PyLong_CheckExact(x):
        return -9
    value = PyLong_AsLongLongAndOverflow(x, &overflow)
    return value if overflow == 0 and least <= value <= most else -9


cdef class Door:
    """The door of one cache whose layers are all in the CPU's memory.

    ``ledger``: pins. ``storage``: a ``CpuStorage``; the door keeps its slabs, not itself.
    """
    cdef object pin_mapping, pin_range, pin_reads, read_ends
    cdef Slabs k, v
    cdef PlainArrays arrays
    cdef bint k_first, looks_at_k, looks_at_v
    cdef int policy, code            # the code: of what gather() makes by default
    cdef int64_t most_layer, block_size
    cdef double scale

    def __init__(self, ledger, storage, int code):
        spec = storage.spec
        self.pin_mapping, self.pin_range = ledger.pin_mapping, ledger.pin_range
        self.pin_reads, self.read_ends = ledger.pin_reads, ledger.read_ends
        slabs = storage.native_slabs()
        self.k, self.v = slabs["k"], slabs["v"]
        self.k_first = next(iter(slabs)) == "k"
        self.arrays = PlainArrays(storage)
        self.policy = get_policy(spec.on_nonfinite)
        self.looks_at_k = self.policy == RAISE and spec.k_format.is_quantized
        self.looks_at_v = self.policy == RAISE and spec.v_format.is_quantized
        self.code = code
        self.most_layer = spec.num_layers - 1
        self.block_size = spec.block_size
        self.scale = 1 / math.sqrt(spec.head_dim)

    def store(self, layer, k, v, mapping):
        """``PagedKVCache.store`` of a plain call -> True; False if it is none, and nothing done.

        Raises what the ledger raises about the mapping.
        """
        cdef int64_t at = plain_int(layer, 0, self.most_layer)
        cdef plain_t of_k, of_v
        cdef Py_buffer slots
        if at < 0 or type(mapping) is not SlotMapping:
            return False
        of_k.held = of_v.held = False
        PyObject_GetBuffer(mapping.place_slots, &slots, PyBUF_SIMPLE)
        try:
            return self._store(at, k, v, mapping, slots.len // 8, <const int64_t *> slots.buf,
                               &of_k, &of_v)
        finally:
            PyBuffer_Release(&slots)
            close_plain(&of_v)
            close_plain(&of_k)

    cdef bint _store(self, int64_t layer, object k, object v, object mapping, int64_t n,
                     const int64_t *slots, plain_t *of_k, plain_t *of_v) except -1:
        cdef pc_rows rows[2]
        cdef int64_t heads = self.arrays.num_heads, dim = self.arrays.head_dim
        if not (self.arrays.look_at_rows(k, n, of_k) and self.arrays.look_at_rows(v, n, of_v)
                and self.arrays.apart(of_k, layer) and self.arrays.apart(of_v, layer)):
            return False
        rows[0] = self.arrays.rows_of(of_k)
        rows[1] = self.arrays.rows_of(of_v)
        if self.looks_at_k and find_nonfinite_at(&rows[0], n, heads, dim) >= 0:
            return False
        if self.looks_at_v and find_nonfinite_at(&rows[1], n, heads, dim) >= 0:
            return False
        pin = self.pin_mapping(mapping)
        try:
            # A status is a value that became NaN meanwhile: the long way looks again.
            if self.k_first:
                return not (self._put(self.k, layer, &rows[0], of_k, slots, n)
                            or self._put(self.v, layer, &rows[1], of_v, slots, n))
            return not (self._put(self.v, layer, &rows[1], of_v, slots, n)
                        or self._put(self.k, layer, &rows[0], of_k, slots, n))
        finally:
            pin.release()

    cdef int _put(self, Slabs slabs, int64_t layer, const pc_rows *rows, const plain_t *found,
                  const int64_t *slots, int64_t n) except -1:
        return slabs.store_at(layer, rows, found.view.len, slots, n, self.policy)

    def gather(self, state, layer, start, stop, out):
        """``Sequence.gather`` of a plain call -> (K, V); None if it is none.

        Raises what the ledger raises about the sequence.
        """
        cdef int64_t at = plain_int(layer, 0, self.most_layer)
        cdef int64_t first = plain_int(start, 0, 2**48), last, n
        cdef int code = self.code
        if at < 0 or first < 0:
            return None
        if stop is None:
            last = state.written(at)
        else:
            last = plain_int(stop, 0, state.readable(at))
        n = last - first
        if n <= 0:
            return None
        if out is not None:
            if (type(out) is not tuple and type(out) is not list) or len(out) != 2:
                return None
            k, v = out
            code = self.can_fill(k, v, n)
            if code < 0:
                return None
        pin = self.pin_range(state, first, last, at)
        try:
            if out is None:
                shape = (n, self.arrays.num_heads, self.arrays.head_dim)
                k, v = empty_rows(shape, formats[code]), empty_rows(shape, formats[code])
            places = pin.places
            first %= self.block_size
            self.k.load(at, places, first, k, code)
            self.v.load(at, places, first, v, code)
        finally:
            pin.release()
        return k, v

    cdef int can_fill(self, object k, object v, int64_t num_tokens) except -2:
        """The code of the dtype of two arrays if both can be filled as they are, or -1."""
        cdef plain_t of_k, of_v
        of_k.held = of_v.held = False
        try:
            if (self.arrays.look_at_rows(k, num_tokens, &of_k)
                    and self.arrays.look_at_rows(v, num_tokens, &of_v)
                    and self.fillable(&of_k) and self.fillable(&of_v)
                    and of_k.ndim == 3 and of_v.ndim == 3
                    and of_k.code == of_v.code and not overlap(&of_k.bytes, &of_v.bytes)):
                return of_k.code
            return -1
        finally:
            close_plain(&of_v)
            close_plain(&of_k)

    cdef bint fillable(self, const plain_t *found) noexcept:
        return found.dense and not found.view.readonly and self.arrays.apart(found, -1)

    def attend(self, cache, layer, q, seqs, q_lens, lengths, out, scale, causal, window, soft_cap):
        """``PagedKVCache.attend`` of a plain call -> its result; None if it is none.

        Raises what the ledger raises about the sequences, and StorageMemoryError.
        """
        cdef plain_t of_q, of_out
        of_q.held = of_out.held = False
        try:
            return self._attend(cache, layer, q, seqs, q_lens, lengths, out, scale, causal, window,
                                soft_cap, &of_q, &of_out)
        finally:
            close_plain(&of_out)
            close_plain(&of_q)

    cdef object _attend(self, cache, layer, q, seqs, q_lens, lengths, out, scale, causal, window,
                        soft_cap, plain_t *of_q, plain_t *of_out):
        cdef int64_t at = plain_int(layer, 0, self.most_layer)
        cdef int64_t heads, behind = 0, num_seqs
        cdef double factor = self.scale, cap = 0
        if at < 0 or not self.arrays.look(q, of_q):
            return None
        if of_q.ndim == 3:
            heads = of_q.view.shape[1] if of_q.view.shape[2] == self.arrays.head_dim else 0
        else:
            heads = of_q.view.shape[1] // self.arrays.head_dim
            if heads * self.arrays.head_dim != of_q.view.shape[1]:
                return None
        if heads < 1 or heads % self.arrays.num_heads != 0:
            return None
        if scale is not None:
            if type(scale) is not float or not -FLT_MAX <= scale <= FLT_MAX:
                return None
            factor = scale
        if soft_cap is not None:
            if type(soft_cap) is not float or not FLT_MIN <= soft_cap <= FLT_MAX:
                return None
            cap = soft_cap
        if window is not None:
            behind = plain_int(window, 1, 2**48)
            if behind < 0:
                return None
        if type(causal) is not bool:
            return None
        states = plain_states(cache, seqs)
        if states is None:
            return None
        num_seqs = len(states)
        if q_lens is not None:
            counts = plain_numbers(q_lens, num_seqs, of_q.view.shape[0])
        elif num_seqs == 1:
            counts = numbers_like(of_q.view.shape[0], 1)
        elif num_seqs == of_q.view.shape[0]:
            counts = numbers_like(1, num_seqs)
        else:
            return None
        if lengths is not None:
            lengths = plain_numbers(lengths, num_seqs, -1)
            if lengths is None:
                return None
        if counts is None:
            return None
        if out is None:
            result = empty_rows(q.shape, formats[of_q.code])
        else:
            if not (self.arrays.look(out, of_out) and of_out.code == of_q.code
                    and self.fillable(of_out) and out.shape == q.shape
                    and not overlap(&of_out.bytes, &of_q.bytes)):
                return None
            result = out
        lengths = self.read_ends(states, lengths, counts, at)
        pin, indptr = self.pin_reads(states, lengths, at)
        try:
            run(self.k, self.v, at, self.arrays.as_rows(q, of_q, heads),
                self.arrays.as_rows(result, of_q, heads), of_q.code, pin.places, indptr,
                lengths, counts, numbers_like(0, num_seqs), factor, causal, behind, cap, None, None)
        finally:
            pin.release()
        return result


cdef object numbers_like(int64_t number, int64_t n):
    """int64 ``[n]``, all of them ``number``."""
    cdef int64_t[::1] view
    cdef int64_t i
    out = empty(n, int64)
    view = out
    for i in range(n):
        view[i] = number
    return out


cdef list plain_states(object cache, object seqs):
    """The states of one sequence of this cache or of a list of them, or None."""
    cdef list states = []
    if type(seqs) is Sequence:
        seqs = (seqs,)
    elif type(seqs) is not list and type(seqs) is not tuple:
        return None
    for seq in seqs:
        if type(seq) is not Sequence or getattr(seq, "_cache", None) is not cache:
            return None
        states.append(seq._state)
    return states if states else None


cdef object plain_numbers(object numbers, int64_t n, int64_t total):
    """A list of n ints, or an int64 array of them, as an array of its own; None for all else.

    None is below 0, and they add up to ``total``, where that is not -1.
    """
    cdef int64_t[::1] view
    cdef int64_t i = 0, found = 0
    if type(numbers) is ndarray:
        if numbers.dtype != int64 or numbers.shape != (n,):
            return None
        numbers = numbers.tolist()
    elif type(numbers) is not list or len(numbers) != n:
        return None
    out = empty(n, int64)
    view = out
    for number in numbers:
        view[i] = plain_int(number, 0, 2**48)
        if view[i] < 0:
            return None
        found += view[i]
        i += 1
        if i == n:
            break                    # of a list that grew meanwhile
    return out if i == n and (total == -1 or found == total) else None
