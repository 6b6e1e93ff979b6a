/* Values of stored rows for tensor cores: slices of 4 or 8 neighbours of one group, read from
 * shared memory.
 *
 * EXACT values fit one operand. SCALED ones do, as quants; their group's scale and minimum go to
 * the products instead. WIDE ones are float32 and take two operands. A format that has no reader of
 * its own here is decoded group by group with its function of the format table.
 */
#ifndef PAGEDCACHE_CUDA_ATTENTION_VALUES_H
#define PAGEDCACHE_CUDA_ATTENTION_VALUES_H

#include "attention_bytes.h"
#include "format_rows.h"

enum pc_way { PC_EXACT, PC_SCALED, PC_WIDE };

/* A row in shared memory; scales: of its first group, or of its first channel. Its groups are
 * whole: what the row lacks of them is zeros. */
struct pc_staged_row {
    const uint8_t *data, *scales;
};

struct pc_group_scale {
    float scale, minimum;
};

/* What a reader says of its format. */
template <pc_way WAY, int GAIN = 1, int ZERO = 0, bool HAS_MINIMUM = false> struct pc_operands {
    static constexpr pc_way way = WAY;
    static constexpr float gain = GAIN, zero = ZERO;
    static constexpr bool has_minimum = HAS_MINIMUM;

    static PC_DEVICE pc_group_scale scale(const pc_staged_row &, int) {
        return {1.0f, 0.0f};
    }
};

/* ---- formats --------------------------------------------------------------------------------- */

/* Any format with groups along the row. */
template <class Format> struct pc_reader : pc_operands<PC_WIDE> {
    static_assert(Format::group_axis == PC_AXIS_ROW, "groups along tokens need a reader here");
    template <pc_kind KIND, int COUNT>
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
};

template <> struct pc_reader<pc_row_of_float32> : pc_operands<PC_WIDE> {
    template <pc_kind KIND, int COUNT>
    static PC_DEVICE void take(const pc_staged_row &row, int group, int first, float (&x)[COUNT]) {
        uint32_t words[COUNT];
        pc_take<4 * COUNT>(row.data + 4 * (group * PC_GROUP + first), words);
        memcpy(x, words, sizeof x);
    }
};

template <> struct pc_reader<pc_row_of_float16> : pc_operands<PC_EXACT> {
    template <pc_kind KIND, int COUNT>
    static PC_DEVICE void take(const pc_staged_row &row, int group, int first, float (&x)[COUNT]) {
        uint32_t words[COUNT / 2];
        pc_take<2 * COUNT>(row.data + 2 * (group * PC_GROUP + first), words);
        PC_UNROLL
        for (int i = 0; i < COUNT; i++) {
            x[i] = pc_widen_half((uint16_t)(words[i / 2] >> (i % 2 * 16)));
        }
    }
};

template <> struct pc_reader<pc_row_of_bfloat16> : pc_operands<PC_EXACT> {
    template <pc_kind KIND, int COUNT>
    static PC_DEVICE void take(const pc_staged_row &row, int group, int first, float (&x)[COUNT]) {
        uint32_t words[COUNT / 2];
        pc_take<2 * COUNT>(row.data + 2 * (group * PC_GROUP + first), words);
        PC_UNROLL
        for (int i = 0; i < COUNT; i++) {
            x[i] = pc_bits_float(i % 2 ? words[i / 2] & 0xFFFF0000u : words[i / 2] << 16);
        }
    }
};

template <> struct pc_reader<pc_row_of_q8> : pc_operands<PC_SCALED> {
    template <pc_kind KIND, int COUNT>
    static PC_DEVICE void take(const pc_staged_row &row, int group, int first, float (&x)[COUNT]) {
        uint32_t words[COUNT / 4];
        pc_take<COUNT>(row.data + group * PC_GROUP + first, words);
        pc_signed_bytes(words, x);
    }
    static PC_DEVICE pc_group_scale scale(const pc_staged_row &row, int group) {
        return {pc_bits_float(pc_load_unit<4>(row.scales + 4 * group)), 0.0f};
    }
};

template <> struct pc_reader<pc_row_of_q4> : pc_operands<PC_SCALED, 16, 24> {
    template <pc_kind KIND, int COUNT>
    static PC_DEVICE void take(const pc_staged_row &row, int group, int first, float (&x)[COUNT]) {
        pc_take_pairs<pc_nibbles<KIND, 8>>(row.data + (group * PC_GROUP + first) / 2, x);
    }
    static PC_DEVICE pc_group_scale scale(const pc_staged_row &row, int group) {
        return {pc_bits_float(pc_load_unit<4>(row.scales + 4 * group)), 0.0f};
    }
};

template <> struct pc_reader<pc_row_of_q8_0> : pc_operands<PC_SCALED> {
    static constexpr int nbytes = 34;
    template <pc_kind KIND, int COUNT>
    static PC_DEVICE void take(const pc_staged_row &row, int group, int first, float (&x)[COUNT]) {
        uint32_t words[COUNT / 4];
        pc_take_anywhere<COUNT>(row.data + group * nbytes + 2 + first, words);
        pc_signed_bytes(words, x);
    }
    static PC_DEVICE pc_group_scale scale(const pc_staged_row &row, int group) {
        return {pc_take_half(row.data + group * nbytes), 0.0f};
    }
};

template <> struct pc_reader<pc_row_of_q4_0> : pc_operands<PC_SCALED, 16, 24> {
    static constexpr int nbytes = 18;
    template <pc_kind KIND, int COUNT>
    static PC_DEVICE void take(const pc_staged_row &row, int group, int first, float (&x)[COUNT]) {
        uint32_t words[COUNT / 4];
        pc_take_anywhere<COUNT>(row.data + group * nbytes + 2 + first % (PC_GROUP / 2), words);
        pc_halves_of<pc_nibbles<KIND, 8>>(words, first, x);
    }
    static PC_DEVICE pc_group_scale scale(const pc_staged_row &row, int group) {
        return {pc_take_half(row.data + group * nbytes), 0.0f};
    }
};

template <> struct pc_reader<pc_row_of_q4_1> : pc_operands<PC_SCALED, 16, 16, true> {
    static constexpr int nbytes = 20;
    template <pc_kind KIND, int COUNT>
    static PC_DEVICE void take(const pc_staged_row &row, int group, int first, float (&x)[COUNT]) {
        uint32_t words[COUNT / 4]; /* rows and groups are whole words */
        PC_UNROLL
        for (int i = 0; i < COUNT / 4; i++) {
            words[i] =
                pc_load_unit<4>(row.data + group * nbytes + 4 + first % (PC_GROUP / 2) + 4 * i);
        }
        pc_halves_of<pc_nibbles<KIND, 0>>(words, first, x);
    }
    static PC_DEVICE pc_group_scale scale(const pc_staged_row &row, int group) {
        const uint32_t both = pc_load_unit<4>(row.data + group * nbytes);
        return {pc_widen_half((uint16_t)both), pc_widen_half((uint16_t)(both >> 16))};
    }
};

template <> struct pc_reader<pc_row_of_q4k> : pc_operands<PC_WIDE> {
    template <pc_kind KIND, int COUNT>
    static PC_DEVICE void take(const pc_staged_row &row, int group, int first, float (&x)[COUNT]) {
        uint32_t scales[COUNT];
        pc_take_pairs<pc_nibbles<PC_V, 0>>(row.data + (group * PC_GROUP + first) / 2, x);
        pc_take<4 * COUNT>(row.scales + 4 * (group * PC_GROUP + first), scales);
        PC_UNROLL
        for (int i = 0; i < COUNT; i++) {
            x[i] = x[i] * pc_widen_half((uint16_t)scales[i]) +
                   pc_widen_half((uint16_t)(scales[i] >> 16));
        }
    }
};

#endif
