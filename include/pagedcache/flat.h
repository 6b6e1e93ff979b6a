/* Flat access: a run of float32 values stored as one long row, read and written whole or at any
 * (offset, length).
 *
 * A group that a write covers in part is decoded, changed and quantised again, so its other values
 * may move by a rounding step; groups outside the range keep their bytes. `data` and `scales` are
 * those of pc_encode_row; ranges are not checked here.
 */
#ifndef PAGEDCACHE_FLAT_H
#define PAGEDCACHE_FLAT_H

#include "streamed.h"
#include "sync.h"
#include "tools.h"

/* Whether num_values in format `code` lie inside `nbytes` bytes whose scales, if they are apart,
 * start at byte scale_offset: PC_OK, PC_E_FORMAT for an unknown code, or PC_E_RANGE. */
PC_INLINE int pc_flat_check(int code, int64_t nbytes, int64_t scale_offset, int64_t num_values) {
    const pc_format format = pc_format_of(code);
    if (format.group_size == 0) {
        return PC_E_FORMAT;
    }
    /* No format takes less than half a byte per value; this keeps the products small. */
    if (nbytes < 0 || nbytes > INT64_MAX / 64 || num_values < 0 || num_values > 2 * nbytes ||
        scale_offset < 0 || scale_offset > nbytes) {
        return PC_E_RANGE;
    }
    if (format.packing != PC_PACK_PLANAR) {
        return pc_row_data_nbytes(code, num_values) <= nbytes ? PC_OK : PC_E_RANGE;
    }
    return pc_row_data_nbytes(code, num_values) <= scale_offset &&
                   pc_row_scale_nbytes(code, num_values) <= nbytes - scale_offset
               ? PC_OK
               : PC_E_RANGE;
}

/* A decoded value as it may be quantised again: 127 * scale rounds past the largest float32 where
 * a q8 group holds exactly that value. */
PC_INLINE float pc_clamp_to_finite(float value) {
    if (value > FLT_MAX) {
        return FLT_MAX;
    }
    return value < -FLT_MAX ? -FLT_MAX : value;
}

/* ---- whole runs ---------------------------------------------------------------------------- */

/* Values that a thread takes at a time, and rows that a run is cut into to be streamed: whole
 * groups. */
#define PC_FLAT_SHARE (64 << 10)
#define PC_FLAT_ROW (PC_STREAMED_NBYTES / 4)

typedef struct {
    const pc_tools *tools;
    int code, policy;
    uint8_t *data, *scales;
    float *values;
    int64_t num_values;
    volatile int64_t status;
} pc_flat;

/* Number `part` of the shares: its values, and where they lie. */
PC_INLINE pc_span pc_flat_part(const pc_flat *flat, int64_t part, pc_place *place) {
    const int64_t first = part * PC_FLAT_SHARE, left = flat->num_values - first;
    *place = pc_flat_place(flat->data + pc_row_data_nbytes(flat->code, first),
                           flat->scales + pc_row_scale_nbytes(flat->code, first), flat->code);
    return pc_flat_span(flat->values + first, left < PC_FLAT_SHARE ? left : PC_FLAT_SHARE,
                        PC_FORMAT_float32);
}

/* Cut off what makes whole rows to be streamed; the rest stays. */
PC_INLINE pc_span pc_flat_rows(const pc_flat *flat, pc_span *span, pc_place *place,
                               pc_place *rows) {
    pc_span cut = *span;
    cut.count = span->num_values / PC_FLAT_ROW;
    cut.num_values = PC_FLAT_ROW;
    cut.step = PC_FLAT_ROW * 4;
    *rows = *place;
    rows->step = pc_row_data_nbytes(flat->code, PC_FLAT_ROW);
    rows->scale_step = pc_row_scale_nbytes(flat->code, PC_FLAT_ROW);
    span->at += cut.count * cut.step;
    span->num_values -= cut.count * PC_FLAT_ROW;
    place->at += cut.count * rows->step;
    place->scales += cut.count * rows->scale_step;
    return cut;
}

static inline void pc_flat_encode_part(void *context, int64_t part, int who) {
    pc_flat *const flat = (pc_flat *)context;
    const pc_codec *const codec = flat->tools->codec;
    pc_place place, rows;
    pc_span span = pc_flat_part(flat, part, &place);
    int status = PC_OK;
    (void)who;
    if (flat->tools->streams && pc_is_streamed(flat->code)) {
        const pc_span streamed = pc_flat_rows(flat, &span, &place, &rows);
        status = pc_put_streamed(codec, streamed, rows, flat->policy);
    }
    if (status == PC_OK) {
        status = codec->encode(&span, &place, flat->policy);
    }
    codec->stream_end();
    if (status != PC_OK) {
        pc_atomic_set(&flat->status, status);
    }
}

static inline void pc_flat_decode_part(void *context, int64_t part, int who) {
    const pc_flat *const flat = (const pc_flat *)context;
    const pc_codec *const codec = flat->tools->codec;
    pc_place place, rows;
    pc_span span = pc_flat_part(flat, part, &place);
    (void)who;
    if (flat->tools->streams) {
        const pc_span streamed = pc_flat_rows(flat, &span, &place, &rows);
        pc_get_streamed(codec, rows, streamed);
    }
    codec->decode(&place, &span);
    codec->stream_end();
}

PC_INLINE int64_t pc_flat_run(pc_flat *flat, pc_task task) {
    const pc_tools best = pc_tools_for(flat->tools, flat->num_values * 4);
    flat->tools = &best;
    pc_run_parts(&best, task, flat, (flat->num_values + PC_FLAT_SHARE - 1) / PC_FLAT_SHARE);
    return flat->status;
}

/* Store num_values as one row, as pc_encode_row does; the bytes are unspecified behind an error. */
PC_INLINE int pc_flat_encode(const pc_tools *tools, int code, const float *values,
                             int64_t num_values, uint8_t *data, uint8_t *scales, int policy) {
    pc_flat flat = {tools, code, policy, data, scales, NULL, num_values, PC_OK};
    flat.values = (float *)(uintptr_t)values;
    return (int)pc_flat_run(&flat, pc_flat_encode_part);
}

PC_INLINE void pc_flat_decode(const pc_tools *tools, int code, const uint8_t *data,
                              const uint8_t *scales, int64_t num_values, float *values) {
    pc_flat flat = {tools, code, 0, NULL, NULL, values, num_values, PC_OK};
    flat.data = (uint8_t *)(uintptr_t)data;
    flat.scales = (uint8_t *)(uintptr_t)scales;
    (void)pc_flat_run(&flat, pc_flat_decode_part);
}

/* ---- ranges -------------------------------------------------------------------------------- */

/* Values of the next piece of a range: a run of whole groups, or the rest of one group. */
PC_INLINE int64_t pc_flat_piece(int64_t at, int64_t left, int64_t group_size) {
    const int64_t inside = at % group_size;
    if (inside == 0 && left >= group_size) {
        return left / group_size * group_size;
    }
    return left < group_size - inside ? left : group_size - inside;
}

PC_INLINE void pc_flat_read(const pc_tools *tools, int code, const uint8_t *PC_RESTRICT data,
                            const uint8_t *PC_RESTRICT scales, int64_t offset, int64_t length,
                            float *PC_RESTRICT dst) {
    const int64_t size = pc_format_of(code).group_size;
    float buffer[PC_GROUP];
    for (int64_t done = 0; done < length;) {
        const int64_t start = (offset + done) / size * size;
        const int64_t inside = offset + done - start;
        const int64_t count = pc_flat_piece(offset + done, length - done, size);
        const uint8_t *const at = data + pc_row_data_nbytes(code, start);
        const uint8_t *const scale = scales + pc_row_scale_nbytes(code, start);
        if (count % size == 0) {
            pc_flat_decode(tools, code, at, scale, count, dst + done);
        } else {
            pc_decode_row(code, at, scale, size, buffer);
            memcpy(dst + done, buffer + inside, (size_t)count * sizeof *dst);
        }
        done += count;
    }
}

/* Returns PC_OK, or PC_E_NONFINITE with nothing written (quantised format, PC_NONFINITE_RAISE, a
 * value is NaN or Inf). Under PC_NONFINITE_SATURATE the group of a replaced value is the group as
 * it is after the write. num_values: of the whole buffer; values behind it are padding. */
PC_INLINE int pc_flat_write(const pc_tools *tools, int code, uint8_t *PC_RESTRICT data,
                            uint8_t *PC_RESTRICT scales, int64_t num_values, int64_t offset,
                            int64_t length, const float *PC_RESTRICT src, int policy) {
    const pc_format format = pc_format_of(code);
    const int64_t size = format.group_size;
    float buffer[PC_GROUP];
    if (format.packing != PC_PACK_DENSE && policy == PC_NONFINITE_RAISE) {
        const pc_span span = pc_flat_span(src, length, PC_FORMAT_float32);
        if (!tools->codec->all_within(&span, pc_finite_bits(PC_FORMAT_float32))) {
            return PC_E_NONFINITE;
        }
    }
    for (int64_t done = 0; done < length;) {
        const int64_t start = (offset + done) / size * size;
        const int64_t inside = offset + done - start;
        const int64_t count = pc_flat_piece(offset + done, length - done, size);
        uint8_t *const at = data + pc_row_data_nbytes(code, start);
        uint8_t *const scale = scales + pc_row_scale_nbytes(code, start);
        if (count % size == 0) {
            (void)pc_flat_encode(tools, code, src + done, count, at, scale, PC_NONFINITE_SATURATE);
        } else {
            const int64_t held = num_values - start < size ? num_values - start : size;
            pc_decode_row(code, at, scale, held, buffer);
            for (int64_t i = 0; i < held; i++) {
                buffer[i] = pc_clamp_to_finite(buffer[i]);
            }
            memcpy(buffer + inside, src + done, (size_t)count * sizeof *src);
            pc_encode_row(code, buffer, held, at, scale, PC_NONFINITE_SATURATE);
        }
        done += count;
    }
    return PC_OK;
}

#endif
