/* The codec for any compiler: the functions of formats.h and channels.h, row by row. */
#ifndef PAGEDCACHE_CODEC_PLAIN_H
#define PAGEDCACHE_CODEC_PLAIN_H

#include "codec.h"

/* Values that are converted at a time: whole groups, on the stack. */
#define PC_PIECE 256

/* Rows of one dtype are copied, whatever they hold. */
PC_INLINE void pc_copy_rows(const pc_span *from, uint8_t *to, int64_t step) {
    const size_t nbytes = (size_t)(from->num_values * pc_dtype_nbytes(from->dtype));
    for (int64_t row = 0; row < from->count; row++) {
        memcpy(to + row * step, from->at + row * from->step, nbytes);
    }
}

PC_INLINE int pc_plain_encode(const pc_span *from, const pc_place *to, int policy) {
    const int64_t nbytes = pc_dtype_nbytes(from->dtype);
    float values[PC_PIECE];
    if (from->dtype == to->code) {
        pc_copy_rows(from, to->at, to->step);
        return PC_OK;
    }
    for (int64_t row = 0; row < from->count; row++) {
        for (int64_t at = 0; at < from->num_values; at += PC_PIECE) {
            const int64_t left = from->num_values - at, count = left < PC_PIECE ? left : PC_PIECE;
            int status;
            pc_widen_row(from->dtype, from->at + row * from->step + at * nbytes, nbytes, count,
                         values);
            status = pc_encode_row(
                to->code, values, count, to->at + row * to->step + pc_row_data_nbytes(to->code, at),
                to->scales + row * to->scale_step + pc_row_scale_nbytes(to->code, at), policy);
            if (status != PC_OK) {
                return status;
            }
        }
    }
    return PC_OK;
}

PC_INLINE void pc_plain_decode(const pc_place *from, const pc_span *to) {
    const int64_t nbytes = pc_dtype_nbytes(to->dtype);
    float values[PC_PIECE];
    if (to->dtype == from->code) {
        pc_span source = *to;
        source.at = from->at;
        source.step = from->step;
        pc_copy_rows(&source, to->at, to->step);
        return;
    }
    for (int64_t row = 0; row < to->count; row++) {
        for (int64_t at = 0; at < to->num_values; at += PC_PIECE) {
            const int64_t left = to->num_values - at, count = left < PC_PIECE ? left : PC_PIECE;
            pc_decode_row(
                from->code, from->at + row * from->step + pc_row_data_nbytes(from->code, at),
                from->scales + row * from->scale_step + pc_row_scale_nbytes(from->code, at), count,
                values);
            pc_narrow_row(to->dtype, values, count, to->at + row * to->step + at * nbytes, nbytes);
        }
    }
}

PC_INLINE int pc_plain_encode_channels(const pc_span *from, const pc_channel_place *to,
                                       int policy) {
    const int64_t nbytes = pc_dtype_nbytes(from->dtype);
    float rows[PC_GROUP * PC_TILE], tile[PC_GROUP][PC_TILE];
    for (int64_t channel = 0; channel < from->num_values; channel += PC_TILE) {
        const int64_t left = from->num_values - channel, width = left < PC_TILE ? left : PC_TILE;
        int status;
        for (int64_t row = 0; row < from->count; row++) {
            pc_widen_row(from->dtype, from->at + row * from->step + channel * nbytes, nbytes, width,
                         rows + row * PC_TILE);
        }
        status = pc_copy_tile(rows, PC_TILE, from->count, width, policy, tile);
        if (status != PC_OK) {
            return status;
        }
        pc_encode_tile((const float (*)[PC_TILE])tile, from->count, width, to->at + channel / 2,
                       to->step, to->scales + 4 * channel);
    }
    return PC_OK;
}

PC_INLINE void pc_plain_decode_channels(const pc_channel_place *from, const pc_span *to) {
    const int64_t nbytes = pc_dtype_nbytes(to->dtype);
    float values[PC_TILE], scale[PC_TILE], minimum[PC_TILE];
    for (int64_t channel = 0; channel < to->num_values; channel += PC_TILE) {
        const int64_t left = to->num_values - channel, width = left < PC_TILE ? left : PC_TILE;
        pc_decode_scales(from->scales + 4 * channel, width, scale, minimum);
        for (int64_t row = 0; row < to->count; row++) {
            pc_decode_nibbles(from->at + row * from->step + channel / 2, scale, minimum, width,
                              values);
            pc_narrow_row(to->dtype, values, width, to->at + row * to->step + channel * nbytes,
                          nbytes);
        }
    }
}

PC_INLINE int pc_plain_all_within(const pc_span *rows, uint32_t most) {
    const uint32_t magnitude = rows->dtype == PC_FORMAT_float32 ? 0x7FFFFFFFu : 0x7FFFu;
    const int64_t nbytes = pc_dtype_nbytes(rows->dtype);
    for (int64_t row = 0; row < rows->count; row++) {
        const uint8_t *const at = rows->at + row * rows->step;
        uint32_t above = 0;
        for (int64_t i = 0; i < rows->num_values; i++) {
            const uint32_t bits =
                nbytes == 4 ? pc_load_u32(at + i * nbytes) : pc_load_u16(at + i * nbytes);
            above |= (bits & magnitude) > most;
        }
        if (above) {
            return 0;
        }
    }
    return 1;
}

PC_INLINE void pc_plain_stream(uint8_t *to, const uint8_t *from, int64_t nbytes) {
    memcpy(to, from, (size_t)nbytes);
}

PC_INLINE void pc_plain_stream_end(void) {
}

/* A few values, for codecs that leave what is unusual to this one: not inlined, which would make
 * their loops slow. */
#if defined(__GNUC__)
#define PC_RARE static __attribute__((noinline, unused))
#else
#define PC_RARE static inline
#endif

PC_RARE int pc_encode_rest(int code, int dtype, const uint8_t *from, int64_t count, uint8_t *data,
                           uint8_t *scales, int policy) {
    const pc_span span = pc_flat_span(from, count, dtype);
    const pc_place place = pc_flat_place(data, scales, code);
    return pc_plain_encode(&span, &place, policy);
}

PC_RARE int pc_encode_other_channels(const pc_span *from, const pc_channel_place *to, int policy) {
    return pc_plain_encode_channels(from, to, policy);
}

PC_RARE void pc_decode_rest(int code, const uint8_t *data, const uint8_t *scales, int64_t count,
                            int dtype, uint8_t *to) {
    const pc_span span = pc_flat_span(to, count, dtype);
    const pc_place place = pc_flat_place(data, scales, code);
    pc_plain_decode(&place, &span);
}

static const pc_codec pc_plain_codec = {
    pc_plain_encode,     pc_plain_decode, pc_plain_encode_channels, pc_plain_decode_channels,
    pc_plain_all_within, pc_plain_stream, pc_plain_stream_end};

#endif
