/*
 * The two products of attention over a run of tokens, for up to PC_ROWS query rows at a time:
 * scores (q · k) and results (p · v). Each stored row is read from memory once and widened in
 * registers, for all query rows. Included once per instruction set, by attend_isa.h.
 *
 * One function per way of reading and number of rows comes out of the two templates below.
 */
#ifdef PC_ISA

/* Sums kept in registers; of a multiple of PC_WIDTH of them all lanes are added up at once. */
#define PC_SUMS (PC_WIDTH > 8 ? PC_WIDTH : 8)

/* Ask for the row at `row`, which comes a run later. Spread over the work on this one, the lines
 * find room to be on their way together. */
PC_VECTOR void V(fetch)(const uint8_t *row, int64_t lines) {
    if (lines > 0) {
        PC_PREFETCH(row);
    }
    if (lines > 1) {
        PC_PREFETCH(row + 64);
    }
    for (int64_t i = 2; i < lines; i += 2) {
        PC_PREFETCH(row + 64 * i);
        PC_PREFETCH(row + 64 * i + 64);
    }
}

/* Scores of `rows` query rows and tile->count tokens, `tokens` at a time: the last ones are reached
 * by repeating pointers, and up to `tokens` - 1 scores behind the last are written. */
PC_VECTOR void V(score)(const int reading, const int rows, const int tokens, const pc_tile *tile) {
    const int64_t pairs = tile->pairs;
    for (int64_t first = 0; first < tile->count; first += tokens) {
        const uint8_t *const *const data = tile->data + first;
        const uint8_t *const *ahead = tile->ahead + first;
        const uint8_t *const *const ahead_end = ahead + tokens;
        const float *q = tile->in;
        vf sums[PC_SUMS];
        float added[PC_SUMS];
        PC_UNROLL
        for (int i = 0; i < PC_SUMS; i++) {
            sums[i] = V(all)(0.0f);
        }
        for (int64_t j = 0; j < pairs; j++, q += rows * PC_PAIR) {
            const int64_t offset = tile->shift + V(pair_offset)(reading, j, tile->step);
            const float *const scales = tile->scales + j / PC_PARTS * PC_SCALE_STRIDE + first;
            const float *const offsets = tile->offsets + j / PC_PARTS * PC_SCALE_STRIDE + first;
            if (ahead < ahead_end) {
                V(fetch)(*ahead++ + tile->ahead_shift, tile->ahead_lines);
            }
            PC_UNROLL
            for (int t = 0; t < tokens; t++) {
                vf a, b;
                if (pc_is_grouped(reading)) {
                    V(scaled_pair)(reading, data[t] + offset, scales[t],
                                   pc_may_have_offsets(reading) ? offsets[t] : 0.0f, &a, &b);
                } else {
                    V(pair)(reading, data[t] + offset, &a, &b);
                }
                PC_UNROLL
                for (int m = 0; m < rows; m++) {
                    sums[m * tokens + t] =
                        V(fma)(V(load)(q + m * PC_PAIR), a, sums[m * tokens + t]);
                }
                PC_UNROLL
                for (int m = 0; m < rows; m++) {
                    sums[m * tokens + t] =
                        V(fma)(V(load)(q + m * PC_PAIR + PC_WIDTH), b, sums[m * tokens + t]);
                }
            }
        }
        if (tile->rest > 0 && !pc_is_grouped(reading)) {
            const int64_t offset = tile->shift + V(pair_offset)(reading, pairs, tile->step);
            PC_UNROLL
            for (int t = 0; t < tokens; t++) {
                vf a, b;
                V(rest)(reading, data[t] + offset, tile->rest, &a, &b);
                PC_UNROLL
                for (int m = 0; m < rows; m++) {
                    const vf sum = V(fma)(V(load)(q + m * PC_PAIR), a, sums[m * tokens + t]);
                    sums[m * tokens + t] = V(fma)(V(load)(q + m * PC_PAIR + PC_WIDTH), b, sum);
                }
            }
        }
        for (; ahead < ahead_end; ahead++) {
            V(fetch)(*ahead + tile->ahead_shift, tile->ahead_lines);
        }
        PC_UNROLL
        for (int i = 0; i < rows * tokens; i += PC_WIDTH) {
            V(add_up)(sums + i, added + i);
        }
        for (int m = 0; m < rows; m++) {
            memcpy(tile->out + m * PC_SCORE_STRIDE + first, added + m * tokens,
                   (size_t)tokens * sizeof *added);
        }
    }
}

/* Weight of token t in row m: with the scale of the group where values have one. */
PC_VECTOR vf V(weight)(const int reading, const float *weights, int64_t group, int m, int64_t t) {
    return V(all)(pc_is_grouped(reading) ? weights[(group * PC_ROWS + m) * PC_WEIGHT_STRIDE + t]
                                         : weights[m * PC_SCORE_STRIDE + t]);
}

/* Add p · v of tokens first … end - 1 of the tile to `pairs` pairs of the results, from pair j on;
 * or (pairs 0) to what stands behind the last whole pair. */
PC_VECTOR void V(mix_columns)(const int reading, const int rows, const int pairs,
                              const pc_tile *tile, int64_t first, int64_t end, int64_t j) {
    const int width = pairs > 0 ? pairs : 1;
    const int64_t share = pc_divide_up(tile->ahead_lines * width, tile->pairs + !tile->pairs);
    const int64_t skip = j / width * share;
    const int64_t lines = pc_between(tile->ahead_lines - skip, 0, share);
    float *const out = tile->out + j * PC_PAIR;
    vf sums[PC_ROWS][2 * PC_COLUMNS];
    PC_UNROLL
    for (int m = 0; m < rows; m++) {
        PC_UNROLL
        for (int c = 0; c < 2 * width; c++) {
            sums[m][c] = V(load)(out + m * tile->out_stride + c * PC_WIDTH);
        }
    }
    for (int64_t t = first; t < end; t++) {
        vf values[2 * PC_COLUMNS];
        const uint8_t *const row = tile->data[t] + tile->shift;
        V(fetch)(tile->ahead[t] + tile->ahead_shift + 64 * skip, lines);
        if (pairs > 0) {
            PC_UNROLL
            for (int c = 0; c < pairs; c++) {
                V(pair)(reading, row + V(pair_offset)(reading, j + c, tile->step), &values[2 * c],
                        &values[2 * c + 1]);
            }
        } else {
            V(rest)(reading, row + V(pair_offset)(reading, j, tile->step), tile->rest, &values[0],
                    &values[1]);
        }
        PC_UNROLL
        for (int m = 0; m < rows; m++) {
            PC_UNROLL
            for (int c = 0; c < width; c++) {
                const vf p = V(weight)(reading, tile->in, (j + c) / PC_PARTS, m, t);
                sums[m][2 * c] = V(fma)(p, values[2 * c], sums[m][2 * c]);
                sums[m][2 * c + 1] = V(fma)(p, values[2 * c + 1], sums[m][2 * c + 1]);
            }
        }
    }
    PC_UNROLL
    for (int m = 0; m < rows; m++) {
        PC_UNROLL
        for (int c = 0; c < 2 * width; c++) {
            V(store)(out + m * tile->out_stride + c * PC_WIDTH, sums[m][c]);
        }
    }
}

/* Add p · v of all tokens of the tile to the results of `rows` query rows: a few tokens at a time,
 * so that their rows are read from the nearest cache for the second and later columns. */
PC_VECTOR void V(mix)(const int reading, const int rows, const int columns, const pc_tile *tile) {
    const int64_t tokens = pc_is_grouped(reading) ? PC_RUN : PC_MIX_TOKENS;
    int64_t first, end, j;
    for (first = 0; first < tile->count; first = end) {
        end = first + tokens < tile->count ? first + tokens : tile->count;
        for (j = 0; j + columns <= tile->pairs; j += columns) {
            V(mix_columns)(reading, rows, columns, tile, first, end, j);
        }
        for (; j < tile->pairs; j++) {
            V(mix_columns)(reading, rows, 1, tile, first, end, j);
        }
        if (tile->rest > 0 && !pc_is_grouped(reading)) {
            V(mix_columns)(reading, rows, 0, tile, first, end, j);
        }
    }
}

/* Tokens (score) and pairs of columns (mix) in registers at once, by the number of rows. */
#define PC_TOKENS_OF(rows) ((rows) == 1 ? PC_SUMS : (rows) == 2 ? PC_SUMS / 2 : PC_SUMS / 4)
#define PC_COLUMNS_OF(rows) ((rows) <= 2 ? PC_COLUMNS : (PC_COLUMNS + 1) / 2)

#define PC_SCORE_OF(reading, rows)                                      \
    PC_FUNCTION void V(score_##reading##_##rows)(const pc_tile *tile) { \
        V(score)(PC_READ_##reading, rows, PC_TOKENS_OF(rows), tile);    \
    }
#define PC_MIX_OF(reading, rows)                                      \
    PC_FUNCTION void V(mix_##reading##_##rows)(const pc_tile *tile) { \
        V(mix)(PC_READ_##reading, rows, PC_COLUMNS_OF(rows), tile);   \
    }
#define PC_EACH_SCORE(reading) \
    PC_SCORE_OF(reading, 1) PC_SCORE_OF(reading, 2) PC_SCORE_OF(reading, 3) PC_SCORE_OF(reading, 4)
#define PC_EACH_MIX(reading) \
    PC_MIX_OF(reading, 1) PC_MIX_OF(reading, 2) PC_MIX_OF(reading, 3) PC_MIX_OF(reading, 4)
PC_DENSE_AND_GROUPED(PC_EACH_SCORE)
PC_EACH_SCORE(CHANNELS)
PC_DENSE_AND_GROUPED(PC_EACH_MIX)
#undef PC_SCORE_OF
#undef PC_MIX_OF
#undef PC_EACH_SCORE
#undef PC_EACH_MIX

#define PC_ROW_OF(reading, name)                                             \
    [PC_READ_##reading] = {V(name##_##reading##_1), V(name##_##reading##_2), \
                           V(name##_##reading##_3), V(name##_##reading##_4)},
#define PC_SCORE_ROW(reading) PC_ROW_OF(reading, score)
#define PC_MIX_ROW(reading) PC_ROW_OF(reading, mix)
PC_FUNCTION void V(run_score)(int reading, int64_t rows, const pc_tile *tile) {
    static const pc_kernel kernels[PC_NUM_READINGS][PC_ROWS] = {PC_DENSE_AND_GROUPED(PC_SCORE_ROW)
                                                                    PC_SCORE_ROW(CHANNELS)};
    kernels[reading][rows - 1](tile);
}

PC_FUNCTION void V(run_mix)(int reading, int64_t rows, const pc_tile *tile) {
    static const pc_kernel kernels[PC_NUM_READINGS][PC_ROWS] = {PC_DENSE_AND_GROUPED(PC_MIX_ROW)};
    kernels[reading][rows - 1](tile);
}
#undef PC_ROW_OF
#undef PC_SCORE_ROW
#undef PC_MIX_ROW

#endif
