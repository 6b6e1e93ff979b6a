/* What one thread works with during a call of attention. The only copies of stored values are at
 * most PC_SHORT_RUN rows of K or V of one head, in `scratch`. */
#ifndef PAGEDCACHE_ATTEND_WORK_H
#define PAGEDCACHE_ATTEND_WORK_H

#include <math.h>

#include "attend_plan.h"

#define PC_LOG2_E 1.44269504088896340736f
#define PC_LN_2 0.693147180559945309417f

enum {
    PC_SCORE_STRIDE = PC_CHUNK + PC_SLACK, /* from row to row of scores */
    PC_SCALE_STRIDE = PC_RUN + PC_SLACK,   /* from group to group of scales */
    PC_WEIGHT_STRIDE = PC_RUN + PC_SLACK   /* from row to row of weights times scales */
};

/* One run of tokens against up to PC_ROWS query rows.
 *
 * score: in = queries [pair of vectors][row][2 vectors], out = scores [row][token].
 * mix: in = weights [row][token], or with scales [group][row][token]; out = sums [row][value]. */
typedef struct {
    const uint8_t *const *data;    /* [count], and PC_SLACK repetitions of the last */
    int64_t shift;                 /* bytes from each of them to the row */
    const float *scales, *offsets; /* [group][token] */
    int64_t step;                  /* bytes from group to group of a row */
    int64_t pairs, rest, count;    /* rest: values behind the last whole pair of vectors */
    const uint8_t *const *ahead;   /* rows to be fetched meanwhile, one for each of these tokens */
    int64_t ahead_shift;           /* bytes from each of them to the row */
    int64_t ahead_lines;           /* of 64 bytes, of each row; 0: none */
    const float *in;
    float *out;
    int64_t out_stride;
} pc_tile;

typedef void (*pc_kernel)(const pc_tile *tile);

/* Results for the rows of a tile over some keys: exact in any unit of `peaks`. */
typedef struct {
    float *peaks;  /* [row]: greatest score, as a power of two; -Inf without keys */
    float *masses; /* [row]: sum of 2^(score - peak) */
    float *sums;   /* [row][padded]: the same times v */
} pc_partial;

/* Addresses of the first head's rows, the last one repeated, and of their scales. */
typedef struct {
    const uint8_t *data[PC_RUN + PC_SLACK], *scales[PC_RUN + PC_SLACK];
} pc_addresses;

/* Tokens that follow one another and are read alike, of one head. */
typedef struct {
    const pc_side *side;
    int64_t chunk;        /* position of the first key of the chunk they belong to */
    int64_t first, count; /* position of the first token; 0 tokens: there are no more */
    int64_t head;         /* of the unit's */
    int where;
    const pc_addresses *first_head;
    int64_t shift, scale_shift; /* bytes from there to the rows of this head, and to their scales */
} pc_run;

/* Way through the keys and values of a unit: chunk by chunk, K before V, run by run, head by head.
 */
typedef struct {
    const pc_attend_plan *plan;
    const int32_t *places;
    int64_t first_head, num_heads;
    pc_range keys; /* that any of the unit's rows has, in its parts */
    int few;       /* whether few rows want them */
    const pc_side *side;
    int64_t chunk, position, end; /* of the next tokens */
} pc_walk;

typedef struct {
    float *q, *scores, *folded, *bias, *scratch, *scales, *offsets, *weights, *shifts, *row;
    float *channels; /* scales and offsets of all channels, in the order of the side */
    pc_partial chunk, part, all;
    pc_range *ranges; /* [query of the tile] */
    uint8_t *halves;
    pc_walk walk;
    pc_run runs[2]; /* the one at hand, and the one behind it, which is being fetched */
    pc_addresses addresses[2];
    int at_hand;
    int reading; /* of the run at hand */
    pc_tile tile;
    const uint8_t *decoded[PC_SHORT_RUN + PC_SLACK]; /* rows of scratch */
} pc_work;

PC_INLINE float *pc_take(uint8_t **memory, int64_t nbytes) {
    float *const part = (float *)(void *)*memory;
    *memory += pc_align_up(nbytes, 64);
    return part;
}

PC_INLINE pc_partial pc_take_partial(uint8_t **memory, int64_t rows, int64_t padded) {
    pc_partial p;
    p.peaks = pc_take(memory, rows * 4);
    p.masses = pc_take(memory, rows * 4);
    p.sums = pc_take(memory, rows * padded * 4);
    return p;
}

/* Lay the parts of `work` out from `memory` on (64-byte aligned) and return the bytes they take;
 * `work` may be laid out over NULL to learn them. */
PC_INLINE int64_t pc_lay_out(const pc_attend_plan *plan, pc_work *work, uint8_t *memory) {
    const int64_t rows = plan->most_rows, k = plan->k.padded, v = plan->v.padded;
    const int64_t most = k > v ? k : v, groups = pc_divide_up(most, PC_GROUP);
    const uintptr_t start = (uintptr_t)memory;
    work->q = pc_take(&memory, rows * k * 4);
    work->scores = pc_take(&memory, rows * (PC_CHUNK + PC_SLACK) * 4);
    work->folded = pc_take(&memory, PC_ROWS * k * 4);
    work->bias = pc_take(&memory, PC_SLACK * 4);
    work->scratch = pc_take(&memory, plan->decodes ? PC_SHORT_RUN * most * 4 : 0);
    work->scales = pc_take(&memory, groups * PC_SCALE_STRIDE * 4);
    work->offsets = pc_take(&memory, groups * PC_SCALE_STRIDE * 4);
    work->halves = (uint8_t *)(void *)pc_take(&memory, groups * PC_SCALE_STRIDE * 4);
    work->weights = pc_take(&memory, groups * PC_ROWS * PC_WEIGHT_STRIDE * 4);
    work->shifts = pc_take(&memory, rows * groups * PC_SLACK * 4);
    work->channels = pc_take(&memory, 2 * most * 4);
    work->row = pc_take(&memory, (most + PC_SLACK) * 4);
    work->chunk = pc_take_partial(&memory, rows, v);
    work->part = pc_take_partial(&memory, rows, v);
    work->all = pc_take_partial(&memory, rows, v);
    work->ranges =
        (pc_range *)(void *)pc_take(&memory, plan->tile_queries * (int64_t)sizeof(pc_range));
    return (int64_t)((uintptr_t)memory - start);
}

/* A kept part in the memory of the plan. */
PC_INLINE pc_partial pc_kept(const pc_attend_plan *plan, const pc_unit *unit, int64_t part) {
    pc_partial p;
    p.peaks = plan->kept + (unit->first_kept + part) * pc_part_values(plan);
    p.masses = p.peaks + plan->most_rows;
    p.sums = p.masses + plan->most_rows;
    return p;
}

/* log2(x) of a positive float32, as a float64 within 1e-10: the exponent, and the series of atanh
 * for a mantissa between sqrt(1/2) and sqrt(2). NaN and Inf stay what they are. */
PC_INLINE double pc_log2(float x) {
    const uint32_t bits = pc_float_bits(x);
    const uint32_t exponent = bits >> 23;
    double m, z, square, series, power;
    if (exponent == 0 ||
        exponent >= 255) { /* zero and subnormals do not come up: x is at least 1 */
        return exponent == 0 ? -127.0 : (double)x;
    }
    m = (double)pc_bits_float((bits & 0x7FFFFFu) | 0x3F800000u);
    power = (double)exponent - 127.0;
    if (m > 1.41421356237309505) {
        m *= 0.5;
        power += 1.0;
    }
    z = (m - 1.0) / (m + 1.0);
    square = z * z;
    series = 1.0 / 11.0;
    series = series * square + 1.0 / 9.0;
    series = series * square + 1.0 / 7.0;
    series = series * square + 1.0 / 5.0;
    series = series * square + 1.0 / 3.0;
    series = series * square + 1.0;
    return power + z * series * 2.88539008177792681472; /* 2 / ln 2 */
}

#endif
