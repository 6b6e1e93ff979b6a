/* The same as attention_tile.h for float formats that hold NaN or Inf: value by value.
 *
 * In products of tensor cores NaN and Inf of one key reach every row, since 0 times them is NaN,
 * and Inf has no second part. So a warp that ends with anything that is not finite goes through its
 * tiles again, in this way, where a key counts for the rows that attend to it and for no other.
 */
#ifndef PAGEDCACHE_CUDA_ATTENTION_EXACT_H
#define PAGEDCACHE_CUDA_ATTENTION_EXACT_H

#include "attention_view.h"

/* As pc_score_keys(). */
template <class Format>
PC_DEVICE void pc_score_exactly(const pc_attention &call, const pc_warp_view &warp,
                                float (&scores)[2][2]) {
    const int g = warp.lane / 4, t = warp.lane % 4;
    PC_UNROLL_BY(1)
    for (int i = 0; i < 4; i++) {
        const int key = pc_first_key(call, i / 2) + 2 * t + i % 2;
        const pc_staged_row row = pc_staged_row_of(call, PC_K, warp.open, warp.stage, key);
        float score = 0.0f;
        PC_UNROLL_BY(1)
        for (int pair = 0; pair < 16 * call.groups; pair += 2) { /* of pairs of channels */
            const int group = pair / 16, part = pair % 16 / 4, step = pair % 4;
            const float4 *const query =
                warp.queries + (group * PC_STEPS + step) * PC_WARP + 4 * g + part;
            float x[4];
            pc_reader<Format>::template take<PC_K>(row, group, 8 * part + 2 * step, x);
            score = fmaf(query[0].x + query[0].y, x[0], score);
            score = fmaf(query[0].z + query[0].w, x[1], score);
            score = fmaf(query[PC_WARP].x + query[PC_WARP].y, x[2], score);
            score = fmaf(query[PC_WARP].z + query[PC_WARP].w, x[3], score);
        }
        PC_UNROLL
        for (int j = 0; j < 4; j++) {
            scores[j / 2][j % 2] = i == j ? score : scores[j / 2][j % 2];
        }
    }
}

/* As pc_add_values(), for the keys of the lane's row. */
template <class Format, int GROUPS>
PC_DEVICE void pc_add_exactly(const pc_attention &call, const pc_warp_view &warp, pc_key_tile tile,
                              pc_key_range keys, const float (&weights)[2][2],
                              pc_results<GROUPS> &made) {
    const int g = warp.lane / 4, t = warp.lane % 4;
    PC_UNROLL_BY(1)
    for (int number = 0; number < PC_KEYS; number++) {
        const float first = number % 2 ? weights[0][1] : weights[0][0];
        const float second = number % 2 ? weights[1][1] : weights[1][0];
        const float weight = __shfl_sync(~0u, number < 8 ? first : second, 4 * g + number % 8 / 2);
        const int key = tile.first + number;
        if (number >= tile.count || key < keys.low || key >= keys.high) {
            continue;
        }
        const pc_staged_row row = pc_staged_row_of(call, PC_V, warp.open, warp.stage, number);
        PC_UNROLL
        for (int part = 0; part < 2 * GROUPS; part++) {
            float x[4];
            if (part / 2 >= call.groups) {
                continue;
            }
            pc_reader<Format>::template take<PC_V>(row, part / 2, 8 * t + part % 2 * 4, x);
            PC_UNROLL
            for (int j = 0; j < 4; j++) {
                float &result = made.results[part / 2 * 4 + j][part % 2];
                result = fmaf(weight, x[j], result);
            }
        }
    }
}

#endif
