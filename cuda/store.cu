/* Rows in: outside values to the stored format, scattered by slot, in one pass. */
#include "abi.h"
#include "channel_store.h"
#include "group_kernels.h"
#include "launch_rows.h"

namespace {

/* ---- same dtype inside and outside: bits are copied ------------------------------------------ */

template <int NBYTES>
__global__ void __launch_bounds__(PC_CTA, PC_CTAS) store_bits(const pc_store_call call) {
    for (int64_t index = pc_thread(); index < call.walk.total; index += pc_num_threads()) {
        const pc_spot spot = pc_spot_of(call.walk, index);
        const uint8_t *const from = pc_outside_row(call.rows, spot);
        const pc_place place = pc_stored_place(call, spot);
        pc_unit<NBYTES> units[PC_BATCH];
        PC_UNROLL
        for (int i = 0; i < PC_BATCH; i++) {
            const int64_t unit = pc_unit_of(call.walk, spot, i);
            if (unit < call.walk.units) {
                units[i] = pc_load_bytes<NBYTES>(from + unit * call.rows.value_stride);
            }
        }
        if (place.data == nullptr) {
            continue;
        }
        PC_ASSUME_GLOBAL(place.data);
        PC_UNROLL
        for (int i = 0; i < PC_BATCH; i++) {
            const int64_t unit = pc_unit_of(call.walk, spot, i);
            if (unit < call.walk.units) {
                pc_store_bytes<NBYTES>(place.data + unit * NBYTES, units[i]);
            }
        }
    }
}

/* ---- another float format: COUNT neighbours at a time ---------------------------------------- */

/* Make values finite and fit for an open block, or report them. Returns whether they may be stored.
 * row: where the whole row is outside. */
template <int COUNT>
PC_DEVICE bool settle_values(const pc_store_call &call, const pc_spot &spot, int64_t first,
                             const uint8_t *row, float *values) {
    const int bad = pc_first_nonfinite<COUNT>(values);
    if (bad < COUNT) {
        if (call.policy == PC_NONFINITE_RAISE) {
            const int64_t flat = spot.token * call.geometry.num_heads + spot.head;
            pc_report(call.fault, PC_E_NONFINITE, flat * call.geometry.head_dim + first + bad);
            return false;
        }
        pc_saturate_part<COUNT>(values, first, call.geometry.head_dim, [&](int64_t i) {
            float value;
            pc_load_values<1>(call.rows.dtype, row + i * call.rows.value_stride, &value);
            return value;
        });
    }
    pc_clamp_values<COUNT>(call.geometry.code, values);
    return true;
}

/* CLAMPS: into open blocks. */
template <class Format, int COUNT, bool CLAMPS>
__global__ void __launch_bounds__(PC_CTA, PC_CTAS) store_dense(const pc_store_call call) {
    constexpr int nbytes = COUNT * Format::quant_nbytes;
    for (int64_t index = pc_thread(); index < call.walk.total; index += pc_num_threads()) {
        const pc_spot spot = pc_spot_of(call.walk, index);
        const uint8_t *const from = pc_outside_row(call.rows, spot);
        const pc_place place = pc_stored_place(call, spot);
        float values[PC_BATCH][COUNT];
        PC_UNROLL
        for (int i = 0; i < PC_BATCH; i++) {
            const int64_t unit = pc_unit_of(call.walk, spot, i);
            if (unit < call.walk.units) {
                pc_load_values<COUNT>(call.rows.dtype, from + unit * COUNT * call.rows.value_stride,
                                      values[i]);
            }
        }
        if (place.data == nullptr) {
            continue;
        }
        PC_ASSUME_GLOBAL(place.data);
        PC_UNROLL
        for (int i = 0; i < PC_BATCH; i++) {
            const int64_t unit = pc_unit_of(call.walk, spot, i);
            if (unit >= call.walk.units) {
                continue;
            }
            if constexpr (CLAMPS) {
                if (!settle_values<COUNT>(call, spot, unit * COUNT, from, values[i])) {
                    continue;
                }
            }
            uint8_t bytes[nbytes];
            PC_UNROLL
            for (int value = 0; value < COUNT; value++) {
                Format::encode(values[i] + value, bytes + value * Format::quant_nbytes, bytes);
            }
            pc_unit<nbytes> packed;
            memcpy(&packed, bytes, nbytes);
            pc_store_bytes<nbytes>(place.data + unit * nbytes, packed);
        }
    }
}

struct store_kernels {
    template <int NBYTES> static constexpr auto bits = store_bits<NBYTES>;
    template <class Format, int COUNT>
    static constexpr auto dense = store_dense<Format, COUNT, false>;
    template <class Format, int COUNT>
    static constexpr auto groups = pc_store_groups<Format, COUNT, pc_store_call>;
};

struct open_kernels {
    template <class Format, int COUNT>
    static constexpr auto dense = store_dense<Format, COUNT, true>;
};

} // namespace

int pc_cuda_store(const void *geometry, void *slab, int64_t block_stride, int64_t num_blocks,
                  const void *rows, int64_t token_stride, int64_t head_stride, int64_t value_stride,
                  int dtype, const int64_t *slots, int64_t num_tokens, int policy, void *fault,
                  void *stream) {
    pc_store_call call = {};
    memcpy(&call.geometry, geometry, sizeof call.geometry);
    call.slab = {(uint8_t *)slab, block_stride};
    call.rows = {(uint8_t *)rows, token_stride, head_stride, value_stride, dtype};
    call.block_size = pc_make_divisor(call.geometry.block_size);
    call.num_slots = num_blocks * call.geometry.block_size;
    call.slots = slots;
    call.fault = fault;
    call.policy = policy;
    if (call.geometry.token_groups > 0) {
        return cudaErrorInvalidValue; /* only whole blocks can be stored */
    }
    return call.geometry.clamps ? pc_launch_open<open_kernels>(call, num_tokens, stream)
                                : pc_launch_rows<store_kernels>(call, num_tokens, stream);
}

int pc_cuda_store_blocks(const void *geometry, void *slab, int64_t block_stride, int64_t num_blocks,
                         const void *rows, int64_t token_stride, int64_t head_stride,
                         int64_t value_stride, int dtype, int64_t num_tokens,
                         const int64_t *entries, int64_t n, int policy, void *fault, void *stream) {
    pc_store_blocks_call call = {};
    memcpy(&call.geometry, geometry, sizeof call.geometry);
    call.slab = {(uint8_t *)slab, block_stride};
    call.rows = {(uint8_t *)rows, token_stride, head_stride, value_stride, dtype};
    call.entries = entries;
    call.num_blocks = num_blocks;
    call.num_tokens = num_tokens;
    call.fault = fault;
    call.policy = policy;
    if (call.geometry.token_groups == 0) {
        return cudaErrorInvalidValue;
    }
    return n > 0 ? pc_launch_columns(call, n, stream) : cudaSuccess;
}
