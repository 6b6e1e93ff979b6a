/* Several callers at once over one slab of each format, each with helpers, for every instruction
 * set; every result must have the bits of the first one, which one thread computed alone. */
#include "pagedcache/attend.h"
#include "pagedcache/threads.h"
#include <stdio.h>
#include <stdlib.h>

enum { HEADS = 2, GROUP = 4, DIM = 72, SIZE = 16, BLOCKS = 70, QUERIES = 2 };
enum { VALUES = QUERIES * HEADS * GROUP * DIM };

static pc_space space;
static pc_slab slabs[2];
static int32_t places[BLOCKS];
static float q[VALUES], want[VALUES];
static const pc_isa *isa;

static void run(float *out, int threads) {
    const int64_t indptr[] = {0, BLOCKS}, lengths[] = {BLOCKS * SIZE - 3};
    const int64_t q_lens[] = {QUERIES}, starts[] = {5};
    const pc_rows rows = {(uint8_t *)q, 4 * HEADS * GROUP * DIM, 4 * DIM, 4, PC_FORMAT_float32};
    pc_attend_call call = {0};
    int64_t wanted;
    call.k.space = call.v.space = &space;
    call.k.slabs[0] = slabs[0];
    call.v.slabs[0] = slabs[1];
    call.places = places;
    call.indptr = indptr;
    call.lengths = lengths;
    call.q_lens = q_lens;
    call.starts = starts;
    call.num_seqs = 1;
    call.num_q_heads = HEADS * GROUP;
    call.group = GROUP;
    call.q = call.out = rows;
    call.out.base = (uint8_t *)out;
    call.scale = 0.1f;
    call.causal = 1;
    if (pc_attend(&call, isa, pc_run_tasks, threads, &wanted) != PC_OK) {
        exit(2);
    }
}

static void *caller(void *unused) {
    float out[VALUES];
    for (int i = 0; i < 2; i++) {
        run(out, 3);
        if (memcmp(out, want, sizeof out) != 0) {
            exit(3);
        }
    }
    return unused;
}

static void fill(int code) {
    float rows[SIZE * DIM];
    pc_space_init(&space, code, PC_FORMAT_float16, PC_HND, HEADS, SIZE, DIM, BLOCKS, 0);
    const pc_geometry *const g = &space.geometry[PC_SEALED];
    for (int s = 0; s < 2; s++) {
        slabs[s].block_stride = g->block_nbytes;
        slabs[s].base = calloc(BLOCKS, (size_t)g->block_nbytes);
        for (int i = 0; i < BLOCKS * HEADS; i++) {
            for (int j = 0; j < SIZE * DIM; j++) {
                rows[j] = (float)((i * 31 + j * 7 + s * 5) % 97 - 48) * 0.05f;
            }
            if (g->token_groups) {
                pc_encode_head(g, slabs[s].base, g->block_nbytes, i / HEADS, i % HEADS, rows, 0);
            }
            for (int t = 0; t < SIZE && !g->token_groups; t++) {
                const pc_address at = pc_row_address(g, g->block_nbytes, i / HEADS, i % HEADS, t);
                pc_encode_row(code, rows + t * DIM, DIM, slabs[s].base + at.data,
                              slabs[s].base + at.scales, 0);
            }
        }
    }
}

int main(void) {
    pthread_t threads[3];
    int count;
    const pc_isa *const known = pc_isas(&count);
    pc_start_threads();
    for (int i = 0; i < BLOCKS; i++) {
        places[i] = (i * 7) % BLOCKS;
    }
    for (int i = 0; i < VALUES; i++) {
        q[i] = (float)(i % 23 - 11) * 0.1f;
    }
    for (int code = 0; code < PC_NUM_FORMATS; code++) {
        fill(code);
        for (int i = 0; i < pc_usable_isas(); i++) {
            isa = &known[i];
            run(want, 1);
            for (int t = 0; t < 3; t++) {
                pthread_create(&threads[t], NULL, caller, NULL);
            }
            for (int t = 0; t < 3; t++) {
                pthread_join(threads[t], NULL);
            }
            for (int j = 0; j < VALUES; j++) {
                if (!(want[j] < 10.0f && want[j] > -10.0f)) {
                    return 1;
                }
            }
        }
        free(slabs[0].base);
        free(slabs[1].base);
    }
    puts("the same");
    return 0;
}
