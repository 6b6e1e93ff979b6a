/* Groups along the tokens: one scale per head, channel and up to PC_GROUP tokens of a block.
 *
 * Keys have a few channels that are large for every token; a scale per token gives those all the
 * room, a scale per channel does not (KIVI, Liu et al. 2024; KVQuant, Hooper et al. 2024). The
 * arithmetic of a group is q4_1's (ggml.h): a float16 scale and a float16 minimum; a group may have
 * fewer than PC_GROUP tokens. Value t of a channel becomes 4 bits in the row of token t: channel 2i
 * in the low half of byte i, channel 2i + 1 in the high half (the high half is 0 behind an odd last
 * channel).
 *
 * Such a block is written whole or not at all; rows can be read one by one.
 */
#ifndef PAGEDCACHE_CHANNELS_H
#define PAGEDCACHE_CHANNELS_H

#include "geometry.h"

/* Channels that are treated side by side, so that the compiler uses vectors. */
#define PC_TILE 32

/* Copy a tile: `count` tokens, head_dim floats apart, of `width` channels. Behind the width the
 * last channel is repeated. NaN and Inf are replaced channel by channel, or refused. */
PC_INLINE int pc_copy_tile(const float *rows, int64_t head_dim, int64_t count, int64_t width,
                           int policy, float tile[PC_GROUP][PC_TILE]) {
    int32_t nonfinite[PC_TILE] = {0}, found = 0;
    float column[PC_GROUP];
    int64_t i, j;
    for (i = 0; i < count; i++) {
        memcpy(tile[i], rows + i * head_dim, (size_t)width * sizeof(float));
        for (j = width; j < PC_TILE; j++) {
            tile[i][j] = tile[i][width - 1];
        }
        for (j = 0; j < PC_TILE; j++) {
            nonfinite[j] |= (int32_t)(pc_float_bits(tile[i][j]) & 0x7FFFFFFFu) >= 0x7F800000;
        }
    }
    for (j = 0; j < PC_TILE; j++) {
        found |= nonfinite[j];
    }
    if (!found) {
        return PC_OK;
    }
    if (policy == PC_NONFINITE_RAISE) {
        return PC_E_NONFINITE;
    }
    for (j = 0; j < PC_TILE; j++) {
        for (i = 0; i < count; i++) {
            column[i] = tile[i][j];
        }
        pc_copy_saturated(column, count, column);
        for (i = 0; i < count; i++) {
            tile[i][j] = column[i];
        }
    }
    return PC_OK;
}

/* Find the scales of the groups of a tile and store them. */
PC_INLINE void pc_scale_tile(const float tile[PC_GROUP][PC_TILE], int64_t count, int64_t width,
                             float minimum[PC_TILE], float inverse[PC_TILE], uint8_t *scales) {
    float least[PC_TILE], most[PC_TILE], scale[PC_TILE];
    uint16_t halves[PC_TILE][2];
    int64_t i, j;
    for (j = 0; j < PC_TILE; j++) {
        least[j] = most[j] = tile[0][j];
    }
    for (i = 1; i < count; i++) {
        for (j = 0; j < PC_TILE; j++) {
            least[j] = tile[i][j] < least[j] ? tile[i][j] : least[j];
            most[j] = tile[i][j] > most[j] ? tile[i][j] : most[j];
        }
    }
    for (j = 0; j < PC_TILE; j++) {
        const pc_affine affine = pc_affine_of(least[j], most[j]);
        minimum[j] = affine.minimum;
        inverse[j] = affine.inverse;
        scale[j] = affine.scale;
    }
    for (j = 0; j < PC_TILE; j++) {
        halves[j][0] = pc_float_to_half(scale[j]);
        halves[j][1] = pc_float_to_half(minimum[j]);
    }
    memcpy(scales, halves, (size_t)width * sizeof *halves);
}

/* Encode the groups of a tile; row_nbytes: from the quants of a token to those of the next. */
PC_INLINE void pc_encode_tile(const float tile[PC_GROUP][PC_TILE], int64_t count, int64_t width,
                              uint8_t *quants, int64_t row_nbytes, uint8_t *scales) {
    float minimum[PC_TILE], inverse[PC_TILE];
    int64_t i, j;
    pc_scale_tile(tile, count, width, minimum, inverse, scales);
    for (i = 0; i < count; i++) {
        uint8_t nibbles[PC_TILE], bytes[PC_TILE / 2];
        for (j = 0; j < PC_TILE; j++) {
            nibbles[j] = (uint8_t)pc_affine_nibble(tile[i][j], minimum[j], inverse[j]);
        }
        if (width % 2) {
            nibbles[width] = 0;
        }
        for (j = 0; j < PC_TILE / 2; j++) {
            bytes[j] = (uint8_t)(nibbles[2 * j] | (nibbles[2 * j + 1] << 4));
        }
        memcpy(quants + i * row_nbytes, bytes, (size_t)(width + 1) / 2);
    }
}

/* Store one head of one block: `rows` is float32 [block_size][head_dim], contiguous. */
PC_INLINE int pc_encode_head(const pc_geometry *g, uint8_t *slab, int64_t block_stride_nbytes,
                             int64_t block, int64_t head, const float *rows, int policy) {
    const int64_t row_nbytes =
        g->layout == PC_HND ? g->row_data_nbytes : g->row_data_nbytes * g->num_heads;
    float tile[PC_GROUP][PC_TILE];
    int64_t first, channel;
    for (first = 0; first < g->block_size; first += PC_GROUP) {
        const int64_t tokens = g->block_size - first;
        const int64_t count = tokens < PC_GROUP ? tokens : PC_GROUP;
        const pc_address at = pc_row_address(g, block_stride_nbytes, block, head, first);
        for (channel = 0; channel < g->head_dim; channel += PC_TILE) {
            const int64_t channels = g->head_dim - channel;
            const int64_t width = channels < PC_TILE ? channels : PC_TILE;
            const int status = pc_copy_tile(rows + first * g->head_dim + channel, g->head_dim,
                                            count, width, policy, tile);
            if (status != PC_OK) {
                return status;
            }
            pc_encode_tile((const float (*)[PC_TILE])tile, count, width,
                           slab + at.data + channel / 2, row_nbytes,
                           slab + at.scales + 4 * channel);
        }
    }
    return PC_OK;
}

/* Read the scales and minima of one token group of a head, of `count` channels. */
PC_INLINE void pc_decode_scales(const uint8_t *scales, int64_t count, float *PC_RESTRICT scale,
                                float *PC_RESTRICT minimum) {
    int64_t channel;
    for (channel = 0; channel < count; channel++) {
        uint16_t halves[2];
        memcpy(halves, scales + 4 * channel, sizeof halves);
        scale[channel] = pc_half_to_float(halves[0]);
        minimum[channel] = pc_half_to_float(halves[1]);
    }
}

/* Read `count` channels of a row, from an even one on, by their scales. */
PC_INLINE void pc_decode_nibbles(const uint8_t *PC_RESTRICT data, const float *PC_RESTRICT scale,
                                 const float *PC_RESTRICT minimum, int64_t count,
                                 float *PC_RESTRICT out) {
    const int64_t even = count / 2;
    int64_t i;
    for (i = 0; i < even; i++) {
        out[2 * i] = (float)(data[i] & 0xF) * scale[2 * i] + minimum[2 * i];
        out[2 * i + 1] = (float)(data[i] >> 4) * scale[2 * i + 1] + minimum[2 * i + 1];
    }
    if (count % 2) {
        out[2 * even] = (float)(data[even] & 0xF) * scale[2 * even] + minimum[2 * even];
    }
}

/* Read one row back as head_dim float32: the same values as the group's decode function gives. */
PC_INLINE void pc_decode_channels(const uint8_t *data, const uint8_t *scales, int64_t head_dim,
                                  float *out) {
    float scale[PC_TILE], minimum[PC_TILE];
    int64_t channel;
    for (channel = 0; channel < head_dim; channel += PC_TILE) {
        const int64_t left = head_dim - channel;
        const int64_t count = left < PC_TILE ? left : PC_TILE;
        pc_decode_scales(scales + 4 * channel, count, scale, minimum);
        pc_decode_nibbles(data + channel / 2, scale, minimum, count, out + channel);
    }
}

#endif
