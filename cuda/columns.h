/* Blocks as columns of bytes, so that copies which must happen one after the other still run in
 * parallel: a copy moves each column of a block to the same column of another, so no column depends
 * on a second one, and the thread that owns a column does all its copies in order.
 *
 * A column is 16 bytes wide, or as much of it as divides what the copy is made of.
 */
#ifndef PAGEDCACHE_CUDA_COLUMNS_H
#define PAGEDCACHE_CUDA_COLUMNS_H

#include "divide.h"
#include "pagedcache/rows.h"
#include "units.h"

/* Columns of a block that a thread copies at once: it starts all loads before it waits for one. */
constexpr int PC_COLUMNS = 4;

/* The part of a call that all kernels over columns share. */
struct pc_column_call {
    pc_geometry geometry;
    const pc_slab *slabs;
    int num_slabs;
    int64_t num_columns;
};

inline pc_column_call pc_make_column_call(const void *geometry, const void *slabs, int num_slabs) {
    pc_column_call call = {};
    memcpy(&call.geometry, geometry, sizeof call.geometry);
    call.slabs = (const pc_slab *)slabs;
    call.num_slabs = num_slabs;
    return call;
}

/* Grid: columns along x, AT_ONCE to a thread; list entries that need no order along y; slabs along
 * z. */
template <int AT_ONCE> dim3 pc_column_grid(const pc_column_call &call, int64_t num_parallel) {
    return dim3(pc_grid(call.num_columns, PC_CTA * AT_ONCE), pc_rounds(num_parallel),
                pc_rounds(call.num_slabs));
}

/* Call visit(slab, column) for this thread's slabs and columns. With AT_ONCE more than one,
 * `column` is the first of them and the others, where they exist, are pc_num_threads() apart. */
template <int AT_ONCE, class Visit>
PC_DEVICE void pc_for_columns(const pc_column_call &call, const Visit &visit) {
    for (int s = (int)blockIdx.z; s < call.num_slabs; s += (int)gridDim.z) {
        const pc_slab slab = call.slabs[s];
        PC_ASSUME_GLOBAL(slab.base);
        for (int64_t column = pc_thread(); column < call.num_columns;
             column += AT_ONCE * pc_num_threads()) {
            visit(slab, column);
        }
    }
}

/* This thread's columns of a block, in registers. */
template <int WIDTH> struct pc_columns {
    pc_unit<WIDTH> units[PC_COLUMNS];

    PC_DEVICE void load(const pc_column_call &call, const pc_slab &slab, int64_t block,
                        int64_t first) {
        const uint8_t *const base = slab.base + pc_block_offset(&call.geometry, &slab, block);
        PC_UNROLL
        for (int i = 0; i < PC_COLUMNS; i++) {
            const int64_t column = first + i * pc_num_threads();
            if (column < call.num_columns) {
                units[i] = pc_load_bytes<WIDTH>(base + column * WIDTH);
            }
        }
    }

    PC_DEVICE void store(const pc_column_call &call, const pc_slab &slab, int64_t block,
                         int64_t first) const {
        uint8_t *const base = slab.base + pc_block_offset(&call.geometry, &slab, block);
        PC_UNROLL
        for (int i = 0; i < PC_COLUMNS; i++) {
            const int64_t column = first + i * pc_num_threads();
            if (column < call.num_columns) {
                pc_store_bytes<WIDTH>(base + column * WIDTH, units[i]);
            }
        }
    }
};

#endif
