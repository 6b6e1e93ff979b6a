/* Flat access: a run of values stored as one long row, read and written at any (offset, length).
 *
 * A group that a write covers in part is decoded, changed and quantised again, so its other values
 * may move by a rounding step; groups outside the range keep their bytes. `data` and `scales` are
 * those of pc_encode_row; ranges are not checked here.
 */
#ifndef PAGEDCACHE_FLAT_H
#define PAGEDCACHE_FLAT_H

#include "formats.h"

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

/* Values of the next piece of a range: a run of whole groups, or the rest of one group. */
PC_INLINE int64_t pc_flat_piece(int64_t at, int64_t left, int64_t group_size) {
    const int64_t inside = at % group_size;
    if (inside == 0 && left >= group_size) {
        return left / group_size * group_size;
    }
    return left < group_size - inside ? left : group_size - inside;
}

PC_INLINE void pc_flat_read(int code, const uint8_t *PC_RESTRICT data,
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
            pc_decode_row(code, at, scale, count, dst + done);
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
PC_INLINE int pc_flat_write(int code, uint8_t *PC_RESTRICT data, uint8_t *PC_RESTRICT scales,
                            int64_t num_values, int64_t offset, int64_t length,
                            const float *PC_RESTRICT src, int policy) {
    const pc_format format = pc_format_of(code);
    const int64_t size = format.group_size;
    float buffer[PC_GROUP];
    if (format.packing != PC_PACK_DENSE && policy == PC_NONFINITE_RAISE &&
        !pc_all_finite(src, length)) {
        return PC_E_NONFINITE;
    }
    for (int64_t done = 0; done < length;) {
        const int64_t start = (offset + done) / size * size;
        const int64_t inside = offset + done - start;
        const int64_t count = pc_flat_piece(offset + done, length - done, size);
        uint8_t *const at = data + pc_row_data_nbytes(code, start);
        uint8_t *const scale = scales + pc_row_scale_nbytes(code, start);
        if (count % size == 0) {
            pc_encode_row(code, src + done, count, at, scale, PC_NONFINITE_SATURATE);
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
