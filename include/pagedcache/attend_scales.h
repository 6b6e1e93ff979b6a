/*
 * Scales of a run of rows, and of channels, as the kernels take them. Included once per instruction
 * set, by attend_isa.h.
 */
#ifdef PC_ISA

/* Copy `size` bytes of each group of the rows, so that those of one group lie side by side. */
PC_VECTOR void V(line_up)(const pc_run *run, const int64_t groups, int64_t step, const int size,
                          uint8_t *to) {
    const int64_t count = run->count;
    for (int64_t t = 0; t < count; t++) {
        const uint8_t *const row = run->first_head->scales[t] + run->scale_shift;
        PC_UNROLL
        for (int64_t i = 0; i < groups; i++) {
            memcpy(to + (i * PC_SCALE_STRIDE + t) * size, row + i * step, (size_t)size);
        }
    }
}

/* Rows of `groups` float32 into columns: four by four where they are that many. */
PC_VECTOR void V(line_up_floats)(const pc_run *run, int64_t groups, float *to) {
    const uint8_t *const *const rows = run->first_head->scales;
    int64_t g = 0, t, i;
    for (; g + 4 <= groups; g += 4) {
        for (t = 0; t < run->count; t += 4) { /* rows behind the last one repeat it */
            V(transpose)(rows + t, run->scale_shift + 4 * g, to + g * PC_SCALE_STRIDE + t,
                         PC_SCALE_STRIDE);
        }
    }
    for (t = 0; g < groups && t < run->count; t++) {
        for (i = g; i < groups; i++) {
            memcpy(to + i * PC_SCALE_STRIDE + t, rows[t] + run->scale_shift + 4 * i, 4);
        }
    }
}

/* The same, with the common numbers of groups known to the compiler. */
PC_VECTOR void V(line_up_groups)(const pc_run *run, int64_t groups, int64_t step, const int size,
                                 uint8_t *to) {
    switch (groups) {
    case 1: V(line_up)(run, 1, step, size, to); break;
    case 2: V(line_up)(run, 2, step, size, to); break;
    case 3: V(line_up)(run, 3, step, size, to); break;
    case 4: V(line_up)(run, 4, step, size, to); break;
    case 8: V(line_up)(run, 8, step, size, to); break;
    default: V(line_up)(run, groups, step, size, to); break;
    }
}

/* Pairs of float16, `step` bytes from group to group, into columns. */
PC_VECTOR void V(line_up_pairs)(const pc_run *run, int64_t groups, int64_t step, uint8_t *to) {
    int64_t g = 0, t;
    if (PC_TURNS_PAIRS && step == 20) {
        for (; g + 4 <= groups; g += 4) {
            for (t = 0; t < run->count; t += 4) {
                V(turn_pairs)(run->first_head->scales + t, run->scale_shift + g * 20,
                              to + (g * PC_SCALE_STRIDE + t) * 4, PC_SCALE_STRIDE * 4);
            }
        }
    }
    if (g < groups) {
        V(line_up_groups)(run, groups, step, 4, to);
    }
}

/* Scales of the run's rows, to work->scales, and where rows may have them offsets, to
 * work->offsets. */
PC_FUNCTION void V(take_scales)(const pc_run *run, pc_work *work) {
    const pc_row_shape *const shape = &run->side->shape[PC_SEALED];
    const int code = run->side->kv->space->geometry[PC_SEALED].code;
    const int64_t groups = shape->values / PC_GROUP, step = shape->scale_step;
    float *scales = work->scales, *offsets = work->offsets;
    const uint8_t *halves = work->halves;
    const int64_t count = run->count;
    int64_t g, t;
    if (code == PC_FORMAT_q8 || code == PC_FORMAT_q4) {
        V(line_up_floats)(run, groups, scales);
        return;
    }
    if (code == PC_FORMAT_q4_1) {
        V(line_up_pairs)(run, groups, step, work->halves);
    } else {
        V(line_up_groups)(run, groups, step, 2, work->halves);
    }
    for (g = 0; g < groups; g++) {
        for (t = 0; t < count; t += PC_WIDTH) {
            vf scale, offset = V(all)(0.0f);
            if (code == PC_FORMAT_q4_1) {
                V(split_halves)(halves + 4 * t, &scale, &offset);
                offset = V(fma)(scale, V(all)(8.0f), offset);
            } else {
                scale = V(half)(halves + 2 * t);
            }
            V(store)(scales + t, scale);
            V(store)(offsets + t, offset);
        }
        scales += PC_SCALE_STRIDE;
        offsets += PC_SCALE_STRIDE;
        halves += PC_SCALE_STRIDE * (code == PC_FORMAT_q4_1 ? 4 : 2);
    }
}

/* Scales and offsets of a pair of vectors of channels, from channel i on, out of those of all. */
PC_VECTOR void V(channel_pair)(const uint8_t *from, int64_t head_dim, int64_t i, vf *scales,
                               vf *offsets) {
    const vf eight = V(all)(8.0f);
    uint8_t last[PC_PAIR * 4];
    from += i * 4;
    if (i + PC_PAIR > head_dim) {
        memset(last, 0, sizeof last);
        memcpy(last, from, (size_t)(head_dim - i) * 4);
        from = last;
    }
    V(half_pairs)(from, scales, offsets);
    offsets[0] = V(fma)(scales[0], eight, offsets[0]);
    offsets[1] = V(fma)(scales[1], eight, offsets[1]);
}

/* Those of all channels, in the order of the side, to work->channels. */
PC_FUNCTION void V(take_channels)(const pc_side *side, const uint8_t *from, pc_work *work) {
    const int64_t head_dim = side->kv->space->geometry[PC_SEALED].head_dim;
    for (int64_t i = 0; i < side->padded; i += PC_PAIR) {
        float *const to = work->channels + i;
        vf scales[2], offsets[2];
        V(channel_pair)(from, head_dim, i, scales, offsets);
        for (int j = 0; j < 2; j++) {
            V(store)(to + j * PC_WIDTH, scales[j]);
            V(store)(to + side->padded + j * PC_WIDTH, offsets[j]);
        }
    }
}

#endif
