/* What pc_cuda_attend() is told. */
#ifndef PAGEDCACHE_CUDA_ABI_ATTENTION_H
#define PAGEDCACHE_CUDA_ABI_ATTENTION_H

#include <stddef.h>
#include <stdint.h>

/* K or V of a layer, sealed or open. geometry: host, as pc_cuda_geometry() makes it; NULL where
 * there are no such blocks. slab: place p lies at slab + p * block_stride, for open places too.
 * Where block pointers are given, slab and block_stride only tell how those are aligned. */
typedef struct {
    const void *geometry, *slab;
    int64_t block_stride;
} pc_cuda_slab;

/* Some rows and keys of one sequence. Its queries and the query heads that share a KV head are
 * rows, query * group + head in the group; an item is up to 8 rows that follow one another, and a
 * range of keys, for each KV head. Keys, and the positions of queries, are counted from the first
 * token of the item's first block on. */
typedef struct {
    int64_t table;      /* that block's index in places or pointers */
    int64_t position;   /* of the sequence's first query */
    int64_t token;      /* of that query in q, out and lse */
    int32_t begin, end; /* keys; none where they are the same */
    int32_t row, rows;  /* first row, 1 … 8 rows */
    /* Where the keys of these rows are split over several items: how many, which of all parts the
     * first one is and which this one (parts of one split follow one another), and which of all
     * tickets is theirs. parts 1: the item is all there is. */
    int32_t parts, first_part, part, ticket;
} pc_cuda_attention_item;

typedef struct {
    pc_cuda_slab k, v, open_k, open_v;
    int64_t num_blocks;                      /* places from here on are open */
    const int32_t *places;                   /* or NULL, with pointers and without open blocks */
    const uint64_t *k_pointers, *v_pointers; /* address of each block, or NULL */
    const pc_cuda_attention_item *items;     /* of all sequences, in any order */
    int64_t num_items, group;                /* group: query heads of a KV head */
    const void *q;                           /* [token][query head][channel] */
    int64_t q_strides[3];                    /* in bytes, of any sign */
    void *out;
    int64_t out_strides[3];
    int64_t window;        /* keys less than this before a query; 0: all */
    float *lse;            /* [token][query head], dense, or NULL */
    const float *sinks;    /* [query head], or NULL */
    float *partials;       /* pc_cuda_attend_partial_nbytes() a part */
    uint32_t *tickets;     /* of each KV head; zeros, and zeros again when done */
    float scale, soft_cap; /* soft_cap 0: none */
    int32_t dtype, causal; /* of q and out: 0 float32, 1 float16, 2 bfloat16 */
} pc_cuda_attention;

#endif
