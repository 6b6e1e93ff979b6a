/* A tile of keys that has arrived: scores of the CTA's rows, their weights, and what they add.
 *
 * Lane 4 g + t works for row g. Its fragments follow pc_mma(): of K it reads key g, of each group
 * the channels 8 t … 8 t + 7; of V keys 2 t and 2 t + 1, of each group the channels 4 g … 4 g + 3.
 * Neither keys nor channels then need to change lanes. A row's query, or its weights, are the upper
 * row g of a product, and what tensor cores do not see of them (pc_split) is the lower row g + 8.
 */
#ifndef PAGEDCACHE_CUDA_ATTENTION_TILE_H
#define PAGEDCACHE_CUDA_ATTENTION_TILE_H

#include "attention_exact.h"
#include "mma.h"

/* scores[n][j]: of row g and key 8 n + 2 t + j. */
template <class Format>
PC_DEVICE void pc_score_keys(const pc_attention &call, const pc_warp_view &warp,
                             float (&scores)[2][2]) {
    using reader = pc_reader<Format>;
    constexpr pc_way way = reader::way;
    const int g = warp.lane / 4, t = warp.lane % 4;
    pc_staged_row own[2], scored[2][2]; /* whose values are read here, whose scores are */
    PC_UNROLL
    for (int n = 0; n < 2; n++) {
        const int first = pc_first_key(call, n);
        own[n] = pc_staged_row_of(call, PC_K, warp.open, warp.stage, first + g);
        PC_UNROLL
        for (int j = 0; j < 2; j++) {
            scored[n][j] = pc_staged_row_of(call, PC_K, warp.open, warp.stage, first + 2 * t + j);
        }
    }
    float sums[2][4] = {};
    PC_UNROLL_BY(1)
    for (int group = 0; group < call.groups; group++) {
        float x[2][8];
        PC_UNROLL
        for (int n = 0; n < 2; n++) {
            reader::template take<PC_K>(own[n], group, 8 * t, x[n]);
        }
        float products[2][4] = {};
        PC_UNROLL
        for (int step = 0; step < PC_STEPS; step++) {
            const float4 query = warp.queries[(group * PC_STEPS + step) * PC_WARP + warp.lane];
            const float a[4] = {query.x, query.y, query.z, query.w};
            PC_UNROLL
            for (int n = 0; n < 2; n++) {
                float (&into)[4] = way == PC_SCALED ? products[n] : sums[n];
                if constexpr (way == PC_WIDE) {
                    const pc_halves even = pc_split(x[n][2 * step]);
                    const pc_halves odd = pc_split(x[n][2 * step + 1]);
                    const float high[2] = {even.high, odd.high}, low[2] = {even.low, odd.low};
                    pc_mma(into, a, low);
                    pc_mma(into, a, high);
                } else {
                    const float b[2] = {x[n][2 * step], x[n][2 * step + 1]};
                    pc_mma(into, a, b);
                }
            }
        }
        if constexpr (way == PC_SCALED) {
            const float sum = warp.sums[group * PC_ROWS + g], zero = -sum * reader::zero;
            PC_UNROLL
            for (int n = 0; n < 2; n++) {
                PC_UNROLL
                for (int j = 0; j < 2; j++) {
                    const pc_group_scale by = reader::scale(scored[n][j], group);
                    float product = products[n][j] + products[n][2 + j];
                    if constexpr (reader::zero > 0.0f) {
                        product = fmaf(product, reader::gain, zero);
                    }
                    sums[n][j] = fmaf(by.scale, product, sums[n][j]);
                    if constexpr (reader::has_minimum) {
                        sums[n][j] = fmaf(by.minimum, sum, sums[n][j]);
                    }
                }
            }
        }
    }
    PC_UNROLL
    for (int n = 0; n < 2; n++) {
        PC_UNROLL
        for (int j = 0; j < 2; j++) {
            scores[n][j] = way == PC_SCALED ? sums[n][j] : sums[n][j] + sums[n][2 + j];
        }
    }
}

/* The same where scales and minima are channels', the same ones for all keys of the tile (q4k): it
 * is the query that is scaled. */
PC_DEVICE void pc_score_channels(const pc_attention &call, const pc_warp_view &warp,
                                 float (&scores)[2][2]) {
    const int g = warp.lane / 4, t = warp.lane % 4;
    pc_staged_row own[2];
    PC_UNROLL
    for (int n = 0; n < 2; n++) {
        own[n] = pc_staged_row_of(call, PC_K, warp.open, warp.stage, pc_first_key(call, n) + g);
    }
    float sums[2][4] = {}, rest = 0.0f; /* rest: of this lane's channels, for every key */
    PC_UNROLL_BY(1)
    for (int group = 0; group < call.groups; group++) {
        uint32_t scales[8];
        float x[2][8];
        pc_take<32>(own[0].scales + 4 * (group * PC_GROUP + 8 * t), scales);
        PC_UNROLL
        for (int n = 0; n < 2; n++) {
            pc_take_pairs<pc_nibbles<PC_K, 0>>(own[n].data + (group * PC_GROUP + 8 * t) / 2, x[n]);
        }
        PC_UNROLL
        for (int step = 0; step < PC_STEPS; step++) {
            const float4 query = warp.queries[(group * PC_STEPS + step) * PC_WARP + warp.lane];
            const float whole[2] = {query.x + query.y, query.z + query.w};
            pc_halves scaled[2];
            PC_UNROLL
            for (int j = 0; j < 2; j++) {
                const uint32_t both = scales[2 * step + j];
                const float product = whole[j] * pc_widen_half((uint16_t)both);
                scaled[j] = pc_split(product);
                rest = fmaf(whole[j], pc_widen_half((uint16_t)(both >> 16)), rest);
                rest = fmaf(product, -16.0f, rest);
            }
            const float a[4] = {scaled[0].high, scaled[0].low, scaled[1].high, scaled[1].low};
            PC_UNROLL
            for (int n = 0; n < 2; n++) {
                const float b[2] = {x[n][2 * step], x[n][2 * step + 1]};
                pc_mma(sums[n], a, b);
            }
        }
    }
    rest += __shfl_xor_sync(~0u, rest, 1);
    rest += __shfl_xor_sync(~0u, rest, 2);
    PC_UNROLL
    for (int i = 0; i < 4; i++) {
        scores[i / 2][i % 2] = fmaf(sums[i / 2][i % 2] + sums[i / 2][2 + i % 2], 16.0f, rest);
    }
}

/* Add the values of the tile's keys, weights[n][j] of key 8 n + 2 t + j each. */
template <class Format, int GROUPS>
PC_DEVICE void pc_add_values(const pc_attention &call, const pc_warp_view &warp,
                             const float (&weights)[2][2], pc_results<GROUPS> &made) {
    using reader = pc_reader<Format>;
    constexpr pc_way way = reader::way;
    const int g = warp.lane / 4, t = warp.lane % 4;
    PC_UNROLL
    for (int n = 0; n < 2; n++) {
        const int first = pc_first_key(call, n) + 2 * t;
        const pc_staged_row rows[2] = {
            pc_staged_row_of(call, PC_V, warp.open, warp.stage, first),
            pc_staged_row_of(call, PC_V, warp.open, warp.stage, first + 1)};
        pc_halves halves[2] = {pc_split(weights[n][0]), pc_split(weights[n][1])};
        PC_UNROLL
        for (int group = 0; group < GROUPS; group++) {
            if (group >= call.groups) {
                continue;
            }
            float x[2][4];
            PC_UNROLL
            for (int j = 0; j < 2; j++) {
                reader::template take<PC_V>(rows[j], group, 4 * g, x[j]);
                if constexpr (way == PC_SCALED) {
                    const pc_group_scale by = reader::scale(rows[j], group);
                    halves[j] = pc_split(weights[n][j] * by.scale);
                    if constexpr (reader::has_minimum) {
                        made.floors[group] = fmaf(weights[n][j], by.minimum, made.floors[group]);
                    }
                }
            }
            const float a[4] = {halves[0].high, halves[0].low, halves[1].high, halves[1].low};
            PC_UNROLL
            for (int i = 0; i < 4; i++) {
                float (&into)[4] = made.results[4 * group + i];
                if constexpr (way == PC_WIDE) {
                    const pc_halves even = pc_split(x[0][i]), odd = pc_split(x[1][i]);
                    const float high[2] = {even.high, odd.high}, low[2] = {even.low, odd.low};
                    pc_mma(into, a, low);
                    pc_mma(into, a, high);
                } else {
                    const float b[2] = {x[0][i], x[1][i]};
                    pc_mma(into, a, b);
                }
            }
        }
    }
}

/* Turn scores to weights: relative to the largest score so far, to which all that was added before
 * is adapted. `whole`: the tile has PC_KEYS keys, each one of every row. */
template <int GROUPS>
PC_DEVICE void pc_weigh(const pc_attention &call, pc_key_tile tile, int lane, pc_key_range keys,
                        bool whole, float (&scores)[2][2], pc_results<GROUPS> &made) {
    if (call.cap > 0.0f) {
        PC_UNROLL
        for (int i = 0; i < 4; i++) {
            scores[i / 2][i % 2] = call.cap * tanhf(scores[i / 2][i % 2]);
        }
    }
    if (!whole) {
        const int end = tile.first + tile.count, first = tile.first + 2 * (lane % 4);
        const int high = keys.high < end ? keys.high : end;
        PC_UNROLL
        for (int i = 0; i < 4; i++) {
            const int key = first + 8 * (i / 2) + i % 2;
            float &score = scores[i / 2][i % 2];
            score = key >= keys.low && key < high ? score : -INFINITY;
        }
    }
    float most = made.most;
    PC_UNROLL
    for (int i = 0; i < 4; i++) {
        most = fmaxf(most, scores[i / 2][i % 2]);
    }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    const float base = most == -INFINITY ? 0.0f : most;
    if (__any_sync(~0u, most > made.most)) {
        const float factor = exp2f(made.most - base);
        made.weight *= factor;
        PC_UNROLL
        for (int group = 0; group < GROUPS; group++) {
            made.floors[group] *= factor;
            PC_UNROLL
            for (int i = 0; i < 16; i++) {
                made.results[4 * group + i / 4][i % 4] *= factor;
            }
        }
        made.most = most;
    }
    PC_UNROLL
    for (int i = 0; i < 4; i++) {
        scores[i / 2][i % 2] = exp2f(scores[i / 2][i % 2] - base);
        made.weight += scores[i / 2][i % 2];
    }
}

template <class Format>
PC_DEVICE void pc_score_tile(const pc_attention &call, const pc_warp_view &warp,
                             float (&scores)[2][2]) {
    if constexpr (Format::group_axis == PC_AXIS_TOKENS) {
        pc_score_channels(call, warp, scores);
    } else if (Format::packing == PC_PACK_DENSE && warp.exact) {
        pc_score_exactly<Format>(call, warp, scores);
    } else {
        pc_score_keys<Format>(call, warp, scores);
    }
}

template <class Format, int GROUPS>
PC_DEVICE void pc_add_values_of(const pc_attention &call, const pc_warp_view &warp,
                                pc_key_tile tile, pc_key_range keys, const float (&weights)[2][2],
                                pc_results<GROUPS> &made) {
    if (Format::packing == PC_PACK_DENSE && warp.exact) {
        pc_add_exactly<Format>(call, warp, tile, keys, weights, made);
    } else {
        pc_add_values<Format>(call, warp, weights, made);
    }
}

template <int GROUPS>
PC_DEVICE void pc_add_tile(const pc_attention &call, const pc_warp_view &warp, pc_key_tile tile,
                           pc_key_range keys, bool whole, pc_results<GROUPS> &made) {
    float scores[2][2] = {};
    switch (call.sides[PC_K][warp.open].code) {
#define PC_SCORE_CASE(code, name, ...) \
    case code: pc_score_tile<pc_row_of_##name>(call, warp, scores); break;
        PC_FORMATS(PC_SCORE_CASE)
#undef PC_SCORE_CASE
    default: return;
    }
    pc_weigh(call, tile, warp.lane, keys, whole, scores, made);
    switch (call.sides[PC_V][warp.open].code) {
#define PC_VALUE_CASE(code, name, ...) \
    case code: pc_add_values_of<pc_row_of_##name>(call, warp, tile, keys, scores, made); break;
        PC_FORMATS(PC_VALUE_CASE)
#undef PC_VALUE_CASE
    default: break;
    }
}

#endif
