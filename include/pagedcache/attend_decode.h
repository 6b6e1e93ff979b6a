/*
 * Stored numbers into vectors. Included once per instruction set, by attend_isa.h.
 *
 * Two vectors at a time, and in the order in which they come out of the bytes with the least work:
 * within 2 * PC_WIDTH values the even ones before the odd ones (bfloat16, PAIRS), or the first
 * halves of groups before the second ones (HALVES). Queries are brought into the same order once,
 * and results out of it, so that no key and no value ever is. Scales are left to the callers.
 */
#ifdef PC_ISA

#define PC_PAIR (2 * PC_WIDTH)
#define PC_PARTS (PC_GROUP / PC_PAIR) /* pairs of vectors in a group */

/* Where the value at place i of that order stands in the row. `whole`: values in whole pairs; those
 * behind them come in their own order, but for nibbles. */
PC_VECTOR int64_t V(value_at)(int reading, int64_t i, int64_t whole) {
    const int64_t pair = i / PC_PAIR, half = i % PC_PAIR / PC_WIDTH, lane = i % PC_WIDTH;
    if (reading == PC_READ_HALVES) {
        return pair / PC_PARTS * PC_GROUP + half * (PC_GROUP / 2) + pair % PC_PARTS * PC_WIDTH +
               lane;
    }
    if (reading == PC_READ_PAIRS || reading == PC_READ_CHANNELS ||
        (reading == PC_READ_BFLOAT16 && i < whole)) {
        return pair * PC_PAIR + 2 * lane + half;
    }
    return i;
}

/* Values of a row in this order, padding to whole pairs included. */
PC_VECTOR int64_t V(padded)(int64_t values) {
    return (values + PC_PAIR - 1) / PC_PAIR * PC_PAIR;
}

/* Byte of a row where its pair number j begins; groups are `step` bytes apart. */
PC_VECTOR int64_t V(pair_offset)(const int reading, int64_t j, int64_t step) {
    switch (reading) {
    case PC_READ_FLOAT32: return j * PC_PAIR * 4;
    case PC_READ_FLOAT16:
    case PC_READ_BFLOAT16: return j * PC_PAIR * 2;
    case PC_READ_CHANNELS: return j * PC_WIDTH;
    case PC_READ_INT8: return j / PC_PARTS * step + j % PC_PARTS * PC_PAIR;
    default: return j / PC_PARTS * step + j % PC_PARTS * PC_WIDTH;
    }
}

/* The pair of vectors at `from`. */
PC_VECTOR void V(pair)(const int reading, const uint8_t *from, vf *a, vf *b) {
    if (reading == PC_READ_FLOAT32) {
        *a = V(load)((const float *)(const void *)from);
        *b = V(load)((const float *)(const void *)from + PC_WIDTH);
    } else if (reading == PC_READ_FLOAT16) {
        *a = V(half)(from);
        *b = V(half)(from + PC_WIDTH * 2);
    } else if (reading == PC_READ_BFLOAT16) {
        const vi both = V(load_bits)(from);
        *a = V(as_float)(both << 16);
        *b = V(as_float)(both & 0xFFFF0000u);
    } else if (reading == PC_READ_INT8) {
        *a = V(int8)(from);
        *b = V(int8)(from + PC_WIDTH);
    } else {
        V(nibbles)(from, a, b);
    }
}

/* The pair of vectors at `from`, of a group that has this scale and this offset, as values. */
PC_VECTOR void V(scaled_pair)(const int reading, const uint8_t *from, float scale, float offset,
                              vf *a, vf *b) {
    const vf s = V(all)(scale);
    if (reading == PC_READ_INT8) {
        V(pair)(reading, from, a, b);
        *a *= s;
        *b *= s;
    } else {
        V(scaled_nibbles)(from, s, V(all)(offset), a, b);
    }
}

/* The last `count` < 2 * PC_WIDTH values of a row, which are at `from`, and zeros; in the order of
 * the row but for nibbles. No byte behind the row is read. */
PC_VECTOR void V(rest)(const int reading, const uint8_t *from, int64_t count, vf *a, vf *b) {
    const int64_t size = reading == PC_READ_FLOAT32 ? 4 : 2;
    uint8_t bytes[PC_PAIR * 4];
    memset(bytes, 0, sizeof bytes);
    if (reading == PC_READ_CHANNELS) {
        memcpy(bytes, from, (size_t)(count + 1) / 2);
        V(nibbles)(bytes, a, b);
        return;
    }
    if (count < PC_WIDTH) {
        memcpy(bytes, from, (size_t)(count * size));
        from = bytes;
    } else if (count > PC_WIDTH) {
        memcpy(bytes + PC_WIDTH * size, from + PC_WIDTH * size,
               (size_t)((count - PC_WIDTH) * size));
    }
    if (reading == PC_READ_FLOAT32) {
        *a = V(load)((const float *)(const void *)from);
        *b = V(load)((const float *)(const void *)(bytes + PC_WIDTH * size));
    } else if (reading == PC_READ_FLOAT16) {
        *a = V(half)(from);
        *b = V(half)(bytes + PC_WIDTH * size);
    } else {
        *a = V(bfloat)(from);
        *b = V(bfloat)(bytes + PC_WIDTH * size);
    }
}

#endif
