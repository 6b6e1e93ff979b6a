/* Rows out: stored rows in token order, by block table or by pointer table, to outside values. */
#include "abi.h"
#include "launch_rows.h"

namespace {

/* ---- same dtype inside and outside: bits are copied ------------------------------------------ */

template <int NBYTES>
__global__ void __launch_bounds__(PC_CTA, PC_CTAS) load_bits(const pc_load_call call) {
    for (int64_t index = pc_thread(); index < call.walk.total; index += pc_num_threads()) {
        const pc_spot spot = pc_spot_of(call.walk, index);
        const uint8_t *const from = pc_listed_place(call, spot).data;
        uint8_t *const to = pc_outside_row(call.rows, spot);
        pc_unit<NBYTES> units[PC_BATCH];
        PC_UNROLL
        for (int i = 0; i < PC_BATCH; i++) {
            const int64_t unit = pc_unit_of(call.walk, spot, i);
            if (unit < call.walk.units) {
                units[i] = pc_load_bytes<NBYTES>(from + unit * NBYTES);
            }
        }
        PC_UNROLL
        for (int i = 0; i < PC_BATCH; i++) {
            const int64_t unit = pc_unit_of(call.walk, spot, i);
            if (unit < call.walk.units) {
                pc_store_bytes<NBYTES>(to + unit * call.rows.value_stride, units[i]);
            }
        }
    }
}

/* ---- another float format: COUNT neighbours at a time ---------------------------------------- */

template <class Format, int COUNT>
__global__ void __launch_bounds__(PC_CTA, PC_CTAS) load_dense(const pc_load_call call) {
    constexpr int nbytes = COUNT * Format::quant_nbytes;
    for (int64_t index = pc_thread(); index < call.walk.total; index += pc_num_threads()) {
        const pc_spot spot = pc_spot_of(call.walk, index);
        const uint8_t *const from = pc_listed_place(call, spot).data;
        uint8_t *const to = pc_outside_row(call.rows, spot);
        pc_unit<nbytes> units[PC_BATCH];
        PC_UNROLL
        for (int i = 0; i < PC_BATCH; i++) {
            const int64_t unit = pc_unit_of(call.walk, spot, i);
            if (unit < call.walk.units) {
                units[i] = pc_load_bytes<nbytes>(from + unit * nbytes);
            }
        }
        PC_UNROLL
        for (int i = 0; i < PC_BATCH; i++) {
            const int64_t unit = pc_unit_of(call.walk, spot, i);
            if (unit >= call.walk.units) {
                continue;
            }
            uint8_t bytes[nbytes];
            float values[COUNT];
            memcpy(bytes, units + i, nbytes);
            PC_UNROLL
            for (int value = 0; value < COUNT; value++) {
                Format::decode(bytes + value * Format::quant_nbytes, bytes, values + value);
            }
            pc_store_values<COUNT>(call.rows.dtype, to + unit * COUNT * call.rows.value_stride,
                                   values);
        }
    }
}

/* ---- quantised formats: 32 groups by a warp -------------------------------------------------- */

template <class Format, int COUNT>
__global__ void __launch_bounds__(PC_TILE_WARPS *PC_WARP, PC_TILE_CTAS)
    load_groups(const pc_load_call call) {
    PC_THIS_TILE(tile);
    const int64_t warp = pc_thread() / PC_WARP, num_warps = pc_num_threads() / PC_WARP;
    uint8_t *const row = pc_tile_row(tile, tile.lane);
    for (int64_t start = warp * PC_WARP; start < call.walk.total; start += num_warps * PC_WARP) {
        const int64_t index = start + tile.lane;
        pc_tile_group group = {nullptr, nullptr, 0};
        uint8_t scale[Format::scale_nbytes] = {0};
        if (index < call.walk.total) {
            const pc_spot spot = pc_spot_of(call.walk, index);
            const pc_place place = pc_listed_place(call, spot);
            const int64_t left = call.geometry.head_dim - spot.unit * PC_GROUP;
            group.count = left < PC_GROUP ? (int)left : PC_GROUP;
            group.outside =
                pc_outside_row(call.rows, spot) + spot.unit * PC_GROUP * call.rows.value_stride;
            group.stored = place.data + spot.unit * pc_stored_group<Format>::nbytes;
            if constexpr (pc_stored_group<Format>::planar) {
                const auto unit = pc_load_bytes<Format::scale_nbytes>(
                    place.scales + spot.unit * Format::scale_nbytes);
                memcpy(scale, &unit, sizeof scale);
            }
        }
        __syncwarp(); /* the tile before this one has left */
        tile.groups[tile.lane] = group;
        __syncwarp();
        pc_tile_load_stored<Format>(tile);
        __syncwarp();
        if (group.count > 0) {
            uint8_t quants[Format::quant_nbytes];
            float values[PC_GROUP];
            pc_tile_read<Format::quant_nbytes>(row + PC_QUANTS_AT, quants);
            if constexpr (!pc_stored_group<Format>::planar) {
                const auto unit =
                    pc_load_unit<Format::scale_nbytes>(row + pc_stored_group<Format>::at);
                memcpy(scale, &unit, sizeof scale);
            }
            Format::decode(quants, scale, values);
            pc_tile_write<sizeof values>(row, values);
        }
        __syncwarp();
        pc_tile_store_values<COUNT>(tile, call.rows);
    }
}

struct load_kernels {
    template <int NBYTES> static constexpr auto bits = load_bits<NBYTES>;
    template <class Format, int COUNT> static constexpr auto dense = load_dense<Format, COUNT>;
    template <class Format, int COUNT> static constexpr auto groups = load_groups<Format, COUNT>;
};

} // namespace

int pc_cuda_load(const void *geometry, const void *slab, int64_t block_stride,
                 const int32_t *block_ids, const uint64_t *block_pointers, int64_t first,
                 void *rows, int64_t token_stride, int64_t head_stride, int64_t value_stride,
                 int dtype, int64_t num_tokens, void *stream) {
    pc_load_call call = {};
    memcpy(&call.geometry, geometry, sizeof call.geometry);
    call.slab = {(uint8_t *)slab, block_stride};
    call.rows = {(uint8_t *)rows, token_stride, head_stride, value_stride, dtype};
    call.block_size = pc_make_divisor(call.geometry.block_size);
    call.first = first;
    call.block_ids = block_ids;
    call.block_pointers = block_pointers;
    return pc_launch_rows<load_kernels>(call, num_tokens, stream);
}
