# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True
"""The short way through ``PagedKVCache.store``, for calls in which everything is plain.

A step of a small model stores a few hundred bytes a layer, and checks in Python would take longer
than the bytes. The door looks at all arguments in one pass and answers one question: is every one
of them of the kind that needs no conversion? Then the ledger pins and the native loops store, as
on the long way. Anything else it declines before it changes anything, and the long way does, or
refuses, what it is. So the door raises no errors of its own, and none is worded twice.
"""
from cpython.buffer cimport PyBUF_STRIDES, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t, uintptr_t
from libc.stdlib cimport calloc, free

import numpy as np

from pagedcache._native.rows import find_nonfinite
from pagedcache.arrays import row_dtypes
from pagedcache.bookkeeping import SlotMapping
from pagedcache.errors import StorageMemoryError
from pagedcache.formats import get_policy
from pagedcache.storage.base import RAISE

cdef object ndarray = np.ndarray

cdef struct extent_t:                # the bytes that an array may touch: low <= address < high
    uintptr_t low
    uintptr_t high


cdef extent_t extent(const Py_buffer *view) noexcept:
    cdef extent_t found
    cdef int64_t reach
    cdef int i
    found.low = found.high = <uintptr_t> view.buf
    for i in range(view.ndim):
        if view.shape[i] == 0:
            found.high = found.low
            return found
        reach = view.strides[i] * (view.shape[i] - 1)
        if reach < 0:
            found.low += <uintptr_t> reach
        else:
            found.high += <uintptr_t> reach
    found.high += <uintptr_t> view.itemsize
    return found


cdef bint aligned(const Py_buffer *view) noexcept:
    """Whether every value is at a multiple of its size, as NumPy's flag says it."""
    cdef uintptr_t bits = <uintptr_t> view.buf
    cdef int i
    for i in range(view.ndim):
        if view.shape[i] > 1:
            bits |= <uintptr_t> view.strides[i]
    return bits & <uintptr_t> (view.itemsize - 1) == 0


cdef class Door:
    """The door of one cache whose layers are all in the CPU's memory.

    ``ledger``: pins. ``storage``: a ``CpuStorage``; the door keeps its slabs, not itself.
    """
    cdef object pin_mapping, num_slots
    cdef object first, second        # Slabs, in the order in which they are written
    cdef bint first_is_k, looks_at_k, looks_at_v
    cdef int policy
    cdef int num_slabs
    cdef int64_t num_layers, num_heads, head_dim
    cdef extent_t *slabs             # of a layer, one after the other: what no row may lie in

    def __init__(self, ledger, storage):
        spec = storage.spec
        self.pin_mapping = ledger.pin_mapping
        (kind, self.first), (_, self.second) = storage.native_slabs()
        self.first_is_k = kind == "k"
        self.policy = get_policy(spec.on_nonfinite)
        self.looks_at_k = self.policy == RAISE and spec.k_format.is_quantized
        self.looks_at_v = self.policy == RAISE and spec.v_format.is_quantized
        self.num_layers = spec.num_layers
        self.num_heads = spec.num_kv_heads
        self.head_dim = spec.head_dim
        self._bound([storage.arrays_of(layer) for layer in range(spec.num_layers)])

    cdef int _bound(self, list layers) except -1:
        cdef Py_buffer view
        cdef int64_t i = 0
        self.num_slabs = <int> len(layers[0])
        free(self.slabs)
        self.slabs = <extent_t *> calloc(<size_t> (self.num_layers * self.num_slabs),
                                         sizeof(extent_t))
        if self.slabs == NULL:
            raise StorageMemoryError(self.num_layers * self.num_slabs * sizeof(extent_t),
                                     "slab descriptors")
        for arrays in layers:
            for array in arrays:
                PyObject_GetBuffer(array, &view, PyBUF_STRIDES)
                self.slabs[i] = extent(&view)
                PyBuffer_Release(&view)
                i += 1
        return 0

    def __dealloc__(self):
        free(self.slabs)

    cdef object _rows(self, object x, int64_t layer, int64_t num_tokens, dict codes, int *code):
        """``x`` as ``[num_tokens, heads, head_dim]`` with the code of its dtype, or None."""
        cdef Py_buffer view
        cdef extent_t bytes_of
        cdef int i
        cdef bint plain
        cdef int64_t values = self.num_heads * self.head_dim
        if type(x) is not ndarray:
            return None
        fmt = codes.get(x.dtype)
        if fmt is None:
            return None
        code[0] = fmt
        PyObject_GetBuffer(x, &view, PyBUF_STRIDES)
        if view.ndim == 3:
            plain = view.shape[1] == self.num_heads and view.shape[2] == self.head_dim
        else:
            plain = view.ndim == 2 and view.shape[1] == values
        plain = plain and view.shape[0] == num_tokens and aligned(&view)
        if plain:
            bytes_of = extent(&view)
            for i in range(self.num_slabs):
                if (bytes_of.low < self.slabs[layer * self.num_slabs + i].high
                        and self.slabs[layer * self.num_slabs + i].low < bytes_of.high):
                    plain = False
        i = view.ndim
        PyBuffer_Release(&view)
        if not plain:
            return None
        return x if i == 3 else x.reshape(num_tokens, self.num_heads, self.head_dim)

    def store(self, layer, k, v, mapping):
        """``PagedKVCache.store`` of a plain call -> True; False if it is none, and nothing done.

        Raises what the ledger raises about the mapping.
        """
        cdef int64_t at, num_tokens
        cdef int k_code = 0, v_code = 0
        if type(layer) is not int or type(mapping) is not SlotMapping:
            return False
        if not 0 <= layer < self.num_layers:
            return False
        at = layer
        num_tokens = len(mapping)
        cdef dict codes = row_codes()
        k = self._rows(k, at, num_tokens, codes, &k_code)
        if k is None:
            return False
        v = self._rows(v, at, num_tokens, codes, &v_code)
        if v is None:
            return False
        if self.looks_at_k and find_nonfinite(k, k_code) >= 0:
            return False
        if self.looks_at_v and find_nonfinite(v, v_code) >= 0:
            return False
        pin = self.pin_mapping(mapping)
        try:
            slots = pin.slots
            if self.first_is_k:
                return not (self.first.store(at, k, k_code, slots, self.policy)
                            or self.second.store(at, v, v_code, slots, self.policy))
            return not (self.first.store(at, v, v_code, slots, self.policy)
                        or self.second.store(at, k, k_code, slots, self.policy))
        finally:
            pin.release()


cdef dict _codes = {}


cdef dict row_codes():
    """Codes of the dtypes that rows come in; made when first asked for (see row_dtypes())."""
    if not _codes:
        _codes.update({dtype: fmt.code for dtype, fmt in row_dtypes().items()})
    return _codes
