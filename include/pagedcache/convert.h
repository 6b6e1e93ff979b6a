/* Rows of float formats into one another, by vectors, as pc_decode_row and pc_encode_row convert
 * them; and a look at their magnitudes. Included once per instruction set, by codec_all.h. */
#if defined(PC_ISA) && PC_WIDTH > 1

/* PC_WIDTH values of `dtype` (a constant where this is inlined) as float32; NaN may be quieted. */
PC_VECTOR vf V(widened)(const int dtype, const uint8_t *from) {
    if (dtype == PC_FORMAT_float32) {
        vf x;
        memcpy(&x, from, sizeof x);
        return x;
    }
    return dtype == PC_FORMAT_float16 ? V(half)(from) : V(bfloat)(from);
}

/* Ask for what is read some time after `from`. The machine foresees runs within a page of 4 KiB;
 * behind its end it has to be told, and this early, as a loop that converts holds few of its rounds
 * in flight. */
#ifndef PC_AHEAD_NBYTES
#define PC_AHEAD_NBYTES 8192
#endif

PC_VECTOR void V(expect)(const uint8_t *from, const int64_t nbytes) {
    PC_UNROLL
    for (int64_t i = 0; i < nbytes; i += 64) {
        PC_PREFETCH(from + PC_AHEAD_NBYTES + i);
    }
}

PC_VECTOR void V(get_group)(const int dtype, const uint8_t *from, vf *x) {
    const int64_t step = (dtype == PC_FORMAT_float32 ? 4 : 2) * PC_WIDTH;
    PC_UNROLL
    for (int i = 0; i < V(per_group); i++) {
        x[i] = V(widened)(dtype, from + i * step);
    }
}

/* Store a group as `dtype`; 0, and nothing is stored, where it has a NaN. */
PC_VECTOR int V(put_group)(const int dtype, const vf *x, uint8_t *to) {
    if (dtype == PC_FORMAT_float32) {
        PC_UNROLL
        for (int i = 0; i < V(per_group); i++) {
            memcpy(to + 4 * PC_WIDTH * i, &x[i], sizeof x[i]);
        }
        return 1;
    }
    if (V(has_nan)(x)) {
        return 0;
    }
    if (dtype == PC_FORMAT_float16) {
        V(put_halves)(x, to);
    } else {
        vi words[V(per_group)];
        PC_UNROLL
        for (int i = 0; i < V(per_group); i++) {
            const vi bits = V(as_bits)(x[i]);
            words[i] = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
        }
        V(put_words)(words, to);
    }
    return 1;
}

/* Rows of one dtype are copied, whatever they hold. */
PC_VECTOR void V(copy)(const pc_span *span, uint8_t *to, int64_t to_step) {
    const int64_t nbytes = span->num_values * pc_dtype_nbytes(span->dtype);
    for (int64_t row = 0; row < span->count; row++) {
        const uint8_t *const source = span->at + row * span->step;
        uint8_t *const target = to + row * to_step;
        if (nbytes < V(line)) {
            memcpy(target, source, (size_t)nbytes);
            continue;
        }
        for (int64_t at = 0; at < nbytes; at += V(line)) {
            at = at + V(line) <= nbytes ? at : nbytes - V(line);
            V(expect)(source + at, V(line));
            memcpy(target + at, source + at, V(line));
        }
    }
}

/* Convert rows from one float format to another. The last group of a row may begin inside the one
 * before it. */
PC_VECTOR void V(convert)(const int dtype, const pc_span *span, const int to_dtype, uint8_t *to,
                          int64_t to_step) {
    const int64_t in = pc_dtype_nbytes(dtype), out = pc_dtype_nbytes(to_dtype);
    const int64_t num_values = span->num_values;
    vf x[V(per_group)];
    if (dtype == to_dtype) {
        V(copy)(span, to, to_step);
        return;
    }
    for (int64_t row = 0; row < span->count; row++) {
        const uint8_t *const source = span->at + row * span->step;
        uint8_t *const target = to + row * to_step;
        if (num_values < PC_GROUP) {
            (void)pc_encode_rest(to_dtype, dtype, source, num_values, target, target,
                                 PC_NONFINITE_SATURATE);
            continue;
        }
        for (int64_t at = 0; at < num_values; at += PC_GROUP) {
            at = at + PC_GROUP <= num_values ? at : num_values - PC_GROUP;
            V(expect)(source + at * in, PC_GROUP * in);
            V(get_group)(dtype, source + at * in, x);
            /* a float16 NaN may have been quieted on the way */
            if ((to_dtype == PC_FORMAT_float32 && dtype == PC_FORMAT_float16 && V(has_nan)(x)) ||
                !V(put_group)(to_dtype, x, target + at * out)) {
                (void)pc_encode_rest(to_dtype, dtype, source + at * in, PC_GROUP, target + at * out,
                                     target, PC_NONFINITE_SATURATE);
            }
        }
    }
}

/* The greatest of the magnitudes of PC_WIDTH float32, or of twice as many 16-bit values, and of
 * `most`, lane by lane, as integers. */
PC_VECTOR vi V(most_of)(const int dtype, const uint8_t *from, vi most) {
    const vi bits = V(load_bits)(from);
    if (dtype == PC_FORMAT_float32) {
        return V(higher)(bits & 0x7FFFFFFFu, most);
    }
    return V(higher)((bits >> 16) & 0x7FFFu, V(higher)(bits & 0x7FFFu, most));
}

PC_VECTOR int V(row_within)(const int dtype, const uint8_t *row, int64_t num_values,
                            uint32_t limit) {
    const int64_t nbytes = num_values * pc_dtype_nbytes(dtype), step = 16 * PC_WIDTH;
    vi most[4] = {{0}, {0}, {0}, {0}};
    uint32_t lanes[PC_WIDTH], highest = 0;
    int64_t at = 0;
    for (; at + step <= nbytes; at += step) {
        PC_UNROLL
        for (int i = 0; i < 4; i++) {
            most[i] = V(most_of)(dtype, row + at + 4 * PC_WIDTH * i, most[i]);
        }
    }
    most[0] = V(higher)(V(higher)(most[0], most[1]), V(higher)(most[2], most[3]));
    memcpy(lanes, &most[0], sizeof lanes);
    for (int i = 0; i < PC_WIDTH; i++) {
        highest = lanes[i] > highest ? lanes[i] : highest;
    }
    for (; at < nbytes; at += pc_dtype_nbytes(dtype)) {
        const uint32_t bits = dtype == PC_FORMAT_float32 ? pc_load_u32(row + at) & 0x7FFFFFFFu
                                                         : pc_load_u16(row + at) & 0x7FFFu;
        highest = bits > highest ? bits : highest;
    }
    return highest <= limit;
}

PC_FUNCTION int V(all_within)(const pc_span *span, uint32_t limit) {
    for (int64_t row = 0; row < span->count; row++) {
        const uint8_t *const at = span->at + row * span->step;
        if (!(span->dtype == PC_FORMAT_float32
                  ? V(row_within)(PC_FORMAT_float32, at, span->num_values, limit)
                  : V(row_within)(PC_FORMAT_float16, at, span->num_values, limit))) {
            return 0;
        }
    }
    return 1;
}

#endif
