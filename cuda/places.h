/* Where rows lie in the pool, for the three ways to name them: by slot, to store; by a list of
 * blocks in token order, to load; by pairs of slots, to convert between two kinds of places.
 * Addresses come from pc_row_address() of geometry.h alone.
 */
#ifndef PAGEDCACHE_CUDA_PLACES_H
#define PAGEDCACHE_CUDA_PLACES_H

#include "units.h"
#include "walk.h"

/* A stored row; data is NULL where there is none. */
struct pc_place {
    uint8_t *data, *scales;
};

PC_DEVICE pc_place pc_place_at(const pc_geometry &geometry, uint8_t *slab, int64_t block_stride,
                               int64_t block, int64_t head, int64_t offset) {
    const pc_address at = pc_row_address(&geometry, block_stride, block, head, offset);
    const pc_place place = {slab + at.data, slab + at.scales};
    PC_ASSUME_GLOBAL(place.data);
    PC_ASSUME_GLOBAL(place.scales);
    return place;
}

/* The two ends of a row's way: its values outside (or in an open block), its bytes in the pool. */
struct pc_row_ends {
    uint8_t *outside;
    pc_place stored;
};

/* The first fault of a call: {code, where}, written by the thread that finds it first. */
PC_DEVICE void pc_report(void *fault, int code, int64_t where) {
    unsigned long long *const words = (unsigned long long *)fault;
    if (words != nullptr && atomicCAS(words, 0ULL, (unsigned long long)code) == 0ULL) {
        words[1] = (unsigned long long)where;
    }
}

/* ---- by slot --------------------------------------------------------------------------------- */

struct pc_store_call {
    pc_geometry geometry;
    pc_slab slab;
    pc_rows rows;
    pc_walk walk;
    pc_divisor block_size;
    int64_t num_slots;
    const int64_t *slots;
    void *fault;
    int policy;
};

PC_DEVICE pc_place pc_stored_place(const pc_store_call &call, const pc_spot &spot) {
    const int64_t slot = call.slots[spot.token];
    if (slot < 0 || slot >= call.num_slots) {
        if (slot != -1 && spot.head == 0 && spot.unit == 0) {
            pc_report(call.fault, PC_E_RANGE, slot);
        }
        return {nullptr, nullptr};
    }
    const int64_t block = pc_divide(slot, call.block_size);
    return pc_place_at(call.geometry, call.slab.base, call.slab.block_stride, block, spot.head,
                       slot - block * call.block_size.divisor);
}

PC_DEVICE pc_row_ends pc_ends_of_row(const pc_store_call &call, const pc_spot &spot) {
    return {pc_outside_row(call.rows, spot), pc_stored_place(call, spot)};
}

/* ---- by a list of blocks --------------------------------------------------------------------- */

struct pc_load_call {
    static constexpr bool clamps = false;
    pc_geometry geometry;
    pc_slab slab;
    pc_rows rows;
    pc_walk walk;
    pc_divisor block_size;
    int64_t first;
    const int32_t *block_ids;
    const uint64_t *block_pointers; /* instead of slab and ids, unless NULL */
};

PC_DEVICE pc_place pc_listed_place(const pc_load_call &call, const pc_spot &spot) {
    const int64_t position = call.first + spot.token;
    const int64_t index = pc_divide(position, call.block_size);
    const int64_t offset = position - index * call.block_size.divisor;
    uint8_t *slab = call.slab.base;
    int64_t block = 0;
    if (call.block_pointers != nullptr) {
        slab = (uint8_t *)(uintptr_t)call.block_pointers[index];
    } else {
        block = call.block_ids[index];
    }
    return pc_place_at(call.geometry, slab, call.slab.block_stride, block, spot.head, offset);
}

PC_DEVICE pc_row_ends pc_ends_of_row(const pc_load_call &call, const pc_spot &spot) {
    return {pc_outside_row(call.rows, spot), pc_listed_place(call, spot)};
}

/* ---- by pairs of slots ----------------------------------------------------------------------- */

/* Pair i is counts[i] token rows from one slot on at either end, in every slab. The walk's tokens
 * are most_rows for each pair of each slab; those from its count on are skipped. */
struct pc_convert_call {
    static constexpr bool clamps = true; /* what comes out goes into open blocks */
    static constexpr int policy = PC_NONFINITE_SATURATE;
    static constexpr void *fault = nullptr;
    pc_geometry geometry; /* of the stored end */
    pc_rows rows;         /* of the open end, inside a block: it has no base */
    const pc_slab *stored_slabs, *open_slabs;
    const int64_t *stored_slots, *open_slots;
    const int32_t *counts;
    pc_walk walk;
    pc_divisor block_size, most_rows, num_pairs;
};

/* First value of head 0 at a slot of an open slab. */
PC_DEVICE uint8_t *pc_open_row(const pc_convert_call &call, int64_t slab, int64_t slot) {
    const pc_slab open = call.open_slabs[slab];
    const int64_t block = pc_divide(slot, call.block_size);
    const int64_t offset = slot - block * call.block_size.divisor;
    uint8_t *const row = open.base + block * open.block_stride + offset * call.rows.token_stride;
    PC_ASSUME_GLOBAL(row);
    return row;
}

PC_DEVICE pc_row_ends pc_ends_of_row(const pc_convert_call &call, const pc_spot &spot) {
    const int64_t entry = pc_divide(spot.token, call.most_rows);
    const int64_t row = spot.token - entry * call.most_rows.divisor;
    const int64_t slab = pc_divide(entry, call.num_pairs);
    const int64_t pair = entry - slab * call.num_pairs.divisor;
    if (row >= call.counts[pair]) {
        return {nullptr, {nullptr, nullptr}};
    }
    const pc_slab stored = call.stored_slabs[slab];
    const int64_t slot = call.stored_slots[pair] + row;
    const int64_t block = pc_divide(slot, call.block_size);
    uint8_t *const open = pc_open_row(call, slab, call.open_slots[pair] + row);
    return {open + spot.head * call.rows.head_stride,
            pc_place_at(call.geometry, stored.base, stored.block_stride, block, spot.head,
                        slot - block * call.block_size.divisor)};
}

#endif
