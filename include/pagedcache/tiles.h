/*
 * Groups along the tokens (channels.h), by vectors: PC_TILE channels side by side. Ordinary tiles
 * alone are encoded here, as in encode.h. Included once per instruction set, by codec_all.h.
 */
#if defined(PC_ISA) && PC_WIDTH > 1

/* A lane for each channel of a tile. */
typedef struct {
    vf minimum[V(per_group)], scale[V(per_group)], inverse[V(per_group)];
    int ordinary;
} V(affine);

PC_VECTOR vi V(inside)(vi magnitude, float least, float most) {
    const vi low = V(higher)(magnitude, V(all_bits)(pc_float_bits(least)));
    const vi both = V(lower)(low, V(all_bits)(pc_float_bits(most)));
    return (vi)(both == magnitude);
}

PC_VECTOR V(affine)
    V(look_along)(const int dtype, const uint8_t *from, int64_t step, int64_t count) {
    V(affine) affine;
    vf least[V(per_group)], most[V(per_group)], x[V(per_group)];
    vi usual = V(all_bits)(0xFFFFFFFFu), highest = V(all_bits)(0u);
    V(get_group)(dtype, from, least);
    memcpy(most, least, sizeof most);
    PC_UNROLL
    for (int i = 0; i < V(per_group); i++) {
        highest = V(higher)(highest, V(as_bits)(least[i]) & 0x7FFFFFFFu);
    }
    for (int64_t row = 1; row < count; row++) {
        V(get_group)(dtype, from + row * step, x);
        PC_UNROLL
        for (int i = 0; i < V(per_group); i++) {
            /* the first of equal values stays: it decides the sign of a zero */
            const vi under = V(below)(x[i], least[i]), over = V(below)(most[i], x[i]);
            least[i] = V(as_float)((under & V(as_bits)(x[i])) | (~under & V(as_bits)(least[i])));
            most[i] = V(as_float)((over & V(as_bits)(x[i])) | (~over & V(as_bits)(most[i])));
            highest = V(higher)(highest, V(as_bits)(x[i]) & 0x7FFFFFFFu);
        }
    }
    usual &= V(inside)(highest, 0.0f, FLT_MAX);
    PC_UNROLL
    for (int i = 0; i < V(per_group); i++) {
        const vf range = most[i] - least[i];
        affine.minimum[i] = least[i];
        affine.scale[i] = range / V(all)(15.0f);
        affine.inverse[i] = V(all)(1.0f) / affine.scale[i];
        usual &= V(inside)(V(as_bits)(least[i]) & 0x7FFFFFFFu, 1e-30f, 6e4f) &
                 V(inside)(V(as_bits)(range), 1e-30f, 6e5f);
    }
    affine.ordinary = V(every)(usual);
    return affine;
}

PC_VECTOR void V(encode_ordinary_tile)(const int dtype, const uint8_t *from, int64_t step,
                                       int64_t count, const V(affine) * affine, uint8_t *to,
                                       int64_t to_step, uint8_t *scales) {
    uint8_t halves[2][2 * PC_TILE];
    vf x[V(per_group)];
    vi q[2 * V(per_group)];
    V(put_halves)(affine->scale, halves[0]);
    V(put_halves)(affine->minimum, halves[1]);
    for (int i = 0; i < PC_TILE; i++) {
        memcpy(scales + 4 * i, halves[0] + 2 * i, 2);
        memcpy(scales + 4 * i + 2, halves[1] + 2 * i, 2);
    }
    /* two rows at a time; the last two may be one row twice */
    for (int64_t row = 0; row < count; row += 2) {
        const int64_t next = row + 1 < count ? 1 : 0;
        PC_UNROLL
        for (int j = 0; j < 2; j++) {
            V(get_group)(dtype, from + (row + j * next) * step, x);
            PC_UNROLL
            for (int i = 0; i < V(per_group); i++) {
                q[j * V(per_group) + i] =
                    V(cut)((x[i] - affine->minimum[i]) * affine->inverse[i] + V(all)(0.5f));
            }
        }
        V(put_pairs)(q, to + row * to_step, next * to_step);
    }
}

PC_VECTOR int V(encode_tiles)(const int dtype, const pc_span *span, const pc_channel_place *to,
                              int policy) {
    for (int64_t channel = 0; channel < span->num_values; channel += PC_TILE) {
        const int64_t left = span->num_values - channel;
        const int64_t width = left < PC_TILE ? left : PC_TILE;
        const uint8_t *const from = span->at + channel * pc_dtype_nbytes(dtype);
        uint8_t *const quants = to->at + channel / 2, *const scales = to->scales + 4 * channel;
        if (width == PC_TILE) {
            const V(affine) affine = V(look_along)(dtype, from, span->step, span->count);
            if (affine.ordinary) {
                V(encode_ordinary_tile)(dtype, from, span->step, span->count, &affine, quants,
                                        to->step, scales);
                continue;
            }
        }
        pc_span other = *span;
        pc_channel_place place = *to;
        other.at = span->at + channel * pc_dtype_nbytes(dtype);
        other.num_values = width;
        place.at = quants;
        place.scales = scales;
        const int status = pc_encode_other_channels(&other, &place, policy);
        if (status != PC_OK) {
            return status;
        }
    }
    return PC_OK;
}

PC_VECTOR void V(decode_tiles)(const pc_channel_place *from, const int dtype, const pc_span *span) {
    float values[PC_TILE];
    for (int64_t channel = 0; channel < span->num_values; channel += PC_TILE) {
        const int64_t left = span->num_values - channel;
        const int64_t width = left < PC_TILE ? left : PC_TILE;
        const uint8_t *const scales = from->scales + 4 * channel;
        float scale[PC_TILE], minimum[PC_TILE];
        if (width == PC_TILE) {
            PC_UNROLL
            for (int i = 0; i < V(per_group); i++) {
                vf first, second;
                V(split_halves)(scales + 4 * PC_WIDTH * i, &first, &second);
                V(store)(scale + PC_WIDTH * i, first);
                V(store)(minimum + PC_WIDTH * i, second);
            }
        } else {
            pc_decode_scales(scales, width, scale, minimum);
        }
        for (int64_t row = 0; row < span->count; row++) {
            const uint8_t *const quants = from->at + row * from->step + channel / 2;
            uint8_t *const to = span->at + row * span->step + channel * pc_dtype_nbytes(dtype);
            if (width == PC_TILE) {
                vi q[V(per_group)];
                vf x[V(per_group)];
                V(get_pairs)(quants, q);
                PC_UNROLL
                for (int i = 0; i < V(per_group); i++) {
                    x[i] = V(to_floats)(q[i]) * V(load)(scale + i * PC_WIDTH) +
                           V(load)(minimum + i * PC_WIDTH);
                }
                if (V(put_group)(dtype, x, to)) {
                    continue;
                }
            }
            pc_decode_nibbles(quants, scale, minimum, width, values);
            pc_narrow_row(dtype, values, width, to, pc_dtype_nbytes(dtype));
        }
    }
}

#endif
