/* What a warp has in hand while it goes through its tiles: queries, the tile that has arrived, and
 * the results so far.
 */
#ifndef PAGEDCACHE_CUDA_ATTENTION_VIEW_H
#define PAGEDCACHE_CUDA_ATTENTION_VIEW_H

#include "attention_stage.h"

/* What a warp works with. */
struct pc_warp_view {
    const float4 *queries; /* [group][step][lane]: two channels of row g, each in two parts */
    const float *sums;     /* [group][row]: of the query's channels */
    const uint8_t *stage;
    int lane;
    bool open, exact; /* exact: see attention_exact.h */
};

constexpr int PC_STEPS = PC_GROUP / 8; /* products of 8 channels in a group */

/* First key of the n-th 8 of a tile. Where a tile has 8 keys only, they are taken twice; the second
 * time nothing comes of it. */
PC_DEVICE int pc_first_key(const pc_attention &call, int n) {
    return 8 * n < call.keys ? 8 * n : 0;
}

/* Keys of a row, low … high - 1, counted as the item counts them. */
struct pc_key_range {
    int low, high;
};

/* What a warp has of its rows so far. results[4 group + i]: channels 8 t + i and 8 t + 4 + i of the
 * group, in the parts of pc_split(); floors: what minima of groups add to all of their channels. */
template <int GROUPS> struct pc_results {
    float results[4 * GROUPS][4], floors[GROUPS];
    float most, weight; /* largest score, and sum of the weights of this lane's keys */

    PC_DEVICE bool is_finite() const {
        float probe = 0.0f;
        PC_UNROLL
        for (int i = 0; i < 16 * GROUPS; i++) {
            probe = fmaf(results[i / 4][i % 4], 0.0f, probe); /* NaN for all but finite values */
        }
        return probe == 0.0f;
    }
};

#endif
