/* A plain read of memory: what reading is measured against. */
#include "abi.h"
#include "device.h"
#include "units.h"

namespace {

constexpr int READS = 8; /* of 16 bytes that a thread starts before it waits for the first */

PC_DEVICE uint64_t sum_of(uint4 unit) {
    return ((uint64_t)unit.y << 32 | unit.x) + ((uint64_t)unit.w << 32 | unit.z);
}

__global__ void __launch_bounds__(PC_CTA, PC_CTAS)
    read(const uint8_t *from, int64_t units, unsigned long long *sum) {
    const int64_t step = pc_num_threads();
    uint64_t mine = 0;
    for (int64_t i = pc_thread(); i < units; i += READS * step) {
        uint4 read[READS] = {};
        PC_UNROLL
        for (int j = 0; j < READS; j++) {
            if (i + j * step < units) {
                read[j] = pc_load_unit<16>(from + (i + j * step) * 16);
            }
        }
        PC_UNROLL
        for (int j = 0; j < READS; j++) {
            mine += sum_of(read[j]);
        }
    }
    for (int flip = PC_WARP / 2; flip > 0; flip /= 2) {
        mine += __shfl_xor_sync(~0u, (unsigned long long)mine, flip);
    }
    if (threadIdx.x % PC_WARP == 0) {
        atomicAdd(sum, (unsigned long long)mine);
    }
}

} // namespace

int pc_cuda_read(const void *from, size_t nbytes, uint64_t *sum, void *stream) {
    const int error = cudaMemsetAsync(sum, 0, sizeof *sum, (cudaStream_t)stream);
    const int64_t units = (int64_t)(nbytes / 16);
    if (error != cudaSuccess || units == 0) {
        return error;
    }
    return pc_launch(read, pc_grid(units, PC_CTA * READS), PC_CTA, 0, stream, (const uint8_t *)from,
                     units, (unsigned long long *)sum);
}
