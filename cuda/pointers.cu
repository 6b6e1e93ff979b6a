/* Pointer tables: the addresses of a sequence's blocks in every layer, for kernels that follow
 * pointers instead of a block table. */
#include "abi.h"
#include "device.h"
#include "pagedcache/rows.h"

namespace {

/* grid: x along the blocks, y over K and V of every layer. */
__global__ void __launch_bounds__(PC_CTA, PC_CTAS)
    build_pointers(const pc_slab *k_slabs, const pc_slab *v_slabs, int num_tables,
                   const int32_t *block_ids, int64_t first, int64_t count, uint64_t *table,
                   int64_t capacity) {
    for (int which = (int)blockIdx.y; which < num_tables; which += (int)gridDim.y) {
        const pc_slab *const slabs = which % 2 ? v_slabs : k_slabs;
        const pc_slab slab = slabs[which / 2];
        uint64_t *const entries = table + which * capacity + first;
        for (int64_t i = pc_thread(); i < count; i += pc_num_threads()) {
            const int64_t block = block_ids[i];
            const uint64_t address =
                (uint64_t)(uintptr_t)slab.base + (uint64_t)(block * slab.block_stride);
            entries[i] = block < 0 ? 0 : address;
        }
    }
}

} // namespace

int pc_cuda_build_pointers(const void *k_slabs, const void *v_slabs, int num_layers,
                           const int32_t *block_ids, int64_t first, int64_t count, uint64_t *table,
                           int64_t capacity, void *stream) {
    if (count <= 0 || num_layers <= 0) {
        return cudaSuccess;
    }
    const int num_tables = 2 * num_layers;
    const dim3 grid(pc_grid(count, PC_CTA), pc_rounds(num_tables));
    return pc_launch(build_pointers, grid, PC_CTA, 0, stream, (const pc_slab *)k_slabs,
                     (const pc_slab *)v_slabs, num_tables, block_ids, first, count, table,
                     capacity);
}
