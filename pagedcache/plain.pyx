# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True
"""Which arrays are plain: what native code reads and writes as it is, with nothing to convert.

Plain is an ``ndarray`` itself (no subclass, no tensor), of a dtype that rows come in, in this
machine's byte order, aligned, of rank 2 or 3. Whoever finds another array leaves it to
``pagedcache.arrays``, which converts it or says what is wrong with it.
"""
from cpython.buffer cimport PyBUF_STRIDES, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t, uint8_t, uintptr_t
from libc.stdlib cimport calloc, free

import numpy as np

from pagedcache._native.space cimport pc_rows
from pagedcache.arrays import row_dtypes
from pagedcache.errors import StorageMemoryError

cdef object ndarray = np.ndarray
cdef dict known = {}                 # dtype -> code of its format


cdef dict codes():
    """Made when first asked for: see row_dtypes()."""
    if not known:
        known.update({dtype: fmt.code for dtype, fmt in row_dtypes().items()})
    return known


cdef extent_t extent(const Py_buffer *view) noexcept:
    """The bytes that an array may touch."""
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


cdef bint dense(const Py_buffer *view) noexcept:
    cdef int64_t stride = view.itemsize
    cdef int i = view.ndim
    while i > 0:
        i -= 1
        if view.shape[i] > 1 and view.strides[i] != stride:
            return False
        stride *= view.shape[i]
    return True


cdef void close_plain(plain_t *found) noexcept:
    """Let go of an array that was looked at; nothing where it was not."""
    if found.held:
        PyBuffer_Release(&found.view)


cdef bint overlap(const extent_t *a, const extent_t *b) noexcept:
    return a.low < b.high and b.low < a.high


cdef class PlainArrays:
    """Looks at arrays for one cache. ``storage``: a ``CpuStorage``, which is not kept."""

    def __init__(self, storage):
        spec = storage.spec
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

    cdef bint look(self, object x, plain_t *found) except -1:
        """Whether an array is plain, and what there is to know of it, to be closed either way."""
        found.held = False
        if type(x) is not ndarray:
            return False
        code = codes().get(x.dtype)
        if code is None:
            return False
        PyObject_GetBuffer(x, &found.view, PyBUF_STRIDES)
        found.held = True
        found.code = code
        found.ndim = found.view.ndim
        found.bytes = extent(&found.view)
        found.dense = dense(&found.view)
        return 2 <= found.ndim <= 3 and aligned(&found.view)

    cdef bint look_at_rows(self, object x, int64_t num_tokens, plain_t *found) except -1:
        """:meth:`look` for K or V ``[num_tokens, heads, head_dim]`` or with both axes in one."""
        cdef const Py_buffer *view = &found.view
        if not self.look(x, found) or view.shape[0] != num_tokens:
            return False
        if found.ndim == 2:
            return view.shape[1] == self.num_heads * self.head_dim
        return view.shape[1] == self.num_heads and view.shape[2] == self.head_dim

    cdef bint apart(self, const plain_t *found, int64_t layer) noexcept:
        """Whether an array lies outside the slabs of a layer; of all layers for -1."""
        cdef int64_t i = 0, end = self.num_layers * self.num_slabs
        if layer >= 0:
            i = layer * self.num_slabs
            end = i + self.num_slabs
        while i < end:
            if overlap(&found.bytes, &self.slabs[i]):
                return False
            i += 1
        return True

    cdef pc_rows rows_of(self, const plain_t *found) noexcept:
        """K or V as native code takes it."""
        cdef pc_rows rows
        cdef int last = found.ndim - 1
        rows.base = <uint8_t *> found.view.buf
        rows.token_stride = found.view.strides[0]
        rows.value_stride = found.view.strides[last]
        rows.head_stride = (found.view.strides[1] if last == 2
                            else self.head_dim * rows.value_stride)
        rows.dtype = found.code
        return rows

    cdef object as_rows(self, object x, const plain_t *found, int64_t num_heads):
        """The array with an axis for heads and one for values; no copy."""
        if found.ndim == 3:
            return x
        return x.reshape(found.view.shape[0], num_heads, self.head_dim)
