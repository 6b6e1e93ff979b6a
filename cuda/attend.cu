/* Attention over stored blocks. */
#include "abi.h"
#include "attention_end.h"
#include "attention_launch.h"

namespace {

/* Queries of the item's rows as fragments of products, each float in two parts, and the sums of
 * their channels by group, which minima are multiplied with. */
PC_DEVICE void bring_queries(const pc_attention &call, const pc_cuda_attention_item &item, int head,
                             float4 *queries, float *sums) {
    const int threads = (int)blockDim.x, count = call.groups * PC_STEPS * PC_WARP;
    for (int i = (int)threadIdx.x; i < count; i += threads) {
        const int lane = i % PC_WARP, step = i / PC_WARP, row = lane / 4;
        const int channel = step / PC_STEPS * PC_GROUP + lane % 4 * 8 + step % PC_STEPS * 2;
        const uint8_t *const at =
            call.q.base + (item.token + pc_query_of(call, item, row)) * call.q.token_stride +
            pc_head_of(call, item, head, row) * call.q.head_stride;
        pc_halves parts[2];
        PC_UNROLL
        for (int j = 0; j < 2; j++) {
            float value = 0.0f;
            if (row < item.rows && channel + j < call.head_dim) {
                pc_load_values<1>(call.q.dtype, at + (channel + j) * call.q.value_stride, &value);
            }
            /* what of the lower part no operand holds is left out everywhere: scores of quants that
             * stand for others, and sums of channels, then fit together */
            parts[j] = pc_split(value * call.query_factor);
            const bool finite = fabsf(parts[j].high) <= FLT_MAX; /* Inf has no second part */
            parts[j].low = finite ? pc_split(parts[j].low).high : 0.0f;
        }
        queries[i] = make_float4(parts[0].high, parts[0].low, parts[1].high, parts[1].low);
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < call.groups * PC_ROWS; i += threads) {
        const int group = i / PC_ROWS, row = i % PC_ROWS;
        float sum = 0.0f;
        for (int j = 0; j < PC_STEPS * 4; j++) {
            const float4 query = queries[(group * PC_STEPS + j / 4) * PC_WARP + 4 * row + j % 4];
            sum += (query.x + query.y) + (query.z + query.w);
        }
        sums[i] = sum;
    }
    __syncthreads();
}

/* The keys of a row of the item. */
PC_DEVICE pc_key_range keys_of(const pc_attention &call, const pc_cuda_attention_item &item,
                               int row) {
    const int64_t position = item.position + pc_query_of(call, item, row);
    int64_t low = item.begin, high = item.end;
    if (call.causal && position + 1 < high) {
        high = position + 1 < low ? low : position + 1;
    }
    if (call.window > 0 && position + 1 - call.window > low) {
        low = position + 1 - call.window < high ? position + 1 - call.window : high;
    }
    return {(int)low, (int)high};
}

/* Whether all other CTAs of these rows have left their parts. `answer`: a word of shared memory. */
PC_DEVICE bool takes_last_ticket(const pc_attention &call, const pc_cuda_attention_item &item,
                                 int head, unsigned *answer) {
    __syncthreads(); /* this CTA's part is written, and by all threads */
    if (threadIdx.x == 0) {
        const unsigned last = (unsigned)item.parts - 1;
        unsigned *const ticket = call.tickets + (item.ticket * (int64_t)call.num_heads + head);
        __threadfence(); /* whoever comes later sees it */
        *answer = atomicInc(ticket, last) == last;
        __threadfence(); /* what the others have written is seen from here on */
    }
    __syncthreads();
    return *answer != 0;
}

/* The keys that all rows of the item have; `keys`: those of the lane's row. */
PC_DEVICE pc_key_range keys_of_all(const pc_cuda_attention_item &item, pc_key_range keys,
                                   int lane) {
    if (lane / 4 >= item.rows) {
        keys = {item.begin, item.end};
    }
    for (int flip = 4; flip < PC_WARP; flip *= 2) {
        const int low = __shfl_xor_sync(~0u, keys.low, flip);
        const int high = __shfl_xor_sync(~0u, keys.high, flip);
        keys.low = low > keys.low ? low : keys.low;
        keys.high = high < keys.high ? high : keys.high;
    }
    return keys;
}

/* CTAs that a multiprocessor is to hold at least: what bounds registers. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int ctas_of(int) {
    return 1; /* has no more shared memory */
}
#else
constexpr int ctas_of(int groups) {
    return groups <= 4 ? 3 : 2;
}
#endif

template <int GROUPS>
__global__ void __launch_bounds__(PC_MOST_WARPS *PC_WARP, ctas_of(GROUPS))
    attend(const __grid_constant__ pc_attention call) {
    PC_DYN_SHARED(uint4, shared);
    const int warp = (int)threadIdx.x / PC_WARP, lane = (int)threadIdx.x % PC_WARP;
    float4 *const queries = (float4 *)(void *)shared;
    float *const sums = (float *)(void *)(queries + call.groups * PC_STEPS * PC_WARP);
    uint8_t *const stages =
        (uint8_t *)shared + call.queries_nbytes + (int64_t)warp * call.stages * call.stage.nbytes;
    float *const parts = (float *)(void *)((uint8_t *)shared + call.queries_nbytes);
    const int row_step = call.groups * PC_GROUP, part_floats = PC_ROWS * (row_step + 2);

    for (int64_t index = blockIdx.x; index < call.total; index += gridDim.x) {
        const int head = (int)(index % call.num_heads);
        const pc_cuda_attention_item item = call.items[index / call.num_heads];
        pc_feed feed(call, item, head, stages, warp, lane);
        const pc_key_range keys = keys_of(call, item, lane / 4);
        const pc_key_range common = keys_of_all(item, keys, lane);
        pc_results<GROUPS> made;
        pc_warp_view view = {queries, sums, nullptr, lane, false, false};
        for (;;) {
            made = {};
            made.most = -INFINITY;
            feed.begin();
            for (int staged = 1;; staged++) {
                feed.stage_one();
                if (staged == call.stages - 1 && !view.exact) {
                    bring_queries(call, item, head, queries, sums);
                }
                if (staged < call.stages) {
                    continue;
                }
                view.stage = feed.next(view.open);
                if (view.stage == nullptr) {
                    break;
                }
                const pc_key_tile tile = feed.tile();
                const bool whole = tile.first >= common.low && tile.count == PC_KEYS &&
                                   tile.first + PC_KEYS <= common.high;
                pc_add_tile(call, view, tile, keys, whole, made);
            }
            if (view.exact || !__any_sync(~0u, !made.is_finite())) {
                break;
            }
            view.exact = true;
        }
        __syncthreads(); /* results take the place of stages */
        pc_leave_results(call, {parts + warp * part_floats, row_step}, lane, made);
        __syncthreads();
        float *part = nullptr;
        if (item.parts > 1) {
            part = call.partials +
                   (item.part * (int64_t)call.num_heads + head) * pc_partial_floats(call.head_dim);
        }
        pc_add_warps(call, item, head, parts, part_floats, row_step, part);
        if (part != nullptr && takes_last_ticket(call, item, head, (unsigned *)(void *)parts)) {
            pc_add_ctas(call, item, head, parts + 4);
        }
        __syncthreads(); /* the next item takes the place of this one */
    }
}

} // namespace

int pc_cuda_attend_sizes(int64_t head_dim, size_t *sizes) {
    sizes[0] = sizeof(pc_cuda_attention);
    sizes[1] = sizeof(pc_cuda_attention_item);
    sizes[2] = (size_t)pc_partial_floats(head_dim) * sizeof(float);
    return cudaSuccess;
}

int pc_cuda_attend(const pc_cuda_attention *given, void *stream) {
    pc_attention call = {};
    int nbytes = 0;
    const int error = pc_make_attention(call, *given, nbytes);
    if (error != cudaSuccess || call.total == 0) {
        return error;
    }
    const auto kernel = call.groups <= 2 ? attend<2> : call.groups <= 4 ? attend<4> : attend<8>;
    if (nbytes > PC_SHARED_ANYWHERE) {
        const int refused = cudaFuncSetAttribute(
            (const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, nbytes);
        if (refused != cudaSuccess) {
            return refused;
        }
    }
    return pc_launch(kernel, pc_grid(call.total, 1), call.warps * PC_WARP, (size_t)nbytes, stream,
                     call);
}
