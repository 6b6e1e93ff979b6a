/* Whole blocks into a format whose groups run along the tokens (channels.h), from rows outside or
 * from open blocks.
 *
 * A thread quantises two neighbouring channels over one group of tokens, because they share the
 * bytes of each token's row. It reads its columns straight from the rows: threads side by side read
 * and write bytes side by side, so nothing has to pass through shared memory.
 */
#ifndef PAGEDCACHE_CUDA_CHANNEL_STORE_H
#define PAGEDCACHE_CUDA_CHANNEL_STORE_H

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

/* ---- quantising ------------------------------------------------------------------------------ */

/* One token's values of two channels, as they lie outside, side by side in one register (two where
 * they are float32). */
template <int DTYPE> struct pc_channel_pair {
    static constexpr int nbytes = DTYPE == PC_FORMAT_float32 ? 4 : 2;
    static constexpr uint32_t exponent = pc_exponent_bits(DTYPE);
    pc_unit<2 * nbytes> unit;

    /* TOGETHER: both in one access. A channel that is not there is zero. */
    template <bool TOGETHER>
    PC_DEVICE void load(const uint8_t *at, int64_t value_stride, bool both) {
        if constexpr (TOGETHER) {
            unit = pc_load_unit<2 * nbytes>(at);
        } else {
            pc_unit<nbytes> parts[2] = {pc_load_bytes<nbytes>(at), 0};
            if (both) {
                parts[1] = pc_load_bytes<nbytes>(at + value_stride);
            }
            memcpy(&unit, parts, sizeof unit);
        }
    }

    PC_DEVICE bool is_finite() const {
        pc_unit<nbytes> parts[2];
        memcpy(parts, &unit, sizeof parts);
        return (parts[0] & exponent) != exponent && (parts[1] & exponent) != exponent;
    }

    /* FINITE: they are known to be, and nothing is looked for. */
    template <bool FINITE> PC_DEVICE void widen(float *values) const {
        pc_unit<nbytes> parts[2];
        memcpy(parts, &unit, sizeof parts);
        if constexpr (FINITE) {
            PC_ASSUME((parts[0] & exponent) != exponent);
            PC_ASSUME((parts[1] & exponent) != exponent);
        }
        pc_widen_values<2>(DTYPE, parts, values);
    }
};

/* The least and the greatest value of two channels; of equal ones the first. */
struct pc_extremes {
    float least[2], most[2];

    PC_DEVICE void start(const float *values) {
        memcpy(least, values, sizeof least);
        memcpy(most, values, sizeof most);
    }

    PC_DEVICE void see(const float *values) {
        PC_UNROLL
        for (int c = 0; c < 2; c++) {
            least[c] = values[c] < least[c] ? values[c] : least[c];
            most[c] = values[c] > most[c] ? values[c] : most[c];
        }
    }

    PC_DEVICE pc_affine affine(int c) const {
        return pc_affine_of(least[c], most[c]);
    }
};

/* Two columns: a group of tokens of two neighbouring channels, and where it goes. TOKENS: of a
 * group that is held in registers. */
template <int DTYPE, int TOKENS> struct pc_column_pair {
    const uint8_t *from;
    int64_t token_stride, value_stride;
    int count; /* of tokens */
    bool both; /* there is a second channel */
    uint8_t *quants, *scales;
    int64_t row_nbytes; /* from the quants of a token to those of the next */

    /* Returns whether all are finite. */
    template <bool TOGETHER> PC_DEVICE bool load(pc_channel_pair<DTYPE> (&given)[TOKENS]) const {
        PC_UNROLL
        for (int i = 0; i < TOKENS; i++) {
            given[i].template load<TOGETHER>(from + i * token_stride, value_stride, both);
        }
        bool finite = true;
        PC_UNROLL
        for (int i = 0; i < TOKENS; i++) {
            finite &= given[i].is_finite();
        }
        return finite;
    }

    PC_DEVICE void store_quants(int token, const float *values, const pc_affine *affine) const {
        const uint32_t low = pc_affine_nibble(values[0], affine[0].minimum, affine[0].inverse);
        const uint32_t high = pc_affine_nibble(values[1], affine[1].minimum, affine[1].inverse);
        /* A channel that is not there is zeros, and so are its quants. */
        quants[token * row_nbytes] = (uint8_t)(low | high << 4);
    }

    PC_DEVICE void store_scales(const pc_affine *affine) const {
        uint8_t bytes[8];
        pc_store_affine(bytes, affine[0]);
        pc_store_affine(bytes + 4, affine[1]);
        if (both) {
            pc_unit<8> unit;
            memcpy(&unit, bytes, sizeof unit);
            pc_store_bytes<8>(scales, unit);
        } else {
            pc_unit<4> unit;
            memcpy(&unit, bytes, sizeof unit);
            pc_store_bytes<4>(scales, unit);
        }
    }

    /* Where all values are finite and in registers. */
    PC_DEVICE void store(const pc_channel_pair<DTYPE> (&given)[TOKENS]) const {
        pc_extremes extremes;
        float values[2];
        given[0].template widen<true>(values);
        extremes.start(values);
        PC_UNROLL
        for (int i = 1; i < TOKENS; i++) {
            given[i].template widen<true>(values);
            extremes.see(values);
        }
        const pc_affine affine[2] = {extremes.affine(0), extremes.affine(1)};
        store_scales(affine);
        PC_UNROLL
        for (int i = 0; i < TOKENS; i++) {
            given[i].template widen<true>(values);
            store_quants(i, values, affine);
        }
    }

    /* Where they are not: read again and again; what is not finite is replaced channel by channel.
     */
    PC_DEVICE void store_saturated() const {
        pc_finite seen[2] = {{0u, 0}, {0u, 0}};
        pc_extremes extremes;
        float values[2];
        PC_UNROLL_BY(1)
        for (int i = 0; i < count; i++) {
            read(i, values);
            pc_see_finite(&seen[0], values[0]);
            pc_see_finite(&seen[1], values[1]);
        }
        PC_UNROLL_BY(1)
        for (int i = 0; i < count; i++) {
            read_saturated(i, seen, values);
            i == 0 ? extremes.start(values) : extremes.see(values);
        }
        const pc_affine affine[2] = {extremes.affine(0), extremes.affine(1)};
        store_scales(affine);
        PC_UNROLL_BY(1)
        for (int i = 0; i < count; i++) {
            read_saturated(i, seen, values);
            store_quants(i, values, affine);
        }
    }

    PC_DEVICE void read_saturated(int token, const pc_finite *seen, float *values) const {
        read(token, values);
        values[0] = pc_saturated(values[0], seen[0]);
        values[1] = pc_saturated(values[1], seen[1]);
    }

    PC_DEVICE void read(int token, float *values) const {
        pc_channel_pair<DTYPE> given;
        given.template load<false>(from + token * token_stride, value_stride, both);
        given.template widen<false>(values);
    }

    /* The first value that is not finite: token * 2 + channel, or -1. */
    PC_DEVICE int first_nonfinite() const {
        PC_UNROLL_BY(1)
        for (int i = 0; i < count; i++) {
            float values[2];
            read(i, values);
            const int channel = pc_first_nonfinite<2>(values);
            if (channel < 2) {
                return 2 * i + channel;
            }
        }
        return -1;
    }
};

/* DTYPE: of the values outside; TOGETHER: both channels come in one access. A group of TOKENS
 * tokens is read once, any other several times. */
template <int DTYPE, int TOKENS, bool TOGETHER, class Call>
__global__ void __launch_bounds__(PC_COLUMN_CTA, PC_COLUMN_CTAS)
    pc_store_columns(const Call call, const pc_column_walk walk) {
    const pc_geometry &g = call.geometry;
    for (int64_t index = pc_thread(); index < walk.total; index += pc_num_threads()) {
        const pc_column_spot spot = pc_column_spot_of(walk, index);
        const pc_block_ends ends = pc_ends_of_block(call, spot.block);
        if (ends.outside == nullptr) {
            continue;
        }
        PC_ASSUME_GLOBAL(ends.outside);
        const int64_t first = spot.group * PC_GROUP, channel = 2 * spot.pair;
        const pc_place place =
            pc_place_at(g, ends.slab.base, ends.slab.block_stride, ends.block, spot.head, first);
        pc_column_pair<DTYPE, TOKENS> columns;
        columns.count = (int)(g.block_size - first < PC_GROUP ? g.block_size - first : PC_GROUP);
        columns.both = channel + 1 < g.head_dim;
        columns.token_stride = call.rows.token_stride;
        columns.value_stride = call.rows.value_stride;
        columns.from = ends.outside + first * call.rows.token_stride +
                       spot.head * call.rows.head_stride + channel * call.rows.value_stride;
        columns.quants = place.data + spot.pair;
        columns.scales = place.scales + 4 * channel;
        columns.row_nbytes =
            g.layout == PC_HND ? g.row_data_nbytes : g.row_data_nbytes * g.num_heads;
        if (columns.count == TOKENS) {
            pc_channel_pair<DTYPE> given[TOKENS];
            if (columns.template load<TOGETHER>(given)) {
                columns.store(given);
                continue;
            }
        }
        const int bad = call.policy == PC_NONFINITE_RAISE ? columns.first_nonfinite() : -1;
        if (bad >= 0) {
            const int64_t token = ends.token + first + bad / 2;
            pc_report(call.fault, PC_E_NONFINITE,
                      (token * g.num_heads + spot.head) * g.head_dim + channel + bad % 2);
        } else {
            columns.store_saturated();
        }
    }
}

/* The kernel for blocks of this size: of 16 tokens, or of groups of PC_GROUP. */
template <int DTYPE, class Call> auto pc_column_kernel(int64_t block_size, bool together) {
    constexpr int few = PC_GROUP / 2;
    return block_size == few ? together ? pc_store_columns<DTYPE, few, true, Call>
                                        : pc_store_columns<DTYPE, few, false, Call>
           : together        ? pc_store_columns<DTYPE, PC_GROUP, true, Call>
                             : pc_store_columns<DTYPE, PC_GROUP, false, Call>;
}

template <class Call> int pc_launch_columns(const Call &call, int64_t num_blocks, void *stream) {
    const pc_geometry &g = call.geometry;
    const pc_column_walk walk = pc_make_column_walk(g, num_blocks);
    const bool together = pc_values_at_once(call.rows, 2, g.num_heads, g.head_dim, 2) == 2;
    const int dtype = call.rows.dtype;
    const auto kernel = dtype == PC_FORMAT_float32
                            ? pc_column_kernel<PC_FORMAT_float32, Call>(g.block_size, together)
                        : dtype == PC_FORMAT_float16
                            ? pc_column_kernel<PC_FORMAT_float16, Call>(g.block_size, together)
                            : pc_column_kernel<PC_FORMAT_bfloat16, Call>(g.block_size, together);
    return pc_launch(kernel, pc_grid(walk.total, PC_COLUMN_CTA), PC_COLUMN_CTA, 0, stream, call,
                     walk);
}

#endif
