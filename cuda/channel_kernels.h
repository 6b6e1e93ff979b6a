/* Groups along the tokens of a block (channels.h): whole blocks quantised, rows read back.
 *
 * A thread quantises two neighbouring channels over one group of tokens, because they share the
 * bytes of each token's row. It reads its columns straight from the rows: threads side by side read
 * and write bytes side by side, so nothing has to pass through shared memory.
 */
#ifndef PAGEDCACHE_CUDA_CHANNEL_KERNELS_H
#define PAGEDCACHE_CUDA_CHANNEL_KERNELS_H

#include "places.h"
#include "settle.h"
#include "values.h"

constexpr int PC_COLUMN_CTA = 128;
constexpr int PC_COLUMN_CTAS = 4; /* at least, on a multiprocessor: 128 registers a thread */

/* ---- which columns a thread has -------------------------------------------------------------- */

/* Pairs of channels are numbered first, then heads, then groups of tokens, then blocks. */
struct pc_column_walk {
    pc_divisor pairs, heads, groups;
    int64_t total;
};

struct pc_column_spot {
    int64_t pair, head, group, block;
};

inline pc_column_walk pc_make_column_walk(const pc_geometry &g, int64_t num_blocks) {
    pc_column_walk walk;
    const int64_t pairs = (g.head_dim + 1) / 2;
    walk.pairs = pc_make_divisor(pairs);
    walk.heads = pc_make_divisor(g.num_heads);
    walk.groups = pc_make_divisor(g.token_groups);
    walk.total = num_blocks * g.token_groups * g.num_heads * pairs;
    return walk;
}

PC_DEVICE pc_column_spot pc_column_spot_of(const pc_column_walk &walk, int64_t index) {
    const int64_t row = pc_divide(index, walk.pairs);
    const int64_t plane = pc_divide(row, walk.heads);
    pc_column_spot spot;
    spot.pair = index - row * walk.pairs.divisor;
    spot.head = row - plane * walk.heads.divisor;
    spot.block = pc_divide(plane, walk.groups);
    spot.group = plane - spot.block * walk.groups.divisor;
    return spot;
}

/* The two ends of a block's way: its first value outside, or in an open block; its place. */
struct pc_block_ends {
    const uint8_t *outside; /* NULL: there is no such block */
    int64_t token;          /* number of the block's first token outside */
    pc_slab slab;
    int64_t block;
};

/* Whole blocks from rows outside: entry i is {first token, block}. */
struct pc_store_blocks_call {
    pc_geometry geometry;
    pc_slab slab;
    pc_rows rows;
    const int64_t *entries;
    int64_t num_blocks, num_tokens;
    void *fault;
    int policy;
};

PC_DEVICE pc_block_ends pc_ends_of_block(const pc_store_blocks_call &call, int64_t entry) {
    const int64_t token = call.entries[2 * entry], block = call.entries[2 * entry + 1];
    if (token < 0 || token > call.num_tokens - call.geometry.block_size || block < 0 ||
        block >= call.num_blocks) {
        pc_report(call.fault, PC_E_RANGE, block);
        return {nullptr, 0, call.slab, 0};
    }
    PC_ASSUME_GLOBAL(call.rows.base);
    return {call.rows.base + token * call.rows.token_stride, token, call.slab, block};
}

/* Whole open blocks; entries are pairs, slab after slab. */
PC_DEVICE pc_block_ends pc_ends_of_block(const pc_convert_call &call, int64_t entry) {
    const int64_t slab = pc_divide(entry, call.num_pairs);
    const int64_t pair = entry - slab * call.num_pairs.divisor;
    return {pc_open_row(call, slab, call.open_slots[pair]), 0, call.stored_slabs[slab],
            pc_divide(call.stored_slots[pair], call.block_size)};
}

/* ---- whole blocks in ------------------------------------------------------------------------- */

/* One token's values of two channels, as they lie outside; NBYTES each. */
template <int NBYTES> struct pc_channel_pair {
    pc_unit<2 * NBYTES> unit;

    template <bool TOGETHER>
    PC_DEVICE void load(const uint8_t *at, int64_t value_stride, bool both) {
        if constexpr (TOGETHER) {
            unit = pc_load_unit<2 * NBYTES>(at);
        } else {
            pc_unit<NBYTES> parts[2] = {pc_load_bytes<NBYTES>(at), 0};
            if (both) {
                parts[1] = pc_load_bytes<NBYTES>(at + value_stride);
            }
            memcpy(&unit, parts, sizeof unit);
        }
    }

    PC_DEVICE void widen(int dtype, float *values) const {
        pc_widen_values<2>(NBYTES == 4 ? (int)PC_FORMAT_float32 : dtype, &unit, values);
    }

    /* Values that dtype holds exactly. */
    PC_DEVICE void narrow(int dtype, const float *values) {
        if constexpr (NBYTES == 4) {
            memcpy(&unit, values, sizeof unit);
        } else {
            uint16_t bits[2];
            PC_UNROLL
            for (int i = 0; i < 2; i++) {
                bits[i] = dtype == PC_FORMAT_float16 ? pc_float_to_half(values[i])
                                                     : pc_float_to_bfloat(values[i]);
            }
            memcpy(&unit, bits, sizeof unit);
        }
    }
};

/* Replace what is not finite, channel by channel; the values that stand in are of the column. */
template <int NBYTES>
PC_DEVICE void pc_saturate_columns(pc_channel_pair<NBYTES> *column, int count, int dtype) {
    pc_finite seen[2] = {{0u, 0}, {0u, 0}};
    float values[2];
    PC_UNROLL
    for (int i = 0; i < PC_GROUP; i++) {
        if (i < count) {
            column[i].widen(dtype, values);
            pc_see_finite(&seen[0], values[0]);
            pc_see_finite(&seen[1], values[1]);
        }
    }
    PC_UNROLL
    for (int i = 0; i < PC_GROUP; i++) {
        if (i < count) {
            column[i].widen(dtype, values);
            values[0] = pc_saturated(values[0], seen[0]);
            values[1] = pc_saturated(values[1], seen[1]);
            column[i].narrow(dtype, values);
        }
    }
}

/* Tell of the first value of two columns that is not finite, if there is one. */
template <int NBYTES, class Call>
PC_DEVICE bool pc_report_columns(const Call &call, const pc_channel_pair<NBYTES> *column, int count,
                                 int64_t token, const pc_column_spot &spot) {
    int64_t found = -1;
    PC_UNROLL
    for (int i = PC_GROUP - 1; i >= 0; i--) {
        float values[2];
        column[i].widen(call.rows.dtype, values);
        const int channel = pc_first_nonfinite<2>(values);
        if (i < count && channel < 2) {
            found = ((token + i) * call.geometry.num_heads + spot.head) * call.geometry.head_dim +
                    2 * spot.pair + channel;
        }
    }
    if (found >= 0) {
        pc_report(call.fault, PC_E_NONFINITE, found);
    }
    return found >= 0;
}

/* NBYTES of a value outside; TOGETHER: both channels come in one access. */
template <int NBYTES, bool TOGETHER, class Call>
__global__ void __launch_bounds__(PC_COLUMN_CTA, PC_COLUMN_CTAS)
    pc_store_columns(const Call call, const pc_column_walk walk) {
    const pc_geometry &g = call.geometry;
    const int dtype = call.rows.dtype;
    for (int64_t index = pc_thread(); index < walk.total; index += pc_num_threads()) {
        const pc_column_spot spot = pc_column_spot_of(walk, index);
        const pc_block_ends ends = pc_ends_of_block(call, spot.block);
        if (ends.outside == nullptr) {
            continue;
        }
        const int64_t first = spot.group * PC_GROUP, channel = 2 * spot.pair;
        const int count = (int)(g.block_size - first < PC_GROUP ? g.block_size - first : PC_GROUP);
        const bool both = channel + 1 < g.head_dim;
        const uint8_t *const from = ends.outside + first * call.rows.token_stride +
                                    spot.head * call.rows.head_stride +
                                    channel * call.rows.value_stride;
        pc_channel_pair<NBYTES> column[PC_GROUP] = {};
        PC_UNROLL
        for (int i = 0; i < PC_GROUP; i++) {
            if (i < count) {
                column[i].template load<TOGETHER>(from + i * call.rows.token_stride,
                                                  call.rows.value_stride, both);
            }
        }
        float least[2], most[2];
        int32_t largest = 0;
        column[0].widen(dtype, least);
        column[0].widen(dtype, most);
        PC_UNROLL
        for (int i = 0; i < PC_GROUP; i++) {
            if (i < count) {
                float values[2];
                column[i].widen(dtype, values);
                const int32_t magnitude = pc_max_magnitude_bits(values, 2);
                largest = magnitude > largest ? magnitude : largest;
            }
        }
        if (largest >= 0x7F800000) {
            if (call.policy == PC_NONFINITE_RAISE) {
                pc_report_columns(call, column, count, ends.token + first, spot);
                continue;
            }
            pc_saturate_columns(column, count, dtype);
            column[0].widen(dtype, least);
            column[0].widen(dtype, most);
        }
        PC_UNROLL
        for (int i = 1; i < PC_GROUP; i++) {
            if (i < count) {
                float values[2];
                column[i].widen(dtype, values);
                PC_UNROLL
                for (int c = 0; c < 2; c++) {
                    least[c] = values[c] < least[c] ? values[c] : least[c];
                    most[c] = values[c] > most[c] ? values[c] : most[c];
                }
            }
        }
        const pc_affine affine[2] = {pc_affine_of(least[0], most[0]),
                                     pc_affine_of(least[1], most[1])};
        const pc_place place =
            pc_place_at(g, ends.slab.base, ends.slab.block_stride, ends.block, spot.head, first);
        uint8_t scales[8];
        pc_store_affine(scales, affine[0]);
        pc_store_affine(scales + 4, affine[1]);
        if (both) {
            pc_unit<8> unit;
            memcpy(&unit, scales, sizeof unit);
            pc_store_bytes<8>(place.scales + 4 * channel, unit);
        } else {
            pc_unit<4> unit;
            memcpy(&unit, scales, sizeof unit);
            pc_store_bytes<4>(place.scales + 4 * channel, unit);
        }
        const int64_t row_nbytes =
            g.layout == PC_HND ? g.row_data_nbytes : g.row_data_nbytes * g.num_heads;
        PC_UNROLL
        for (int i = 0; i < PC_GROUP; i++) {
            if (i < count) {
                float values[2];
                column[i].widen(dtype, values);
                const uint32_t low =
                    pc_affine_nibble(values[0], affine[0].minimum, affine[0].inverse);
                const uint32_t high =
                    pc_affine_nibble(values[1], affine[1].minimum, affine[1].inverse);
                /* A channel that is not there is zeros, and so are its quants. */
                place.data[i * row_nbytes + spot.pair] = (uint8_t)(low | high << 4);
            }
        }
    }
}

template <class Call> int pc_launch_columns(const Call &call, int64_t num_blocks, void *stream) {
    const pc_geometry &g = call.geometry;
    const pc_column_walk walk = pc_make_column_walk(g, num_blocks);
    const bool wide = call.rows.dtype == PC_FORMAT_float32;
    const bool together = pc_values_at_once(call.rows, 2, g.num_heads, g.head_dim, 2) == 2;
    const auto kernel =
        wide       ? together ? pc_store_columns<4, true, Call> : pc_store_columns<4, false, Call>
        : together ? pc_store_columns<2, true, Call>
                   : pc_store_columns<2, false, Call>;
    return pc_launch(kernel, pc_grid(walk.total, PC_COLUMN_CTA), PC_COLUMN_CTA, 0, stream, call,
                     walk);
}

/* ---- rows out -------------------------------------------------------------------------------- */

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
