/*
 * The next tokens of a sequence whose rows can be read alike: their addresses, and where the
 * kernels cannot read the bytes (or many slices would), the rows as float32. Included once per
 * instruction set, by attend_isa.h.
 */
#ifdef PC_ISA

/* Row t of the run as float32, in the order of the side, to `out` [padded]. */
PC_VECTOR void V(decode_row)(const int reading, const pc_run *run, int64_t t, const pc_work *work,
                             float *out) {
    const pc_row_shape *const shape = &run->side->shape[PC_SEALED];
    const int64_t pairs = shape->values / PC_PAIR, rest = shape->values % PC_PAIR;
    for (int64_t j = 0; j < pairs + (rest > 0); j++) {
        const uint8_t *const from =
            run->first_head->data[t] + run->shift + V(pair_offset)(reading, j, shape->step);
        const int64_t at = j / PC_PARTS * PC_SCALE_STRIDE + t;
        vf a, b;
        if (pc_is_grouped(reading)) {
            V(scaled_pair)(reading, from, work->scales[at],
                           pc_may_have_offsets(reading) ? work->offsets[at] : 0.0f, &a, &b);
        } else if (j < pairs) {
            V(pair)(reading, from, &a, &b);
        } else {
            V(rest)(reading, from, rest, &a, &b);
        }
        if (reading == PC_READ_CHANNELS) {
            const float *const scale = work->channels + j * PC_PAIR;
            const float *const offset = scale + run->side->padded;
            a = V(fma)(a, V(load)(scale), V(load)(offset));
            b = V(fma)(b, V(load)(scale + PC_WIDTH), V(load)(offset + PC_WIDTH));
        }
        V(store)(out + j * PC_PAIR, a);
        V(store)(out + j * PC_PAIR + PC_WIDTH, b);
    }
}

/* Row t of the run as float32, whatever it is stored as. */
PC_FUNCTION void V(decode)(const pc_run *run, int64_t t, pc_work *work, float *out) {
    const pc_side *const side = run->side;
    const pc_geometry *const g = &side->kv->space->geometry[run->where];
    const uint8_t *const data = run->first_head->data[t] + run->shift;
    const uint8_t *const scales = run->first_head->scales[t] + run->scale_shift;
    if (run->where == PC_SEALED) {
        switch (side->shape[PC_SEALED].reading) {
#define PC_DECODE(reading) \
    case PC_READ_##reading: V(decode_row)(PC_READ_##reading, run, t, work, out); return;
            PC_DENSE_AND_GROUPED(PC_DECODE)
            PC_DECODE(CHANNELS)
#undef PC_DECODE
        default: break;
        }
    }
    if (pc_format_of(g->code).packing == PC_PACK_DENSE) {
        V(widen)(g->code, data, g->head_dim, work->row);
    } else {
        const pc_address at = {0, scales - data};
        pc_decode_at(g, data, at, work->row);
    }
    memset(work->row + g->head_dim, 0, (size_t)(side->padded - g->head_dim) * sizeof *work->row);
    V(bring_in_order)(side, work->row, 1.0f, out, PC_PAIR);
}

/* Make the run at hand ready for the kernels: work->tile and work->reading. `direct`: rows are to
 * be read as they are stored where that can be, as few query rows want them. */
PC_FUNCTION void V(prepare_run)(const pc_run *run, int direct, pc_work *work) {
    const pc_side *const side = run->side;
    const pc_row_shape *const shape = &side->shape[run->where];
    pc_tile *const tile = &work->tile;
    int64_t t;
    if (run->where == PC_SEALED && pc_is_grouped(shape->reading)) {
        V(take_scales)(run, work);
    }
    tile->data = run->first_head->data;
    tile->shift = run->shift;
    if (direct && run->where == PC_SEALED && shape->reading != PC_READ_OTHER) {
        work->reading = shape->reading;
        tile->step = shape->step;
        tile->pairs = shape->values / PC_PAIR;
        tile->rest = shape->values % PC_PAIR;
    } else {
        if (run->where == PC_SEALED && shape->reading == PC_READ_CHANNELS) {
            V(take_channels)(side, run->first_head->scales[0] + run->scale_shift, work);
        }
        for (t = 0; t < run->count; t++) {
            float *const row = work->scratch + t * side->padded;
            V(decode)(run, t, work, row);
            work->decoded[t] = (const uint8_t *)(const void *)row;
        }
        for (; t < run->count + PC_SLACK; t++) {
            work->decoded[t] = work->decoded[run->count - 1];
        }
        work->reading = PC_READ_FLOAT32;
        tile->data = work->decoded;
        tile->shift = 0;
        tile->step = 4;
        tile->pairs = side->padded / PC_PAIR;
        tile->rest = 0;
    }
    tile->scales = work->scales;
    tile->offsets = work->offsets;
    tile->count = run->count;
}

/* Move the walk to its next tokens; 0 at its end. */
PC_VECTOR int V(next_tokens)(pc_walk *walk) {
    const pc_attend_plan *const plan = walk->plan;
    while (walk->position >= walk->end) {
        if (walk->side == &plan->k) {
            walk->side = &plan->v;
        } else if (walk->chunk + PC_CHUNK >= walk->keys.high) {
            return 0;
        } else {
            walk->side = &plan->k;
            walk->chunk += PC_CHUNK;
        }
        walk->position = walk->keys.low > walk->chunk ? walk->keys.low : walk->chunk;
        walk->end = walk->chunk + PC_CHUNK;
        walk->end = walk->end < walk->keys.high ? walk->end : walk->keys.high;
    }
    return 1;
}

/* Tokens of a run of such rows at most. */
PC_VECTOR int64_t V(longest_run)(const pc_walk *walk, const pc_geometry *g, int where) {
    const int reading = walk->side->shape[PC_SEALED].reading;
    return walk->few && where == PC_SEALED && pc_is_grouped(reading) &&
                   g->row_data_nbytes <= PC_NARROW
               ? PC_RUN
               : PC_SHORT_RUN;
}

/* Addresses of the next tokens, for the first head of the unit; 0 tokens at the end of the walk. */
PC_FUNCTION void V(find_tokens)(pc_walk *walk, pc_run *run, pc_addresses *to) {
    int64_t count = 0, most = 1, i;
    run->count = run->head = 0;
    run->shift = run->scale_shift = 0;
    run->first_head = to;
    if (!V(next_tokens)(walk)) {
        return;
    }
    const pc_side *const side = walk->side;
    const pc_space *const space = side->kv->space;
    const int64_t block_size = space->geometry[PC_SEALED].block_size;
    int64_t index = walk->position / block_size;
    int64_t offset = walk->position - index * block_size;
    run->side = side;
    run->chunk = walk->chunk;
    run->first = walk->position;
    while (count < most && walk->position < walk->end) {
        const int64_t place = walk->places[index];
        const int where = pc_where_is(space, place);
        const pc_geometry *const g = &space->geometry[where];
        const pc_slab *const slab = &side->kv->slabs[where];
        int64_t n = pc_between(block_size - offset, 0, walk->end - walk->position);
        pc_address row, next;
        if (count > 0 && (where != run->where || g->token_groups)) {
            break;
        }
        run->where = where;
        most = V(longest_run)(walk, g, where);
        n = pc_between(n, 0, most - count);
        n = g->token_groups ? pc_between(n, 0, PC_GROUP - offset % PC_GROUP) : n;
        row = next = pc_row_address(g, slab->block_stride, place, walk->first_head, offset);
        if (n > 1) {
            next = pc_row_address(g, slab->block_stride, place, walk->first_head, offset + 1);
        }
        row.data += side->shape[where].first;
        next.data += side->shape[where].first;
        for (i = 0; i < n; i++) {
            to->data[count + i] = slab->base + row.data + i * (next.data - row.data);
            to->scales[count + i] = slab->base + row.scales + i * (next.scales - row.scales);
        }
        count += n;
        walk->position += n;
        offset += n;
        if (offset == block_size) {
            offset = 0;
            index++;
        }
    }
    for (i = count; i < PC_RUN + PC_SLACK; i++) {
        to->data[i] = to->data[count - 1];
        to->scales[i] = to->scales[count - 1];
    }
    run->count = count;
}

/* The run behind `run`: the same tokens of the next head, or the next tokens of the first one. */
PC_FUNCTION void V(find_run)(pc_walk *walk, const pc_run *run, pc_run *next,
                             pc_addresses *addresses) {
    if (run->head + 1 >= walk->num_heads) {
        V(find_tokens)(walk, next, &addresses[run->first_head == addresses]);
        return;
    }
    const pc_geometry *const g = &run->side->kv->space->geometry[run->where];
    const pc_address here = pc_row_address(g, 0, 0, walk->first_head + run->head, 0);
    const pc_address there = pc_row_address(g, 0, 0, walk->first_head + run->head + 1, 0);
    *next = *run;
    next->head++;
    next->shift += there.data - here.data;
    next->scale_shift += there.scales - here.scales;
}

/* Begin to walk through keys low … high - 1 of what the unit's rows have. */
PC_FUNCTION void V(start_walk)(const pc_attend_plan *plan, const pc_unit *unit, pc_range keys,
                               pc_work *work) {
    pc_walk *const walk = &work->walk;
    walk->plan = plan;
    walk->places = plan->call->places + plan->call->indptr[unit->seq];
    walk->first_head = unit->first_head;
    walk->num_heads = unit->num_heads;
    walk->keys = keys;
    walk->few = unit->head_rows <= PC_FEW_ROWS;
    walk->side = &plan->v;
    walk->chunk = keys.low / PC_CHUNK * PC_CHUNK - PC_CHUNK;
    walk->position = walk->end = 0;
    work->at_hand = 0;
    V(find_tokens)(walk, &work->runs[1], &work->addresses[0]);
}

/* The next run, if it is of this side and chunk, made ready; else NULL. */
PC_FUNCTION const pc_run *V(next_run)(const pc_side *side, int64_t chunk, int direct,
                                      pc_work *work) {
    pc_run *const run = &work->runs[!work->at_hand], *const behind = &work->runs[work->at_hand];
    if (run->count == 0 || run->side != side || run->chunk != chunk) {
        return NULL;
    }
    work->at_hand = !work->at_hand;
    V(find_run)(&work->walk, run, behind, work->addresses);
    work->tile.ahead = behind->first_head->data;
    work->tile.ahead_shift = behind->shift;
    work->tile.ahead_lines = 0;
    if (behind->count > 0) {
        const pc_geometry *const g = &behind->side->kv->space->geometry[behind->where];
        const uint8_t *const *const scales = behind->first_head->scales;
        work->tile.ahead_lines = pc_divide_up(g->row_data_nbytes, 64);
        for (int64_t i = 0; i < g->channel_nbytes; i += 64) {
            PC_PREFETCH(scales[0] + behind->scale_shift + i);
        }
        for (int64_t t = 0; g->row_scale_nbytes > 0 && t < behind->count; t += 4) {
            PC_PREFETCH(scales[t] + behind->scale_shift);
        }
    }
    V(prepare_run)(run, direct, work);
    return run;
}

#endif
