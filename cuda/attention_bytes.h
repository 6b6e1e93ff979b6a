/* From bytes of stored rows, in shared memory, to operands of products. */
#ifndef PAGEDCACHE_CUDA_ATTENTION_BYTES_H
#define PAGEDCACHE_CUDA_ATTENTION_BYTES_H

#include "attention.h"
#include "pagedcache/formats.h"

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

/* Nibbles as operands. Of V: the quants, which are LESS less than the nibbles. Of K: 1 + nibble /
 * 16, which needs no addition, as the nibble is put into the upper bits of a significand. That 1,
 * in the end, is taken off for all channels of a group at once; where weights are added up, it
 * would cost accuracy. `word`: the low nibbles of a word's bytes, made ready; `at`: byte i of that.
 */
template <pc_kind KIND, int LESS> struct pc_nibbles {
    static PC_DEVICE uint32_t word(uint32_t bytes) {
        return KIND == PC_V ? bytes & 0x0F0F0F0Fu : (bytes << 3 & 0x78787878u) | 0x80808080u;
    }
    static PC_DEVICE float at(uint32_t word, int i) {
        if (KIND == PC_V) {
            return pc_byte_less(word, i, (float)LESS);
        }
#if defined(__CUDA_ARCH__)
        return pc_bits_float(__byte_perm(word, 0x3F000000u, 0x7044 + (i << 8)));
#else
        return pc_bits_float(0x3F000000u | (word >> 8 * i & 0xFF) << 16);
#endif
    }
};

/* COUNT nibbles, those of values 2 i in the low halves of bytes (q4, q4k). */
template <class Nibbles, int COUNT>
PC_DEVICE void pc_take_pairs(const uint8_t *quants, float (&x)[COUNT]) {
    uint32_t words[1];
    pc_take<COUNT / 2>(quants, words);
    const uint32_t low = Nibbles::word(words[0]), high = Nibbles::word(words[0] >> 4);
    PC_UNROLL
    for (int i = 0; i < COUNT / 2; i++) {
        x[2 * i] = Nibbles::at(low, i);
        x[2 * i + 1] = Nibbles::at(high, i);
    }
}

/* COUNT nibbles where value i lies in the low half of byte i, and i + 16 in the high one (ggml).
 * words: the bytes of values first … */
template <class Nibbles, int COUNT>
PC_DEVICE void pc_halves_of(const uint32_t (&words)[COUNT / 4], int first, float (&x)[COUNT]) {
    PC_UNROLL
    for (int i = 0; i < COUNT / 4; i++) {
        const uint32_t word = Nibbles::word(words[i] >> first / (PC_GROUP / 2) * 4);
        PC_UNROLL
        for (int j = 0; j < 4; j++) {
            x[4 * i + j] = Nibbles::at(word, j);
        }
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

#endif
