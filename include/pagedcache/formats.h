/* The ONE table of storage formats. Sizes, shapes, dispatch and Python's KVFormat are loops over
 * it: a new format is one row here and its two group functions.
 */
#ifndef PAGEDCACHE_FORMATS_H
#define PAGEDCACHE_FORMATS_H

#include "dense.h"
#include "ggml.h"
#include "groups.h"
#include "status.h"

/* Which values share a scale. */
enum pc_group_axis {
    PC_AXIS_ROW = 0,   /* values of one (token, head) row */
    PC_AXIS_TOKENS = 1 /* one channel of one head over up to PC_GROUP tokens of a block */
};

/* Where the bytes of the groups lie. */
enum pc_packing {
    PC_PACK_DENSE = 0,      /* values only, no scale */
    PC_PACK_PLANAR = 1,     /* all quants of a run of rows, 16-byte aligned, then all scales */
    PC_PACK_INTERLEAVED = 2 /* scale, then quants, group after group */
};

/* on_nonfinite of quantised formats */
enum pc_policy { PC_NONFINITE_RAISE = 0, PC_NONFINITE_SATURATE = 1 };

#define PC_NO_OPEN_FORMAT (-1)

/* X(code, name, values per group, quant bytes per group, scale bytes per group, group axis,
 *   packing, open format, encode group, decode group)
 *
 * open format: the code in which a block that is still being filled is kept, for formats that
 * need a full block before they can quantise. The first three codes are also the codes of source
 * and destination dtypes.
 *
 * Along the tokens a group is a column of a block, so its quants cannot lie side by side: each is
 * put into its token's row (channels.h). Flat buffers have no tokens; there a group is 32 values
 * that follow one another, for every format. */
#define PC_FORMATS(X)                                                                          \
    X(0, float32, 1, 4, 0, PC_AXIS_ROW, PC_PACK_DENSE, PC_NO_OPEN_FORMAT, pc_encode_float32,   \
      pc_decode_float32)                                                                       \
    X(1, float16, 1, 2, 0, PC_AXIS_ROW, PC_PACK_DENSE, PC_NO_OPEN_FORMAT, pc_encode_float16,   \
      pc_decode_float16)                                                                       \
    X(2, bfloat16, 1, 2, 0, PC_AXIS_ROW, PC_PACK_DENSE, PC_NO_OPEN_FORMAT, pc_encode_bfloat16, \
      pc_decode_bfloat16)                                                                      \
    X(3, q8, 32, 32, 4, PC_AXIS_ROW, PC_PACK_PLANAR, PC_NO_OPEN_FORMAT, pc_encode_q8,          \
      pc_decode_q8)                                                                            \
    X(4, q4, 32, 16, 4, PC_AXIS_ROW, PC_PACK_PLANAR, PC_NO_OPEN_FORMAT, pc_encode_q4,          \
      pc_decode_q4)                                                                            \
    X(5, q8_0, 32, 32, 2, PC_AXIS_ROW, PC_PACK_INTERLEAVED, PC_NO_OPEN_FORMAT, pc_encode_q8_0, \
      pc_decode_q8_0)                                                                          \
    X(6, q4_0, 32, 16, 2, PC_AXIS_ROW, PC_PACK_INTERLEAVED, PC_NO_OPEN_FORMAT, pc_encode_q4_0, \
      pc_decode_q4_0)                                                                          \
    X(7, q4_1, 32, 16, 4, PC_AXIS_ROW, PC_PACK_INTERLEAVED, PC_NO_OPEN_FORMAT, pc_encode_q4_1, \
      pc_decode_q4_1)                                                                          \
    X(8, q4k, 32, 16, 4, PC_AXIS_TOKENS, PC_PACK_PLANAR, PC_FORMAT_float16, pc_encode_q4_1,    \
      pc_decode_q4_1)

#define PC_FORMAT_CODE(code, name, ...) PC_FORMAT_##name = code,
enum pc_format_code { PC_FORMATS(PC_FORMAT_CODE) PC_NUM_FORMATS };
#undef PC_FORMAT_CODE

/* One row of the table; group_size is 0 where the code is unknown. */
typedef struct {
    int group_size, quant_nbytes, scale_nbytes, group_axis, packing, open_format;
} pc_format;

PC_INLINE pc_format pc_format_of(int code) {
    pc_format row = {0, 0, 0, 0, 0, PC_NO_OPEN_FORMAT};
    switch (code) {
#define PC_FORMAT_ROW(code, name, group, quant, scale, axis, pack, open, encode, decode) \
    case code:                                                                           \
        row.group_size = group;                                                          \
        row.quant_nbytes = quant;                                                        \
        row.scale_nbytes = scale;                                                        \
        row.group_axis = axis;                                                           \
        row.packing = pack;                                                              \
        row.open_format = open;                                                          \
        break;
        PC_FORMATS(PC_FORMAT_ROW)
#undef PC_FORMAT_ROW
    default: break;
    }
    return row;
}

/* Groups of a row of num_values values; the last one may be part-filled (0 for unknown codes). */
PC_INLINE int64_t pc_row_groups(int code, int64_t num_values) {
    const int64_t size = pc_format_of(code).group_size;
    return size > 0 ? (num_values + size - 1) / size : 0;
}

/* Bytes of a row at `data`: quants alone where scales lie apart (planar), else all of it. */
PC_INLINE int64_t pc_row_data_nbytes(int code, int64_t num_values) {
    const pc_format f = pc_format_of(code);
    const int group_nbytes = f.quant_nbytes + (f.packing == PC_PACK_PLANAR ? 0 : f.scale_nbytes);
    return pc_row_groups(code, num_values) * group_nbytes;
}

/* Bytes of a row at `scales`: 0 but for planar formats. */
PC_INLINE int64_t pc_row_scale_nbytes(int code, int64_t num_values) {
    const pc_format f = pc_format_of(code);
    return f.packing == PC_PACK_PLANAR ? pc_row_groups(code, num_values) * f.scale_nbytes : 0;
}

/* The two loops over the groups of a row. Both are inlined into each case of the switch below, so
 * sizes and group functions are constants in them. */
typedef void (*pc_encode_group)(const float *PC_RESTRICT, uint8_t *PC_RESTRICT,
                                uint8_t *PC_RESTRICT);
typedef void (*pc_decode_group)(const uint8_t *PC_RESTRICT, const uint8_t *PC_RESTRICT,
                                float *PC_RESTRICT);

PC_FORCE_INLINE int pc_encode_groups(const pc_format f, pc_encode_group encode,
                                     const float *PC_RESTRICT src, int64_t num_values,
                                     uint8_t *PC_RESTRICT data, uint8_t *PC_RESTRICT scales,
                                     int policy) {
    const int planar = f.packing == PC_PACK_PLANAR;
    const int step = planar ? f.quant_nbytes : f.quant_nbytes + f.scale_nbytes;
    float buffer[PC_GROUP];
    if (f.packing == PC_PACK_DENSE) {
        for (int64_t i = 0; i < num_values; i++) {
            encode(src + i, data + i * step, scales);
        }
        return PC_OK;
    }
    for (int64_t at = 0, group = 0; at < num_values; at += f.group_size, group++) {
        const int64_t left = num_values - at;
        const int64_t count = left < f.group_size ? left : f.group_size;
        const float *values = src + at;
        uint8_t *const quants = data + group * step + (planar ? 0 : f.scale_nbytes);
        uint8_t *const scale = planar ? scales + group * f.scale_nbytes : data + group * step;
        const int finite = pc_all_finite(values, count);
        if (!finite && policy == PC_NONFINITE_RAISE) {
            return PC_E_NONFINITE;
        }
        if (!finite || count < f.group_size) {
            memset(buffer, 0, sizeof buffer);
            if (finite) {
                memcpy(buffer, values, (size_t)count * sizeof *values);
            } else {
                pc_copy_saturated(values, count, buffer);
            }
            values = buffer;
        }
        encode(values, quants, scale);
    }
    return PC_OK;
}

PC_FORCE_INLINE void pc_decode_groups(const pc_format f, pc_decode_group decode,
                                      const uint8_t *PC_RESTRICT data,
                                      const uint8_t *PC_RESTRICT scales, int64_t num_values,
                                      float *PC_RESTRICT dst) {
    const int planar = f.packing == PC_PACK_PLANAR;
    const int step = planar ? f.quant_nbytes : f.quant_nbytes + f.scale_nbytes;
    float buffer[PC_GROUP];
    if (f.packing == PC_PACK_DENSE) {
        for (int64_t i = 0; i < num_values; i++) {
            decode(data + i * step, scales, dst + i);
        }
        return;
    }
    for (int64_t at = 0, group = 0; at < num_values; at += f.group_size, group++) {
        const int64_t left = num_values - at;
        const uint8_t *const quants = data + group * step + (planar ? 0 : f.scale_nbytes);
        const uint8_t *const scale = planar ? scales + group * f.scale_nbytes : data + group * step;
        if (left >= f.group_size) {
            decode(quants, scale, dst + at);
        } else {
            decode(quants, scale, buffer);
            memcpy(dst + at, buffer, (size_t)left * sizeof *dst);
        }
    }
}

/* Store one row of num_values contiguous float32 in format `code`.
 *
 * data: the row's first byte (planar: its first quant); scales: planar formats' first scale, unused
 * by others. Returns PC_OK, PC_E_FORMAT, or PC_E_NONFINITE where the format is quantised, the
 * policy is PC_NONFINITE_RAISE and a value is NaN or Inf (the row's bytes are unspecified then). */
PC_INLINE int pc_encode_row(int code, const float *PC_RESTRICT src, int64_t num_values,
                            uint8_t *PC_RESTRICT data, uint8_t *PC_RESTRICT scales, int policy) {
    switch (code) {
#define PC_ENCODE_CASE(code, name, group, quant, scale, axis, pack, open, encode, decode) \
    case code: {                                                                          \
        const pc_format row = {group, quant, scale, axis, pack, open};                    \
        return pc_encode_groups(row, encode, src, num_values, data, scales, policy);      \
    }
        PC_FORMATS(PC_ENCODE_CASE)
#undef PC_ENCODE_CASE
    default: return PC_E_FORMAT;
    }
}

/* Read one row back as num_values float32; data and scales as for pc_encode_row. An unknown code
 * reads as zeros. */
PC_INLINE void pc_decode_row(int code, const uint8_t *PC_RESTRICT data,
                             const uint8_t *PC_RESTRICT scales, int64_t num_values,
                             float *PC_RESTRICT dst) {
    switch (code) {
#define PC_DECODE_CASE(code, name, group, quant, scale, axis, pack, open, encode, decode) \
    case code: {                                                                          \
        const pc_format row = {group, quant, scale, axis, pack, open};                    \
        pc_decode_groups(row, decode, data, scales, num_values, dst);                     \
        break;                                                                            \
    }
        PC_FORMATS(PC_DECODE_CASE)
#undef PC_DECODE_CASE
    default: memset(dst, 0, (size_t)num_values * sizeof *dst); break;
    }
}

#define PC_CHECK_GROUP(code, name, group, quant, scale, axis, pack, open, encode, decode) \
    PC_STATIC_ASSERT(group == 1 || group == PC_GROUP, "rows buffer PC_GROUP values");
PC_FORMATS(PC_CHECK_GROUP)
#undef PC_CHECK_GROUP

#endif
