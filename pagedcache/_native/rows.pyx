# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True
"""Slabs for native code: rows in, rows out, copies, with the GIL released.

The door's checks (dtype, rank, byte order, finiteness) are in ``pagedcache.storage``; what would
let an address leave a slab (codes, geometry, layer, shape, places, slots) is checked here, by
every call for itself and before it writes a byte.
"""
from cpython.buffer cimport (
    PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport calloc, free, malloc

from pagedcache._native.machine cimport pc_tools, pc_useful_threads, take_tools
from pagedcache._native.space cimport (
    PC_E_FORMAT, PC_FORMAT_bfloat16, PC_FORMAT_float16, PC_FORMAT_float32, PC_NUM_FORMATS, PC_OK,
    PC_OPEN, PC_SEALED, pc_buffer_values, pc_copy_block, pc_copy_tokens, pc_dtype_nbytes,
    pc_find_nonfinite, pc_geometry, pc_load_rows, pc_move_block, pc_num_places, pc_open_slab,
    pc_rows, pc_slab, pc_space_check, pc_space_init, pc_store_rows,
)
from pagedcache.errors import (
    BlockError, FormatError, InvalidArgumentError, InvalidPositionError, ShapeError, SlotError,
    StorageMemoryError,
)


cdef enum:
    STACK_VALUES = 2048  # float32 values of buffers that need no heap


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


cdef void close_tools(pc_tools *tools, float *small) noexcept:
    if tools.buffer != small:
        free(tools.buffer)


def find_nonfinite(array, int dtype):
    """Return the flat index of the first NaN or Inf of 3-D rows (as integers), or -1."""
    cdef Py_buffer view
    cdef pc_rows rows
    open_rows(array, dtype, 0, &view, &rows)
    try:
        return find_nonfinite_at(&rows, view.shape[0], view.shape[1], view.shape[2])
    finally:
        PyBuffer_Release(&view)


cdef int64_t find_nonfinite_at(const pc_rows *rows, int64_t n, int64_t num_heads,
                               int64_t head_dim) except -2:
    """The same of rows that are described already."""
    cdef pc_tools tools
    cdef int64_t index
    take_tools(&tools)
    with nogil:
        index = pc_find_nonfinite(&tools, rows, n, num_heads, head_dim)
    return index


cdef object open_slab(object array, int64_t block_nbytes, str what, Py_buffer *view):
    """Open the buffer of one slab, uint8 [n, block_nbytes]; the caller releases it."""
    PyObject_GetBuffer(array, view, PyBUF_STRIDES | PyBUF_WRITABLE)
    if (
        view.ndim != 2 or view.itemsize != 1 or view.shape[1] != block_nbytes
        or (view.strides[1] != 1 and view.shape[1] > 1)
    ):
        got = f"{[view.shape[i] for i in range(view.ndim)]}"
        PyBuffer_Release(view)
        raise ShapeError(f"[n, {block_nbytes}] bytes, dense inside a block", got, what)


cdef class Slabs:
    """The slabs of one kind (K or V): sealed and open blocks of every layer (space.h).

    ``sealed``: one uint8 ``[num_blocks, block_nbytes]`` per layer, writable, values of a block
    adjacent; kept alive by this object. ``format_code``: row of the format table. ``opened``:
    such arrays of the open slots, in the float format ``open_code``; an empty list for none.
    Ids are places and slots are place-slots, but where a function says otherwise.
    """

    def __cinit__(self, list sealed, int format_code, int layout, int64_t num_heads,
                  int64_t block_size, int64_t head_dim, list opened=None, int open_code=0):
        cdef int status = pc_space_check(format_code, open_code, layout, num_heads, block_size,
                                         head_dim)
        if status == PC_E_FORMAT:
            raise FormatError(f"a code below {PC_NUM_FORMATS}, and that of a float format to open",
                              (format_code, open_code), "format code")
        if status != PC_OK:
            raise InvalidArgumentError(
                f"no block has layout {layout}, {num_heads} heads, {block_size} tokens and "
                f"{head_dim} values per head")
        self.arrays = [list(sealed), list(opened or ())]  # kept, whatever becomes of the lists
        pc_space_init(&self.space, format_code, open_code, layout, num_heads, block_size,
                      head_dim, 0, 0)
        self.num_layers = <int> len(self.arrays[0])
        if self.arrays[1] and len(self.arrays[1]) != self.num_layers:
            raise ShapeError(f"{self.num_layers} arrays", len(self.arrays[1]), "open slabs")
        self.slabs = <pc_slab *> calloc(<size_t> self.num_layers, 2 * sizeof(pc_slab))
        if self.slabs == NULL:
            raise StorageMemoryError(self.num_layers * 2 * sizeof(pc_slab), "slab descriptors")
        self.space.num_blocks = self.describe(PC_SEALED, "slab of layer")
        self.space.num_open = self.describe(PC_OPEN, "open slab of layer")

    cdef int64_t describe(self, int where, str what) except -1:
        """Take over address and stride of the slabs of one side; returns their length."""
        cdef Py_buffer view
        cdef int layer
        cdef int64_t length = 0
        for layer, array in enumerate(self.arrays[where]):
            open_slab(array, self.space.geometry[where].block_nbytes, f"{what} {layer}", &view)
            if layer > 0 and view.shape[0] != length:
                PyBuffer_Release(&view)
                raise ShapeError(f"{length} blocks", view.shape[0], f"{what} {layer}")
            length = view.shape[0]
            if where == PC_OPEN:
                self.slabs[2 * layer + 1] = pc_open_slab(&self.space, <uint8_t *> view.buf,
                                                         view.strides[0])
            else:
                self.slabs[2 * layer].base = <uint8_t *> view.buf
                self.slabs[2 * layer].block_stride = view.strides[0]
            PyBuffer_Release(&view)
        return length

    def __dealloc__(self):
        free(self.slabs)

    @property
    def num_blocks(self):
        """Sealed blocks; the places from here on are open slots."""
        return self.space.num_blocks

    @property
    def num_places(self):
        """Sealed blocks and open slots."""
        return pc_num_places(&self.space)

    @property
    def block_nbytes(self):
        """Bytes of one sealed block in one layer, padding included."""
        return self.space.geometry[PC_SEALED].block_nbytes

    cdef int check_layer(self, int64_t layer) except -1:
        if not 0 <= layer < self.num_layers:
            raise InvalidArgumentError(f"layer: {layer} is outside 0…{self.num_layers - 1}")
        return 0

    cdef int check_shape(self, Py_buffer *view, int64_t num_tokens) except -1:
        cdef pc_geometry *geometry = &self.space.geometry[PC_SEALED]
        if (
            view.shape[0] != num_tokens or view.shape[1] != geometry.num_heads
            or view.shape[2] != geometry.head_dim
        ):
            raise ShapeError(
                [num_tokens, geometry.num_heads, geometry.head_dim],
                [view.shape[0], view.shape[1], view.shape[2]], "rows")
        return 0

    def check_slots(self, const int64_t[::1] slots, int64_t low=-1):
        """Raise SlotError for the first slot outside ``low … num_places * block_size - 1``."""
        self.check_slots_at(&slots[0] if slots.shape[0] > 0 else NULL, slots.shape[0], low)

    cdef int check_slots_at(self, const int64_t *slots, int64_t n, int64_t low) except -1:
        cdef int64_t i
        cdef int64_t end = pc_num_places(&self.space) * self.space.geometry[PC_SEALED].block_size
        for i in range(n):
            if slots[i] < low or slots[i] >= end:
                raise SlotError(slots[i], f"outside {low}…{end - 1} (index {i} of the mapping)")
        return 0

    def check_store(self, const int64_t[::1] slots):
        """Raise SlotError unless :meth:`store` may write these slots.

        They are in range, and where groups run along the tokens, those of a sealed block are
        all of that block's, in order.
        """
        self.check_store_at(&slots[0] if slots.shape[0] > 0 else NULL, slots.shape[0])

    cdef int check_store_at(self, const int64_t *slots, int64_t n) except -1:
        cdef int64_t i = 0, j, size = self.space.geometry[PC_SEALED].block_size
        cdef int64_t sealed = self.space.num_blocks * size
        self.check_slots_at(slots, n, -1)
        if not self.space.geometry[PC_SEALED].token_groups:
            return 0
        while i < n:
            if slots[i] < 0 or slots[i] >= sealed:
                i += 1
                continue
            for j in range(size):
                if slots[i] % size != 0 or i + j >= n or slots[i + j] != slots[i] + j:
                    raise SlotError(
                        slots[i], "a block whose scales run along its tokens is written whole: "
                        f"all {size} slots of it, in order (index {i} of the mapping)")
            i += size
        return 0

    def check_places(self, const int32_t[::1] places):
        """Raise BlockError for the first place outside ``0 … num_places - 1``."""
        cdef int64_t i, n = places.shape[0], end = pc_num_places(&self.space)
        for i in range(n):
            if places[i] < 0 or places[i] >= end:
                raise BlockError(places[i], f"outside 0…{end - 1} (index {i})")

    def check_copies(self, const int32_t[::1] src, const int32_t[::1] dst,
                     const int32_t[::1] rows):
        """Raise ShapeError, BlockError or InvalidPositionError unless :meth:`copy` may run."""
        cdef int64_t i, n = rows.shape[0], size = self.space.geometry[PC_SEALED].block_size
        cdef bint whole = self.space.geometry[PC_SEALED].token_groups > 0
        check_lengths(src.shape[0], dst.shape[0], "src and dst")
        check_lengths(src.shape[0], n, "src and rows")
        self.check_places(src)
        self.check_places(dst)
        for i in range(n):
            if rows[i] < 0 or rows[i] > size:
                raise InvalidPositionError(rows[i], size, f"token rows of copy {i}")
            if whole and 0 < rows[i] < size and dst[i] < self.space.num_blocks:
                raise InvalidPositionError(
                    rows[i], size, f"token rows of copy {i}: a block whose scales run along its "
                    "tokens is written whole")

    def check_copy_tokens(self, const int64_t[::1] src, const int64_t[::1] dst):
        """Raise ShapeError, SlotError or FormatError unless :meth:`copy_tokens` may run."""
        cdef int64_t i, n = dst.shape[0]
        cdef int64_t sealed = self.space.num_blocks * self.space.geometry[PC_SEALED].block_size
        check_lengths(src.shape[0], n, "src and dst")
        self.check_slots(src, 0)
        self.check_slots(dst, 0)
        if self.space.geometry[PC_SEALED].token_groups:
            for i in range(n):
                if dst[i] < sealed:
                    raise FormatError("an open block, or copies of whole blocks, as scales run "
                                      "along the tokens", f"slot {dst[i]} of a sealed block",
                                      f"dst of copy {i}")

    def store(self, int64_t layer, array, int dtype, const int64_t[::1] slots, int policy):
        """Store ``array[i]`` (3-D, as integers) at the slots; -1 skips a token.

        Returns 0, or the status of the first row that the format could not hold.
        """
        cdef Py_buffer view
        cdef pc_rows rows
        cdef int64_t n = slots.shape[0]
        self.check_layer(layer)
        open_rows(array, dtype, 0, &view, &rows)
        try:
            self.check_shape(&view, n)
            return self.store_at(layer, &rows, view.len, &slots[0] if n > 0 else NULL, n, policy)
        finally:
            PyBuffer_Release(&view)

    cdef int store_at(self, int64_t layer, const pc_rows *rows, int64_t nbytes,
                      const int64_t *slots, int64_t n, int policy) except -1:
        """:meth:`store` of n rows of the right shape, ``nbytes`` in all, in a layer that is."""
        cdef pc_tools tools
        cdef float small[STACK_VALUES]
        cdef int status
        self.check_store_at(slots, n)
        if n == 0:
            return PC_OK
        self.open_tools(&tools, small, nbytes)
        with nogil:
            status = pc_store_rows(&tools, &self.space, &self.slabs[2 * layer], rows, slots, n,
                                   policy)
        close_tools(&tools, small)
        return status

    def load(self, int64_t layer, const int32_t[::1] places, int64_t first, array, int dtype):
        """Fill ``array`` (3-D, as integers) with tokens ``first …`` of the places."""
        cdef Py_buffer view
        cdef pc_rows rows
        cdef pc_tools tools
        cdef float small[STACK_VALUES]
        cdef int64_t n, available
        self.check_layer(layer)
        open_rows(array, dtype, PyBUF_WRITABLE, &view, &rows)
        try:
            n = view.shape[0]
            self.check_shape(&view, n)
            available = places.shape[0] * self.space.geometry[PC_SEALED].block_size
            if first < 0 or first > available or n > available - first:
                raise InvalidPositionError(first, available, f"{n} tokens from there on")
            self.check_places(places)
            if n > 0:
                self.open_tools(&tools, small, view.len)
                with nogil:
                    pc_load_rows(&tools, &self.space, &self.slabs[2 * layer], &places[0], first,
                                 &rows, n)
                close_tools(&tools, small)
        finally:
            PyBuffer_Release(&view)

    cdef int open_tools(self, pc_tools *tools, float *small, int64_t nbytes) except -1:
        """Codec, threads and buffers for a call that moves ``nbytes`` outside rows: the buffers
        are the caller's stack, or on the heap if they are large."""
        cdef int64_t values
        take_tools(tools)
        tools.threads = pc_useful_threads(tools, nbytes)
        values = tools.threads * pc_buffer_values(&self.space)
        tools.buffer = small
        if values > STACK_VALUES:
            tools.buffer = <float *> malloc(<size_t> values * sizeof(float))
            if tools.buffer == NULL:
                raise StorageMemoryError(values * sizeof(float), "row buffers")
        return 0

    def copy(self, const int32_t[::1] src, const int32_t[::1] dst, const int32_t[::1] rows):
        """Copy the first ``rows[i]`` token rows of block ``src[i]`` to ``dst[i]``, every layer.

        From an open to a sealed place the rows are quantised, the other way round read back.
        """
        cdef pc_tools tools
        cdef float small[STACK_VALUES]
        cdef int64_t i, n = src.shape[0]
        cdef int layer
        self.check_copies(src, dst, rows)
        self.open_tools(&tools, small, 0)
        with nogil:
            for layer in range(self.num_layers):
                for i in range(n):
                    pc_copy_block(&tools, &self.space, &self.slabs[2 * layer], src[i], dst[i],
                                  rows[i])
        close_tools(&tools, small)

    def copy_tokens(self, const int64_t[::1] src, const int64_t[::1] dst):
        """Copy the token at slot ``src[i]`` to slot ``dst[i]``, every layer, as :meth:`copy`."""
        cdef pc_tools tools
        cdef float small[STACK_VALUES]
        cdef int64_t i, n = src.shape[0], size = self.space.geometry[PC_SEALED].block_size
        cdef int layer
        self.check_copy_tokens(src, dst)
        self.open_tools(&tools, small, 0)
        with nogil:
            for layer in range(self.num_layers):
                for i in range(n):
                    pc_copy_tokens(&tools, &self.space, &self.slabs[2 * layer], src[i] // size,
                                   src[i] % size, dst[i] // size, dst[i] % size, 1)
        close_tools(&tools, small)

    def move(self, const int32_t[::1] src, const int32_t[::1] dst, uint8_t[::1] scratch):
        """Move whole sealed blocks in every layer; -1 is ``scratch`` (at least block_nbytes)."""
        cdef int64_t i, n = src.shape[0]
        cdef int layer
        if scratch.shape[0] < self.space.geometry[PC_SEALED].block_nbytes:
            raise ShapeError(f"{self.space.geometry[PC_SEALED].block_nbytes} bytes",
                             scratch.shape[0], "scratch")
        check_lengths(n, dst.shape[0], "src and dst")
        self.check_moved(src)
        self.check_moved(dst)
        with nogil:
            for layer in range(self.num_layers):
                for i in range(n):
                    pc_move_block(&self.space.geometry[PC_SEALED], &self.slabs[2 * layer],
                                  &scratch[0], src[i], dst[i])

    cdef int check_moved(self, const int32_t[::1] ids) except -1:
        cdef int64_t i, n = ids.shape[0]
        for i in range(n):
            if ids[i] < -1 or ids[i] >= self.space.num_blocks:
                raise BlockError(ids[i], f"outside -1…{self.space.num_blocks - 1} (index {i})")
        return 0
