/* Pointer tables: the addresses of a sequence's blocks in every layer, for kernels that follow
 * pointers instead of a block table. */
#include "abi.h"
#include "device.h"
#include "pagedcache/rows.h"

namespace {

/* Slabs of K and of V, of every layer. */
struct both_kinds {
    const pc_slab *k, *v;

    /* Number `which` of K and V in turn. */
    PC_DEVICE pc_slab slab(int which) const {
        const pc_slab *const slabs = which % 2 ? v : k;
        return slabs[which / 2];
    }
};

/* grid: x along the places, y over K and V of every layer. */
__global__ void __launch_bounds__(PC_CTA, PC_CTAS)
    build_pointers(const both_kinds sealed, const both_kinds open, int64_t num_blocks,
                   int num_tables, const int32_t *places, int64_t first, int64_t count,
                   uint64_t *table, int64_t capacity) {
    for (int which = (int)blockIdx.y; which < num_tables; which += (int)gridDim.y) {
        const pc_slab own = sealed.slab(which), other = open.slab(which);
        uint64_t *const entries = table + which * capacity + first;
        for (int64_t i = pc_thread(); i < count; i += pc_num_threads()) {
            const int64_t place = places[i];
            const pc_slab slab = place < num_blocks ? own : other;
            const uint64_t address =
                (uint64_t)(uintptr_t)slab.base + (uint64_t)(place * slab.block_stride);
            entries[i] = place < 0 ? 0 : address;
        }
    }
}

} // namespace

int pc_cuda_build_pointers(const void *k_slabs, const void *v_slabs, const void *open_k_slabs,
                           const void *open_v_slabs, int64_t num_blocks, int num_layers,
                           const int32_t *places, int64_t first, int64_t count, uint64_t *table,
                           int64_t capacity, void *stream) {
    if (count <= 0 || num_layers <= 0) {
        return cudaSuccess;
    }
    const int num_tables = 2 * num_layers;
    const dim3 grid(pc_grid(count, PC_CTA), pc_rounds(num_tables));
    const both_kinds sealed = {(const pc_slab *)k_slabs, (const pc_slab *)v_slabs};
    const both_kinds open = {(const pc_slab *)open_k_slabs, (const pc_slab *)open_v_slabs};
    return pc_launch(build_pointers, grid, PC_CTA, 0, stream, sealed, open, num_blocks, num_tables,
                     places, first, count, table, capacity);
}
