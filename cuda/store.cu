/* Rows in: outside values to the stored format, scattered by slot, in one pass. */
#include "abi.h"
#include "launch_rows.h"

namespace {

/* ---- same dtype inside and outside: bits are copied ------------------------------------------ */

template <int NBYTES>
__global__ void __launch_bounds__(PC_CTA, PC_CTAS) store_bits(const pc_store_call call) {
    for (int64_t index = pc_thread(); index < call.walk.total; index += pc_num_threads()) {
        const pc_spot spot = pc_spot_of(call.walk, index);
        const uint8_t *const from = pc_outside_row(call.rows, spot);
        const pc_place place = pc_stored_place(call, spot);
        pc_unit<NBYTES> units[PC_BATCH];
        PC_UNROLL
        for (int i = 0; i < PC_BATCH; i++) {
            const int64_t unit = pc_unit_of(call.walk, spot, i);
            if (unit < call.walk.units) {
                units[i] = pc_load_bytes<NBYTES>(from + unit * call.rows.value_stride);
            }
        }
        if (place.data == nullptr) {
            continue;
        }
        PC_ASSUME_GLOBAL(place.data);
        PC_UNROLL
        for (int i = 0; i < PC_BATCH; i++) {
            const int64_t unit = pc_unit_of(call.walk, spot, i);
            if (unit < call.walk.units) {
                pc_store_bytes<NBYTES>(place.data + unit * NBYTES, units[i]);
            }
        }
    }
}

/* ---- another float format: COUNT neighbours at a time ---------------------------------------- */

template <class Format, int COUNT>
__global__ void __launch_bounds__(PC_CTA, PC_CTAS) store_dense(const pc_store_call call) {
    constexpr int nbytes = COUNT * Format::quant_nbytes;
    for (int64_t index = pc_thread(); index < call.walk.total; index += pc_num_threads()) {
        const pc_spot spot = pc_spot_of(call.walk, index);
        const uint8_t *const from = pc_outside_row(call.rows, spot);
        const pc_place place = pc_stored_place(call, spot);
        float values[PC_BATCH][COUNT];
        PC_UNROLL
        for (int i = 0; i < PC_BATCH; i++) {
            const int64_t unit = pc_unit_of(call.walk, spot, i);
            if (unit < call.walk.units) {
                pc_load_values<COUNT>(call.rows.dtype, from + unit * COUNT * call.rows.value_stride,
                                      values[i]);
            }
        }
        if (place.data == nullptr) {
            continue;
        }
        PC_ASSUME_GLOBAL(place.data);
        PC_UNROLL
        for (int i = 0; i < PC_BATCH; i++) {
            const int64_t unit = pc_unit_of(call.walk, spot, i);
            if (unit >= call.walk.units) {
                continue;
            }
            uint8_t bytes[nbytes];
            PC_UNROLL
            for (int value = 0; value < COUNT; value++) {
                Format::encode(values[i] + value, bytes + value * Format::quant_nbytes, bytes);
            }
            pc_unit<nbytes> packed;
            memcpy(&packed, bytes, nbytes);
            pc_store_bytes<nbytes>(place.data + unit * nbytes, packed);
        }
    }
}

/* ---- quantised formats: 32 groups by a warp -------------------------------------------------- */

/* Make the lane's group in the tile finite, or report it. Returns whether it may be stored. */
PC_DEVICE bool settle_nonfinite(const pc_store_call &call, uint8_t *row, int count,
                                const pc_spot &spot) {
    float *const values = (float *)(void *)row;
    if (call.policy == PC_NONFINITE_RAISE) {
        int first = 0;
        while (pc_all_finite(values + first, 1)) {
            first++;
        }
        const int64_t flat = spot.token * call.geometry.num_heads + spot.head;
        pc_report(call.fault, PC_E_NONFINITE,
                  flat * call.geometry.head_dim + spot.unit * PC_GROUP + first);
        return false;
    }
    pc_copy_saturated(values, count, values);
    return true;
}

template <class Format, int COUNT>
__global__ void __launch_bounds__(PC_TILE_WARPS *PC_WARP, PC_TILE_CTAS)
    store_groups(const pc_store_call call) {
    PC_THIS_TILE(tile);
    const int64_t warp = pc_thread() / PC_WARP, num_warps = pc_num_threads() / PC_WARP;
    uint8_t *const row = pc_tile_row(tile, tile.lane);
    for (int64_t start = warp * PC_WARP; start < call.walk.total; start += num_warps * PC_WARP) {
        const int64_t index = start + tile.lane;
        pc_spot spot = {0, 0, 0};
        pc_place place = {nullptr, nullptr};
        pc_tile_group group = {nullptr, nullptr, 0};
        if (index < call.walk.total) {
            spot = pc_spot_of(call.walk, index);
            place = pc_stored_place(call, spot);
        }
        if (place.data != nullptr) {
            const int64_t left = call.geometry.head_dim - spot.unit * PC_GROUP;
            group.count = left < PC_GROUP ? (int)left : PC_GROUP;
            group.outside =
                pc_outside_row(call.rows, spot) + spot.unit * PC_GROUP * call.rows.value_stride;
            group.stored = place.data + spot.unit * pc_stored_group<Format>::nbytes;
        }
        __syncwarp(); /* the tile before this one has left */
        tile.groups[tile.lane] = group;
        __syncwarp();
        pc_tile_load_values<COUNT>(tile, call.rows);
        __syncwarp();
        float values[PC_GROUP];
        pc_tile_read<sizeof values>(row, values);
        if (group.count > 0 && !pc_all_finite(values, PC_GROUP)) {
            if (settle_nonfinite(call, row, group.count, spot)) {
                pc_tile_read<sizeof values>(row, values);
            } else {
                group.count = tile.groups[tile.lane].count = 0;
            }
        }
        if (group.count > 0) {
            uint8_t quants[Format::quant_nbytes], scale[Format::scale_nbytes];
            pc_unit<Format::scale_nbytes> scale_unit;
            Format::encode(values, quants, scale);
            memcpy(&scale_unit, scale, sizeof scale);
            pc_tile_write<Format::quant_nbytes>(row + PC_QUANTS_AT, quants);
            if constexpr (pc_stored_group<Format>::planar) {
                pc_store_bytes<Format::scale_nbytes>(
                    place.scales + spot.unit * Format::scale_nbytes, scale_unit);
            } else {
                pc_store_unit<Format::scale_nbytes>(row + pc_stored_group<Format>::at, scale_unit);
            }
        }
        __syncwarp();
        pc_tile_store_stored<Format>(tile);
    }
}

struct store_kernels {
    template <int NBYTES> static constexpr auto bits = store_bits<NBYTES>;
    template <class Format, int COUNT> static constexpr auto dense = store_dense<Format, COUNT>;
    template <class Format, int COUNT> static constexpr auto groups = store_groups<Format, COUNT>;
};

} // namespace

int pc_cuda_store(const void *geometry, void *slab, int64_t block_stride, int64_t num_blocks,
                  const void *rows, int64_t token_stride, int64_t head_stride, int64_t value_stride,
                  int dtype, const int64_t *slots, int64_t num_tokens, int policy, void *fault,
                  void *stream) {
    pc_store_call call = {};
    memcpy(&call.geometry, geometry, sizeof call.geometry);
    call.slab = {(uint8_t *)slab, block_stride};
    call.rows = {(uint8_t *)rows, token_stride, head_stride, value_stride, dtype};
    call.block_size = pc_make_divisor(call.geometry.block_size);
    call.num_slots = num_blocks * call.geometry.block_size;
    call.slots = slots;
    call.fault = fault;
    call.policy = policy;
    return pc_launch_rows<store_kernels>(call, num_tokens, stream);
}
