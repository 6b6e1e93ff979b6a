/*
 * What one call of attention is: queries, keys and values of many sequences, and where the bytes
 * lie. Nothing here checks its arguments; the caller has (attention.pyx).
 *
 * Query i of a sequence stands at position length - q_len + i and attends to the keys of positions
 * start … of its own sequence that causality and the window leave it: a range, always.
 */
#ifndef PAGEDCACHE_ATTEND_CALL_H
#define PAGEDCACHE_ATTEND_CALL_H

#include "rows.h"

/* K or V of the layer. */
typedef struct {
    const pc_space *space;
    pc_slab slabs[2]; /* by pc_where */
} pc_kv;

typedef struct {
    pc_kv k, v;
    const int32_t *places; /* of all sequences; those of sequence i from indptr[i] on */
    const int64_t *indptr, *lengths, *q_lens, *starts;
    int64_t num_seqs, num_q_heads, group; /* group: query heads per KV head */
    pc_rows q, out;                       /* [query][query head][value], of one dtype */
    float *lse;                           /* [query][query head], or NULL */
    const float *sinks;                   /* [query head], or NULL */
    float scale, soft_cap;                /* soft_cap 0: none */
    int64_t window;                       /* 0: none */
    int causal;
} pc_attend_call;

/* Keys low … high - 1; empty where high <= low. */
typedef struct {
    int64_t low, high;
} pc_range;

/* The keys of query i of sequence seq. */
PC_INLINE pc_range pc_keys_of(const pc_attend_call *call, int64_t seq, int64_t i) {
    const int64_t length = call->lengths[seq];
    const int64_t position = length - call->q_lens[seq] + i;
    pc_range keys;
    keys.low = call->starts[seq];
    keys.high = call->causal ? position + 1 : length;
    if (call->window > 0 && position - call->window + 1 > keys.low) {
        keys.low = position - call->window + 1;
    }
    return keys;
}

/* ---- how the values of a row reach a vector ---------------------------------------------- */

/* Ways of reading that the kernels have; rows of any other format are decoded by the format's own
 * functions first. Halves of bytes are numbers from -8 on: so sums over them stay small, and lose
 * little to rounding. value = number * scale + offset, where the offset is 0 but for formats that
 * have a minimum: minimum + 8 * scale. */
enum pc_reading {
    PC_READ_FLOAT32,
    PC_READ_FLOAT16,
    PC_READ_BFLOAT16,
    PC_READ_INT8,     /* 32 signed bytes and a scale */
    PC_READ_PAIRS,    /* 16 bytes, value 2i in the low half of byte i; scale and offset */
    PC_READ_HALVES,   /* 16 bytes, value i in the low, value i + 16 in the high half of byte i */
    PC_READ_CHANNELS, /* as PAIRS; scale and offset per channel of a group of tokens */
    PC_READ_OTHER,
    PC_NUM_READINGS
};

/* Those with kernels of their own for both products; CHANNELS has one for scores. */
#define PC_DENSE_AND_GROUPED(X) X(FLOAT32) X(FLOAT16) X(BFLOAT16) X(INT8) X(PAIRS) X(HALVES)

/* A row as the kernels see it. */
typedef struct {
    int reading;
    int64_t first, step; /* byte of the first group's quants, and from group to group */
    int64_t scale_step;  /* bytes from a group's scale to the next one's */
    int64_t values;      /* that are read: whole groups, their padding included */
    int has_offsets;     /* whether the format has a minimum beside the scale */
} pc_row_shape;

PC_INLINE int pc_reading_of(int code) {
#ifdef PC_READ_ALL_AS_OTHERS /* for tests: as if no format had kernels */
    code = -1;
#endif
    switch (code) {
    case PC_FORMAT_float32: return PC_READ_FLOAT32;
    case PC_FORMAT_float16: return PC_READ_FLOAT16;
    case PC_FORMAT_bfloat16: return PC_READ_BFLOAT16;
    case PC_FORMAT_q8:
    case PC_FORMAT_q8_0: return PC_READ_INT8;
    case PC_FORMAT_q4: return PC_READ_PAIRS;
    case PC_FORMAT_q4_0:
    case PC_FORMAT_q4_1: return PC_READ_HALVES;
    case PC_FORMAT_q4k: return PC_READ_CHANNELS;
    default: return PC_READ_OTHER;
    }
}

PC_INLINE pc_row_shape pc_shape_of(const pc_geometry *g) {
    const pc_format f = pc_format_of(g->code);
    const int apart = f.packing != PC_PACK_INTERLEAVED;
    pc_row_shape shape;
    shape.reading = pc_reading_of(g->code);
    shape.has_offsets = g->code == PC_FORMAT_q4_1 || g->code == PC_FORMAT_q4k;
    shape.first = apart || shape.reading == PC_READ_OTHER ? 0 : f.scale_nbytes;
    shape.step = f.quant_nbytes + (apart ? 0 : f.scale_nbytes);
    shape.scale_step = apart ? f.scale_nbytes : shape.step;
    shape.values = g->token_groups || f.group_size == 1
                       ? g->head_dim
                       : (g->head_dim + PC_GROUP - 1) / PC_GROUP * PC_GROUP;
    return shape;
}

/* Whether a row's groups have a scale each (READ_INT8, PAIRS, HALVES). */
PC_INLINE int pc_is_grouped(int reading) {
    return reading == PC_READ_INT8 || reading == PC_READ_PAIRS || reading == PC_READ_HALVES;
}

/* Whether some format that is read so has a minimum beside the scales of its groups. */
PC_INLINE int pc_may_have_offsets(int reading) {
    return reading == PC_READ_HALVES;
}

#endif
