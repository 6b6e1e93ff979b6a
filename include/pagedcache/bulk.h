/*
 * Rows in, rows out: the loops over the rows of a slab.
 *
 * pc_store_rows() and pc_load_rows() alone iterate; a codec (codec.h) converts, many rows at a
 * time, and threads share the tokens, or the heads where two tokens may have one slot.
 *
 * Nothing here checks its arguments: slots, places and shapes are right when they come in.
 */
#ifndef PAGEDCACHE_BULK_H
#define PAGEDCACHE_BULK_H

#include "streamed.h"
#include "sync.h"
#include "tools.h"

/* Parts for each thread, so that one which is held up leaves its share to others. */
#define PC_PARTS_PER_THREAD 4

/* float32 values that a thread needs as a buffer: the rows of a token group, or one row. */
PC_INLINE int64_t pc_buffer_values(const pc_space *space) {
    const pc_geometry *const g = &space->geometry[PC_SEALED];
    const int64_t rows = g->block_size < PC_GROUP ? g->block_size : PC_GROUP;
    return g->head_dim * (g->token_groups ? rows : 1);
}

/* ---- rows at one stride ------------------------------------------------------------------- */

/* Rows outside the pool, `step` bytes apart, and where they are or go inside. */
typedef struct {
    const pc_geometry *g;
    pc_place place;
    uint8_t *outside;
    int64_t step, count;
} pc_strip;

PC_INLINE pc_span pc_span_of(const pc_strip *strip, const pc_rows *rows) {
    pc_span span;
    span.at = strip->outside;
    span.step = strip->step;
    span.count = strip->count;
    span.num_values = strip->g->head_dim;
    span.dtype = rows->dtype;
    return span;
}

/* Pack a row whose values are apart. */
PC_INLINE pc_span pc_packed(const pc_rows *rows, uint8_t *at, int64_t num_values, float *buffer) {
    const int64_t nbytes = pc_dtype_nbytes(rows->dtype);
    pc_copy_row(nbytes, at, rows->value_stride, (uint8_t *)(void *)buffer, nbytes, num_values);
    return pc_flat_span(buffer, num_values, rows->dtype);
}

/* A row that an open block may not hold as it is. */
PC_INLINE int pc_put_clamped(const pc_geometry *g, const pc_rows *rows, const uint8_t *row,
                             uint8_t *to, int policy, float *buffer) {
    const float *values = buffer;
    int status;
    pc_widen_row(rows->dtype, row, rows->value_stride, g->head_dim, buffer);
    status = pc_clamp_row(g->code, &values, g->head_dim, policy, buffer);
    return status == PC_OK ? pc_encode_row(g->code, values, g->head_dim, to, NULL, policy) : status;
}

PC_INLINE int pc_put_strip(const pc_tools *tools, const pc_strip *strip, const pc_rows *rows,
                           int policy, float *buffer) {
    const pc_codec *const codec = tools->codec;
    const pc_geometry *const g = strip->g;
    const uint32_t most = pc_most_bits(rows->dtype, g->code);
    pc_span span = pc_span_of(strip, rows);
    pc_place place = strip->place;
    if (rows->value_stride == pc_dtype_nbytes(rows->dtype) &&
        !(g->clamps && !codec->all_within(&span, most))) {
        if (tools->streams && pc_is_streamed(g->code) && g->row_data_nbytes <= PC_STREAMED_NBYTES) {
            return pc_put_streamed(codec, span, place, policy);
        }
        pc_join_rows(&span, &place);
        return codec->encode(&span, &place, policy);
    }
    for (int64_t i = 0; i < strip->count; i++) {
        uint8_t *const row = strip->outside + i * strip->step;
        int status;
        span = pc_packed(rows, row, g->head_dim, buffer);
        status = g->clamps && !codec->all_within(&span, most)
                     ? pc_put_clamped(g, rows, row, place.at, policy, buffer)
                     : codec->encode(&span, &place, policy);
        if (status != PC_OK) {
            return status;
        }
        place.at += place.step;
        place.scales += place.scale_step;
    }
    return PC_OK;
}

PC_INLINE void pc_get_strip(const pc_tools *tools, const pc_strip *strip, const pc_rows *rows,
                            float *buffer) {
    const pc_codec *const codec = tools->codec;
    const int64_t nbytes = pc_dtype_nbytes(rows->dtype), num_values = strip->g->head_dim;
    pc_span span = pc_span_of(strip, rows);
    pc_place place = strip->place;
    if (rows->value_stride == nbytes) {
        if (tools->streams && num_values * nbytes <= PC_STREAMED_NBYTES) {
            pc_get_streamed(codec, place, span);
            return;
        }
        pc_join_rows(&span, &place);
        codec->decode(&place, &span);
        return;
    }
    span = pc_flat_span(buffer, num_values, rows->dtype);
    for (int64_t i = 0; i < strip->count; i++) {
        codec->decode(&place, &span);
        pc_copy_row(nbytes, (const uint8_t *)(const void *)buffer, nbytes,
                    strip->outside + i * strip->step, rows->value_stride, num_values);
        place.at += place.step;
        place.scales += place.scale_step;
    }
}

/* ---- token groups ------------------------------------------------------------------------- */

PC_INLINE pc_channel_place pc_group_place(const pc_geometry *g, const pc_slab *slab, int64_t block,
                                          int64_t head, int64_t offset) {
    const pc_address at = pc_row_address(g, slab->block_stride, block, head, offset);
    pc_channel_place place;
    place.at = slab->base + at.data;
    place.scales = slab->base + at.scales;
    place.step = g->row_data_nbytes * (g->layout == PC_HND ? 1 : g->num_heads);
    return place;
}

/* Store a whole block of a format whose groups run along the tokens, heads first … end - 1. */
PC_INLINE int pc_put_block(const pc_codec *codec, const pc_geometry *g, const pc_slab *slab,
                           int64_t block, const pc_rows *rows, int64_t first_token, int64_t first,
                           int64_t end, int policy, float *buffer) {
    const int64_t nbytes = pc_dtype_nbytes(rows->dtype);
    for (int64_t head = first; head < end; head++) {
        for (int64_t at = 0; at < g->block_size; at += PC_GROUP) {
            const int64_t left = g->block_size - at, count = left < PC_GROUP ? left : PC_GROUP;
            const pc_channel_place place = pc_group_place(g, slab, block, head, at);
            uint8_t *const row =
                rows->base + (first_token + at) * rows->token_stride + head * rows->head_stride;
            pc_span span;
            int status;
            span.at = row;
            span.step = rows->token_stride;
            span.count = count;
            span.num_values = g->head_dim;
            span.dtype = rows->dtype;
            if (rows->value_stride != nbytes) {
                span.at = (uint8_t *)(void *)buffer;
                span.step = g->head_dim * nbytes;
                for (int64_t i = 0; i < count; i++) {
                    pc_copy_row(nbytes, row + i * rows->token_stride, rows->value_stride,
                                span.at + i * span.step, nbytes, g->head_dim);
                }
            }
            status = codec->encode_channels(&span, &place, policy);
            if (status != PC_OK) {
                return status;
            }
        }
    }
    return PC_OK;
}

/* Read `count` tokens of one token group into rows from `token` on. */
PC_INLINE void pc_get_group(const pc_codec *codec, const pc_geometry *g, const pc_slab *slab,
                            int64_t block, int64_t offset, int64_t count, const pc_rows *rows,
                            int64_t token, float *buffer) {
    const int64_t nbytes = pc_dtype_nbytes(rows->dtype);
    const int dense = rows->value_stride == nbytes;
    for (int64_t head = 0; head < g->num_heads; head++) {
        const pc_channel_place place = pc_group_place(g, slab, block, head, offset);
        uint8_t *const row = rows->base + token * rows->token_stride + head * rows->head_stride;
        pc_span span;
        span.at = dense ? row : (uint8_t *)(void *)buffer;
        span.step = dense ? rows->token_stride : g->head_dim * nbytes;
        span.count = count;
        span.num_values = g->head_dim;
        span.dtype = rows->dtype;
        codec->decode_channels(&place, &span);
        for (int64_t i = 0; !dense && i < count; i++) {
            pc_copy_row(nbytes, span.at + i * span.step, nbytes, row + i * rows->token_stride,
                        rows->value_stride, g->head_dim);
        }
    }
}

/* ---- strips of rows that make up some tokens of a block ------------------------------------ */

typedef struct {
    pc_strip strip; /* the next one */
    int64_t times;
    int64_t step, scale_step, outside_step; /* from one strip to the next */
} pc_strips;

/* The rows of `count` tokens of a block, heads first … end - 1, in strips of as many rows as have
 * one stride; those that follow one another outside come first. */
PC_INLINE pc_strips pc_strips_of(const pc_geometry *g, const pc_slab *slab, int64_t block,
                                 int64_t offset, const pc_rows *rows, int64_t token, int64_t count,
                                 int64_t first, int64_t end) {
    const pc_address at = pc_row_address(g, slab->block_stride, block, first, offset);
    const int64_t rows_a_token = g->layout == PC_HND ? 1 : g->num_heads;
    const int64_t token_step = g->row_data_nbytes * rows_a_token;
    const int64_t token_scale_step = g->row_scale_nbytes * rows_a_token;
    const int64_t head_step = g->layout == PC_HND ? g->plane_nbytes : g->row_data_nbytes;
    const int64_t head_scale_step =
        g->layout == PC_HND && g->row_scale_nbytes ? g->plane_nbytes : g->row_scale_nbytes;
    const int64_t heads = end - first;
    const int by_head = heads == 1 || (count > 1 && (rows->head_stride > rows->token_stride));
    pc_strips strips;
    strips.strip.g = g;
    strips.strip.place.code = g->code;
    strips.strip.place.at = slab->base + at.data;
    strips.strip.place.scales = slab->base + at.scales;
    strips.strip.outside = rows->base + token * rows->token_stride + first * rows->head_stride;
    strips.strip.place.step = by_head ? token_step : head_step;
    strips.strip.place.scale_step = by_head ? token_scale_step : head_scale_step;
    strips.strip.step = by_head ? rows->token_stride : rows->head_stride;
    strips.strip.count = by_head ? count : heads;
    strips.times = by_head ? heads : count;
    strips.step = by_head ? head_step : token_step;
    strips.scale_step = by_head ? head_scale_step : token_scale_step;
    strips.outside_step = by_head ? rows->head_stride : rows->token_stride;
    if (strips.step == strips.strip.count * strips.strip.place.step &&
        strips.scale_step == strips.strip.count * strips.strip.place.scale_step &&
        strips.outside_step ==
            strips.strip.count * strips.strip.step) { /* so do the strips themselves */
        strips.strip.count *= strips.times;
        strips.times = 1;
    }
    return strips;
}

PC_INLINE void pc_next_strip(pc_strips *strips) {
    strips->strip.place.at += strips->step;
    strips->strip.place.scales += strips->scale_step;
    strips->strip.outside += strips->outside_step;
}

/* ---- the loops ----------------------------------------------------------------------------- */

/* One call, and the last thing that went wrong in it. */
typedef struct {
    const pc_tools *tools;
    const pc_space *space;
    const pc_slab *slabs;
    const pc_rows *rows;
    const int64_t *slots;  /* to store */
    const int32_t *places; /* to load */
    int64_t first;         /* token of the places that token 0 of the rows is */
    int64_t n;
    int64_t head_parts, token_parts;
    int policy;
    volatile int64_t status;
} pc_bulk;

typedef struct {
    int64_t first, end;
} pc_share;

/* Part number `part` of `parts` equal ones, but for rounding. */
PC_INLINE pc_share pc_share_of(int64_t n, int64_t part, int64_t parts) {
    pc_share share;
    share.first = n / parts * part + (part < n % parts ? part : n % parts);
    share.end = share.first + n / parts + (part < n % parts ? 1 : 0);
    return share;
}

/* Slots of one block that follow one another, from `token` on. */
PC_INLINE int64_t pc_slots_in_line(const int64_t *slots, int64_t token, int64_t end, int64_t offset,
                                   int64_t block_size) {
    const int64_t most = end - token < block_size - offset ? end - token : block_size - offset;
    int64_t count = 1;
    while (count < most && slots[token + count] == slots[token] + count) {
        count++;
    }
    return count;
}

static inline void pc_store_part(void *context, int64_t part, int who) {
    pc_bulk *const bulk = (pc_bulk *)context;
    const pc_codec *const codec = bulk->tools->codec;
    const int64_t block_size = bulk->space->geometry[PC_SEALED].block_size;
    const int64_t num_heads = bulk->space->geometry[PC_SEALED].num_heads;
    const pc_share tokens = pc_share_of(bulk->n, part / bulk->head_parts, bulk->token_parts);
    const pc_share heads = pc_share_of(num_heads, part % bulk->head_parts, bulk->head_parts);
    float *const buffer = bulk->tools->buffer + who * pc_buffer_values(bulk->space);
    int64_t count;
    int status = PC_OK;
    for (int64_t token = tokens.first; token < tokens.end && status == PC_OK; token += count) {
        const int64_t block = bulk->slots[token] / block_size;
        const int64_t offset = bulk->slots[token] - block * block_size;
        const int where = pc_where_is(bulk->space, block);
        const pc_geometry *const g = &bulk->space->geometry[where];
        const pc_slab *const slab = &bulk->slabs[where];
        pc_strips strips;
        count = 1;
        if (bulk->slots[token] < 0) {
            continue;
        }
        if (g->token_groups) {
            status = pc_put_block(codec, g, slab, block, bulk->rows, token, heads.first, heads.end,
                                  bulk->policy, buffer);
            count = block_size;
            continue;
        }
        count = pc_slots_in_line(bulk->slots, token, tokens.end, offset, block_size);
        strips =
            pc_strips_of(g, slab, block, offset, bulk->rows, token, count, heads.first, heads.end);
        for (int64_t i = 0; i < strips.times && status == PC_OK; i++) {
            status = pc_put_strip(bulk->tools, &strips.strip, bulk->rows, bulk->policy, buffer);
            pc_next_strip(&strips);
        }
    }
    if (bulk->tools->streams) {
        codec->stream_end();
    }
    if (status != PC_OK) {
        pc_atomic_set(&bulk->status, status);
    }
}

static inline void pc_load_part(void *context, int64_t part, int who) {
    const pc_bulk *const bulk = (const pc_bulk *)context;
    const pc_codec *const codec = bulk->tools->codec;
    const int64_t block_size = bulk->space->geometry[PC_SEALED].block_size;
    const pc_share tokens = pc_share_of(bulk->n, part, bulk->token_parts);
    float *const buffer = bulk->tools->buffer + who * pc_buffer_values(bulk->space);
    int64_t count;
    for (int64_t token = tokens.first; token < tokens.end; token += count) {
        const int64_t index = (bulk->first + token) / block_size;
        const int64_t offset = bulk->first + token - index * block_size;
        const int64_t block = bulk->places[index];
        const int where = pc_where_is(bulk->space, block);
        const pc_geometry *const g = &bulk->space->geometry[where];
        const pc_slab *const slab = &bulk->slabs[where];
        const int64_t group_end = offset / PC_GROUP * PC_GROUP + PC_GROUP;
        const int64_t end = g->token_groups && group_end < block_size ? group_end : block_size;
        pc_strips strips;
        count = tokens.end - token < end - offset ? tokens.end - token : end - offset;
        if (g->token_groups) {
            pc_get_group(codec, g, slab, block, offset, count, bulk->rows, token, buffer);
            continue;
        }
        strips = pc_strips_of(g, slab, block, offset, bulk->rows, token, count, 0, g->num_heads);
        for (int64_t i = 0; i < strips.times; i++) {
            pc_get_strip(bulk->tools, &strips.strip, bulk->rows, buffer);
            pc_next_strip(&strips);
        }
    }
    if (bulk->tools->streams) {
        codec->stream_end();
    }
}

/* Whether no two tokens have one slot, as each has a greater one than those before it. */
PC_INLINE int pc_slots_ascend(const int64_t *slots, int64_t n) {
    int64_t last = -1;
    for (int64_t i = 0; i < n; i++) {
        if (slots[i] >= 0 && slots[i] <= last) {
            return 0;
        }
        last = slots[i] < 0 ? last : slots[i];
    }
    return 1;
}

PC_INLINE int64_t pc_outside_nbytes(const pc_space *space, const pc_rows *rows, int64_t n) {
    const pc_geometry *const g = &space->geometry[PC_SEALED];
    return n * g->num_heads * g->head_dim * pc_dtype_nbytes(rows->dtype);
}

/*
 * Store n tokens of rows at their slots (place * block_size + offset; negative: skipped). Where
 * groups run along the tokens, the slots of a sealed block come one after the other and all of
 * them. Returns PC_OK or why a row could not be stored; others may have been then.
 */
PC_INLINE int pc_store_rows(const pc_tools *tools, const pc_space *space, const pc_slab slabs[2],
                            const pc_rows *rows, const int64_t *slots, int64_t n, int policy) {
    const pc_geometry *const g = &space->geometry[PC_SEALED];
    const pc_tools best = pc_tools_for(tools, pc_outside_nbytes(space, rows, n));
    const int threads = best.threads;
    pc_bulk bulk = {&best, space, slabs, rows, slots, NULL, 0, n, 1, 1, policy, PC_OK};
    if (threads > 1 && !g->token_groups && pc_slots_ascend(slots, n)) {
        bulk.token_parts = n < threads * PC_PARTS_PER_THREAD ? n : threads * PC_PARTS_PER_THREAD;
    } else if (threads > 1) {
        bulk.head_parts = g->num_heads;
    }
    pc_run_parts(&best, pc_store_part, &bulk, bulk.head_parts * bulk.token_parts);
    return (int)bulk.status;
}

/* Read n tokens from token `first` of the places listed on into rows. */
PC_INLINE void pc_load_rows(const pc_tools *tools, const pc_space *space, const pc_slab slabs[2],
                            const int32_t *places, int64_t first, const pc_rows *rows, int64_t n) {
    const pc_tools best = pc_tools_for(tools, pc_outside_nbytes(space, rows, n));
    const int threads = best.threads;
    pc_bulk bulk = {&best, space, slabs, rows, NULL, places, first, n, 1, 1, 0, PC_OK};
    if (threads > 1) {
        bulk.token_parts = n < threads * PC_PARTS_PER_THREAD ? n : threads * PC_PARTS_PER_THREAD;
    }
    pc_run_parts(&best, pc_load_part, &bulk, bulk.token_parts);
}

#endif
