/* The first NaN or Inf of rows outside the pool, for formats that cannot hold one. */
#include "abi.h"
#include "values.h"
#include "walk.h"

namespace {

/* COUNT values of type Bits in one access. A thread looks at ever later places, so it may stop at
 * its first hit; the least of all hits stays. */
template <class Bits, int COUNT>
__global__ void __launch_bounds__(PC_CTA, PC_CTAS)
    find_nonfinite(const pc_rows rows, const pc_walk walk, uint32_t exponent,
                   unsigned long long *first) {
    constexpr int nbytes = COUNT * sizeof(Bits);
    for (int64_t i = pc_thread(); i < walk.total; i += pc_num_threads()) {
        const pc_spot spot = pc_spot_of(walk, i);
        const uint8_t *const at =
            pc_outside_row(rows, spot) + spot.unit * COUNT * rows.value_stride;
        const pc_unit<nbytes> unit = pc_load_bytes<nbytes>(at);
        Bits values[COUNT];
        memcpy(values, &unit, nbytes);
        int found = COUNT;
        PC_UNROLL
        for (int value = COUNT - 1; value >= 0; value--) {
            found = (values[value] & exponent) == exponent ? value : found;
        }
        if (found < COUNT) {
            atomicMin(first, (unsigned long long)(i * COUNT + found));
            return;
        }
    }
}

} // namespace

int pc_cuda_find_nonfinite(const void *rows, int64_t token_stride, int64_t head_stride,
                           int64_t value_stride, int dtype, int64_t num_tokens, int64_t num_heads,
                           int64_t head_dim, uint64_t *first, void *stream) {
    const int error = cudaMemsetAsync(first, 0xFF, sizeof *first, (cudaStream_t)stream);
    if (error != cudaSuccess || num_tokens <= 0) {
        return error;
    }
    const pc_rows source = {(uint8_t *)rows, token_stride, head_stride, value_stride, dtype};
    const bool words = dtype == PC_FORMAT_float32;
    const int count = pc_values_at_once(source, num_tokens, num_heads, head_dim, words ? 4 : 8);
    /* Token by token, so that the number of a unit is the flat index of its first value. */
    const pc_walk walk = pc_make_walk(0, num_tokens, num_heads, head_dim / count, 1);
    const auto kernel = words
                            ? count == 4 ? find_nonfinite<uint32_t, 4> : find_nonfinite<uint32_t, 1>
                        : count == 8 ? find_nonfinite<uint16_t, 8>
                                     : find_nonfinite<uint16_t, 1>;
    return pc_launch(kernel, pc_grid(walk.total, PC_CTA), PC_CTA, 0, stream, source, walk,
                     pc_exponent_bits(dtype), (unsigned long long *)first);
}
