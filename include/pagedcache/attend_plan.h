/*
 * How a call of attention is divided: into units that threads take one by one, and into sums whose
 * order does not depend on who takes what.
 *
 * The queries of a sequence are cut into tiles; a tile has, for each KV head, a row for each of its
 * queries and of their heads. The keys of a sequence are cut into parts, at positions that its own
 * length decides. A unit is a tile, some KV heads (as what lies side by side is best read
 * together), and a piece: consecutive parts. Heads and parts of a unit follow the number of
 * threads, but what a part gives a head does not, and parts are added up in order: by the unit that
 * has all of them, or by the last unit of the same tile and heads to end. So neither threads nor
 * neighbours in the batch change a bit of the result.
 */
#ifndef PAGEDCACHE_ATTEND_PLAN_H
#define PAGEDCACHE_ATTEND_PLAN_H

#include "attend_call.h"

enum {
    PC_CHUNK = 512,     /* keys of which the scores are kept at once */
    PC_RUN = 128,       /* tokens read alike at once, where rows are narrow and few want them */
    PC_SHORT_RUN = 64,  /* elsewhere */
    PC_NARROW = 80,     /* bytes of a narrow row at most: runs of them fit the nearest cache */
    PC_MIX_TOKENS = 32, /* of which all values are multiplied before the next ones */
    PC_TILE_ROWS = 64,  /* rows of a unit, where one query and KV head have fewer than that */
    PC_MOST_PARTS = 32, /* of a sequence */
    PC_ROWS = 4,        /* query rows that share what was read into registers */
    PC_FEW_ROWS = 8,    /* as many in a tile read rows as they are stored, more want them decoded */
    PC_SLACK = 16       /* values behind a row of scores that may be overwritten */
};

/* K or V as the kernels take it. */
typedef struct {
    const pc_kv *kv;
    pc_row_shape shape[2]; /* by pc_where */
    int64_t padded;        /* values of a row in registers */
    const int32_t *order;  /* [padded]: the value at each place, padding included */
    int natural, paired;   /* whether that is the order of the row; the even ones of each pair of
                            * vectors before the odd ones */
} pc_side;

typedef struct {
    int64_t first_query; /* among those of all sequences */
    int64_t first_unit, num_tiles;
    int64_t first_key, part_keys, num_parts;
    int64_t unit_parts, num_pieces;      /* parts of a unit; units that share a tile and heads */
    int64_t unit_heads, num_head_blocks; /* KV heads of a unit; units that share the rest */
    int64_t first_group;                 /* of its tiles and heads among those in several pieces */
    int64_t first_kept;                  /* of its parts among the kept ones */
} pc_seq_plan;

typedef struct {
    const pc_attend_call *call;
    pc_side k, v;
    pc_seq_plan *seqs;
    int64_t num_units, tile_queries;
    int64_t most_rows, head_rows; /* of a unit, and of one KV head in it, at most */
    int64_t num_groups, num_kept; /* tiles and heads in several pieces; their parts */
    volatile int64_t *left;       /* [num_groups]: pieces that are not done */
    float *kept;                  /* [num_kept][pc_part_values()] */
    int decodes;                  /* whether some rows are decoded before they are multiplied */
    float query_scale;            /* of q, so that scores are powers of two or arguments of tanh */
} pc_attend_plan;

/* What a unit is. Its rows: KV head by KV head, query by query, query head by query head. */
typedef struct {
    int64_t seq, first_part, end_part;
    int64_t first_query, num_queries; /* of the sequence */
    int64_t first_head, num_heads;    /* KV heads */
    int64_t head_rows, num_rows;      /* of one KV head; of all */
    int64_t group;                    /* among those in several pieces; -1: this piece is all */
    int64_t first_kept;               /* of the parts of its tile and heads */
} pc_unit;

/* Keys of any query first … first + n - 1 of a sequence: their ends never move down. */
PC_INLINE pc_range pc_keys_of_tile(const pc_attend_call *call, int64_t seq, int64_t first,
                                   int64_t n) {
    pc_range keys = pc_keys_of(call, seq, first);
    keys.high = pc_keys_of(call, seq, first + n - 1).high;
    return keys;
}

/* Floats that a part leaves behind: per row its greatest score, its mass and its sums. */
PC_INLINE int64_t pc_part_values(const pc_attend_plan *plan) {
    return plan->most_rows * (2 + plan->v.padded);
}

PC_INLINE int64_t pc_divide_up(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

PC_INLINE int64_t pc_between(int64_t x, int64_t least, int64_t most) {
    return x < least ? least : x > most ? most : x;
}

/* Cut the keys of one sequence; returns the chunks of a part. */
PC_INLINE int64_t pc_cut_keys(const pc_attend_call *call, int64_t seq, pc_seq_plan *s) {
    const pc_range keys = pc_keys_of_tile(call, seq, 0, call->q_lens[seq]);
    const int64_t span = keys.high > keys.low ? keys.high - keys.low : 0;
    const int64_t chunks = pc_divide_up(pc_divide_up(span, PC_CHUNK) + 1, PC_MOST_PARTS);
    s->part_keys = chunks * PC_CHUNK;
    s->first_key = keys.low / s->part_keys * s->part_keys;
    s->num_parts = span > 0 ? pc_divide_up(keys.high - s->first_key, s->part_keys) : 1;
    return chunks;
}

/* Multiplications of the call, about: those with a row each of at least two queries, as reading and
 * widening keys costs as much as that. */
PC_INLINE double pc_work_of(const pc_attend_call *call) {
    const double dims = (double)(call->k.space->geometry[PC_SEALED].head_dim +
                                 call->v.space->geometry[PC_SEALED].head_dim);
    double keys = 0.0;
    int64_t seq;
    for (seq = 0; seq < call->num_seqs; seq++) {
        if (call->q_lens[seq] > 0) {
            const pc_range all = pc_keys_of_tile(call, seq, 0, call->q_lens[seq]);
            const int64_t rows = call->q_lens[seq] * call->group;
            keys += (double)(all.high - all.low) * (double)(rows > 2 ? rows : 2);
        }
    }
    return keys * dims * (double)(call->num_q_heads / call->group);
}

/* Fill plan->seqs (room for one per sequence) and the counts; threads > 0. */
PC_INLINE void pc_divide(pc_attend_plan *plan, int64_t threads) {
    const pc_attend_call *const call = plan->call;
    const int64_t heads = call->num_q_heads / call->group;
    int64_t seq, query = 0, total = 0, share;
    memset(plan->seqs, 0, (size_t)call->num_seqs * sizeof *plan->seqs);
    plan->tile_queries = pc_between(PC_TILE_ROWS / call->group, 1, PC_TILE_ROWS);
    for (seq = 0; seq < call->num_seqs; seq++) {
        pc_seq_plan *const s = &plan->seqs[seq];
        s->first_query = query;
        query += call->q_lens[seq];
        if (call->q_lens[seq] > 0) {
            const int64_t chunks = pc_cut_keys(call, seq, s);
            s->num_tiles = pc_divide_up(call->q_lens[seq], plan->tile_queries);
            total += s->num_tiles * heads * s->num_parts * chunks;
        }
    }
    /* units of an eighth of a thread's share: small enough to even out, large enough to be few */
    share = threads > 1 ? pc_divide_up(total, 8 * threads) : INT64_MAX;
    plan->num_units = plan->num_groups = plan->num_kept = 0;
    plan->most_rows = plan->head_rows = 0;
    for (seq = 0; seq < call->num_seqs; seq++) {
        pc_seq_plan *const s = &plan->seqs[seq];
        const int64_t queries = pc_between(call->q_lens[seq], 0, plan->tile_queries);
        int64_t groups, parts;
        s->first_unit = plan->num_units;
        if (queries == 0) {
            continue;
        }
        parts = share / (s->part_keys / PC_CHUNK); /* of one head */
        s->unit_heads = pc_between(PC_TILE_ROWS / (queries * call->group), 1, heads);
        s->unit_heads = pc_between(s->unit_heads, 1, pc_between(parts, 1, heads));
        s->num_head_blocks = pc_divide_up(heads, s->unit_heads);
        s->unit_parts = pc_between(parts / s->unit_heads, 1, s->num_parts);
        s->num_pieces = pc_divide_up(s->num_parts, s->unit_parts);
        s->first_group = plan->num_groups;
        s->first_kept = plan->num_kept;
        groups = s->num_tiles * s->num_head_blocks;
        if (s->num_pieces > 1) {
            plan->num_groups += groups;
            plan->num_kept += groups * s->num_parts;
        }
        plan->num_units += groups * s->num_pieces;
        plan->head_rows = pc_between(queries * call->group, plan->head_rows, INT64_MAX);
        plan->most_rows =
            pc_between(s->unit_heads * queries * call->group, plan->most_rows, INT64_MAX);
    }
}

/* Unit number `number`. The tiles of a sequence come last first: with causality those are larger.
 */
PC_INLINE pc_unit pc_unit_of(const pc_attend_plan *plan, int64_t number) {
    const pc_attend_call *const call = plan->call;
    const int64_t heads = call->num_q_heads / call->group;
    const pc_seq_plan *s;
    int64_t low = 0, high = call->num_seqs, group, tile;
    pc_unit unit;
    while (high - low > 1) { /* the last sequence that starts at or before the unit */
        const int64_t middle = low + (high - low) / 2;
        if (plan->seqs[middle].first_unit <= number) {
            low = middle;
        } else {
            high = middle;
        }
    }
    s = &plan->seqs[low];
    number -= s->first_unit;
    group = number / s->num_pieces;
    tile = s->num_tiles - 1 - group / s->num_head_blocks;
    unit.seq = low;
    unit.first_part = number % s->num_pieces * s->unit_parts;
    unit.end_part = pc_between(unit.first_part + s->unit_parts, 0, s->num_parts);
    unit.first_query = tile * plan->tile_queries;
    unit.num_queries = pc_between(call->q_lens[low] - unit.first_query, 0, plan->tile_queries);
    unit.first_head = group % s->num_head_blocks * s->unit_heads;
    unit.num_heads = pc_between(heads - unit.first_head, 0, s->unit_heads);
    unit.head_rows = unit.num_queries * call->group;
    unit.num_rows = unit.num_heads * unit.head_rows;
    unit.group = s->num_pieces > 1 ? s->first_group + group : -1;
    unit.first_kept = s->first_kept + group * s->num_parts;
    return unit;
}

/* Query of the tile, and query head, of row r of a unit. */
typedef struct {
    int64_t query, head;
} pc_row_of;

PC_INLINE pc_row_of pc_row_number(const pc_attend_call *call, const pc_unit *unit, int64_t r) {
    const int64_t kv_head = unit->first_head + r / unit->head_rows, inside = r % unit->head_rows;
    pc_row_of row;
    row.query = inside / call->group;
    row.head = kv_head * call->group + inside % call->group;
    return row;
}

/* Rows of the next slice of a tile: those that share what is read. A query's heads first; two or
 * four queries where they have that few. */
PC_INLINE int64_t pc_slice_rows(int64_t group, int64_t num_rows, int64_t row) {
    int64_t left = num_rows - row;
    if (group <= PC_ROWS / 2) {
        return left < PC_ROWS / group * group ? left : PC_ROWS / group * group;
    }
    left = group - row % group;
    return pc_divide_up(left, pc_divide_up(left, PC_ROWS));
}

#endif
