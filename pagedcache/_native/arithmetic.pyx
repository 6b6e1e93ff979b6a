# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The format table, and encoding and decoding of contiguous values, with the GIL released.

``data`` is a run of values stored as one row whose scales, if they lie apart, start at byte
``scale_offset``. What would let an address leave an array is refused here, whatever the callers
(``formats``, ``arithmetic``, ``spec``) checked: ``FormatError`` for a code that is not in the
table, ``ShapeError`` for values that ``data`` does not hold, ``InvalidArgumentError`` for a
geometry that no block has.
"""

from libc.stdint cimport int64_t, uint8_t

from pagedcache._native.machine cimport pc_tools, take_tools
from pagedcache.errors import FormatError, InvalidArgumentError, ShapeError

cdef extern from *:
    """
    #include "pagedcache/flat.h"
    #include "pagedcache/geometry.h"

    typedef struct {
        int code;
        const char *name;
        pc_format row;
    } pc_named_format;

    #define PC_NAMED(code, name, group, quant, scale, axis, pack, open, encode, decode) \\
        {code, #name, {group, quant, scale, axis, pack, open}},
    static const pc_named_format pc_named_formats[] = {PC_FORMATS(PC_NAMED)};

    typedef struct {
        int code;
        const char *name;
        const char *text;
    } pc_named_status;

    #define PC_NAMED_STATUS(name, value, text) {value, #name, text},
    static const pc_named_status pc_named_statuses[] = {PC_STATUS_CODES(PC_NAMED_STATUS)};
    enum { PC_NUM_STATUSES = sizeof pc_named_statuses / sizeof *pc_named_statuses };
    """
    ctypedef struct pc_format:
        int group_size
        int quant_nbytes
        int scale_nbytes
        int group_axis
        int packing
        int open_format

    ctypedef struct pc_named_format:
        int code
        const char *name
        pc_format row

    ctypedef struct pc_named_status:
        int code
        const char *name
        const char *text

    ctypedef struct pc_geometry:
        int64_t row_data_nbytes
        int64_t row_scale_nbytes
        int64_t plane_rows
        int64_t plane_nbytes
        int64_t scale_offset
        int64_t block_nbytes
        int64_t token_groups
        int64_t channel_nbytes

    ctypedef struct pc_address:
        int64_t data
        int64_t scales

    const pc_named_format *pc_named_formats
    const pc_named_status *pc_named_statuses
    int PC_NUM_FORMATS
    int PC_NUM_STATUSES
    int PC_OK
    int PC_E_FORMAT

    int pc_flat_check(int code, int64_t nbytes, int64_t scale_offset, int64_t num_values) nogil
    int pc_geometry_check(int code, int layout, int64_t num_heads, int64_t block_size,
                          int64_t head_dim) nogil
    int pc_flat_encode(const pc_tools *tools, int code, const float *values, int64_t num_values,
                       uint8_t *data, uint8_t *scales, int policy) nogil
    void pc_flat_decode(const pc_tools *tools, int code, const uint8_t *data,
                        const uint8_t *scales, int64_t num_values, float *values) nogil
    void pc_flat_read(const pc_tools *tools, int code, const uint8_t *data, const uint8_t *scales,
                      int64_t offset, int64_t length, float *dst) nogil
    int pc_flat_write(const pc_tools *tools, int code, uint8_t *data, uint8_t *scales,
                      int64_t num_values, int64_t offset, int64_t length, const float *src,
                      int policy) nogil
    void pc_geometry_init(pc_geometry *g, int code, int layout, int64_t num_heads,
                          int64_t block_size, int64_t head_dim) nogil
    pc_address pc_row_address(const pc_geometry *g, int64_t block_stride_nbytes, int64_t block,
                              int64_t head, int64_t offset) nogil


def format_table():
    """Return the rows of the format table as dicts, in the order of their codes."""
    cdef int i
    return [
        dict(pc_named_formats[i].row, code=pc_named_formats[i].code,
             name=pc_named_formats[i].name.decode())
        for i in range(PC_NUM_FORMATS)
    ]


def status_table():
    """Return {code: (name, text)} of the native status codes."""
    cdef int i
    return {
        pc_named_statuses[i].code: (pc_named_statuses[i].name.decode(),
                                    pc_named_statuses[i].text.decode())
        for i in range(PC_NUM_STATUSES)
    }


cdef int check_values(int code, int64_t nbytes, int64_t scale_offset, int64_t offset,
                      int64_t count, int64_t num_values) except -1:
    """Values offset … offset + count of num_values that lie in nbytes bytes, or an exception."""
    cdef int status = pc_flat_check(code, nbytes, scale_offset, num_values)
    if status == PC_E_FORMAT:
        raise FormatError(f"a code below {PC_NUM_FORMATS}", code, "format code")
    if status != PC_OK:
        raise ShapeError(f"room for {num_values} values",
                         f"{nbytes} bytes, scales from byte {scale_offset} on", "data")
    if offset < 0 or count > num_values or offset > num_values - count:
        raise ShapeError(f"a range inside {num_values} values", f"{count} from {offset} on",
                         "range")
    return 0


cdef int check_geometry(int code, int layout, int64_t num_heads, int64_t block_size,
                        int64_t head_dim) except -1:
    cdef int status = pc_geometry_check(code, layout, num_heads, block_size, head_dim)
    if status == PC_E_FORMAT:
        raise FormatError(f"a code below {PC_NUM_FORMATS}", code, "format code")
    if status != PC_OK:
        raise InvalidArgumentError(
            f"no block has layout {layout}, {num_heads} heads, {block_size} tokens and "
            f"{head_dim} values per head")
    return 0


def encode(int code, const float[::1] src, uint8_t[::1] data, int64_t scale_offset, int policy):
    """Store all of `src` from the start of `data`; returns a status code."""
    cdef int status = 0
    cdef pc_tools tools
    check_values(code, data.shape[0], scale_offset, 0, src.shape[0], src.shape[0])
    if src.shape[0]:
        take_tools(&tools)
        with nogil:
            status = pc_flat_encode(&tools, code, &src[0], src.shape[0], &data[0],
                                    &data[0] + scale_offset, policy)
    return status


def decode(int code, const uint8_t[::1] data, int64_t scale_offset, float[::1] dst):
    """Read the first values of `data` until `dst` is full."""
    cdef pc_tools tools
    check_values(code, data.shape[0], scale_offset, 0, dst.shape[0], dst.shape[0])
    if dst.shape[0]:
        take_tools(&tools)
        with nogil:
            pc_flat_decode(&tools, code, &data[0], &data[0] + scale_offset, dst.shape[0], &dst[0])


def flat_read(int code, const uint8_t[::1] data, int64_t scale_offset, int64_t offset,
              float[::1] dst):
    """Read values offset … offset + len(dst)."""
    cdef pc_tools tools
    if offset < 0 or offset > 2 * data.shape[0]:
        raise ShapeError(f"an offset inside {data.shape[0]} bytes of values", offset, "offset")
    check_values(code, data.shape[0], scale_offset, offset, dst.shape[0], offset + dst.shape[0])
    if dst.shape[0]:
        take_tools(&tools)
        with nogil:
            pc_flat_read(&tools, code, &data[0], &data[0] + scale_offset, offset, dst.shape[0],
                         &dst[0])


def flat_write(int code, uint8_t[::1] data, int64_t scale_offset, int64_t num_values,
               int64_t offset, const float[::1] src, int policy):
    """Replace values offset … offset + len(src) of num_values; returns a status code."""
    cdef int status = 0
    cdef pc_tools tools
    check_values(code, data.shape[0], scale_offset, offset, src.shape[0], num_values)
    if src.shape[0]:
        take_tools(&tools)
        with nogil:
            status = pc_flat_write(&tools, code, &data[0], &data[0] + scale_offset, num_values,
                                   offset, src.shape[0], &src[0], policy)
    return status


def block_geometry(int code, int layout, int64_t num_heads, int64_t block_size,
                   int64_t head_dim):
    """Return the sizes of one block of one layer and kind as a dict of ints.

    ``token_groups``: groups along the tokens per head and channel, 0 where groups lie inside
    rows; ``channel_nbytes``: scales of one of them for all channels.
    """
    cdef pc_geometry g
    check_geometry(code, layout, num_heads, block_size, head_dim)
    pc_geometry_init(&g, code, layout, num_heads, block_size, head_dim)
    return {
        "row_data_nbytes": g.row_data_nbytes,
        "row_scale_nbytes": g.row_scale_nbytes,
        "plane_rows": g.plane_rows,
        "plane_nbytes": g.plane_nbytes,
        "scale_offset": g.scale_offset,
        "block_nbytes": g.block_nbytes,
        "token_groups": g.token_groups,
        "channel_nbytes": g.channel_nbytes,
    }


def row_address(int code, int layout, int64_t num_heads, int64_t block_size, int64_t head_dim,
                int64_t block_stride_nbytes, int64_t block, int64_t head, int64_t offset):
    """Return the byte offsets (data, scales) of one row in a slab.

    Where groups run along the tokens, scales is that of the row's token group and channel 0.
    """
    cdef pc_geometry g
    cdef pc_address address
    check_geometry(code, layout, num_heads, block_size, head_dim)
    pc_geometry_init(&g, code, layout, num_heads, block_size, head_dim)
    address = pc_row_address(&g, block_stride_nbytes, block, head, offset)
    return address.data, address.scales
