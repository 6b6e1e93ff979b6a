/* Rows out of blocks whose groups run along the tokens (channels.h): to rows outside, or into open
 * blocks. A thread reads a few channels of one token and their scales, which those of the group's
 * other tokens read too.
 */
#ifndef PAGEDCACHE_CUDA_CHANNEL_LOAD_H
#define PAGEDCACHE_CUDA_CHANNEL_LOAD_H

#include "places.h"
#include "settle.h"
#include "values.h"

/* Where a row of channels lies, and COUNT of them as they are stored. */
template <int COUNT> struct pc_stored_channels {
    static constexpr int quant_nbytes = COUNT / 2 > 0 ? COUNT / 2 : 1;
    static constexpr int pieces = COUNT / 4 > 0 ? COUNT / 4 : 1;
    static constexpr int piece = COUNT < 4 ? 4 * COUNT : 16;
    pc_unit<quant_nbytes> quants;
    pc_unit<piece> scales[pieces];

    PC_DEVICE void load(const pc_place &place, int64_t channel) {
        quants = pc_load_bytes<quant_nbytes>(place.data + channel / 2);
        PC_UNROLL
        for (int i = 0; i < pieces; i++) {
            scales[i] = pc_load_bytes<piece>(place.scales + 4 * channel + i * piece);
        }
        if constexpr (COUNT == 1) {
            quants = (uint8_t)(channel % 2 ? quants >> 4 : quants & 0xF);
        }
    }

    PC_DEVICE void decode(float *values) const {
        uint8_t bytes[quant_nbytes], scale_bytes[4 * COUNT];
        memcpy(bytes, &quants, sizeof bytes);
        memcpy(scale_bytes, scales, sizeof scale_bytes);
        pc_decode_channels(bytes, scale_bytes, COUNT, values);
    }
};

template <int COUNT, class Call>
__global__ void __launch_bounds__(PC_CTA, PC_CTAS) pc_load_channels(const Call call) {
    for (int64_t index = pc_thread(); index < call.walk.total; index += pc_num_threads()) {
        const pc_spot spot = pc_spot_of(call.walk, index);
        const pc_row_ends ends = pc_ends_of_row(call, spot);
        pc_stored_channels<COUNT> stored[PC_BATCH];
        if (ends.stored.data == nullptr) {
            continue;
        }
        PC_ASSUME_GLOBAL(ends.stored.data);
        PC_ASSUME_GLOBAL(ends.stored.scales);
        PC_ASSUME_GLOBAL(ends.outside);
        PC_UNROLL
        for (int i = 0; i < PC_BATCH; i++) {
            const int64_t unit = pc_unit_of(call.walk, spot, i);
            if (unit < call.walk.units) {
                stored[i].load(ends.stored, unit * COUNT);
            }
        }
        PC_UNROLL
        for (int i = 0; i < PC_BATCH; i++) {
            const int64_t unit = pc_unit_of(call.walk, spot, i);
            if (unit >= call.walk.units) {
                continue;
            }
            float values[COUNT];
            stored[i].decode(values);
            if constexpr (Call::clamps) {
                if (!pc_all_finite(values, COUNT)) {
                    const pc_place place = ends.stored;
                    pc_saturate_part<COUNT>(values, unit * COUNT, call.geometry.head_dim,
                                            [&](int64_t channel) {
                                                pc_stored_channels<1> one;
                                                float value;
                                                one.load(place, channel);
                                                one.decode(&value);
                                                return value;
                                            });
                }
                pc_clamp_values<COUNT>(call.rows.dtype, values);
            }
            pc_store_values<COUNT>(call.rows.dtype,
                                   ends.outside + unit * COUNT * call.rows.value_stride, values);
        }
    }
}

/* num_tokens: of the walk. */
template <class Call> int pc_launch_channels(Call &call, int64_t num_tokens, void *stream) {
    const pc_geometry &g = call.geometry;
    const bool wide = call.rows.dtype == PC_FORMAT_float32;
    const int count =
        pc_values_at_once(call.rows, num_tokens, g.num_heads, g.head_dim, wide ? 4 : 8);
    const auto kernel = count == 8   ? pc_load_channels<8, Call>
                        : count == 4 ? pc_load_channels<4, Call>
                                     : pc_load_channels<1, Call>;
    call.walk =
        pc_make_walk(g.layout == PC_HND, num_tokens, g.num_heads, g.head_dim / count, PC_BATCH);
    return pc_launch(kernel, pc_grid(call.walk.total, PC_CTA), PC_CTA, 0, stream, call);
}

#endif
