/* Kernels with bugs on purpose, for the tests of the emulation itself. Only in the emulated build;
 * pc_cuda_bug(which, in, out, stream) launches one. */
#include "emulation.h"

namespace {

constexpr int cta_threads = 128;

__global__ void reverse(const float *in, float *out, bool with_barrier) {
    PC_SHARED(float, tile, cta_threads);
    const int i = int(threadIdx.x);
    tile[i] = in[i];
    if (with_barrier)
        __syncthreads();
    out[i] = tile[cta_threads - 1 - i];
}

__global__ void swap_lanes(const float *in, float *out, bool with_barrier) {
    PC_SHARED(float, tile, cta_threads);
    const int i = int(threadIdx.x);
    tile[i] = in[i];
    if (with_barrier)
        __syncwarp();
    out[i] = tile[i ^ 1];
}

__global__ void write_past_shared(const float *in, float *out) {
    PC_SHARED(float, tile, cta_threads);
    const int i = int(threadIdx.x);
    tile[i + 1] = in[i];
    __syncthreads();
    out[i] = tile[i];
}

__global__ void read_past_shared(const float *in, float *out) {
    PC_DYN_SHARED(float, tile);
    const int i = int(threadIdx.x);
    tile[i] = in[i];
    __syncthreads();
    out[i] = tile[i + 1];
}

__global__ void half_a_warp_shuffles(const float *in, float *out) {
    float value = in[threadIdx.x];
    if (threadIdx.x < 16)
        value = __shfl_xor_sync(0xffffffffu, value, 1);
    out[threadIdx.x] = value;
}

__global__ void two_barriers(const float *in, float *out) {
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
    out[threadIdx.x] = in[threadIdx.x];
}

__global__ void ctas_write_one_word(const float *in, float *out) {
    out[0] = in[threadIdx.x + blockIdx.x]; // one thread for each CTA
}

__global__ void early_use_of_copy(const float *in, float *out, bool with_wait) {
    PC_SHARED(float, tile, cta_threads);
    const int i = int(threadIdx.x);
    __pipeline_memcpy_async(&tile[i], &in[i], sizeof(float));
    __pipeline_commit();
    if (with_wait)
        __pipeline_wait_prior(0);
    out[i] = tile[i];
}

__global__ void misaligned_16_bytes(const float *in, float *out) {
    const uint4 value = *reinterpret_cast<const uint4 *>(in + 1);
    out[threadIdx.x] = float(value.x);
}

__global__ void not_in_its_mask(const float *in, float *out) {
    out[threadIdx.x] = float(__ballot_sync(1u, in[threadIdx.x] > 0));
}

// 64-bit exchange, votes, atomics and segments: expected values are in the test.
__global__ void warp_operations(const uint64_t *in, uint64_t *out) {
    const unsigned i = threadIdx.x, lane = i % 32;
    unsigned long long *sums = reinterpret_cast<unsigned long long *>(out) + cta_threads;
    const uint64_t value = in[i];
    uint64_t mixed = __shfl_sync(~0u, value, int(31 - lane));
    mixed ^= __shfl_up_sync(~0u, value, 1, 8) << 1;
    mixed ^= __shfl_down_sync(~0u, value, 3) << 2;
    mixed ^= uint64_t(__ballot_sync(~0u, lane % 3 == 0)) << 16;
    mixed ^= uint64_t(__any_sync(~0u, lane == 5)) << 8 ^ uint64_t(__all_sync(~0u, lane < 31)) << 9;
    out[i] = mixed;
    atomicAdd(&sums[0], static_cast<unsigned long long>(value));
    atomicMin(&sums[1], static_cast<unsigned long long>(value));
    atomicMax(&sums[2], static_cast<unsigned long long>(value));
    atomicCAS(&sums[3], 0ull, 1ull + blockIdx.x);
}

// in: a of each lane, then b, then c.
__global__ void product(const float *in, float *out) {
    const unsigned lane = threadIdx.x;
    float a[4], b[2], c[4];
    for (int i = 0; i < 4; i++) {
        a[i] = in[4 * lane + i];
        c[i] = in[192 + lane % 22 * 4 + i];
    }
    for (int i = 0; i < 2; i++)
        b[i] = in[128 + 2 * lane + i];
    pc_emulated_mma(c, a, b);
    pc_emulated_mma(c, a, b);
    for (int i = 0; i < 4; i++)
        out[4 * lane + i] = c[i];
}

// The CTA that is last sees what the others have written, if there are fences: out[0] becomes the
// sum of in[1 … 128]. The ticket lies behind them.
__global__ void pass_on(const float *in, float *out, bool with_fences) {
    PC_SHARED(unsigned, is_last, 1);
    const unsigned i = 1 + blockIdx.x * 32 + threadIdx.x, last = gridDim.x - 1;
    out[i] = in[i];
    __syncthreads();
    if (threadIdx.x == 0) {
        if (with_fences)
            __threadfence();
        is_last[0] = atomicInc(reinterpret_cast<unsigned *>(out + 1 + cta_threads), last) == last;
        if (with_fences)
            __threadfence();
    }
    __syncthreads();
    if (is_last[0] && threadIdx.x == 0) {
        out[0] = 0;
        for (unsigned j = 1; j <= 32 * gridDim.x; j++)
            out[0] += out[j];
    }
}

__global__ void much_shared(const float *in, float *out) {
    PC_DYN_SHARED(float, tile);
    const unsigned i = threadIdx.x;
    tile[i * 100] = in[i];
    __syncthreads();
    out[i] = tile[(cta_threads - 1 - i) * 100];
}

__global__ void trap(const float *in, float *) {
    if (in[threadIdx.x] == 3)
        __trap();
}

__global__ void too_much_shared(const float *in, float *out) {
    PC_SHARED(char, first, 32 << 10);
    PC_SHARED(char, second, 32 << 10);
    first[0] = second[0] = char(in[0]);
    out[0] = float(first[0]);
}

} // namespace

extern "C" __attribute__((visibility("default"))) int pc_cuda_bug(int which, void *in, void *out,
                                                                  void *stream) {
    const float *from = static_cast<const float *>(in);
    float *to = static_cast<float *>(out);
    constexpr size_t tile_nbytes = cta_threads * sizeof(float);
    switch (which) {
    case 0: return pc_launch(reverse, 1, cta_threads, 0, stream, from, to, true);
    case 1: return pc_launch(reverse, 1, cta_threads, 0, stream, from, to, false);
    case 2: return pc_launch(swap_lanes, 1, cta_threads, 0, stream, from, to, true);
    case 3: return pc_launch(swap_lanes, 1, cta_threads, 0, stream, from, to, false);
    case 4: return pc_launch(write_past_shared, 1, cta_threads, 0, stream, from, to);
    case 5: return pc_launch(read_past_shared, 1, cta_threads, tile_nbytes, stream, from, to);
    case 6: return pc_launch(half_a_warp_shuffles, 1, 32, 0, stream, from, to);
    case 7: return pc_launch(two_barriers, 1, 64, 0, stream, from, to);
    case 8: return pc_launch(ctas_write_one_word, 2, 1, 0, stream, from, to);
    case 9: return pc_launch(early_use_of_copy, 1, cta_threads, 0, stream, from, to, true);
    case 10: return pc_launch(early_use_of_copy, 1, cta_threads, 0, stream, from, to, false);
    case 11: return pc_launch(misaligned_16_bytes, 1, 1, 0, stream, from, to);
    case 12: return pc_launch(not_in_its_mask, 1, 32, 0, stream, from, to);
    case 13:
        return pc_launch(warp_operations, 1, cta_threads, 0, stream,
                         static_cast<const uint64_t *>(in), static_cast<uint64_t *>(out));
    case 14: return pc_launch(reverse, 1, 1025, 0, stream, from, to, true);
    case 15: return pc_launch(reverse, 1, cta_threads, 300 << 10, stream, from, to, true);
    case 16: return pc_launch(trap, 1, cta_threads, 0, stream, from, to);
    case 17: return pc_launch(too_much_shared, 1, 1, 0, stream, from, to);
    case 18: return pc_launch(product, 1, 32, 0, stream, from, to);
    case 19: return pc_launch(pass_on, 4, 32, 0, stream, from, to, true);
    case 20: return pc_launch(pass_on, 4, 32, 0, stream, from, to, false);
    case 21:
    case 22:
        if (const int code = cudaFuncSetAttribute(reinterpret_cast<const void *>(much_shared),
                                                  cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                  which == 21 ? 52 << 10 : 48 << 10))
            return code;
        return pc_launch(much_shared, 1, cta_threads, 52 << 10, stream, from, to);
    default: return cudaErrorInvalidValue;
    }
}
