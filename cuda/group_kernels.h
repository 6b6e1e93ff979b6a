/* Groups inside rows, quantised and read back, 32 of them by a warp. Call says where a row's two
 * ends are (places.h).
 */
#ifndef PAGEDCACHE_CUDA_GROUP_KERNELS_H
#define PAGEDCACHE_CUDA_GROUP_KERNELS_H

#include "format_rows.h"
#include "settle.h"
#include "tile.h"

/* Make the lane's group in the tile finite, or report it. Returns whether it may be stored. */
template <class Call>
PC_DEVICE bool pc_settle_group(const Call &call, uint8_t *row, int count, const pc_spot &spot) {
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

template <class Format, int COUNT, class Call>
__global__ void __launch_bounds__(PC_TILE_WARPS *PC_WARP, PC_TILE_CTAS)
    pc_store_groups(const Call call) {
    PC_THIS_TILE(tile);
    const int64_t warp = pc_thread() / PC_WARP, num_warps = pc_num_threads() / PC_WARP;
    uint8_t *const row = pc_tile_row(tile, tile.lane);
    for (int64_t start = warp * PC_WARP; start < call.walk.total; start += num_warps * PC_WARP) {
        const int64_t index = start + tile.lane;
        pc_spot spot = {0, 0, 0};
        pc_row_ends ends = {nullptr, {nullptr, nullptr}};
        pc_tile_group group = {nullptr, nullptr, 0};
        if (index < call.walk.total) {
            spot = pc_spot_of(call.walk, index);
            ends = pc_ends_of_row(call, spot);
        }
        if (ends.stored.data != nullptr) {
            const int64_t left = call.geometry.head_dim - spot.unit * PC_GROUP;
            group.count = left < PC_GROUP ? (int)left : PC_GROUP;
            group.outside = ends.outside + spot.unit * PC_GROUP * call.rows.value_stride;
            group.stored = ends.stored.data + spot.unit * pc_stored_group<Format>::nbytes;
        }
        __syncwarp(); /* the tile before this one has left */
        tile.groups[tile.lane] = group;
        __syncwarp();
        pc_tile_load_values<COUNT>(tile, call.rows);
        __syncwarp();
        float values[PC_GROUP];
        pc_tile_read<sizeof values>(row, values);
        if (group.count > 0 && !pc_all_finite(values, PC_GROUP)) {
            if (pc_settle_group(call, row, group.count, spot)) {
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
                    ends.stored.scales + spot.unit * Format::scale_nbytes, scale_unit);
            } else {
                pc_store_unit<Format::scale_nbytes>(row + pc_stored_group<Format>::at, scale_unit);
            }
        }
        __syncwarp();
        pc_tile_store_stored<Format>(tile);
    }
}

template <class Format, int COUNT, class Call>
__global__ void __launch_bounds__(PC_TILE_WARPS *PC_WARP, PC_TILE_CTAS)
    pc_load_groups(const Call call) {
    PC_THIS_TILE(tile);
    const int64_t warp = pc_thread() / PC_WARP, num_warps = pc_num_threads() / PC_WARP;
    uint8_t *const row = pc_tile_row(tile, tile.lane);
    for (int64_t start = warp * PC_WARP; start < call.walk.total; start += num_warps * PC_WARP) {
        const int64_t index = start + tile.lane;
        pc_spot spot = {0, 0, 0};
        pc_row_ends ends = {nullptr, {nullptr, nullptr}};
        pc_tile_group group = {nullptr, nullptr, 0};
        uint8_t scale[Format::scale_nbytes] = {0};
        if (index < call.walk.total) {
            spot = pc_spot_of(call.walk, index);
            ends = pc_ends_of_row(call, spot);
        }
        if (ends.stored.data != nullptr) {
            const int64_t left = call.geometry.head_dim - spot.unit * PC_GROUP;
            group.count = left < PC_GROUP ? (int)left : PC_GROUP;
            group.outside = ends.outside + spot.unit * PC_GROUP * call.rows.value_stride;
            group.stored = ends.stored.data + spot.unit * pc_stored_group<Format>::nbytes;
            if constexpr (pc_stored_group<Format>::planar) {
                const auto unit = pc_load_bytes<Format::scale_nbytes>(
                    ends.stored.scales + spot.unit * Format::scale_nbytes);
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
            if constexpr (Call::clamps) {
                if (!pc_all_finite(values, PC_GROUP)) {
                    pc_tile_write<sizeof values>(row, values);
                    pc_copy_saturated((float *)(void *)row, group.count, (float *)(void *)row);
                    pc_tile_read<sizeof values>(row, values);
                }
                pc_clamp_values<PC_GROUP>(call.rows.dtype, values);
            }
            pc_tile_write<sizeof values>(row, values);
        }
        __syncwarp();
        pc_tile_store_values<COUNT>(tile, call.rows);
    }
}

#endif
