/*
 * Rows of values into rows of quantised formats, by vectors: the same bytes as pc_encode_row gives
 * for the same values widened to float32. Included once per instruction set, by codec_all.h.
 *
 * Four groups at a time, so that what is done once for a group is done in one vector for four.
 * Ordinary groups alone are done here: full, finite, of magnitudes at which no scale is clamped, no
 * quotient overflows and no sign of a zero decides. The rest is left to pc_encode_row, which is
 * also what the tests compare with.
 */
#if defined(PC_ISA) && PC_WIDTH > 1

/* ---- what a group needs to know of all its values ------------------------------------------ */

/* Of four groups: what is in common to all values of one, a lane for each. */
typedef struct {
    pc_4f scale, inverse, minimum;
    int ordinary; /* whether all four are */
} V(four);

PC_VECTOR int V(all_true)(pc_4i lanes) {
    int64_t halves[2];
    memcpy(halves, &lanes, sizeof halves);
    return (halves[0] & halves[1]) == -1;
}

/* Bits of magnitudes, as integers, lie in least … most. */
PC_VECTOR pc_4i V(between)(pc_4i bits, float least, float most) {
    const int32_t low = (int32_t)pc_float_bits(least), high = (int32_t)pc_float_bits(most);
    return (bits >= low) & (bits <= high);
}

/* q8, q4 and q8_0: a scale by the largest magnitude. */
PC_VECTOR V(four) V(by_magnitude)(pc_4i amax, float steps, float least, float largest) {
    V(four) four;
    four.ordinary = V(all_true)(V(between)(amax, least, largest));
    four.scale = (pc_4f)amax / steps;
    four.inverse = 1.0f / four.scale;
    four.minimum = four.scale;
    return four;
}

/* Whether the first value of a group whose magnitude is `amax` is a negative one. */
PC_FUNCTION int V(first_is_negative)(int dtype, const uint8_t *from, float amax) {
    float values[PC_GROUP];
    pc_widen_row(dtype, from, pc_dtype_nbytes(dtype), PC_GROUP, values);
    return pc_first_extreme(values) == -amax;
}

/* q4_0: the value of the largest magnitude becomes -8, the first one if they are several. */
PC_VECTOR V(four)
    V(by_extreme)(int dtype, const uint8_t *const *from, pc_4f lowest, pc_4f highest) {
    V(four) four;
    const pc_4f down = -lowest;
    const pc_4i tied = (pc_4i)(down == highest);
    pc_4i negative = (pc_4i)(down > highest);
    const pc_4i amax = (negative & (pc_4i)down) | (~negative & (pc_4i)highest);
    four.ordinary = V(all_true)(V(between)(amax, 1e-30f, 5e5f));
    if (four.ordinary && !V(all_true)(~tied)) {
        for (int g = 0; g < 4; g++) {
            if (tied[g]) {
                negative[g] = -V(first_is_negative)(dtype, from[g], ((pc_4f)amax)[g]);
            }
        }
    }
    four.scale = (pc_4f)(amax | (negative & INT32_MIN)) / -8.0f;
    four.inverse = 1.0f / four.scale;
    four.minimum = four.scale;
    return four;
}

/* q4_1: from the least to the greatest. */
PC_VECTOR V(four) V(by_range)(pc_4f lowest, pc_4f highest) {
    V(four) four;
    const pc_4f range = highest - lowest;
    four.ordinary = V(all_true)(V(between)((pc_4i)lowest & INT32_MAX, 1e-30f, 6e4f) &
                                V(between)((pc_4i)highest & INT32_MAX, 0.0f, 6e5f) &
                                V(between)((pc_4i)range, 1e-30f, 6e5f));
    four.minimum = lowest;
    four.scale = range / 15.0f;
    four.inverse = 1.0f / four.scale;
    return four;
}

PC_VECTOR V(four)
    V(look_at_magnitudes)(const int code, const int dtype, const uint8_t *const *from) {
    vf x[V(per_group)];
    vi most[4];
    PC_UNROLL
    for (int g = 0; g < 4; g++) {
        V(get_group)(dtype, from[g], x);
        most[g] = V(as_bits)(x[0]) & 0x7FFFFFFFu;
        PC_UNROLL
        for (int i = 1; i < V(per_group); i++) {
            most[g] = V(higher)(V(as_bits)(x[i]) & 0x7FFFFFFFu, most[g]);
        }
    }
    const pc_4i amax = V(highest_of_each)(0, most);
    return code == PC_FORMAT_q8   ? V(by_magnitude)(amax, 127.0f, PC_ZERO_AMAX, FLT_MAX)
           : code == PC_FORMAT_q4 ? V(by_magnitude)(amax, 7.0f, PC_ZERO_AMAX, FLT_MAX)
                                  : V(by_magnitude)(amax, 127.0f, 1e-30f, 8e6f);
}

PC_VECTOR V(four) V(look_at_ends)(const int code, const int dtype, const uint8_t *const *from) {
    vf x[V(per_group)];
    vi high[4], low[4];
    V(four) four;
    int nan = 0;
    PC_UNROLL
    for (int g = 0; g < 4; g++) {
        V(get_group)(dtype, from[g], x);
        vf most = x[0], least = x[0];
        PC_UNROLL
        for (int i = 1; i < V(per_group); i++) {
            most = V(max)(x[i], most);
            least = V(min)(x[i], least);
        }
        nan |= V(has_nan)(x);
        high[g] = V(as_bits)(most);
        low[g] = V(as_bits)(-least);
    }
    const pc_4f highest = (pc_4f)V(highest_of_each)(1, high);
    const pc_4f lowest = -(pc_4f)V(highest_of_each)(1, low);
    four = code == PC_FORMAT_q4_0 ? V(by_extreme)(dtype, from, lowest, highest)
                                  : V(by_range)(lowest, highest);
    four.ordinary &= !nan;
    return four;
}

/* ---- quants ------------------------------------------------------------------------------- */

/* Rounded to the nearest integer, halves away from zero: adding the largest float below a half
 * carries exactly the values from the half on. */
PC_VECTOR vi V(nearest)(vf x) {
    return V(cut)(x + V(with_sign)(x, 0.49999997f));
}

PC_VECTOR void V(quants_of)(const int code, const int dtype, const uint8_t *from, float inverse,
                            float minimum, vi *q) {
    const vf factor = V(all)(inverse), least = V(all)(minimum);
    vf x[V(per_group)];
    V(get_group)(dtype, from, x);
    PC_UNROLL
    for (int i = 0; i < V(per_group); i++) {
        if (code == PC_FORMAT_q4_0) {
            q[i] = V(lower)(V(cut)(x[i] * factor + V(all)(8.5f)), V(all_bits)(15u));
        } else if (code == PC_FORMAT_q4_1) {
            q[i] = V(cut)((x[i] - least) * factor + V(all)(0.5f));
        } else {
            q[i] = V(nearest)(x[i] * factor) + (code == PC_FORMAT_q4 ? 8u : 0u);
        }
    }
}

/* Groups g and g + 1 of the four, `step` bytes apart. */
PC_VECTOR void V(put_two)(const int code, const int dtype, const V(four) * four, const int g,
                          const uint8_t *const *from, uint8_t *to, int64_t step) {
    vi q[2 * V(per_group)];
    V(quants_of)(code, dtype, from[g], four->inverse[g], four->minimum[g], q);
    V(quants_of)(code, dtype, from[g + 1], four->inverse[g + 1], four->minimum[g + 1],
                 q + V(per_group));
    if (code == PC_FORMAT_q8 || code == PC_FORMAT_q8_0) {
        V(put_bytes)(q, to, step);
    } else if (code == PC_FORMAT_q4) {
        V(put_pairs)(q, to, step);
    } else {
        V(put_split)(q, to, step);
    }
}

/* What is stored of the scales: the first two from scales[0] on, `step` bytes apart, the others
 * from scales[1] on. */
PC_VECTOR void V(put_scales)(const int code, const V(four) * four, uint8_t *const *scales,
                             int64_t step) {
    uint8_t scale[16], minimum[8];
    const int nbytes = code == PC_FORMAT_q8 || code == PC_FORMAT_q4 ? 4 : 2;
    if (nbytes == 4) {
        memcpy(scale, &four->scale, 16);
    } else {
        V(put_four_halves)(four->scale, scale);
    }
    if (code == PC_FORMAT_q4_1) {
        V(put_four_halves)(four->minimum, minimum);
    }
    PC_UNROLL
    for (int g = 0; g < 4; g++) {
        uint8_t *const at = scales[g / 2] + g % 2 * step;
        memcpy(at, scale + g * nbytes, (size_t)nbytes);
        if (code == PC_FORMAT_q4_1) {
            memcpy(at + 2, minimum + 2 * g, 2);
        }
    }
}

/* ---- rows --------------------------------------------------------------------------------- */

/* Two pairs of groups; those of a pair follow one another at either end. */
typedef struct {
    const uint8_t *from[2];
    uint8_t *data[2], *scales[2];
} V(pairs);

PC_VECTOR int V(encode_four)(const int stored_code, const int dtype, const V(pairs) * pairs,
                             int policy) {
    const pc_format f = pc_format_of(stored_code);
    const int code = pc_rule_of(stored_code);
    const int planar = f.packing == PC_PACK_PLANAR;
    const int64_t nbytes = PC_GROUP * pc_dtype_nbytes(dtype);
    const int64_t step = f.quant_nbytes + (planar ? 0 : f.scale_nbytes);
    const int64_t scale_step = planar ? f.scale_nbytes : step;
    const uint8_t *const from[4] = {pairs->from[0], pairs->from[0] + nbytes, pairs->from[1],
                                    pairs->from[1] + nbytes};
    const int by_magnitude = code == PC_FORMAT_q8 || code == PC_FORMAT_q4 || code == PC_FORMAT_q8_0;
    const V(four) four = by_magnitude ? V(look_at_magnitudes)(code, dtype, from)
                                      : V(look_at_ends)(code, dtype, from);
    if (!four.ordinary) {
        int status = PC_OK;
        for (int i = 0; i < 2 && status == PC_OK; i++) {
            status = pc_encode_rest(stored_code, dtype, pairs->from[i], 2 * PC_GROUP,
                                    pairs->data[i], pairs->scales[i], policy);
        }
        return status;
    }
    V(put_scales)(code, &four, pairs->scales, scale_step);
    PC_UNROLL
    for (int i = 0; i < 2; i++) {
        V(put_two)(code, dtype, &four, 2 * i, from, pairs->data[i] + (planar ? 0 : f.scale_nbytes),
                   step);
    }
    return PC_OK;
}

/* Rows are taken in pairs of groups; the last pair of a row may begin with the last group of the
 * one before, and the last four groups may be one pair twice: what is written again is the same. */
PC_VECTOR int V(encode_quantised)(const int code, const int dtype, const pc_span *span,
                                  const pc_place *to, int policy) {
    const pc_format f = pc_format_of(code);
    const int planar = f.packing == PC_PACK_PLANAR;
    const int64_t nbytes = PC_GROUP * pc_dtype_nbytes(dtype);
    const int64_t step = f.quant_nbytes + (planar ? 0 : f.scale_nbytes);
    const int64_t full = span->num_values / PC_GROUP;
    const int64_t paired = full > 1 ? full : 0; /* groups that are treated here */
    V(pairs) pairs;
    int held = 0, status = PC_OK;
    for (int64_t row = 0; row < span->count; row++) {
        const uint8_t *const from = span->at + row * span->step;
        uint8_t *const data = to->at + row * to->step;
        uint8_t *const scales = planar ? to->scales + row * to->scale_step : data;
        for (int64_t next = 0; next < paired; next += 2) {
            const int64_t group = next + 2 <= full ? next : full - 2;
            pairs.from[held] = from + group * nbytes;
            V(expect)(pairs.from[held], 2 * nbytes);
            pairs.data[held] = data + group * step;
            pairs.scales[held] = scales + group * (planar ? f.scale_nbytes : step);
            if (!held && (next + 2 < paired || row + 1 < span->count)) {
                held = 1;
                continue;
            }
            if (!held) {
                pairs.from[1] = pairs.from[0];
                pairs.data[1] = pairs.data[0];
                pairs.scales[1] = pairs.scales[0];
            }
            held = 0;
            status = V(encode_four)(code, dtype, &pairs, policy);
            if (status != PC_OK) {
                return status;
            }
        }
        if (paired * PC_GROUP < span->num_values) {
            status = pc_encode_rest(code, dtype, from + paired * nbytes,
                                    span->num_values - paired * PC_GROUP, data + paired * step,
                                    scales + paired * f.scale_nbytes, policy);
            if (status != PC_OK) {
                return status;
            }
        }
    }
    return status;
}

#endif
