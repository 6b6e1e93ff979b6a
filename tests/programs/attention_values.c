/* Attention of every instruction set and of every format against float64, over scattered blocks of
 * several shapes. */
#include "pagedcache/attend.h"
#include "pagedcache/threads.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static uint32_t state = 1;

static float draw(void) { /* about normal */
    float sum = 0.0f;
    for (int i = 0; i < 4; i++) {
        state = state * 1664525u + 1013904223u;
        sum += (float)(state >> 8) / 16777216.0f - 0.5f;
    }
    return 1.7f * sum;
}

/* One sequence of n keys in scattered blocks, q queries at its end; the largest error. */
static double run(int code, const pc_isa *isa, int dim, int size, int group, int layout, int q) {
    enum { HEADS = 2, KEYS = 600, START = 3 };
    const int blocks = (KEYS + size - 1) / size, heads = HEADS * group;
    const int64_t indptr[] = {0, blocks}, lengths[] = {KEYS}, q_lens[] = {q}, starts[] = {START};
    pc_space space;
    pc_slab slabs[2];
    float *kv[2], *const rows = malloc(sizeof(float) * (size_t)(size * dim));
    float *const queries = malloc(sizeof(float) * (size_t)(q * heads * dim));
    float *const out = malloc(sizeof(float) * (size_t)(q * heads * dim));
    float *const lse = malloc(sizeof(float) * (size_t)(q * heads));
    int32_t *const places = malloc(sizeof(int32_t) * (size_t)blocks);
    double *const p = malloc(sizeof(double) * KEYS);
    double worst = 0.0, worst_of_all = 0.0;
    pc_attend_call call = {0};
    int64_t wanted;
    pc_space_init(&space, code, PC_FORMAT_float16, layout, HEADS, size, dim, blocks, 0);
    const pc_geometry *const g = &space.geometry[PC_SEALED];
    for (int s = 0; s < 2; s++) {
        slabs[s].block_stride = g->block_nbytes;
        slabs[s].base = calloc((size_t)blocks, (size_t)g->block_nbytes);
        kv[s] = malloc(sizeof(float) * (size_t)(blocks * size * HEADS * dim));
        for (int b = 0; b < blocks; b++) {
            places[b] = blocks - 1 - b;
            for (int h = 0; h < HEADS; h++) {
                for (int i = 0; i < size * dim; i++) {
                    rows[i] = draw() + (float)(i % dim % 5 == 0);
                }
                if (g->token_groups) {
                    pc_encode_head(g, slabs[s].base, g->block_nbytes, places[b], h, rows, 0);
                }
                for (int t = 0; t < size; t++) {
                    const pc_address at = pc_row_address(g, g->block_nbytes, places[b], h, t);
                    if (!g->token_groups) {
                        pc_encode_row(code, rows + t * dim, dim, slabs[s].base + at.data,
                                      slabs[s].base + at.scales, 0);
                    }
                    pc_decode_at(g, slabs[s].base, at,
                                 kv[s] + ((size_t)(b * size + t) * HEADS + h) * dim);
                }
            }
        }
    }
    for (int i = 0; i < q * heads * dim; i++) {
        queries[i] = draw();
    }
    call.k.space = call.v.space = &space;
    call.k.slabs[0] = slabs[0];
    call.v.slabs[0] = slabs[1];
    call.places = places;
    call.indptr = indptr;
    call.lengths = lengths;
    call.q_lens = q_lens;
    call.starts = starts;
    call.num_seqs = 1;
    call.num_q_heads = heads;
    call.group = group;
    call.q = (pc_rows){(uint8_t *)queries, 4 * heads * dim, 4 * dim, 4, PC_FORMAT_float32};
    call.out = call.q;
    call.out.base = (uint8_t *)out;
    call.lse = lse;
    call.scale = 1.0f / sqrtf((float)dim);
    call.causal = 1;
    if (pc_attend(&call, isa, pc_run_tasks, 2, &wanted) != PC_OK) {
        exit(2);
    }
    for (int row = 0; row < q * heads; row++) {
        const int i = row / heads, h = row % heads, end = KEYS - q + i + 1;
        double most = -1e300, mass = 0.0;
        for (int t = START; t < end; t++) {
            double score = 0.0;
            for (int c = 0; c < dim; c++) {
                score += (double)queries[row * dim + c] *
                         kv[0][((size_t)t * HEADS + h / group) * dim + c];
            }
            p[t] = score * (double)call.scale;
            most = p[t] > most ? p[t] : most;
        }
        for (int t = START; t < end; t++) {
            mass += p[t] = exp(p[t] - most);
        }
        worst = fabs(most + log(mass) - (double)lse[row]);
        for (int c = 0; c < dim; c++) {
            double want = 0.0, off;
            for (int t = START; t < end; t++) {
                want += p[t] * kv[1][((size_t)t * HEADS + h / group) * dim + c];
            }
            off = fabs(want / mass - (double)out[row * dim + c]);
            worst = off <= worst ? worst : off;
        }
        worst_of_all = worst <= worst_of_all ? worst_of_all : worst;
    }
    for (int s = 0; s < 2; s++) {
        free(slabs[s].base);
        free(kv[s]);
    }
    free(rows), free(queries), free(out), free(lse), free(places), free(p);
    return worst_of_all;
}

int main(void) {
    int count;
    const pc_isa *const known = pc_isas(&count);
    pc_start_threads();
    for (int i = 0; i < pc_usable_isas(); i++) {
        for (int code = 0; code < PC_NUM_FORMATS; code++) {
            const double off[] = {run(code, &known[i], 64, 16, 4, PC_HND, 1),
                                  run(code, &known[i], 33, 32, 1, PC_NHD, 1),
                                  run(code, &known[i], 128, 3, 3, PC_HND, 20),
                                  run(code, &known[i], 7, 1, 5, PC_NHD, 2)};
            for (int j = 0; j < 4; j++) {
                if (!(off[j] < 4e-6)) { /* values about 1, and some tens of roundings */
                    printf("%s, format %d, case %d: %g\n", known[i].name, code, j, off[j]);
                    return 1;
                }
            }
        }
    }
    puts("close");
    return 0;
}
