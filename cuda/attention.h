/* What a launch of attention is told, and how a warp's shared memory is laid out.
 *
 * The queries of a sequence that share a KV head are rows: row = query * group + head in the group.
 * A CTA takes PC_ROWS of them and a range of keys. Its warps take tiles of 8 or 16 keys in turn; a
 * tile of K and V lies in shared memory as it is stored, row by row, and the next tiles are on
 * their way there meanwhile.
 */
#ifndef PAGEDCACHE_CUDA_ATTENTION_H
#define PAGEDCACHE_CUDA_ATTENTION_H

#include "abi.h"
#include "divide.h"
#include "pagedcache/rows.h"
#include "units.h"

constexpr int PC_ROWS = 8;
constexpr int PC_KEYS = 16;           /* of a tile, at most */
constexpr int PC_MOST_STAGES = 4;     /* tiles of a warp in shared memory */
constexpr int PC_MOST_WARPS = 4;      /* of a CTA */
constexpr int PC_MOST_HEAD_DIM = 256; /* in attention: accumulators are registers */

enum pc_kind { PC_K = 0, PC_V = 1 };

/* K or V, sealed or open: where its rows lie in the pool and, in copies, in a stage. */
struct pc_side {
    uint8_t *base; /* of place 0; unused where pointers are given */
    int64_t block_stride, head_step, token_step;
    int64_t scales_at, scale_head_step, scale_step; /* scale_step: per token, or per PC_GROUP */
    int code, by_tokens;                            /* scales per channel and PC_GROUP tokens */
    int unit, units, scale_unit, scale_units; /* bytes of one copy; copies of a row; 0: no scales */
    int lanes_log2, scale_lanes_log2;         /* lanes that copy a row together */
    int row_nbytes, scale_nbytes;
    int rounds;                   /* copies take bytes of neighbouring rows with them */
    int lines, scale_lines;       /* rows are whole numbers of 16 bytes, at such */
    int row_step, scale_row_step; /* from row to row of a stage */
};

/* One stage: rows of K, their scales, rows of V, theirs, and where all of them come from. */
struct pc_stage_map {
    int rows_at[2], scales_at[2], sources_at, nbytes;
};

struct pc_attention {
    pc_side sides[2][2]; /* by pc_kind and pc_where */
    pc_stage_map stage;
    int64_t num_blocks; /* places from here on are open */
    const int32_t *places;
    const uint64_t *pointers[2]; /* instead of base and places, unless NULL */
    const pc_cuda_attention_item *items;
    int64_t total; /* items times KV heads */
    pc_divisor block_size;
    pc_divisor run, tiles_per_run; /* tiles begin anew after every run of keys */
    int run_keys, keys;            /* of a tile */
    int num_heads, group, head_dim, groups, has_open;
    int one_block; /* whole tiles lie in one block each */
    int warps, stages, queries_nbytes;
    pc_rows q, out;
    float *lse;
    const float *sinks;
    float query_factor, cap; /* cap 0: none; scores are in units of log2 */
    int causal;
    int64_t window; /* 0: none */
    float *partials;
    unsigned *tickets;
};

/* Floats that one CTA leaves for the one that adds up: results, then maxima and sums of weights. */
PC_INLINE int64_t pc_partial_floats(int64_t head_dim) {
    return PC_ROWS * (head_dim + 2);
}

#endif
