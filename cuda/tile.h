/* A tile: 32 groups that one warp converts together, in shared memory of its own.
 *
 * Threads touch global memory side by side, but a group is encoded and decoded by one thread alone,
 * with the very function of the format table. The tile turns the one order into the other. Row i of
 * the tile belongs to the group of lane i. Rows are 36 words apart, so that both the accesses along
 * the groups and those of a lane to its own group spread over all banks.
 *
 * A row holds the group's 32 float32 values, or, before or after them, its stored bytes: the quants
 * at PC_QUANTS_AT, where 16-byte accesses fit, and an interleaved scale right before them.
 */
#ifndef PAGEDCACHE_CUDA_TILE_H
#define PAGEDCACHE_CUDA_TILE_H

#include "places.h"
#include "values.h"

constexpr int PC_TILE_ROW_NBYTES = 144;
constexpr int PC_TILE_NBYTES = PC_WARP * PC_TILE_ROW_NBYTES;
constexpr int PC_QUANTS_AT = 16;
constexpr int PC_TILE_WARPS = 4; /* of a CTA */
constexpr int PC_TILE_CTAS = 4;  /* at least, on a multiprocessor: 128 registers a thread */

/* One group of the tile: where its values are outside, where its bytes are in the pool. */
struct pc_tile_group {
    uint8_t *outside; /* first value */
    uint8_t *stored;  /* first byte: the scale where it is interleaved, else the first quant */
    int count;        /* of values; 0: nothing is to be done */
};

struct pc_tile {
    uint8_t *rows;
    pc_tile_group *groups;
    int lane;
};

/* This warp's tile; to be used once in a kernel whose CTAs have PC_TILE_WARPS warps. */
#define PC_THIS_TILE(name)                                                         \
    PC_SHARED(uint4, name##_rows, PC_TILE_WARPS *PC_TILE_NBYTES / 16);             \
    PC_SHARED(pc_tile_group, name##_groups, PC_TILE_WARPS *PC_WARP);               \
    const int name##_warp = (int)threadIdx.x / PC_WARP;                            \
    const pc_tile name = {(uint8_t *)(name##_rows) + name##_warp * PC_TILE_NBYTES, \
                          name##_groups + name##_warp * PC_WARP, (int)threadIdx.x % PC_WARP}

/* Another lane's group. */
PC_DEVICE pc_tile_group pc_tile_group_of(const pc_tile &tile, int group) {
    const pc_tile_group found = tile.groups[group];
    PC_ASSUME_GLOBAL(found.outside);
    PC_ASSUME_GLOBAL(found.stored);
    return found;
}

PC_DEVICE uint8_t *pc_tile_row(const pc_tile &tile, int group) {
    return tile.rows + group * PC_TILE_ROW_NBYTES;
}

/* ---- values: outside rows to the tile and back ----------------------------------------------- */

/* The dtype outside, as a constant where COUNT tells it: 4 values at once are float32. */
template <int COUNT> PC_DEVICE int pc_tile_dtype(const pc_rows &rows) {
    return COUNT == 4 ? (int)PC_FORMAT_float32 : rows.dtype;
}

/* COUNT values as they lie outside: 16 bytes, or those of one value. */
template <int COUNT> using pc_outside_unit = pc_unit<COUNT == 1 ? 4 : 16>;

template <int COUNT>
PC_DEVICE pc_outside_unit<COUNT> pc_load_outside(const pc_rows &rows, const uint8_t *at) {
    if constexpr (COUNT > 1) {
        return pc_load_unit<16>(at);
    } else {
        return rows.dtype == PC_FORMAT_float32 ? pc_load_bytes<4>(at) : pc_load_bytes<2>(at);
    }
}

/* Fill the tile with the groups' values, COUNT of them in one access; places behind a group's last
 * value get zeros. Loads are started together, up to 8: a thread that converts one before it starts
 * the next waits for the memory each time. */
template <int COUNT> PC_DEVICE void pc_tile_load_values(const pc_tile &tile, const pc_rows &rows) {
    constexpr int per_group = PC_GROUP / COUNT;
    constexpr int steps = per_group < 8 ? per_group : 8;
    for (int first = 0; first < per_group; first += steps) {
        pc_outside_unit<COUNT> units[steps] = {};
        PC_UNROLL
        for (int i = 0; i < steps; i++) {
            const int unit = (first + i) * PC_WARP + tile.lane;
            const int value = unit % per_group * COUNT;
            const pc_tile_group group = pc_tile_group_of(tile, unit / per_group);
            if (value < group.count) {
                units[i] = pc_load_outside<COUNT>(rows, group.outside + value * rows.value_stride);
            }
        }
        PC_UNROLL
        for (int i = 0; i < steps; i++) {
            const int unit = (first + i) * PC_WARP + tile.lane;
            const int value = unit % per_group * COUNT;
            uint8_t *const to = pc_tile_row(tile, unit / per_group) + value * sizeof(float);
            float values[COUNT];
            pc_widen_values<COUNT>(pc_tile_dtype<COUNT>(rows), units + i, values);
            pc_store_values<COUNT>(PC_FORMAT_float32, to, values);
        }
    }
}

/* Write the groups' values where they belong outside. */
template <int COUNT> PC_DEVICE void pc_tile_store_values(const pc_tile &tile, const pc_rows &rows) {
    constexpr int per_group = PC_GROUP / COUNT;
    PC_UNROLL_BY(8)
    for (int step = 0; step < per_group; step++) {
        const int unit = step * PC_WARP + tile.lane;
        const int value = unit % per_group * COUNT;
        const pc_tile_group group = pc_tile_group_of(tile, unit / per_group);
        if (value >= group.count) {
            continue;
        }
        const uint8_t *const from = pc_tile_row(tile, unit / per_group) + value * sizeof(float);
        uint8_t *const to = group.outside + value * rows.value_stride;
        float values[COUNT];
        pc_load_values<COUNT>(PC_FORMAT_float32, from, values);
        pc_store_values<COUNT>(pc_tile_dtype<COUNT>(rows), to, values);
    }
}

/* ---- stored bytes: the pool to the tile and back --------------------------------------------- */

/* How the stored bytes of a group of Format are moved: everything but planar scales. */
template <class Format> struct pc_stored_group {
    static constexpr bool planar = Format::packing == PC_PACK_PLANAR;
    static constexpr int nbytes = Format::quant_nbytes + (planar ? 0 : Format::scale_nbytes);
    static constexpr int unit = pc_unit_nbytes(nbytes);
    static constexpr int units = nbytes / unit;
    static constexpr int at = PC_QUANTS_AT - (planar ? 0 : Format::scale_nbytes);
};

/* All loads are started before the first one is waited for. */
template <class Format> PC_DEVICE void pc_tile_load_stored(const pc_tile &tile) {
    using group_of = pc_stored_group<Format>;
    pc_unit<group_of::unit> units[group_of::units] = {};
    PC_UNROLL
    for (int i = 0; i < group_of::units; i++) {
        const int unit = i * PC_WARP + tile.lane;
        const int byte = unit % group_of::units * group_of::unit;
        const pc_tile_group group = pc_tile_group_of(tile, unit / group_of::units);
        if (group.count > 0) {
            units[i] = pc_load_bytes<group_of::unit>(group.stored + byte);
        }
    }
    PC_UNROLL
    for (int i = 0; i < group_of::units; i++) {
        const int unit = i * PC_WARP + tile.lane;
        const int byte = unit % group_of::units * group_of::unit;
        pc_store_unit<group_of::unit>(
            pc_tile_row(tile, unit / group_of::units) + group_of::at + byte, units[i]);
    }
}

template <class Format> PC_DEVICE void pc_tile_store_stored(const pc_tile &tile) {
    using group_of = pc_stored_group<Format>;
    PC_UNROLL_BY(4)
    for (int unit = tile.lane; unit < PC_WARP * group_of::units; unit += PC_WARP) {
        const int g = unit / group_of::units;
        const int byte = unit % group_of::units * group_of::unit;
        const pc_tile_group group = pc_tile_group_of(tile, g);
        if (group.count > 0) {
            pc_store_bytes<group_of::unit>(
                group.stored + byte,
                pc_load_unit<group_of::unit>(pc_tile_row(tile, g) + group_of::at + byte));
        }
    }
}

/* ---- one lane's own row ---------------------------------------------------------------------- */

template <int NBYTES> PC_DEVICE void pc_tile_read(const uint8_t *from, void *to) {
    uint4 units[NBYTES / 16];
    PC_UNROLL
    for (int i = 0; i < NBYTES / 16; i++) {
        units[i] = pc_load_unit<16>(from + 16 * i);
    }
    memcpy(to, units, NBYTES);
}

template <int NBYTES> PC_DEVICE void pc_tile_write(uint8_t *to, const void *from) {
    uint4 units[NBYTES / 16];
    memcpy(units, from, NBYTES);
    PC_UNROLL
    for (int i = 0; i < NBYTES / 16; i++) {
        pc_store_unit<16>(to + 16 * i, units[i]);
    }
}

#endif
