/* Copies inside the slabs of all layers: blocks, single tokens, moves through a scratch block, and
 * filling blocks with a byte. */
#include "abi.h"
#include "columns.h"

namespace {

/* ---- blocks, or their first rows ------------------------------------------------------------- */

struct block_pairs {
    const int32_t *src, *dst, *rows;
    int64_t n;
    int in_order;
    pc_divisor plane;
};

/* How many bytes of the column belong to the block's first `rows` token rows: those are a piece of
 * quants and a piece of scales in each plane. */
PC_DEVICE int64_t kept_bytes(const pc_geometry &g, const pc_divisor &plane, int64_t at,
                             int64_t rows) {
    const int64_t in_plane = at - pc_divide(at, plane) * plane.divisor;
    const int64_t plane_rows = g.layout == PC_HND ? rows : rows * g.num_heads;
    if (g.row_scale_nbytes > 0 && in_plane >= g.scale_offset) {
        return g.scale_offset + plane_rows * g.row_scale_nbytes - in_plane;
    }
    return plane_rows * g.row_data_nbytes - in_plane;
}

template <int WIDTH>
PC_DEVICE void copy_rows(const pc_column_call &call, const block_pairs &pairs, const pc_slab &slab,
                         int64_t pair, int64_t first) {
    const uint8_t *const from = slab.base + pc_block_offset(&call.geometry, &slab, pairs.src[pair]);
    uint8_t *const to = slab.base + pc_block_offset(&call.geometry, &slab, pairs.dst[pair]);
    PC_UNROLL_BY(1)
    for (int i = 0; i < PC_COLUMNS; i++) {
        const int64_t at = (first + i * pc_num_threads()) * WIDTH;
        if (at >= call.geometry.block_nbytes) {
            break;
        }
        const int64_t kept = kept_bytes(call.geometry, pairs.plane, at, pairs.rows[pair]);
        if (kept >= WIDTH) {
            pc_store_bytes<WIDTH>(to + at, pc_load_bytes<WIDTH>(from + at));
        } else {
            PC_UNROLL_BY(1)
            for (int64_t byte = 0; byte < kept; byte++) {
                to[at + byte] = from[at + byte];
            }
        }
    }
}

template <int WIDTH>
__global__ void __launch_bounds__(PC_CTA, PC_CTAS)
    copy_blocks(const pc_column_call call, const block_pairs pairs) {
    const int64_t start = pairs.in_order ? 0 : blockIdx.y;
    const int64_t step = pairs.in_order ? 1 : gridDim.y;
    pc_for_columns<PC_COLUMNS>(call, [&](const pc_slab &slab, int64_t first) {
        for (int64_t pair = start; pair < pairs.n; pair += step) {
            if (pairs.rows[pair] == call.geometry.block_size) {
                pc_columns<WIDTH> columns;
                columns.load(call, slab, pairs.src[pair], first);
                columns.store(call, slab, pairs.dst[pair], first);
            } else {
                copy_rows<WIDTH>(call, pairs, slab, pair, first);
            }
        }
    });
}

/* ---- single tokens --------------------------------------------------------------------------- */

struct token_pairs {
    const int64_t *src, *dst;
    int64_t n;
    pc_divisor block_size, row_columns; /* columns of one row: its quants, then its scales */
};

/* Address of byte `at` of a row, counted through its quants and then its scales. */
PC_DEVICE uint8_t *row_byte(const pc_geometry &g, const pc_slab &slab, const pc_divisor &block_size,
                            int64_t slot, int64_t head, int64_t at) {
    const int64_t block = pc_divide(slot, block_size);
    const int64_t offset = slot - block * block_size.divisor;
    const pc_address row = pc_row_address(&g, slab.block_stride, block, head, offset);
    return slab.base +
           (at < g.row_data_nbytes ? row.data + at : row.scales + at - g.row_data_nbytes);
}

template <int WIDTH>
__global__ void __launch_bounds__(PC_CTA, PC_CTAS)
    copy_tokens(const pc_column_call call, const token_pairs pairs) {
    pc_for_columns<1>(call, [&](const pc_slab &slab, int64_t column) {
        const int64_t head = pc_divide(column, pairs.row_columns);
        const int64_t at = (column - head * pairs.row_columns.divisor) * WIDTH;
        for (int64_t pair = 0; pair < pairs.n; pair++) {
            const uint8_t *const from =
                row_byte(call.geometry, slab, pairs.block_size, pairs.src[pair], head, at);
            uint8_t *const to =
                row_byte(call.geometry, slab, pairs.block_size, pairs.dst[pair], head, at);
            pc_store_bytes<WIDTH>(to, pc_load_bytes<WIDTH>(from));
        }
    });
}

/* ---- moves through a scratch block ----------------------------------------------------------- */

/* Each thread holds its columns of the scratch block in registers. */
template <int WIDTH>
__global__ void __launch_bounds__(PC_CTA, PC_CTAS)
    move_blocks(const pc_column_call call, const int32_t *moves, int64_t m) {
    pc_for_columns<PC_COLUMNS>(call, [&](const pc_slab &slab, int64_t first) {
        pc_columns<WIDTH> scratch = {};
        for (int64_t move = 0; move < m; move++) {
            const int64_t src = moves[2 * move], dst = moves[2 * move + 1];
            pc_columns<WIDTH> columns = scratch;
            if (src >= 0) {
                columns.load(call, slab, src, first);
            }
            if (dst >= 0) {
                columns.store(call, slab, dst, first);
            } else {
                scratch = columns;
            }
        }
    });
}

/* ---- filling --------------------------------------------------------------------------------- */

template <int WIDTH>
__global__ void __launch_bounds__(PC_CTA, PC_CTAS)
    fill_blocks(const pc_column_call call, const int32_t *ids, int64_t n, uint8_t byte) {
    pc_columns<WIDTH> columns;
    PC_UNROLL
    for (int i = 0; i < PC_COLUMNS; i++) {
        memset(&columns.units[i], byte, WIDTH);
    }
    pc_for_columns<PC_COLUMNS>(call, [&](const pc_slab &slab, int64_t first) {
        for (int64_t i = blockIdx.y; i < n; i += gridDim.y) {
            columns.store(call, slab, ids[i], first);
        }
    });
}

} // namespace

int pc_cuda_copy_blocks(const void *geometry, const void *slabs, int num_slabs, const int32_t *src,
                        const int32_t *dst, const int32_t *rows, int64_t n, int in_order,
                        void *stream) {
    if (n <= 0 || num_slabs <= 0) {
        return cudaSuccess;
    }
    pc_column_call call = pc_make_column_call(geometry, slabs, num_slabs);
    const pc_geometry &g = call.geometry;
    const int width = pc_unit_nbytes((uint64_t)g.plane_nbytes | (uint64_t)g.scale_offset);
    call.num_columns = g.block_nbytes / width;
    const block_pairs pairs = {src, dst, rows, n, in_order, pc_make_divisor(g.plane_nbytes)};
    const dim3 grid = pc_column_grid<PC_COLUMNS>(call, in_order ? 1 : n);
    return PC_LAUNCH_WIDTH(copy_blocks, width, grid, stream, call, pairs);
}

int pc_cuda_copy_tokens(const void *geometry, const void *slabs, int num_slabs, const int64_t *src,
                        const int64_t *dst, int64_t n, void *stream) {
    if (n <= 0 || num_slabs <= 0) {
        return cudaSuccess;
    }
    pc_column_call call = pc_make_column_call(geometry, slabs, num_slabs);
    const pc_geometry &g = call.geometry;
    const int width = pc_unit_nbytes((uint64_t)g.row_data_nbytes | (uint64_t)g.row_scale_nbytes);
    const int64_t row_columns = (g.row_data_nbytes + g.row_scale_nbytes) / width;
    call.num_columns = g.num_heads * row_columns;
    const token_pairs pairs = {src, dst, n, pc_make_divisor(g.block_size),
                               pc_make_divisor(row_columns)};
    return PC_LAUNCH_WIDTH(copy_tokens, width, pc_column_grid<1>(call, 1), stream, call, pairs);
}

int pc_cuda_move_blocks(const void *geometry, const void *slabs, int num_slabs,
                        const int32_t *moves, int64_t m, void *stream) {
    if (m <= 0 || num_slabs <= 0) {
        return cudaSuccess;
    }
    pc_column_call call = pc_make_column_call(geometry, slabs, num_slabs);
    const int width = pc_unit_nbytes((uint64_t)call.geometry.block_nbytes);
    call.num_columns = call.geometry.block_nbytes / width;
    return PC_LAUNCH_WIDTH(move_blocks, width, pc_column_grid<PC_COLUMNS>(call, 1), stream, call,
                           moves, m);
}

int pc_cuda_fill_blocks(const void *geometry, const void *slabs, int num_slabs, const int32_t *ids,
                        int64_t n, int byte, void *stream) {
    if (n <= 0 || num_slabs <= 0) {
        return cudaSuccess;
    }
    pc_column_call call = pc_make_column_call(geometry, slabs, num_slabs);
    const int width = pc_unit_nbytes((uint64_t)call.geometry.block_nbytes);
    call.num_columns = call.geometry.block_nbytes / width;
    const dim3 grid = pc_column_grid<PC_COLUMNS>(call, n);
    return PC_LAUNCH_WIDTH(fill_blocks, width, grid, stream, call, ids, n, (uint8_t)byte);
}
