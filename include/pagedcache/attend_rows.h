/*
 * Query rows in, result rows out, and stored rows of any format by way of float32. Included once
 * per instruction set, by attend_isa.h.
 */
#ifdef PC_ISA

/* Widen n values of a dense format that lie side by side. */
PC_VECTOR void V(widen)(int code, const uint8_t *from, int64_t n, float *to) {
    const int64_t size = pc_dtype_nbytes(code);
    int64_t i = 0;
    if (code == PC_FORMAT_float32) {
        memcpy(to, from, (size_t)n * 4);
        return;
    }
    for (; i + PC_WIDTH <= n; i += PC_WIDTH) {
        V(store)(to + i,
                 code == PC_FORMAT_float16 ? V(half)(from + i * size) : V(bfloat)(from + i * size));
    }
    for (; i < n; i++) {
        const uint16_t bits = pc_load_u16(from + i * size);
        to[i] = code == PC_FORMAT_float16 ? pc_half_to_float(bits) : pc_bfloat_to_float(bits);
    }
}

/* `padded` values of `row`, times `scale`, in the order of the side. */
PC_VECTOR void V(bring_in_order)(const pc_side *side, const float *row, float scale, float *to,
                                 int64_t step) {
    for (int64_t i = 0; i < side->padded; i += PC_PAIR, to += step) {
        if (side->natural) {
            V(store)(to, V(load)(row + i) * V(all)(scale));
            V(store)(to + PC_WIDTH, V(load)(row + i + PC_WIDTH) * V(all)(scale));
        } else if (side->paired) {
            for (int64_t j = 0; j < PC_WIDTH; j++) {
                to[j] = row[i + 2 * j] * scale;
                to[PC_WIDTH + j] = row[i + 2 * j + 1] * scale;
            }
        } else {
            for (int64_t j = 0; j < PC_PAIR; j++) {
                to[j] = row[side->order[i + j]] * scale;
            }
        }
    }
}

/* The rows of a unit's queries times plan->query_scale, in the order of the keys, to work->q: slice
 * by slice, in each [pair of vectors][row][2 vectors]. */
PC_FUNCTION void V(take_queries)(const pc_attend_plan *plan, const pc_unit *unit, int64_t first,
                                 pc_work *work) {
    const pc_attend_call *const call = plan->call;
    const pc_rows *const rows = &call->q;
    const int64_t head_dim = call->k.space->geometry[PC_SEALED].head_dim;
    const int64_t padded = plan->k.padded;
    int64_t r = 0, m, n;
    for (; r < unit->num_rows; r += n) {
        n = pc_slice_rows(call->group, unit->head_rows, r % unit->head_rows);
        for (m = 0; m < n; m++) {
            const pc_row_of row = pc_row_number(call, unit, r + m);
            const uint8_t *const from = rows->base + (first + row.query) * rows->token_stride +
                                        row.head * rows->head_stride;
            float *const out = work->q + r * padded + m * PC_PAIR;
            if (rows->value_stride == pc_dtype_nbytes(rows->dtype)) {
                V(widen)(rows->dtype, from, head_dim, work->row);
            } else {
                pc_widen_row(rows->dtype, from, rows->value_stride, head_dim, work->row);
            }
            memset(work->row + head_dim, 0, (size_t)(padded - head_dim) * sizeof *work->row);
            V(bring_in_order)(&plan->k, work->row, plan->query_scale, out, n * PC_PAIR);
        }
    }
}

/* Write one row of results: sums / mass, in the order of the row. */
PC_FUNCTION void V(put_result)(const pc_attend_plan *plan, const float *sums, float mass,
                               int64_t query, int64_t head, float *buffer) {
    const pc_rows *const rows = &plan->call->out;
    const int64_t head_dim = plan->call->v.space->geometry[PC_SEALED].head_dim;
    const int32_t *const order = plan->v.order;
    const float inverse = mass == 0.0f ? 0.0f : 1.0f / mass;
    int64_t i;
    for (i = 0; plan->v.natural && i < plan->v.padded; i += PC_WIDTH) {
        V(store)(buffer + i, V(load)(sums + i) * V(all)(inverse));
    }
    for (; plan->v.paired && i < plan->v.padded; i += PC_PAIR) {
        for (int64_t j = 0; j < PC_WIDTH; j++) {
            buffer[i + 2 * j] = sums[i + j] * inverse;
            buffer[i + 2 * j + 1] = sums[i + PC_WIDTH + j] * inverse;
        }
    }
    for (; i < plan->v.padded; i++) {
        buffer[order[i]] = sums[i] * inverse;
    }
    pc_narrow_row(rows->dtype, buffer, head_dim,
                  rows->base + query * rows->token_stride + head * rows->head_stride,
                  rows->value_stride);
}

#endif
