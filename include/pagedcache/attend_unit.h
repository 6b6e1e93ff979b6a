/*
 * One unit of a call: scores, softmax and results of a tile of queries of one KV head, part by
 * part. Included once per instruction set, by attend_isa.h.
 */
#ifdef PC_ISA

/* Turn the scores of the unit's rows into weights. */
PC_FUNCTION void V(weigh_rows)(const pc_attend_plan *plan, const pc_unit *unit, int64_t start,
                               pc_work *work, pc_partial *to) {
    const pc_attend_call *const call = plan->call;
    for (int64_t r = 0; r < unit->num_rows; r++) {
        const pc_range keys = work->ranges[r % unit->head_rows / call->group];
        const int64_t n = keys.high - keys.low;
        float *const scores = work->scores + r * PC_SCORE_STRIDE + (keys.low - start);
        to->peaks[r] = -INFINITY;
        to->masses[r] = 0.0f;
        if (n > 0) {
            if (call->soft_cap > 0.0f) {
                V(cap_scores)(scores, n, call->soft_cap * PC_LOG2_E);
            }
            to->peaks[r] = V(weigh)(scores, n, &to->masses[r]);
        }
    }
}

/* Add what the offsets of a group came to, the sum of the lanes, to its values. */
PC_VECTOR void V(add_shift)(const float *lanes, float *sums) {
    float shift = 0.0f;
    for (int i = 0; i < PC_WIDTH; i++) {
        shift += lanes[i];
    }
    for (int i = 0; i < PC_GROUP; i += PC_WIDTH) {
        V(store)(sums + i, V(load)(sums + i) + V(all)(shift));
    }
}

/* The results of the unit's rows over keys start … start + PC_CHUNK - 1. */
PC_FUNCTION void V(attend_chunk)(const pc_attend_plan *plan, const pc_unit *unit, int64_t start,
                                 pc_work *work, pc_partial *to) {
    const pc_attend_call *const call = plan->call;
    const int64_t group = call->group, rows = unit->head_rows;
    const int few = rows <= PC_FEW_ROWS;
    const int mix_few = few && plan->v.shape[PC_SEALED].reading != PC_READ_CHANNELS;
    const pc_row_shape *const shape = &plan->v.shape[PC_SEALED];
    const int64_t groups =
        shape->has_offsets && pc_is_grouped(shape->reading) ? shape->values / PC_GROUP : 0;
    const pc_run *run;
    int64_t i, r, n;
    for (i = 0; i < unit->num_queries; i++) {
        const pc_range keys = pc_keys_of(call, unit->seq, unit->first_query + i);
        work->ranges[i] = V(cut)(keys, start, start + PC_CHUNK);
    }
    while ((run = V(next_run)(&plan->k, start, few, work)) != NULL) {
        for (r = 0; r < rows; r += n) {
            pc_range keys = {work->ranges[r / group].low, 0};
            n = pc_slice_rows(group, rows, r);
            keys.high = work->ranges[(r + n - 1) / group].high;
            keys = V(cut)(keys, run->first, run->first + run->count);
            if (keys.low < keys.high) {
                V(score_slice)(plan, run, run->head * rows + r, n, keys, start, work);
            }
        }
    }
    V(weigh_rows)(plan, unit, start, work, to);
    memset(to->sums, 0, (size_t)(unit->num_rows * plan->v.padded) * sizeof *to->sums);
    memset(work->shifts, 0, (size_t)(unit->num_rows * groups * PC_WIDTH) * sizeof *work->shifts);
    while ((run = V(next_run)(&plan->v, start, mix_few, work)) != NULL) {
        for (r = 0; r < rows; r += n) {
            n = pc_slice_rows(group, rows, r);
            V(mix_rows)(plan, unit, run, r, n, start, work, to->sums);
        }
    }
    for (r = 0; r < unit->num_rows * groups; r++) {
        V(add_shift)(work->shifts + r * PC_WIDTH,
                     to->sums + r / groups * plan->v.padded + r % groups * PC_GROUP);
    }
}

/* 2^x of one x <= 0, as for vectors. */
PC_VECTOR float V(exp2_of)(float x) {
    float lanes[PC_WIDTH];
    V(store)(lanes, V(exp2)(V(all)(x)));
    return lanes[0];
}

/* Add what keys further on gave to what those before them gave. */
PC_FUNCTION void V(add_partial)(const pc_attend_plan *plan, int64_t rows, pc_partial *to,
                                const pc_partial *more) {
    const int64_t padded = plan->v.padded;
    for (int64_t r = 0; r < rows; r++) {
        float *const sums = to->sums + r * padded;
        const float *const others = more->sums + r * padded;
        const float peak = to->peaks[r] > more->peaks[r] ? to->peaks[r] : more->peaks[r];
        float mine, theirs;
        if (more->masses[r] == 0.0f) {
            continue;
        }
        mine = to->masses[r] == 0.0f ? 0.0f : V(exp2_of)(to->peaks[r] - peak);
        theirs = V(exp2_of)(more->peaks[r] - peak);
        to->peaks[r] = peak;
        to->masses[r] = to->masses[r] * mine + more->masses[r] * theirs;
        for (int64_t i = 0; i < padded; i += PC_WIDTH) {
            const vf sum = V(load)(sums + i) * V(all)(mine);
            V(store)(sums + i, V(fma)(V(load)(others + i), V(all)(theirs), sum));
        }
    }
}

/* The results of the unit's rows over one part. */
PC_FUNCTION void V(attend_part)(const pc_attend_plan *plan, const pc_unit *unit, int64_t part,
                                pc_work *work, pc_partial *to) {
    const pc_seq_plan *const s = &plan->seqs[unit->seq];
    const int64_t low = s->first_key + part * s->part_keys;
    const pc_range tile =
        pc_keys_of_tile(plan->call, unit->seq, unit->first_query, unit->num_queries);
    int64_t start;
    int any = 0;
    for (start = low; start < low + s->part_keys; start += PC_CHUNK) {
        if (start >= tile.high || start + PC_CHUNK <= tile.low) {
            continue;
        }
        if (any) {
            V(attend_chunk)(plan, unit, start, work, &work->chunk);
            V(add_partial)(plan, unit->num_rows, to, &work->chunk);
        } else {
            V(attend_chunk)(plan, unit, start, work, to);
        }
        any = 1;
    }
    if (!any) {
        for (int64_t r = 0; r < unit->num_rows; r++) {
            to->peaks[r] = -INFINITY;
            to->masses[r] = 0.0f;
        }
        memset(to->sums, 0, (size_t)(unit->num_rows * plan->v.padded) * sizeof *to->sums);
    }
}

/* Results and log-sum-exp of all keys, the sinks beside them. */
PC_FUNCTION void V(finish)(const pc_attend_plan *plan, const pc_unit *unit, int64_t first_query,
                           pc_partial *all, pc_work *work) {
    const pc_attend_call *const call = plan->call;
    for (int64_t r = 0; r < unit->num_rows; r++) {
        const pc_row_of row = pc_row_number(call, unit, r);
        const int64_t query = first_query + row.query, head = row.head;
        float *const sums = all->sums + r * plan->v.padded;
        float mass = all->masses[r], peak = all->peaks[r];
        if (call->sinks != NULL && call->sinks[head] > -INFINITY) {
            const float sink = call->sinks[head] * PC_LOG2_E;
            if (mass == 0.0f) {
                peak = sink;
                mass = 1.0f;
            } else if (sink <= peak) {
                mass += V(exp2_of)(sink - peak);
            } else {
                const float factor = V(exp2_of)(peak - sink);
                mass = mass * factor + 1.0f;
                peak = sink;
                for (int64_t i = 0; i < plan->v.padded; i++) {
                    sums[i] *= factor;
                }
            }
        }
        V(put_result)(plan, sums, mass, query, head, work->row);
        if (call->lse != NULL) {
            call->lse[query * call->num_q_heads + head] =
                mass == 0.0f ? -INFINITY
                             : (float)(((double)peak + pc_log2(mass)) * 0.693147180559945309417);
        }
    }
}

PC_FUNCTION void V(attend_unit)(const pc_attend_plan *plan, int64_t number, pc_work *work) {
    const pc_unit unit = pc_unit_of(plan, number);
    const pc_seq_plan *const s = &plan->seqs[unit.seq];
    const int64_t first_query = s->first_query + unit.first_query;
    const pc_range keys = pc_keys_of_tile(plan->call, unit.seq, unit.first_query, unit.num_queries);
    int64_t part;
    V(take_queries)(plan, &unit, first_query, work);
    V(start_walk)(plan, &unit,
                  V(cut)(keys, s->first_key + unit.first_part * s->part_keys,
                         s->first_key + unit.end_part * s->part_keys),
                  work);
    if (unit.group < 0) {
        V(attend_part)(plan, &unit, 0, work, &work->all);
        for (part = 1; part < s->num_parts; part++) {
            V(attend_part)(plan, &unit, part, work, &work->part);
            V(add_partial)(plan, unit.num_rows, &work->all, &work->part);
        }
        V(finish)(plan, &unit, first_query, &work->all, work);
        return;
    }
    for (part = unit.first_part; part < unit.end_part; part++) {
        pc_partial kept = pc_kept(plan, &unit, part);
        V(attend_part)(plan, &unit, part, work, &kept);
    }
    if (pc_count_down(&plan->left[unit.group]) == 0) {
        pc_partial all = pc_kept(plan, &unit, 0);
        for (part = 1; part < s->num_parts; part++) {
            const pc_partial kept = pc_kept(plan, &unit, part);
            V(add_partial)(plan, unit.num_rows, &all, &kept);
        }
        V(finish)(plan, &unit, first_query, &all, work);
    }
}

#endif
