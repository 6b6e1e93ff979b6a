/* The rows of the format table as types, so that kernels are compiled for one format each with its
 * sizes and its group functions as constants; and the switch from a code to its type.
 */
#ifndef PAGEDCACHE_CUDA_FORMAT_ROWS_H
#define PAGEDCACHE_CUDA_FORMAT_ROWS_H

#include "device.h"
#include "pagedcache/formats.h"

#define PC_FORMAT_TYPE(code, name, group, quant, scale, axis, pack, open, encode_group,         \
                       decode_group)                                                            \
    struct pc_row_of_##name {                                                                   \
        static constexpr int group_size = group, quant_nbytes = quant, scale_nbytes = scale;    \
        static constexpr int packing = pack, group_axis = axis;                                 \
        static PC_DEVICE void encode(const float *values, uint8_t *quants, uint8_t *scale_at) { \
            encode_group(values, quants, scale_at);                                             \
        }                                                                                       \
        static PC_DEVICE void decode(const uint8_t *quants, const uint8_t *scale_at,            \
                                     float *values) {                                           \
            decode_group(quants, scale_at, values);                                             \
        }                                                                                       \
    };
PC_FORMATS(PC_FORMAT_TYPE)
#undef PC_FORMAT_TYPE

/* Call visit(row type) for a format code; cudaErrorInvalidValue for an unknown one. */
template <class Visit> int pc_with_format(int code, const Visit &visit) {
    switch (code) {
#define PC_FORMAT_CASE(code, name, ...) \
    case code: return visit(pc_row_of_##name{});
        PC_FORMATS(PC_FORMAT_CASE)
#undef PC_FORMAT_CASE
    default: return cudaErrorInvalidValue;
    }
}

#endif
