/*
 * What turns rows of values into stored rows and back: a table of functions, one for each
 * instruction set (codecs.h), so that the loops over slabs (bulk.h) and flat buffers (flat.h) are
 * compiled once and know none of them. Whatever the set, the bytes are those of pc_encode_row and
 * the values those of pc_decode_row.
 */
#ifndef PAGEDCACHE_CODEC_H
#define PAGEDCACHE_CODEC_H

#include "rows.h"

/* `count` rows of `num_values` values of a float format (dtype), `step` bytes from one to the next;
 * the values of a row follow one another. */
typedef struct {
    uint8_t *at;
    int64_t step;
    int64_t count, num_values;
    int dtype;
} pc_span;

/* As many rows as they are stored: `at` and `scales` are the data and scales of pc_encode_row for
 * the first; scales are not read where they lie in the data. */
typedef struct {
    uint8_t *at, *scales;
    int64_t step, scale_step;
    int code;
} pc_place;

/* The rows of one token group of one head (channels.h); the scales of all channels follow one
 * another. */
typedef struct {
    uint8_t *at, *scales;
    int64_t step;
} pc_channel_place;

typedef struct {
    /* PC_OK or PC_E_NONFINITE. Not for formats whose groups run along the tokens. */
    int (*encode)(const pc_span *from, const pc_place *to, int policy);
    void (*decode)(const pc_place *from, const pc_span *to);
    /* The same for those formats; up to PC_GROUP rows, all of a token group to encode. */
    int (*encode_channels)(const pc_span *from, const pc_channel_place *to, int policy);
    void (*decode_channels)(const pc_channel_place *from, const pc_span *to);
    /* Whether no magnitude's bits, as an integer, are above `most`. */
    int (*all_within)(const pc_span *rows, uint32_t most);
    /* As memcpy, past the caches where the machine can: for what is not read again soon. Others see
     * it for certain only once stream_end was called. */
    void (*stream)(uint8_t *to, const uint8_t *from, int64_t nbytes);
    void (*stream_end)(void);
} pc_codec;

/* Bits of the largest finite magnitude of a dtype. */
PC_INLINE uint32_t pc_finite_bits(int dtype) {
    return dtype == PC_FORMAT_float32   ? 0x7F7FFFFFu
           : dtype == PC_FORMAT_float16 ? 0x7BFFu
                                        : 0x7F7Fu;
}

/* Bits of the largest magnitude of `dtype` that is finite in the float format `code` too. */
PC_INLINE uint32_t pc_most_bits(int dtype, int code) {
    if (dtype == PC_FORMAT_float16 || code == PC_FORMAT_float32 || dtype == code) {
        return pc_finite_bits(dtype);
    }
    if (dtype == PC_FORMAT_float32) { /* 65504, or the largest bfloat16 */
        return code == PC_FORMAT_float16 ? 0x477FE000u : 0x7F7F0000u;
    }
    return 0x477Fu; /* 65280: the next bfloat16 is 65536 */
}

/* The format whose groups of 32 values in line are worked out as those of `code` are. */
PC_INLINE int pc_rule_of(int code) {
    return code == PC_FORMAT_q4k ? PC_FORMAT_q4_1 : code;
}

/* Rows that follow one another at both ends, in whole groups, are one long row. */
PC_INLINE void pc_join_rows(pc_span *span, pc_place *place) {
    const int64_t num_values = span->num_values;
    const int64_t size = pc_format_of(place->code).group_size;
    if (span->count > 1 && span->step == num_values * pc_dtype_nbytes(span->dtype) &&
        num_values % size == 0 && place->step == pc_row_data_nbytes(place->code, num_values) &&
        place->scale_step == pc_row_scale_nbytes(place->code, num_values)) {
        span->num_values = num_values * span->count;
        span->count = 1;
    }
}

/* A flat run of values as one row. */
PC_INLINE pc_span pc_flat_span(const void *values, int64_t num_values, int dtype) {
    pc_span span;
    span.at = (uint8_t *)(uintptr_t)values;
    span.step = 0;
    span.count = 1;
    span.num_values = num_values;
    span.dtype = dtype;
    return span;
}

PC_INLINE pc_place pc_flat_place(const uint8_t *data, const uint8_t *scales, int code) {
    pc_place place;
    place.at = (uint8_t *)(uintptr_t)data;
    place.scales = (uint8_t *)(uintptr_t)scales;
    place.step = place.scale_step = 0;
    place.code = code;
    return place;
}

#endif
