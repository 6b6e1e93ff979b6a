/* Values of stored rows for tensor cores: slices of 4 or 8 neighbours of one group, read from
 * shared memory.
 *
 * EXACT values fit one operand. SCALED ones do, as quants; their group's scale and minimum go to
 * the products instead. WIDE ones are float32 and take two operands. A format that has no reader of
 * its own here is decoded group by group with its function of the format table.
 */
#ifndef PAGEDCACHE_CUDA_ATTENTION_VALUES_H
#define PAGEDCACHE_CUDA_ATTENTION_VALUES_H

#include "format_rows.h"
#include "units.h"

enum pc_way { PC_EXACT, PC_SCALED, PC_WIDE };

/* A row in shared memory; scales: of its first group, or of its first channel. Its groups are
 * whole: what the row lacks of them is zeros. */
struct pc_staged_row {
    const uint8_t *data, *scales;
};

/* value = quant * scale + minimum */
struct pc_group_scale {
    float scale, minimum;
};

/* ---- bytes ----------------------------------------------------------------------------------- */

/* NBYTES at a multiple of that, or of 16. */
template <int NBYTES>
PC_DEVICE void pc_take(const uint8_t *at, uint32_t (&words)[(NBYTES + 3) / 4]) {
    constexpr int piece = NBYTES < 16 ? NBYTES : 16;
    PC_UNROLL
    for (int i = 0; i < NBYTES / piece; i++) {
        const auto unit = pc_load_unit<piece>(at + i * piece);
        if constexpr (piece < 4) {
            words[0] = unit;
        } else {
            memcpy(words + i * piece / 4, &unit, piece);
        }
    }
}

/* NBYTES, a multiple of 4, from anywhere; up to 4 bytes around them are read too. */
template <int NBYTES>
PC_DEVICE void pc_take_anywhere(const uint8_t *at, uint32_t (&words)[NBYTES / 4]) {
    const int shift = 8 * (int)((uintptr_t)at & 3);
    const uint8_t *const first = at - shift / 8;
    uint64_t pair = pc_load_unit<4>(first);
    PC_UNROLL
    for (int i = 0; i < NBYTES / 4; i++) {
        pair |= (uint64_t)pc_load_unit<4>(first + 4 * i + 4) << 32;
        words[i] = (uint32_t)(pair >> shift);
        pair >>= 32;
    }
}

/* Byte i of a word as a float, less `offset`: the byte is put behind the significand of 2^23. */
PC_DEVICE float pc_byte_less(uint32_t word, int i, float offset) {
#if defined(__CUDA_ARCH__)
    return pc_bits_float(__byte_perm(word, 0x4B000000u, 0x7440 + i)) - (8388608.0f + offset);
#else
    return (float)((word >> 8 * i) & 0xFF) - offset;
#endif
}

/* A float16 without the care that its conversion takes of NaN's bits. */
PC_DEVICE float pc_widen_half(uint16_t half) {
#if defined(__CUDA_ARCH__)
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
#else
    return pc_half_to_float(half);
#endif
}

PC_DEVICE float pc_take_half(const uint8_t *at) {
    return pc_widen_half(pc_load_unit<2>(at));
}

/* COUNT nibbles in the order of the values: 2 i in the low half of byte i (q4, q4k). */
template <int COUNT>
PC_DEVICE void pc_take_pairs(const pc_staged_row &row, int group, int first, float offset,
                             float (&x)[COUNT]) {
    uint32_t words[1];
    pc_take<COUNT / 2>(row.data + group * (PC_GROUP / 2) + first / 2, words);
    const uint32_t low = words[0] & 0x0F0F0F0Fu, high = (words[0] >> 4) & 0x0F0F0F0Fu;
    PC_UNROLL
    for (int i = 0; i < COUNT / 2; i++) {
        x[2 * i] = pc_byte_less(low, i, offset);
        x[2 * i + 1] = pc_byte_less(high, i, offset);
    }
}

/* The same where value i lies in the low half of byte i, and i + 16 in the high one (ggml). */
template <int COUNT>
PC_DEVICE void pc_take_halves(const pc_staged_row &row, int group_nbytes, int quants_at, int group,
                              int first, float offset, float (&x)[COUNT]) {
    uint32_t words[COUNT / 4];
    const int byte = first % (PC_GROUP / 2), shift = first / (PC_GROUP / 2) * 4;
    pc_take_anywhere<COUNT>(row.data + group * group_nbytes + quants_at + byte, words);
    PC_UNROLL
    for (int i = 0; i < COUNT; i++) {
        x[i] = pc_byte_less((words[i / 4] >> shift) & 0x0F0F0F0Fu, i % 4, offset);
    }
}

/* Signed bytes, the upper bits of words turned over. */
template <int COUNT>
PC_DEVICE void pc_signed_bytes(const uint32_t (&words)[COUNT / 4], float (&x)[COUNT]) {
    PC_UNROLL
    for (int i = 0; i < COUNT; i++) {
        x[i] = pc_byte_less(words[i / 4] ^ 0x80808080u, i % 4, 128.0f);
    }
}

/* ---- formats --------------------------------------------------------------------------------- */

/* Any format with groups along the row. */
template <class Format> struct pc_reader {
    static_assert(Format::group_axis == PC_AXIS_ROW, "groups along tokens need a reader here");
    static constexpr pc_way way = PC_WIDE;
    template <int COUNT>
    static PC_DEVICE void take(const pc_staged_row &row, int group, int first, float (&x)[COUNT]) {
        constexpr bool planar = Format::packing == PC_PACK_PLANAR;
        constexpr int step = Format::quant_nbytes + (planar ? 0 : Format::scale_nbytes);
        const uint8_t *const data = row.data + group * step;
        float values[PC_GROUP];
        Format::decode(data + (planar ? 0 : Format::scale_nbytes),
                       planar ? row.scales + group * Format::scale_nbytes : data, values);
        PC_UNROLL
        for (int i = 0; i < COUNT; i++) {
            x[i] = values[first + i];
        }
    }
    static PC_DEVICE pc_group_scale scale(const pc_staged_row &, int) {
        return {1.0f, 0.0f};
    }
};

template <> struct pc_reader<pc_row_of_float32> {
    static constexpr pc_way way = PC_WIDE;
    template <int COUNT>
    static PC_DEVICE void take(const pc_staged_row &row, int group, int first, float (&x)[COUNT]) {
        uint32_t words[COUNT];
        pc_take<4 * COUNT>(row.data + 4 * (group * PC_GROUP + first), words);
        memcpy(x, words, sizeof x);
    }
    static PC_DEVICE pc_group_scale scale(const pc_staged_row &, int) {
        return {1.0f, 0.0f};
    }
};

template <> struct pc_reader<pc_row_of_float16> {
    static constexpr pc_way way = PC_EXACT;
    template <int COUNT>
    static PC_DEVICE void take(const pc_staged_row &row, int group, int first, float (&x)[COUNT]) {
        uint32_t words[COUNT / 2];
        pc_take<2 * COUNT>(row.data + 2 * (group * PC_GROUP + first), words);
        PC_UNROLL
        for (int i = 0; i < COUNT; i++) {
            x[i] = pc_widen_half((uint16_t)(words[i / 2] >> (i % 2 * 16)));
        }
    }
    static PC_DEVICE pc_group_scale scale(const pc_staged_row &, int) {
        return {1.0f, 0.0f};
    }
};

template <> struct pc_reader<pc_row_of_bfloat16> {
    static constexpr pc_way way = PC_EXACT;
    template <int COUNT>
    static PC_DEVICE void take(const pc_staged_row &row, int group, int first, float (&x)[COUNT]) {
        uint32_t words[COUNT / 2];
        pc_take<2 * COUNT>(row.data + 2 * (group * PC_GROUP + first), words);
        PC_UNROLL
        for (int i = 0; i < COUNT; i++) {
            x[i] = pc_bits_float(i % 2 ? words[i / 2] & 0xFFFF0000u : words[i / 2] << 16);
        }
    }
    static PC_DEVICE pc_group_scale scale(const pc_staged_row &, int) {
        return {1.0f, 0.0f};
    }
};

template <> struct pc_reader<pc_row_of_q8> {
    static constexpr pc_way way = PC_SCALED;
    template <int COUNT>
    static PC_DEVICE void take(const pc_staged_row &row, int group, int first, float (&x)[COUNT]) {
        uint32_t words[COUNT / 4];
        pc_take<COUNT>(row.data + group * PC_GROUP + first, words);
        pc_signed_bytes(words, x);
    }
    static PC_DEVICE pc_group_scale scale(const pc_staged_row &row, int group) {
        return {pc_bits_float(pc_load_unit<4>(row.scales + 4 * group)), 0.0f};
    }
};

template <> struct pc_reader<pc_row_of_q4> {
    static constexpr pc_way way = PC_SCALED;
    template <int COUNT>
    static PC_DEVICE void take(const pc_staged_row &row, int group, int first, float (&x)[COUNT]) {
        pc_take_pairs(row, group, first, 8.0f, x);
    }
    static PC_DEVICE pc_group_scale scale(const pc_staged_row &row, int group) {
        return {pc_bits_float(pc_load_unit<4>(row.scales + 4 * group)), 0.0f};
    }
};

template <> struct pc_reader<pc_row_of_q8_0> {
    static constexpr pc_way way = PC_SCALED;
    static constexpr int nbytes = 34;
    template <int COUNT>
    static PC_DEVICE void take(const pc_staged_row &row, int group, int first, float (&x)[COUNT]) {
        uint32_t words[COUNT / 4];
        pc_take_anywhere<COUNT>(row.data + group * nbytes + 2 + first, words);
        pc_signed_bytes(words, x);
    }
    static PC_DEVICE pc_group_scale scale(const pc_staged_row &row, int group) {
        return {pc_take_half(row.data + group * nbytes), 0.0f};
    }
};

template <> struct pc_reader<pc_row_of_q4_0> {
    static constexpr pc_way way = PC_SCALED;
    static constexpr int nbytes = 18;
    template <int COUNT>
    static PC_DEVICE void take(const pc_staged_row &row, int group, int first, float (&x)[COUNT]) {
        pc_take_halves(row, nbytes, 2, group, first, 8.0f, x);
    }
    static PC_DEVICE pc_group_scale scale(const pc_staged_row &row, int group) {
        return {pc_take_half(row.data + group * nbytes), 0.0f};
    }
};

template <> struct pc_reader<pc_row_of_q4_1> {
    static constexpr pc_way way = PC_SCALED;
    static constexpr int nbytes = 20;
    template <int COUNT>
    static PC_DEVICE void take(const pc_staged_row &row, int group, int first, float (&x)[COUNT]) {
        pc_take_halves(row, nbytes, 4, group, first, 0.0f, x);
    }
    static PC_DEVICE pc_group_scale scale(const pc_staged_row &row, int group) {
        const uint8_t *const at = row.data + group * nbytes;
        return {pc_take_half(at), pc_take_half(at + 2)};
    }
};

template <> struct pc_reader<pc_row_of_q4k> {
    static constexpr pc_way way = PC_WIDE;
    template <int COUNT>
    static PC_DEVICE void take(const pc_staged_row &row, int group, int first, float (&x)[COUNT]) {
        uint32_t scales[COUNT];
        pc_take_pairs(row, group, first, 0.0f, x);
        pc_take<4 * COUNT>(row.scales + 4 * (group * PC_GROUP + first), scales);
        PC_UNROLL
        for (int i = 0; i < COUNT; i++) {
            x[i] = x[i] * pc_widen_half((uint16_t)scales[i]) +
                   pc_widen_half((uint16_t)(scales[i] >> 16));
        }
    }
    static PC_DEVICE pc_group_scale scale(const pc_staged_row &, int) {
        return {1.0f, 0.0f};
    }
};

#endif
