/* From a call of attention to a launch: addresses as steps, the map of shared memory, the kernel.
 */
#ifndef PAGEDCACHE_CUDA_ATTENTION_LAUNCH_H
#define PAGEDCACHE_CUDA_ATTENTION_LAUNCH_H

#include "attention_tile.h"

/* Bytes of shared memory that let two CTAs of a large GPU's multiprocessor work side by side, and
 * what any GPU gives to a kernel that asks for more. */
constexpr int PC_SHARED_AIM = 100 << 10, PC_SHARED_ANYWHERE = 48 << 10;

inline int pc_log2_of_lanes(int units) {
    int log2 = 0;
    while (log2 < 5 && 1 << log2 < units) {
        log2++;
    }
    return log2;
}

/* At least `nbytes`, a multiple of 16, and `remainder` more than a multiple of `modulus`: rows that
 * are so far apart lie in different banks where a warp reads several of them. */
inline int pc_spread(int nbytes, int modulus, int remainder) {
    int step = (nbytes + 15) / 16 * 16;
    while (step % modulus != remainder) {
        step += 16;
    }
    return step;
}

/* How rows of a slab come to a stage: see pc_side. */
inline void pc_plan_rows(pc_side &side, const pc_geometry &g, uint64_t base, int kind) {
    const pc_format f = pc_format_of(g.code);
    const int groups = (int)((g.head_dim + PC_GROUP - 1) / PC_GROUP);
    const uint64_t blocks = base | (uint64_t)side.block_stride;
    const uint64_t rows = (g.num_heads > 1 ? (uint64_t)side.head_step : 0) |
                          (g.block_size > 1 ? (uint64_t)side.token_step : 0);
    const int apart = pc_unit_nbytes(rows | 16); /* what rows of a block are multiples of */
    int group_nbytes = f.group_size == 1 ? f.quant_nbytes * PC_GROUP : f.quant_nbytes;
    int nbytes = group_nbytes * groups; /* of whole groups */
    side.unit = pc_unit_nbytes(blocks | rows | (uint64_t)side.row_nbytes);
    if (f.packing == PC_PACK_INTERLEAVED) {
        group_nbytes += f.scale_nbytes;
        nbytes = side.row_nbytes;
        /* in which all of a plane's or block's rows lie, and not more */
        if (side.unit < 16 && pc_unit_nbytes(blocks | (uint64_t)g.plane_nbytes) == 16) {
            side.unit = 16;
            side.rounds = 1;
            nbytes += 16 - apart;
        }
    }
    side.units = (nbytes + side.unit - 1) / side.unit;
    side.lines = side.unit == 16 && !side.rounds && side.units * 16 == side.row_nbytes;
    side.lanes_log2 = pc_log2_of_lanes(side.units);
    nbytes = side.units * side.unit + (f.packing == PC_PACK_INTERLEAVED ? 4 : 0);
    side.row_step = kind == PC_V         ? pc_spread(nbytes, 64, 16)
                    : group_nbytes == 64 ? pc_spread(nbytes, 128, 64)
                    : group_nbytes == 32 ? pc_spread(nbytes, 128, 32)
                                         : pc_spread(nbytes, 128, 16);
}

inline void pc_plan_scales(pc_side &side, const pc_geometry &g, uint64_t base) {
    side.scale_nbytes = (int)(g.token_groups ? g.channel_nbytes : g.row_scale_nbytes);
    if (side.scale_nbytes == 0) {
        return;
    }
    const int groups = (int)((g.head_dim + PC_GROUP - 1) / PC_GROUP);
    const int whole = side.by_tokens ? groups * PC_GROUP * 4 : side.scale_nbytes;
    side.scale_unit = pc_unit_nbytes(base | (uint64_t)side.block_stride | (uint64_t)side.scales_at |
                                     (uint64_t)side.scale_head_step | (uint64_t)side.scale_step |
                                     (uint64_t)side.scale_nbytes);
    side.scale_units = whole / side.scale_unit;
    side.scale_lines = side.scale_unit == 16 && whole == side.scale_nbytes;
    side.scale_lanes_log2 = pc_log2_of_lanes(side.scale_units);
    side.scale_row_step = side.by_tokens ? 0 : (whole + 15) / 16 * 16;
}

inline pc_side pc_make_side(const pc_cuda_slab &slab, const pc_geometry &g, int kind) {
    pc_side side = {};
    const pc_address first = pc_row_address(&g, 0, 0, 0, 0);
    const pc_address head = pc_row_address(&g, 0, 0, 1, 0);
    const pc_address token = pc_row_address(&g, 0, 0, 0, 1);
    const pc_address group = pc_row_address(&g, 0, 0, 0, PC_GROUP);
    side.base = (uint8_t *)slab.slab;
    side.block_stride = slab.block_stride;
    side.head_step = head.data - first.data;
    side.token_step = token.data - first.data;
    side.by_tokens = g.token_groups > 0;
    side.scales_at = first.scales;
    side.scale_head_step = head.scales - first.scales;
    side.scale_step = (side.by_tokens ? group : token).scales - first.scales;
    side.code = g.code;
    side.row_nbytes = (int)g.row_data_nbytes;
    pc_plan_rows(side, g, (uint64_t)(uintptr_t)slab.slab, kind);
    pc_plan_scales(side, g, (uint64_t)(uintptr_t)slab.slab);
    return side;
}

/* Bytes of one stage, and what lies where in it. */
inline void pc_map_stage(pc_attention &call, int keys) {
    int at = 0;
    for (int kind = 0; kind < 2; kind++) {
        int rows = 0, scales = 0;
        for (const pc_side &side : call.sides[kind]) {
            const int scales_nbytes =
                side.by_tokens ? side.scale_units * side.scale_unit : keys * side.scale_row_step;
            rows = side.row_step > rows ? side.row_step : rows;
            scales = scales_nbytes > scales ? scales_nbytes : scales;
        }
        call.stage.rows_at[kind] = at;
        call.stage.scales_at[kind] = at + keys * rows;
        at += keys * rows + (scales + 15) / 16 * 16;
    }
    call.stage.sources_at = at;
    call.stage.nbytes = at + 4 * PC_KEYS * (int)sizeof(uint64_t);
}

/* Choose keys of a tile, warps and stages: as much as possible of each, in this order, in `limit`
 * bytes. Returns the bytes, 0 where nothing fits. */
inline int pc_choose_shape(pc_attention &call, int limit) {
    constexpr int shapes[][2] = {{4, 16}, {4, 8}, {2, 8}, {1, 8}}; /* warps, keys */
    const int queries = call.groups * (PC_STEPS * PC_WARP * 16 + PC_ROWS * 4);
    call.queries_nbytes = (queries + 15) / 16 * 16;
    for (const auto &shape : shapes) {
        call.warps = shape[0];
        call.keys = shape[1];
        pc_map_stage(call, call.keys);
        for (call.stages = PC_MOST_STAGES; call.stages > 1; call.stages--) {
            const int stages = call.warps * call.stages * call.stage.nbytes;
            const int parts = call.warps * PC_ROWS * (call.groups * PC_GROUP + 2) * 4;
            const int nbytes = call.queries_nbytes + (stages > parts ? stages : parts);
            if (nbytes <= limit) {
                return nbytes;
            }
        }
    }
    return 0;
}

/* The call as the kernel takes it, and its bytes of shared memory; or an error code. */
inline int pc_make_attention(pc_attention &call, const pc_cuda_attention &given, int &nbytes) {
    const pc_cuda_slab *const slabs[2][2] = {{&given.k, &given.open_k}, {&given.v, &given.open_v}};
    pc_geometry g;
    for (int kind = 0; kind < 2; kind++) {
        for (int where = 0; where < 2; where++) {
            const bool exists = slabs[kind][where]->geometry != nullptr;
            const pc_cuda_slab &slab = *slabs[kind][exists ? where : PC_SEALED];
            memcpy(&g, slab.geometry, sizeof g);
            if (g.head_dim > PC_MOST_HEAD_DIM) {
                return cudaErrorInvalidValue;
            }
            call.sides[kind][where] = pc_make_side(slab, g, kind);
        }
    }
    call.num_blocks = given.num_blocks;
    call.places = given.places;
    call.pointers[PC_K] = given.k_pointers;
    call.pointers[PC_V] = given.v_pointers;
    call.items = given.items;
    call.total = given.num_items * g.num_heads;
    call.block_size = pc_make_divisor(g.block_size);
    call.num_heads = (int)g.num_heads;
    call.group = (int)given.group;
    call.head_dim = (int)g.head_dim;
    call.groups = (int)((g.head_dim + PC_GROUP - 1) / PC_GROUP);
    call.has_open = given.open_k.geometry != nullptr || given.open_v.geometry != nullptr;
    const int32_t dtype = given.dtype;
    call.q = {(uint8_t *)given.q, given.q_strides[0], given.q_strides[1], given.q_strides[2],
              dtype};
    call.out = {(uint8_t *)given.out, given.out_strides[0], given.out_strides[1],
                given.out_strides[2], dtype};
    call.lse = given.lse;
    call.sinks = given.sinks;
    const bool caps = given.soft_cap > 0.0f;
    call.query_factor = caps ? given.scale / given.soft_cap : given.scale * 1.44269504f;
    call.cap = caps ? given.soft_cap * 1.44269504f : 0.0f; /* log2(e) */
    call.causal = given.causal;
    call.window = given.window;
    call.partials = given.partials;
    call.tickets = given.tickets;

    int device = 0, limit = 0;
    int error = cudaGetDevice(&device);
    if (error == cudaSuccess) {
        error = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    }
    if (error != cudaSuccess) {
        return error;
    }
    nbytes = pc_choose_shape(call, limit < PC_SHARED_AIM ? limit : PC_SHARED_AIM);
    if (nbytes == 0) {
        return cudaErrorInvalidValue;
    }
    /* A tile is of one block where blocks may be stored differently, or share scales. */
    const bool by_block = call.has_open || call.sides[PC_K][PC_SEALED].by_tokens ||
                          call.sides[PC_V][PC_SEALED].by_tokens;
    call.one_block = by_block || g.block_size % call.keys == 0;
    call.run_keys = by_block ? (int)g.block_size : call.keys;
    call.run = pc_make_divisor(call.run_keys);
    call.tiles_per_run = pc_make_divisor((call.run_keys + call.keys - 1) / call.keys);
    return cudaSuccess;
}

#endif
