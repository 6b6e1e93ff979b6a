/* Which kernel serves a call that stores or loads rows, and how its work is counted. Not for
 * formats whose groups run along the tokens (channel_store.h, channel_load.h).
 *
 * Kernels names the three of a direction: bits<NBYTES> copies where the dtype outside is the stored
 * one, dense<Format, COUNT> converts between float formats, groups<Format, COUNT> quantises or
 * back. COUNT values are accessed at once: 16 bytes or less on either side, or one value where rows
 * are not dense or not aligned.
 */
#ifndef PAGEDCACHE_CUDA_LAUNCH_ROWS_H
#define PAGEDCACHE_CUDA_LAUNCH_ROWS_H

#include "format_rows.h"
#include "tile.h"

/* Count the strips of the call and start the kernel, with a thread for each. */
template <class Call>
int pc_launch_units(void (*kernel)(const Call), Call &call, int64_t num_tokens,
                    int64_t units_per_row, int per_strip, int cta, void *stream) {
    const pc_geometry &g = call.geometry;
    call.walk = pc_make_walk(g.layout == PC_HND, num_tokens, g.num_heads, units_per_row, per_strip);
    return pc_launch(kernel, pc_grid(call.walk.total, cta), cta, 0, stream, call);
}

template <class Kernels, class Call>
int pc_launch_bits(Call &call, int64_t num_tokens, void *stream) {
    const pc_geometry &g = call.geometry;
    const int64_t value_nbytes = pc_dtype_nbytes(call.rows.dtype);
    const int most = (int)(16 / value_nbytes);
    auto kernel = value_nbytes == 4 ? Kernels::template bits<4> : Kernels::template bits<2>;
    int64_t nbytes = value_nbytes;
    if (pc_values_at_once(call.rows, num_tokens, g.num_heads, g.head_dim, most) == most) {
        kernel = Kernels::template bits<16>;
        nbytes = call.rows.value_stride = 16; /* a unit is the "value" of this kernel */
    }
    return pc_launch_units(kernel, call, num_tokens, g.row_data_nbytes / nbytes, PC_BATCH, PC_CTA,
                           stream);
}

template <class Kernels, class Format, class Call>
int pc_launch_dense(Call &call, int64_t num_tokens, void *stream) {
    const pc_geometry &g = call.geometry;
    const bool wide = Format::quant_nbytes > 2 || call.rows.dtype == PC_FORMAT_float32;
    const int count =
        pc_values_at_once(call.rows, num_tokens, g.num_heads, g.head_dim, wide ? 4 : 8);
    auto kernel =
        count == 4 ? Kernels::template dense<Format, 4> : Kernels::template dense<Format, 1>;
    if constexpr (Format::quant_nbytes <= 2) {
        if (count == 8) {
            kernel = Kernels::template dense<Format, 8>;
        }
    }
    return pc_launch_units(kernel, call, num_tokens, g.head_dim / count, PC_BATCH, PC_CTA, stream);
}

template <class Kernels, class Format, class Call>
int pc_launch_groups(Call &call, int64_t num_tokens, void *stream) {
    const pc_geometry &g = call.geometry;
    const int cta = PC_TILE_WARPS * PC_WARP;
    /* tile.h relies on 4 meaning float32 */
    const int most = call.rows.dtype == PC_FORMAT_float32 ? 4 : 8;
    const int count = pc_values_at_once(call.rows, num_tokens, g.num_heads, g.head_dim, most);
    const auto kernel = count == 8   ? Kernels::template groups<Format, 8>
                        : count == 4 ? Kernels::template groups<Format, 4>
                                     : Kernels::template groups<Format, 1>;
    return pc_launch_units(kernel, call, num_tokens, pc_row_groups(g.code, g.head_dim), 1, cta,
                           stream);
}

template <class Kernels, class Call>
int pc_launch_rows(Call &call, int64_t num_tokens, void *stream) {
    if (num_tokens <= 0) {
        return cudaSuccess;
    }
    if (call.rows.dtype == call.geometry.code) {
        return pc_launch_bits<Kernels>(call, num_tokens, stream);
    }
    return pc_with_format(call.geometry.code, [&](auto format) {
        using Format = decltype(format);
        if constexpr (Format::packing == PC_PACK_DENSE) {
            return pc_launch_dense<Kernels, Format>(call, num_tokens, stream);
        } else if constexpr (Format::group_axis == PC_AXIS_ROW) {
            return pc_launch_groups<Kernels, Format>(call, num_tokens, stream);
        } else {
            return (int)cudaErrorInvalidValue;
        }
    });
}

/* Into open blocks: bits are not copied, as they may be NaN. */
template <class Kernels, class Call>
int pc_launch_open(Call &call, int64_t num_tokens, void *stream) {
    if (num_tokens <= 0) {
        return cudaSuccess;
    }
    return pc_with_format(call.geometry.code, [&](auto format) {
        using Format = decltype(format);
        if constexpr (Format::packing == PC_PACK_DENSE) {
            return pc_launch_dense<Kernels, Format>(call, num_tokens, stream);
        } else {
            return (int)cudaErrorInvalidValue;
        }
    });
}

#endif
