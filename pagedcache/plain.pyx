# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True
"""Which arrays are plain: what native code reads and writes as it is, with nothing to convert.

Plain is an ``ndarray`` itself (no subclass, no tensor), of a dtype that rows come in, in this
machine's byte order, aligned, of rank 2 or 3. Whoever finds another array leaves it to
``pagedcache.arrays``, which converts it or says what is wrong with it.
"""
from cpython.buffer cimport PyBUF_STRIDES, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t, uintptr_t
from libc.stdlib cimport calloc, free

import numpy as np

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
        """Whether an array is plain, and what there is to know of it."""
        cdef Py_buffer view
        cdef int i
        if type(x) is not ndarray:
            return False
        code = codes().get(x.dtype)
        if code is None:
            return False
        PyObject_GetBuffer(x, &view, PyBUF_STRIDES)
        found.ndim = view.ndim
        if 2 <= view.ndim <= 3 and aligned(&view):
            found.code = code
            for i in range(view.ndim):
                found.shape[i] = view.shape[i]
            found.bytes = extent(&view)
            found.writable = not view.readonly
            found.dense = dense(&view)
        else:
            found.ndim = 0
        PyBuffer_Release(&view)
        return found.ndim > 0

    cdef bint look_at_rows(self, object x, int64_t num_tokens, plain_t *found) except -1:
        """:meth:`look` for K or V ``[num_tokens, heads, head_dim]`` or with both axes in one."""
        if not self.look(x, found) or found.shape[0] != num_tokens:
            return False
        if found.ndim == 2:
            return found.shape[1] == self.num_heads * self.head_dim
        return found.shape[1] == self.num_heads and found.shape[2] == self.head_dim

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

    cdef object as_rows(self, object x, const plain_t *found, int64_t num_heads):
        """The array with an axis for heads and one for values; no copy."""
        if found.ndim == 3:
            return x
        return x.reshape(found.shape[0], num_heads, self.head_dim)
