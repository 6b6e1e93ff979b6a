/* The end of an item: the warps of a CTA add up, then, where keys were split, the CTAs do.
 *
 * A CTA leaves its part in global memory and takes a ticket; the one that gets the last ticket adds
 * all parts up, in their order, so that results do not depend on which came when. Tickets count
 * modulo the number of parts: they are zero again afterwards.
 */
#ifndef PAGEDCACHE_CUDA_ATTENTION_END_H
#define PAGEDCACHE_CUDA_ATTENTION_END_H

#include "attention_tile.h"
#include "values.h"
#include <float.h>

/* Results of the rows of an item and where they lie: [row][channel], then largest scores, then sums
 * of weights, by row. */
struct pc_part {
    float *results;
    int row_step;

    PC_DEVICE float *most() const {
        return results + PC_ROWS * row_step;
    }
    PC_DEVICE float *weight() const {
        return results + PC_ROWS * (row_step + 1);
    }
};

/* What a part's sums count for in units of the largest score of all, `base`. */
PC_DEVICE float pc_factor(float most, float base) {
    return exp2f(most - (base == -INFINITY ? 0.0f : base));
}

/* Write what the lane has of its rows to the warp's part. */
template <int GROUPS>
PC_DEVICE void pc_leave_results(const pc_attention &call, const pc_part &part, int lane,
                                pc_results<GROUPS> &made) {
    const int g = lane / 4, t = lane % 4;
    float weight = made.weight + __shfl_xor_sync(~0u, made.weight, 1);
    weight += __shfl_xor_sync(~0u, weight, 2);
    PC_UNROLL
    for (int group = 0; group < GROUPS; group++) {
        if (group >= call.groups) {
            continue;
        }
        float extra = made.floors[group];
        extra += __shfl_xor_sync(~0u, extra, 1);
        extra += __shfl_xor_sync(~0u, extra, 2);
        float *const row = part.results + g * part.row_step + group * PC_GROUP + 8 * t;
        PC_UNROLL
        for (int i = 0; i < 4; i++) {
            const float (&both)[4] = made.results[4 * group + i];
            row[i] = both[0] + both[2] + extra;
            row[4 + i] = both[1] + both[3] + extra;
        }
    }
    if (t == 0) {
        part.most()[g] = made.most;
        part.weight()[g] = weight;
    }
}

/* Token and query head of a row of an item. */
PC_DEVICE int64_t pc_query_of(const pc_attention &call, const pc_cuda_attention_item &item,
                              int row) {
    return (item.row + row) / call.group;
}

PC_DEVICE int64_t pc_head_of(const pc_attention &call, const pc_cuda_attention_item &item, int head,
                             int row) {
    return (int64_t)head * call.group + (item.row + row) % call.group;
}

/* One value of a row, divided by all weights, the sink's too; with channel 0 goes the row's sum of
 * weights, as its natural logarithm. */
PC_DEVICE void pc_finish(const pc_attention &call, const pc_cuda_attention_item &item, int head,
                         int row, int channel, float result, float most, float weight) {
    const int64_t token = item.token + pc_query_of(call, item, row);
    const int64_t q_head = pc_head_of(call, item, head, row);
    if (call.sinks != nullptr) {
        const float sink = call.sinks[q_head] * 1.44269504f; /* log2(e) */
        const float base = fmaxf(most, sink), factor = pc_factor(most, base);
        result *= factor;
        weight = fmaf(weight, factor, pc_factor(sink, base));
        most = base;
    }
    const float value = weight == 0.0f ? 0.0f : result / weight;
    pc_store_values<1>(call.out.dtype,
                       call.out.base + token * call.out.token_stride +
                           q_head * call.out.head_stride + channel * call.out.value_stride,
                       &value);
    if (channel == 0 && call.lse != nullptr) {
        call.lse[token * call.num_heads * call.group + q_head] =
            weight == 0.0f ? -INFINITY : (most + log2f(weight)) * 0.693147181f; /* ln(2) */
    }
}

/* The warps' parts, in shared memory, as one: finished, or written to `to`. */
PC_DEVICE void pc_add_warps(const pc_attention &call, const pc_cuda_attention_item &item, int head,
                            const float *parts, int part_floats, int row_step, float *to) {
    const int threads = (int)blockDim.x;
    for (int row = 0; row < item.rows; row++) {
        float most = -INFINITY, weight = 0.0f, factors[PC_MOST_WARPS];
        for (int warp = 0; warp < call.warps; warp++) {
            const pc_part part = {(float *)parts + warp * part_floats, row_step};
            most = fmaxf(most, part.most()[row]);
        }
        PC_UNROLL
        for (int warp = 0; warp < PC_MOST_WARPS; warp++) {
            if (warp < call.warps) {
                const pc_part part = {(float *)parts + warp * part_floats, row_step};
                factors[warp] = pc_factor(part.most()[row], most);
                weight = fmaf(part.weight()[row], factors[warp], weight);
            }
        }
        for (int channel = (int)threadIdx.x; channel < call.head_dim; channel += threads) {
            float result = 0.0f;
            PC_UNROLL
            for (int warp = 0; warp < PC_MOST_WARPS; warp++) {
                if (warp < call.warps) {
                    result = fmaf(parts[warp * part_floats + row * row_step + channel],
                                  factors[warp], result);
                }
            }
            if (to == nullptr) {
                pc_finish(call, item, head, row, channel, result, most, weight);
            } else {
                to[row * call.head_dim + channel] = result;
            }
        }
        if (to != nullptr && threadIdx.x == 0) {
            const pc_part part = {to, call.head_dim};
            part.most()[row] = most;
            part.weight()[row] = weight;
        }
    }
}

/* The parts of all CTAs of these rows, in global memory, as one: finished. `summed`: two floats of
 * shared memory for each row. */
PC_DEVICE void pc_add_ctas(const pc_attention &call, const pc_cuda_attention_item &item, int head,
                           float *summed) {
    const int threads = (int)blockDim.x, lane = (int)threadIdx.x % PC_WARP;
    const int64_t step = call.num_heads * pc_partial_floats(call.head_dim);
    float *const first = call.partials + (item.first_part * (int64_t)call.num_heads + head) *
                                             pc_partial_floats(call.head_dim);
    const pc_part part = {first, call.head_dim};
    for (int row = (int)threadIdx.x / PC_WARP; row < item.rows; row += call.warps) {
        float most = -INFINITY, weight = 0.0f;
        for (int i = lane; i < item.parts; i += PC_WARP) {
            most = fmaxf(most, __ldcg(part.most() + i * step + row));
        }
        for (int flip = PC_WARP / 2; flip > 0; flip /= 2) {
            most = fmaxf(most, __shfl_xor_sync(~0u, most, flip));
        }
        for (int i = lane; i < item.parts; i += PC_WARP) {
            const float factor = pc_factor(__ldcg(part.most() + i * step + row), most);
            weight = fmaf(__ldcg(part.weight() + i * step + row), factor, weight);
        }
        for (int flip = PC_WARP / 2; flip > 0; flip /= 2) {
            weight += __shfl_xor_sync(~0u, weight, flip);
        }
        if (lane == 0) {
            summed[2 * row] = most;
            summed[2 * row + 1] = weight;
        }
    }
    __syncthreads();
    for (int row = 0; row < item.rows; row++) {
        const float most = summed[2 * row], weight = summed[2 * row + 1];
        for (int channel = (int)threadIdx.x; channel < call.head_dim; channel += threads) {
            float result = 0.0f;
            PC_UNROLL_BY(8)
            for (int i = 0; i < item.parts; i++) {
                const float *const at = part.results + i * step;
                const float factor = pc_factor(__ldcg(part.most() + i * step + row), most);
                result = fmaf(__ldcg(at + row * call.head_dim + channel), factor, result);
            }
            pc_finish(call, item, head, row, channel, result, most, weight);
        }
    }
}

#endif
