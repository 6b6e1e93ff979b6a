/* The first value of rows outside the pool that is not finite. */
#ifndef PAGEDCACHE_NONFINITE_H
#define PAGEDCACHE_NONFINITE_H

#include "bulk.h"

/* The rows of one token, joined where they follow one another. */
PC_INLINE int pc_token_is_finite(const pc_codec *codec, const pc_rows *rows, int64_t token,
                                 int64_t num_heads, int64_t head_dim) {
    const int64_t nbytes = pc_dtype_nbytes(rows->dtype);
    pc_span span;
    span.at = rows->base + token * rows->token_stride;
    if (rows->value_stride != nbytes) {
        for (int64_t head = 0; head < num_heads; head++) {
            if (!pc_row_is_finite(rows->dtype, span.at + head * rows->head_stride,
                                  rows->value_stride, head_dim)) {
                return 0;
            }
        }
        return 1;
    }
    span.step = rows->head_stride;
    span.count = num_heads;
    span.num_values = head_dim;
    span.dtype = rows->dtype;
    if (span.step == head_dim * nbytes) {
        span.num_values *= num_heads;
        span.count = 1;
    }
    return codec->all_within(&span, pc_finite_bits(rows->dtype));
}

typedef struct {
    const pc_codec *codec;
    const pc_rows *rows;
    int64_t n, num_heads, head_dim, parts;
    volatile int64_t found; /* whether a part has one */
} pc_search;

static inline void pc_search_part(void *context, int64_t part, int who) {
    pc_search *const search = (pc_search *)context;
    const pc_share tokens = pc_share_of(search->n, part, search->parts);
    (void)who;
    for (int64_t token = tokens.first; token < tokens.end; token++) {
        if (!pc_token_is_finite(search->codec, search->rows, token, search->num_heads,
                                search->head_dim)) {
            pc_atomic_set(&search->found, 1);
            return;
        }
    }
}

/* Flat index ((token * num_heads + head) * head_dim + value) of the first value of [n][num_heads]
 * rows that is not finite, or -1. */
PC_INLINE int64_t pc_find_nonfinite(const pc_tools *tools, const pc_rows *rows, int64_t n,
                                    int64_t num_heads, int64_t head_dim) {
    const int64_t nbytes = n * num_heads * head_dim * pc_dtype_nbytes(rows->dtype);
    const pc_tools best = pc_tools_for(tools, nbytes);
    const uint32_t magnitude = rows->dtype == PC_FORMAT_float32 ? 0x7FFFFFFFu : 0x7FFFu;
    pc_search search = {tools->codec, rows, n, num_heads, head_dim, 1, 0};
    search.parts = n < best.threads ? 1 : best.threads;
    pc_run_parts(&best, pc_search_part, &search, search.parts);
    for (int64_t i = 0; search.found && i < n * num_heads * head_dim; i++) {
        const int64_t row = i / head_dim;
        const uint8_t *const at = rows->base + row / num_heads * rows->token_stride +
                                  row % num_heads * rows->head_stride +
                                  i % head_dim * rows->value_stride;
        const uint32_t bits = rows->dtype == PC_FORMAT_float32 ? pc_load_u32(at) : pc_load_u16(at);
        if ((bits & magnitude) > pc_finite_bits(rows->dtype)) {
            return i;
        }
    }
    return -1;
}

#endif
