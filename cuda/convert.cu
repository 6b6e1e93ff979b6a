/* Rows from one kind of place to the other: open blocks quantised (sealed), sealed ones read back
 * into open blocks (reopened). The kernels are those that store and load rows; an open block takes
 * the part of the rows outside. */
#include "abi.h"
#include "channel_load.h"
#include "channel_store.h"
#include "group_kernels.h"
#include "launch_rows.h"

namespace {

/* ---- both kinds in one format: bits are copied ----------------------------------------------- */

template <int WIDTH>
__global__ void __launch_bounds__(PC_CTA, PC_CTAS) convert_bits(const pc_convert_call call) {
    for (int64_t index = pc_thread(); index < call.walk.total; index += pc_num_threads()) {
        const pc_spot spot = pc_spot_of(call.walk, index);
        const pc_row_ends ends = pc_ends_of_row(call, spot);
        if (ends.stored.data == nullptr) {
            continue;
        }
        PC_ASSUME_GLOBAL(ends.stored.data);
        PC_ASSUME_GLOBAL(ends.outside);
        pc_unit<WIDTH> units[PC_BATCH];
        PC_UNROLL
        for (int i = 0; i < PC_BATCH; i++) {
            const int64_t unit = pc_unit_of(call.walk, spot, i);
            if (unit < call.walk.units) {
                units[i] = pc_load_bytes<WIDTH>(ends.stored.data + unit * WIDTH);
            }
        }
        PC_UNROLL
        for (int i = 0; i < PC_BATCH; i++) {
            const int64_t unit = pc_unit_of(call.walk, spot, i);
            if (unit < call.walk.units) {
                pc_store_bytes<WIDTH>(ends.outside + unit * WIDTH, units[i]);
            }
        }
    }
}

int launch_bits(pc_convert_call &call, int64_t num_tokens, void *stream) {
    const pc_geometry &g = call.geometry;
    const int width = pc_unit_nbytes((uint64_t)g.row_data_nbytes);
    call.walk = pc_make_walk(g.layout == PC_HND, num_tokens, g.num_heads, g.row_data_nbytes / width,
                             PC_BATCH);
    return PC_LAUNCH_WIDTH(convert_bits, width, pc_grid(call.walk.total, PC_CTA), stream, call);
}

/* ---- groups inside rows ---------------------------------------------------------------------- */

struct seal_kernels {
    template <class Format, int COUNT>
    static constexpr auto groups = pc_store_groups<Format, COUNT, pc_convert_call>;
};

struct reopen_kernels {
    template <class Format, int COUNT>
    static constexpr auto groups = pc_load_groups<Format, COUNT, pc_convert_call>;
};

template <class Kernels>
int launch_groups(pc_convert_call &call, int64_t num_tokens, void *stream) {
    return pc_with_format(call.geometry.code, [&](auto format) {
        using Format = decltype(format);
        if constexpr (Format::packing != PC_PACK_DENSE && Format::group_axis == PC_AXIS_ROW) {
            return pc_launch_groups<Kernels, Format>(call, num_tokens, stream);
        } else {
            return (int)cudaErrorInvalidValue;
        }
    });
}

/* Strides of rows inside an open block, as for rows outside. */
pc_rows rows_of_open(const pc_geometry &open) {
    const bool by_head = open.layout == PC_HND;
    pc_rows rows = {};
    rows.token_stride = open.row_data_nbytes * (by_head ? 1 : open.num_heads);
    rows.head_stride = by_head ? open.plane_nbytes : open.row_data_nbytes;
    rows.value_stride = pc_dtype_nbytes(open.code);
    rows.dtype = open.code;
    return rows;
}

} // namespace

int pc_cuda_convert(const void *from_geometry, const void *from_slabs, const void *to_geometry,
                    const void *to_slabs, int num_slabs, const int64_t *src, const int64_t *dst,
                    const int32_t *rows, int64_t n, int64_t most_rows, void *stream) {
    if (n <= 0 || num_slabs <= 0 || most_rows <= 0) {
        return cudaSuccess;
    }
    pc_geometry from, to;
    memcpy(&from, from_geometry, sizeof from);
    memcpy(&to, to_geometry, sizeof to);
    const bool from_floats = pc_format_of(from.code).packing == PC_PACK_DENSE;
    const bool to_floats = pc_format_of(to.code).packing == PC_PACK_DENSE;
    const bool bits = from.code == to.code, seals = from_floats && !bits;
    if (bits ? !from_floats : from_floats == to_floats) {
        return cudaErrorInvalidValue;
    }
    pc_convert_call call = {};
    call.geometry = seals ? to : from;
    call.rows = rows_of_open(seals ? from : to);
    call.stored_slabs = (const pc_slab *)(seals ? to_slabs : from_slabs);
    call.open_slabs = (const pc_slab *)(seals ? from_slabs : to_slabs);
    call.stored_slots = seals ? dst : src;
    call.open_slots = seals ? src : dst;
    call.counts = rows;
    call.block_size = pc_make_divisor(from.block_size);
    call.most_rows = pc_make_divisor(most_rows);
    call.num_pairs = pc_make_divisor(n);
    const int64_t num_tokens = num_slabs * n * most_rows;
    if (bits) {
        return launch_bits(call, num_tokens, stream);
    }
    if (call.geometry.token_groups > 0) {
        return seals ? pc_launch_columns(call, num_slabs * n, stream)
                     : pc_launch_channels(call, num_tokens, stream);
    }
    return seals ? launch_groups<seal_kernels>(call, num_tokens, stream)
                 : launch_groups<reopen_kernels>(call, num_tokens, stream);
}
