/*
 * Rows through a codec and past the caches: converted into a piece of memory that stays in the
 * first one, and copied from there. Writing memory that is not cached has the machine read it
 * first, and drives out what is worth more: this does neither.
 */
#ifndef PAGEDCACHE_STREAMED_H
#define PAGEDCACHE_STREAMED_H

#include "codec.h"

#define PC_STREAMED_NBYTES 4096

/* Whether rows are put past the caches: quantised ones are so much smaller than what they are made
 * of that nothing was won (tools/profile.md). */
PC_INLINE int pc_is_streamed(int code) {
    return pc_format_of(code).packing == PC_PACK_DENSE;
}

PC_INLINE int64_t pc_least_of(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* Rows of which PC_STREAMED_NBYTES hold one at least. Scales that lie apart are few: they are
 * written where they belong at once. */
PC_INLINE int pc_put_streamed(const pc_codec *codec, pc_span span, pc_place place, int policy) {
    const int64_t nbytes = pc_row_data_nbytes(place.code, span.num_values), count = span.count;
    const int64_t most = place.step == nbytes ? PC_STREAMED_NBYTES / nbytes : 1;
    uint8_t piece[PC_STREAMED_NBYTES];
    for (int64_t done = 0; done < count; done += span.count) {
        pc_place staged = place;
        int status;
        staged.at = piece;
        span.count = pc_least_of(most, count - done);
        status = codec->encode(&span, &staged, policy);
        if (status != PC_OK) {
            return status;
        }
        codec->stream(place.at, piece, span.count * nbytes);
        span.at += span.count * span.step;
        place.at += span.count * place.step;
        place.scales += span.count * place.scale_step;
    }
    return PC_OK;
}

PC_INLINE void pc_get_streamed(const pc_codec *codec, pc_place place, pc_span span) {
    const int64_t nbytes = span.num_values * pc_dtype_nbytes(span.dtype), count = span.count;
    const int64_t most = span.step == nbytes ? PC_STREAMED_NBYTES / nbytes : 1;
    uint8_t piece[PC_STREAMED_NBYTES];
    for (int64_t done = 0; done < count; done += span.count) {
        pc_span staged = span;
        staged.at = piece;
        staged.count = span.count = pc_least_of(most, count - done);
        codec->decode(&place, &staged);
        codec->stream(span.at, piece, span.count * nbytes);
        span.at += span.count * span.step;
        place.at += span.count * place.step;
        place.scales += span.count * place.scale_step;
    }
}

#endif
