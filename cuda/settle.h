/* What an open row may hold, as pc_clamp_row() of rows.h says, for threads that have a part of a
 * group each: finite values within the range of the float format.
 */
#ifndef PAGEDCACHE_CUDA_SETTLE_H
#define PAGEDCACHE_CUDA_SETTLE_H

#include "device.h"
#include "pagedcache/rows.h"

/* Make COUNT values of a row finite, of which `first` is the first one's number. value_at(i) is
 * value i of the row: a group is saturated by its largest finite value, which may be another
 * thread's. Rare, so that nothing but its size matters. */
template <int COUNT, class ValueAt>
PC_DEVICE void pc_saturate_part(float *values, int64_t first, int64_t head_dim,
                                const ValueAt &value_at) {
    const int64_t start = first - first % PC_GROUP;
    const int64_t end = start + PC_GROUP < head_dim ? start + PC_GROUP : head_dim;
    pc_finite seen = {0u, 0};
    PC_UNROLL_BY(1)
    for (int64_t i = start; i < end; i++) {
        pc_see_finite(&seen, value_at(i));
    }
    PC_UNROLL
    for (int i = 0; i < COUNT; i++) {
        values[i] = pc_saturated(values[i], seen);
    }
}

template <int COUNT> PC_DEVICE void pc_clamp_values(int code, float *values) {
    const float most = pc_largest(code);
    PC_UNROLL
    for (int i = 0; i < COUNT; i++) {
        values[i] = pc_clamp_value(values[i], most);
    }
}

/* The number of the first value that is not finite; COUNT where all are. */
template <int COUNT> PC_DEVICE int pc_first_nonfinite(const float *values) {
    int found = COUNT;
    PC_UNROLL
    for (int i = COUNT - 1; i >= 0; i--) {
        found = pc_all_finite(values + i, 1) ? found : i;
    }
    return found;
}

#endif
