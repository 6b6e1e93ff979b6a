/*
 * One slice of the rows of a tile against one run of tokens: its scores, or what it gets of the
 * values. Included once per instruction set, by attend_isa.h.
 *
 * No arithmetic touches a key that a query must not see: where the rows of a slice have different
 * keys, scores outside a row's range are left lying, and values outside it are not multiplied.
 */
#ifdef PC_ISA

PC_VECTOR pc_range V(cut)(pc_range keys, int64_t low, int64_t high) {
    keys.low = keys.low > low ? keys.low : low;
    keys.high = keys.high < high ? keys.high : high;
    return keys;
}

/* The run's tile for the tokens of `keys`, all of them in the run. What is ahead is fetched once:
 * by the first tile that has all tokens of the run. */
PC_VECTOR pc_tile V(part_of_run)(const pc_run *run, pc_range keys, pc_work *work) {
    pc_tile tile = work->tile;
    tile.data += keys.low - run->first;
    tile.scales += keys.low - run->first;
    tile.offsets += keys.low - run->first;
    tile.count = keys.high - keys.low;
    tile.ahead += keys.low - run->first;
    work->tile.ahead_lines = 0;
    return tile;
}

/* Queries of a slice times the scales of the run's channels, to work->folded, and their products
 * with the offsets, to work->bias: so that q · k is a sum over the stored numbers. */
PC_VECTOR void V(fold_rows)(const int rows, const pc_run *run, const float *q, pc_work *work) {
    const int64_t head_dim = run->side->kv->space->geometry[PC_SEALED].head_dim;
    const uint8_t *const from = run->first_head->scales[0] + run->scale_shift;
    float *folded = work->folded;
    vf sums[PC_SUMS];
    PC_UNROLL
    for (int m = 0; m < PC_SUMS; m++) {
        sums[m] = V(all)(0.0f);
    }
    for (int64_t i = 0; i < run->side->padded; i += PC_PAIR) {
        vf scales[2], offsets[2];
        V(channel_pair)(from, head_dim, i, scales, offsets);
        PC_UNROLL
        for (int m = 0; m < rows; m++, q += PC_PAIR, folded += PC_PAIR) {
            const vf a = V(load)(q), b = V(load)(q + PC_WIDTH);
            V(store)(folded, a * scales[0]);
            V(store)(folded + PC_WIDTH, b * scales[1]);
            sums[m] = V(fma)(a, offsets[0], V(fma)(b, offsets[1], sums[m]));
        }
    }
    for (int m = 0; m < PC_SUMS; m += PC_WIDTH) {
        V(add_up)(sums + m, work->bias + m);
    }
}

PC_FUNCTION void V(fold_channels)(int64_t rows, const pc_run *run, const float *q, pc_work *work) {
    switch (rows) {
    case 1: V(fold_rows)(1, run, q, work); break;
    case 2: V(fold_rows)(2, run, q, work); break;
    case 3: V(fold_rows)(3, run, q, work); break;
    default: V(fold_rows)(4, run, q, work); break;
    }
}

/* Scores of the rows from `row` on with the keys of `keys`, which are in the run. */
PC_FUNCTION void V(score_slice)(const pc_attend_plan *plan, const pc_run *run, int64_t row,
                                int64_t rows, pc_range keys, int64_t start, pc_work *work) {
    pc_tile tile = V(part_of_run)(run, keys, work);
    const int channels = work->reading == PC_READ_CHANNELS;
    tile.in = work->q + row * plan->k.padded;
    tile.out = work->scores + row * PC_SCORE_STRIDE + (keys.low - start);
    if (channels) {
        V(fold_channels)(rows, run, tile.in, work);
        tile.in = work->folded;
    }
    V(run_score)(work->reading, rows, &tile);
    for (int64_t m = 0; channels && m < rows; m++) {
        float *const scores = tile.out + m * PC_SCORE_STRIDE;
        const vf bias = V(all)(work->bias[m]);
        for (int64_t t = 0; t < tile.count; t += PC_WIDTH) {
            V(store)(scores + t, V(load)(scores + t) + bias);
        }
    }
}

/* Weights of the rows times the scales of a group, to `out`; and what the weights times the group's
 * offsets add up to, a vector per row, to `shifts`. What stands behind the last token may be
 * anything. */
PC_VECTOR void V(fold_group)(const int rows, const pc_tile *tile, int64_t g, int has_offsets,
                             float *out, float *shifts, int64_t step) {
    const float *const scales = tile->scales + g * PC_SCALE_STRIDE;
    const float *const offsets = tile->offsets + g * PC_SCALE_STRIDE;
    const int64_t whole = tile->count / PC_WIDTH * PC_WIDTH;
    vf sums[PC_ROWS];
    PC_UNROLL
    for (int m = 0; m < rows; m++) {
        sums[m] = V(load)(shifts + m * step);
    }
    for (int64_t t = 0; t < tile->count; t += PC_WIDTH) {
        const vf scale = V(load)(scales + t), offset = V(load)(offsets + t);
        PC_UNROLL
        for (int m = 0; m < rows; m++) {
            const vf p = V(load)(tile->in + m * PC_SCORE_STRIDE + t);
            V(store)(out + m * PC_WEIGHT_STRIDE + t, p * scale);
            if (has_offsets && t < whole) {
                sums[m] = V(fma)(p, offset, sums[m]);
            }
        }
    }
    PC_UNROLL
    for (int m = 0; m < rows; m++) {
        V(store)(shifts + m * step, sums[m]);
        for (int64_t t = whole; has_offsets && t < tile->count; t++) {
            shifts[m * step + t - whole] += tile->in[m * PC_SCORE_STRIDE + t] * offsets[t];
        }
    }
}

/* Weights times scales, to work->weights, and weights times offsets, to work->shifts: so that
 * p · v is a sum over the stored numbers. */
PC_FUNCTION void V(fold_scales)(const pc_tile *tile, int64_t row, int64_t rows, int64_t groups,
                                int has_offsets, pc_work *work) {
    const int64_t step = groups * PC_WIDTH; /* from row to row of shifts */
    for (int64_t g = 0; g < groups; g++) {
        float *const out = work->weights + g * PC_ROWS * PC_WEIGHT_STRIDE;
        float *const shifts = work->shifts + row * step + g * PC_WIDTH;
        switch (rows) {
        case 1: V(fold_group)(1, tile, g, has_offsets, out, shifts, step); break;
        case 2: V(fold_group)(2, tile, g, has_offsets, out, shifts, step); break;
        case 3: V(fold_group)(3, tile, g, has_offsets, out, shifts, step); break;
        default: V(fold_group)(4, tile, g, has_offsets, out, shifts, step); break;
        }
    }
}

/* Add weights · values to the sums of the rows from `row` on, for `keys`, which are in the run. */
PC_FUNCTION void V(mix_slice)(const pc_attend_plan *plan, const pc_run *run, int64_t row,
                              int64_t rows, pc_range keys, int64_t start, pc_work *work,
                              float *sums) {
    const pc_row_shape *const shape = &plan->v.shape[PC_SEALED];
    pc_tile tile;
    if (keys.low >= keys.high) {
        return;
    }
    tile = V(part_of_run)(run, keys, work);
    tile.in = work->scores + row * PC_SCORE_STRIDE + (keys.low - start);
    if (pc_is_grouped(work->reading)) {
        V(fold_scales)(&tile, row, rows, shape->values / PC_GROUP, shape->has_offsets, work);
        tile.in = work->weights;
    }
    tile.out = sums + row * plan->v.padded;
    tile.out_stride = plan->v.padded;
    V(run_mix)(work->reading, rows, &tile);
}

/* Values of a slice of the run's head: where all rows have the keys at once, then what single rows
 * have beside. */
PC_FUNCTION void V(mix_rows)(const pc_attend_plan *plan, const pc_unit *unit, const pc_run *run,
                             int64_t slice, int64_t rows, int64_t start, pc_work *work,
                             float *sums) {
    const int64_t group = plan->call->group, end = run->first + run->count;
    const int64_t head = run->head * unit->head_rows;
    const pc_range first = work->ranges[slice / group];
    const pc_range last = work->ranges[(slice + rows - 1) / group];
    pc_range shared = {last.low, first.high}, keys;
    if (shared.low >= shared.high) { /* none: each row has all of its own */
        shared.low = shared.high = first.high;
    }
    V(mix_slice)(plan, run, head + slice, rows, V(cut)(shared, run->first, end), start, work, sums);
    for (int64_t r = slice; r < slice + rows; r++) {
        keys = V(cut)(work->ranges[r / group], run->first, end);
        V(mix_slice)(plan, run, head + r, 1, V(cut)(keys, start, shared.low), start, work, sums);
        V(mix_slice)(plan, run, head + r, 1, V(cut)(keys, shared.high, INT64_MAX), start, work,
                     sums);
    }
}

#endif
