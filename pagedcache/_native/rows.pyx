# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True
"""Slabs for native code: rows in, rows out, copies, with the GIL released.

The door's checks (dtype, rank, byte order, finiteness) are in ``pagedcache.storage``; what would
let an address leave a slab (codes, geometry, layer, shape, ids, slots) is checked here, by every
call for itself and before it writes a byte.
"""
from cpython.buffer cimport (
    PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport calloc, free, malloc

from pagedcache.errors import (
    BlockError, FormatError, InvalidArgumentError, InvalidPositionError, ShapeError, SlotError,
    StorageMemoryError,
)

cdef extern from "pagedcache/rows.h" nogil:
    int PC_OK
    int PC_E_FORMAT
    int PC_NUM_FORMATS
    int PC_FORMAT_float32
    int PC_FORMAT_float16
    int PC_FORMAT_bfloat16

    ctypedef struct pc_geometry:
        int64_t num_heads
        int64_t block_size
        int64_t head_dim
        int64_t block_nbytes

    ctypedef struct pc_slab:
        uint8_t *base
        int64_t block_stride

    ctypedef struct pc_rows:
        uint8_t *base
        int64_t token_stride
        int64_t head_stride
        int64_t value_stride
        int dtype

    int pc_geometry_check(int code, int layout, int64_t num_heads, int64_t block_size,
                          int64_t head_dim)
    void pc_geometry_init(pc_geometry *geometry, int code, int layout, int64_t num_heads,
                          int64_t block_size, int64_t head_dim)
    int64_t pc_dtype_nbytes(int dtype)
    int pc_store_rows(const pc_geometry *geometry, const pc_slab *slab, const pc_rows *rows,
                      const int64_t *slots, int64_t n, int policy, float *buffer)
    void pc_load_rows(const pc_geometry *geometry, const pc_slab *slab, const int32_t *block_ids,
                      int64_t first, const pc_rows *rows, int64_t n, float *buffer)
    int64_t pc_find_nonfinite(const pc_rows *rows, int64_t n, int64_t num_heads,
                              int64_t head_dim)
    void pc_copy_tokens(const pc_geometry *geometry, const pc_slab *slab, int64_t src_block,
                        int64_t src_offset, int64_t dst_block, int64_t dst_offset, int64_t count)
    void pc_copy_block(const pc_geometry *geometry, const pc_slab *slab, int64_t src, int64_t dst,
                       int64_t rows)
    void pc_move_block(const pc_geometry *geometry, const pc_slab *slab, uint8_t *scratch,
                       int64_t src, int64_t dst)


cdef enum:
    STACK_VALUES = 1024  # float32 rows up to this head_dim need no heap


cdef int open_rows(object array, int dtype, int flags, Py_buffer *view, pc_rows *rows) except -1:
    """Describe a 3-D array of 2- or 4-byte integers as rows; the caller releases `view`."""
    if dtype not in (PC_FORMAT_float32, PC_FORMAT_float16, PC_FORMAT_bfloat16):
        raise FormatError("the code of a float format", dtype, "dtype code")
    PyObject_GetBuffer(array, view, PyBUF_STRIDES | flags)
    if view.ndim != 3 or view.itemsize != pc_dtype_nbytes(dtype):
        PyBuffer_Release(view)
        raise ShapeError(f"rank 3 of {pc_dtype_nbytes(dtype)}-byte values",
                         f"rank {view.ndim} of {view.itemsize}-byte values", "rows")
    rows.base = <uint8_t *> view.buf
    rows.token_stride = view.strides[0]
    rows.head_stride = view.strides[1]
    rows.value_stride = view.strides[2]
    rows.dtype = dtype
    return 0


cdef int check_lengths(int64_t first, int64_t second, str what) except -1:
    if first != second:
        raise ShapeError(f"{what} of one length", [first, second], "copies")
    return 0


def find_nonfinite(array, int dtype):
    """Return the flat index of the first NaN or Inf of 3-D rows (as integers), or -1."""
    cdef Py_buffer view
    cdef pc_rows rows
    cdef int64_t index
    open_rows(array, dtype, 0, &view, &rows)
    try:
        with nogil:
            index = pc_find_nonfinite(&rows, view.shape[0], view.shape[1], view.shape[2])
    finally:
        PyBuffer_Release(&view)
    return index


cdef class Slabs:
    """The slabs of one kind (K or V), one per layer, all of one geometry.

    ``arrays``: one uint8 ``[num_blocks, block_nbytes]`` per layer, writable, values of a block
    adjacent; kept alive by this object. ``format_code``: row of the format table.
    """

    cdef pc_geometry geometry
    cdef pc_slab *slabs
    cdef list arrays
    cdef readonly int64_t num_blocks
    cdef readonly int num_layers

    def __cinit__(self, list arrays, int format_code, int layout, int64_t num_heads,
                  int64_t block_size, int64_t head_dim):
        cdef Py_buffer view
        cdef int layer
        cdef int status = pc_geometry_check(format_code, layout, num_heads, block_size, head_dim)
        if status == PC_E_FORMAT:
            raise FormatError(f"a code below {PC_NUM_FORMATS}", format_code, "format code")
        if status != PC_OK:
            raise InvalidArgumentError(
                f"no block has layout {layout}, {num_heads} heads, {block_size} tokens and "
                f"{head_dim} values per head")
        arrays = list(arrays)             # kept alive below, whatever happens to the caller's list
        pc_geometry_init(&self.geometry, format_code, layout,
                         num_heads, block_size, head_dim)
        self.num_layers = <int> len(arrays)
        self.slabs = <pc_slab *> calloc(<size_t> self.num_layers, sizeof(pc_slab))
        if self.slabs == NULL:
            raise StorageMemoryError(self.num_layers * sizeof(pc_slab), "slab descriptors")
        for layer, array in enumerate(arrays):
            PyObject_GetBuffer(array, &view, PyBUF_STRIDES | PyBUF_WRITABLE)
            try:
                if (
                    view.ndim != 2 or view.itemsize != 1
                    or view.shape[1] != self.geometry.block_nbytes
                    or (view.strides[1] != 1 and view.shape[1] > 1)
                    or (layer > 0 and view.shape[0] != self.num_blocks)
                ):
                    raise ShapeError(
                        f"[num_blocks, {self.geometry.block_nbytes}] bytes, dense inside a block",
                        f"{[view.shape[i] for i in range(view.ndim)]}", f"slab of layer {layer}")
                self.num_blocks = view.shape[0]
                self.slabs[layer].base = <uint8_t *> view.buf
                self.slabs[layer].block_stride = view.strides[0]
            finally:
                PyBuffer_Release(&view)
        self.arrays = arrays

    def __dealloc__(self):
        free(self.slabs)

    @property
    def block_nbytes(self):
        """Bytes of one block in one layer, padding included."""
        return self.geometry.block_nbytes

    cdef int check_layer(self, int64_t layer) except -1:
        if not 0 <= layer < self.num_layers:
            raise InvalidArgumentError(f"layer: {layer} is outside 0…{self.num_layers - 1}")
        return 0

    cdef int check_shape(self, Py_buffer *view, int64_t num_tokens) except -1:
        if (
            view.shape[0] != num_tokens or view.shape[1] != self.geometry.num_heads
            or view.shape[2] != self.geometry.head_dim
        ):
            raise ShapeError(
                [num_tokens, self.geometry.num_heads, self.geometry.head_dim],
                [view.shape[0], view.shape[1], view.shape[2]], "rows")
        return 0

    def check_slots(self, const int64_t[::1] slots, int64_t low=-1):
        """Raise SlotError for the first slot outside ``low … num_blocks * block_size - 1``."""
        cdef int64_t i, n = slots.shape[0]
        cdef int64_t end = self.num_blocks * self.geometry.block_size
        for i in range(n):
            if slots[i] < low or slots[i] >= end:
                raise SlotError(slots[i], f"outside {low}…{end - 1} (index {i} of the mapping)")

    def check_ids(self, const int32_t[::1] ids, int64_t low=0):
        """Raise BlockError for the first id outside ``low … num_blocks - 1``."""
        cdef int64_t i, n = ids.shape[0]
        for i in range(n):
            if ids[i] < low or ids[i] >= self.num_blocks:
                raise BlockError(ids[i], f"outside {low}…{self.num_blocks - 1} (index {i})")

    def check_copies(self, const int32_t[::1] src, const int32_t[::1] dst,
                     const int32_t[::1] rows):
        """Raise ShapeError, BlockError or InvalidPositionError unless :meth:`copy` may run."""
        cdef int64_t i, n = rows.shape[0]
        check_lengths(src.shape[0], dst.shape[0], "src and dst")
        check_lengths(src.shape[0], n, "src and rows")
        self.check_ids(src)
        self.check_ids(dst)
        for i in range(n):
            if rows[i] < 0 or rows[i] > self.geometry.block_size:
                raise InvalidPositionError(rows[i], self.geometry.block_size,
                                           f"token rows of copy {i}")

    def store(self, int64_t layer, array, int dtype, const int64_t[::1] slots, int policy):
        """Store ``array[i]`` (3-D, as integers) at the slots; -1 skips a token.

        Returns 0, or the status of the first row that the format could not hold.
        """
        cdef Py_buffer view
        cdef pc_rows rows
        cdef float small[STACK_VALUES]
        cdef float *buffer = NULL
        cdef int64_t n = slots.shape[0]
        cdef int status = PC_OK
        self.check_layer(layer)
        open_rows(array, dtype, 0, &view, &rows)
        try:
            self.check_shape(&view, n)
            self.check_slots(slots)
            if n > 0:
                buffer = self.row_buffer(small)
                with nogil:
                    status = pc_store_rows(&self.geometry, &self.slabs[layer], &rows, &slots[0],
                                           n, policy, buffer)
        finally:
            if buffer != small:
                free(buffer)
            PyBuffer_Release(&view)
        return status

    def load(self, int64_t layer, const int32_t[::1] block_ids, int64_t first, array, int dtype):
        """Fill ``array`` (3-D, as integers) with tokens ``first …`` of the ids."""
        cdef Py_buffer view
        cdef pc_rows rows
        cdef float small[STACK_VALUES]
        cdef float *buffer = NULL
        cdef int64_t n, available
        self.check_layer(layer)
        open_rows(array, dtype, PyBUF_WRITABLE, &view, &rows)
        try:
            n = view.shape[0]
            self.check_shape(&view, n)
            available = block_ids.shape[0] * self.geometry.block_size
            if first < 0 or first > available or n > available - first:
                raise InvalidPositionError(first, available, f"{n} tokens from there on")
            self.check_ids(block_ids)
            if n > 0:
                buffer = self.row_buffer(small)
                with nogil:
                    pc_load_rows(&self.geometry, &self.slabs[layer], &block_ids[0], first, &rows,
                                 n, buffer)
        finally:
            if buffer != small:
                free(buffer)
            PyBuffer_Release(&view)

    cdef float *row_buffer(self, float *small) except NULL:
        """One float32 row for a whole call: the caller's stack, or the heap for long rows."""
        cdef float *buffer
        if self.geometry.head_dim <= STACK_VALUES:
            return small
        buffer = <float *> malloc(<size_t> self.geometry.head_dim * sizeof(float))
        if buffer == NULL:
            raise StorageMemoryError(self.geometry.head_dim * sizeof(float), "a row buffer")
        return buffer

    def copy(self, const int32_t[::1] src, const int32_t[::1] dst, const int32_t[::1] rows):
        """Copy the first ``rows[i]`` token rows of block ``src[i]`` to ``dst[i]``, every layer."""
        cdef int64_t i, n = src.shape[0]
        cdef int layer
        self.check_copies(src, dst, rows)
        with nogil:
            for layer in range(self.num_layers):
                for i in range(n):
                    pc_copy_block(&self.geometry, &self.slabs[layer], src[i], dst[i], rows[i])

    def copy_tokens(self, const int64_t[::1] src, const int64_t[::1] dst):
        """Copy the token at slot ``src[i]`` to slot ``dst[i]``, every layer."""
        cdef int64_t i, n = src.shape[0], size = self.geometry.block_size
        cdef int layer
        check_lengths(n, dst.shape[0], "src and dst")
        self.check_slots(src, 0)
        self.check_slots(dst, 0)
        with nogil:
            for layer in range(self.num_layers):
                for i in range(n):
                    pc_copy_tokens(&self.geometry, &self.slabs[layer], src[i] // size,
                                   src[i] % size, dst[i] // size, dst[i] % size, 1)

    def move(self, const int32_t[::1] src, const int32_t[::1] dst, uint8_t[::1] scratch):
        """Move whole blocks in every layer; id -1 is ``scratch`` (at least block_nbytes)."""
        cdef int64_t i, n = src.shape[0]
        cdef int layer
        if scratch.shape[0] < self.geometry.block_nbytes:
            raise ShapeError(f"{self.geometry.block_nbytes} bytes", scratch.shape[0], "scratch")
        check_lengths(n, dst.shape[0], "src and dst")
        self.check_ids(src, -1)
        self.check_ids(dst, -1)
        with nogil:
            for layer in range(self.num_layers):
                for i in range(n):
                    pc_move_block(&self.geometry, &self.slabs[layer], &scratch[0], src[i], dst[i])
