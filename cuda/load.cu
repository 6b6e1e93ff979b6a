/* Rows out: stored rows in token order, by block table or by pointer table, to outside values. */
#include "abi.h"
#include "channel_load.h"
#include "group_kernels.h"
#include "launch_rows.h"

namespace {

/* ---- same dtype inside and outside: bits are copied ------------------------------------------ */

template <int NBYTES>
__global__ void __launch_bounds__(PC_CTA, PC_CTAS) load_bits(const pc_load_call call) {
    for (int64_t index = pc_thread(); index < call.walk.total; index += pc_num_threads()) {
        const pc_spot spot = pc_spot_of(call.walk, index);
        const uint8_t *const from = pc_listed_place(call, spot).data;
        uint8_t *const to = pc_outside_row(call.rows, spot);
        pc_unit<NBYTES> units[PC_BATCH];
        PC_UNROLL
        for (int i = 0; i < PC_BATCH; i++) {
            const int64_t unit = pc_unit_of(call.walk, spot, i);
            if (unit < call.walk.units) {
                units[i] = pc_load_bytes<NBYTES>(from + unit * NBYTES);
            }
        }
        PC_UNROLL
        for (int i = 0; i < PC_BATCH; i++) {
            const int64_t unit = pc_unit_of(call.walk, spot, i);
            if (unit < call.walk.units) {
                pc_store_bytes<NBYTES>(to + unit * call.rows.value_stride, units[i]);
            }
        }
    }
}

/* ---- another float format: COUNT neighbours at a time ---------------------------------------- */

template <class Format, int COUNT>
__global__ void __launch_bounds__(PC_CTA, PC_CTAS) load_dense(const pc_load_call call) {
    constexpr int nbytes = COUNT * Format::quant_nbytes;
    for (int64_t index = pc_thread(); index < call.walk.total; index += pc_num_threads()) {
        const pc_spot spot = pc_spot_of(call.walk, index);
        const uint8_t *const from = pc_listed_place(call, spot).data;
        uint8_t *const to = pc_outside_row(call.rows, spot);
        pc_unit<nbytes> units[PC_BATCH];
        PC_UNROLL
        for (int i = 0; i < PC_BATCH; i++) {
            const int64_t unit = pc_unit_of(call.walk, spot, i);
            if (unit < call.walk.units) {
                units[i] = pc_load_bytes<nbytes>(from + unit * nbytes);
            }
        }
        PC_UNROLL
        for (int i = 0; i < PC_BATCH; i++) {
            const int64_t unit = pc_unit_of(call.walk, spot, i);
            if (unit >= call.walk.units) {
                continue;
            }
            uint8_t bytes[nbytes];
            float values[COUNT];
            memcpy(bytes, units + i, nbytes);
            PC_UNROLL
            for (int value = 0; value < COUNT; value++) {
                Format::decode(bytes + value * Format::quant_nbytes, bytes, values + value);
            }
            pc_store_values<COUNT>(call.rows.dtype, to + unit * COUNT * call.rows.value_stride,
                                   values);
        }
    }
}

struct load_kernels {
    template <int NBYTES> static constexpr auto bits = load_bits<NBYTES>;
    template <class Format, int COUNT> static constexpr auto dense = load_dense<Format, COUNT>;
    template <class Format, int COUNT>
    static constexpr auto groups = pc_load_groups<Format, COUNT, pc_load_call>;
};

} // namespace

int pc_cuda_load(const void *geometry, const void *slab, int64_t block_stride,
                 const int32_t *block_ids, const uint64_t *block_pointers, int64_t first,
                 void *rows, int64_t token_stride, int64_t head_stride, int64_t value_stride,
                 int dtype, int64_t num_tokens, void *stream) {
    pc_load_call call = {};
    memcpy(&call.geometry, geometry, sizeof call.geometry);
    call.slab = {(uint8_t *)slab, block_stride};
    call.rows = {(uint8_t *)rows, token_stride, head_stride, value_stride, dtype};
    call.block_size = pc_make_divisor(call.geometry.block_size);
    call.first = first;
    call.block_ids = block_ids;
    call.block_pointers = block_pointers;
    if (call.geometry.token_groups > 0) {
        return num_tokens > 0 ? pc_launch_channels(call, num_tokens, stream) : cudaSuccess;
    }
    return pc_launch_rows<load_kernels>(call, num_tokens, stream);
}
