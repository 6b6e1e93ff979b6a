"""Attention as C programs: the headers alone, without Python.

One program is watched by ThreadSanitizer (addresses are watched in CI's instrumented build, by all
tests of attention), one compares values with float64, as they are and as if no format had kernels
of its own, which is how a new format begins.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

INCLUDE = Path(__file__).resolve().parent.parent / "include"

# Several callers at once over one slab of each format, each with helpers, for every instruction
# set; every result must have the bits of the first one, which one thread computed alone.
RACES = r"""
#include <stdio.h>
#include <stdlib.h>
#include "pagedcache/attend.h"
#include "pagedcache/threads.h"

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
                const pc_address at =
                    pc_row_address(g, g->block_nbytes, i / HEADS, i % HEADS, t);
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
"""


VALUES = r"""
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include "pagedcache/attend.h"
#include "pagedcache/threads.h"

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
"""


@pytest.mark.parametrize("readings", ((), ("-DPC_READ_ALL_AS_OTHERS",)), ids=("own", "others"))
def test_values_by_every_way_of_reading(readings: tuple[str, ...], tmp_path: Path) -> None:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc on this machine")
    source, program = tmp_path / "values.c", tmp_path / "values"
    source.write_text(VALUES)
    command = [compiler, "-std=gnu11", "-O1", "-pthread", "-ffp-contract=off", *readings,
               "-fno-strict-aliasing", f"-I{INCLUDE}", str(source), "-o", str(program),
               "-lm"]  # fmt: skip
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.strip()) == (0, "close"), done.stderr


def test_threads_do_not_race(tmp_path: Path) -> None:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc on this machine")
    source, program = tmp_path / "attend.c", tmp_path / "attend"
    source.write_text(RACES)
    command = [compiler, "-std=gnu11", "-O1", "-g", "-pthread", "-ffp-contract=off",
               "-fno-strict-aliasing", "-fsanitize=thread", f"-I{INCLUDE}", str(source),
               "-o", str(program)]  # fmt: skip
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode and "cannot find" in built.stderr:
        pytest.skip("no library of ThreadSanitizer on this machine")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=300, env={})
    assert (done.returncode, done.stdout.strip()) == (0, "the same"), done.stderr[-4000:]
