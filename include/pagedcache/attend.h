/*
 * Attention of a batch of sequences over their pages: o = softmax(scale * q k^T) v, per query head,
 * with the softmax in float32 and online (Milakov and Gimelshein 2018; Dao et al. 2022).
 *
 * The stored rows are read where they are, in any format; see attend_plan.h for the division of the
 * work, attend_kernel.h for the arithmetic.
 */
#ifndef PAGEDCACHE_ATTEND_H
#define PAGEDCACHE_ATTEND_H

#include <stdlib.h>

#include "attend_isa.h"

/* Multiplications below which waking a thread costs more than it gives. */
#define PC_LEAST_SHARED_WORK 2e6

typedef struct {
    const pc_attend_plan *plan;
    const pc_isa *isa;
    pc_work *works; /* one per thread */
} pc_attend_job;

static inline void pc_attend_task(void *context, int64_t number, int who) {
    const pc_attend_job *const job = (const pc_attend_job *)context;
    job->isa->attend_unit(job->plan, number, &job->works[who]);
}

PC_INLINE void pc_side_init(pc_side *side, const pc_kv *kv, const pc_isa *isa) {
    memset(side, 0, sizeof *side);
    side->kv = kv;
    side->shape[PC_SEALED] = pc_shape_of(&kv->space->geometry[PC_SEALED]);
    side->shape[PC_OPEN] = pc_shape_of(&kv->space->geometry[PC_OPEN]);
    side->padded = isa->padded(side->shape[PC_SEALED].values);
}

/* Whether rows may be met that no kernel reads as they are stored. */
PC_INLINE int pc_side_decodes(const pc_side *side, int is_v) {
    const int reading = side->shape[PC_SEALED].reading;
    return side->kv->space->num_open > 0 || reading == PC_READ_OTHER ||
           (is_v && reading == PC_READ_CHANNELS);
}

PC_INLINE void pc_side_order(pc_side *side, const pc_isa *isa, int32_t *order) {
    const pc_row_shape *const shape = &side->shape[PC_SEALED];
    const int64_t pair = 2 * isa->width, whole = shape->values / pair * pair;
    int64_t i;
    side->natural = side->paired = 1;
    for (i = 0; i < side->padded; i++) {
        order[i] = (int32_t)isa->value_at(shape->reading, i, whole);
        side->natural &= order[i] == i;
        side->paired &= order[i] == i / pair * pair + i % isa->width * 2 + i % pair / isa->width;
    }
    side->order = order;
}

/* Set the counters of tiles and heads whose parts are spread over several units. */
PC_INLINE void pc_count_pieces(pc_attend_plan *plan) {
    int64_t seq, i;
    for (seq = 0; seq < plan->call->num_seqs; seq++) {
        const pc_seq_plan *const s = &plan->seqs[seq];
        for (i = 0; s->num_pieces > 1 && i < s->num_tiles * s->num_head_blocks; i++) {
            plan->left[s->first_group + i] = s->num_pieces;
        }
    }
}

/* Memory in one piece that is 64-byte aligned; *whole is to be freed. */
PC_INLINE uint8_t *pc_aligned_memory(int64_t nbytes, void **whole) {
    *whole = malloc((size_t)nbytes + 64);
    return *whole == NULL ? NULL : (uint8_t *)(((uintptr_t)*whole + 63) & ~(uintptr_t)63);
}

/* Run the call on at most `threads` threads of the runner's. PC_OK, or PC_E_MEMORY with nothing
 * written and the bytes that could not be had in *wanted. */
PC_INLINE int pc_attend(const pc_attend_call *call, const pc_isa *isa, pc_runner run, int threads,
                        int64_t *wanted) {
    pc_attend_plan plan;
    pc_attend_job job;
    pc_work measured;
    void *table_memory = NULL, *memory = NULL;
    uint8_t *at;
    int64_t work_nbytes, works_nbytes, kept_nbytes, total;
    int i, status = PC_E_MEMORY;
    memset(&plan, 0, sizeof plan);
    plan.call = call;
    plan.query_scale =
        call->soft_cap > 0.0f ? call->scale / call->soft_cap : call->scale * PC_LOG2_E;
    pc_side_init(&plan.k, &call->k, isa);
    pc_side_init(&plan.v, &call->v, isa);
    *wanted = call->num_seqs * (int64_t)sizeof *plan.seqs + 4 * (plan.k.padded + plan.v.padded);
    at = pc_aligned_memory(*wanted, &table_memory);
    if (at == NULL) {
        return PC_E_MEMORY;
    }
    plan.seqs = (pc_seq_plan *)(void *)at;
    at += call->num_seqs * (int64_t)sizeof *plan.seqs;
    pc_side_order(&plan.k, isa, (int32_t *)(void *)at);
    pc_side_order(&plan.v, isa, (int32_t *)(void *)(at + 4 * plan.k.padded));
    threads = pc_work_of(call) < PC_LEAST_SHARED_WORK ? 1 : threads;
    pc_divide(&plan, threads);
    threads = threads < plan.num_units ? threads : (int)plan.num_units;
    threads = threads < 1 ? 1 : threads;
    plan.decodes =
        plan.head_rows > PC_FEW_ROWS || pc_side_decodes(&plan.k, 0) || pc_side_decodes(&plan.v, 1);
    work_nbytes = pc_lay_out(&plan, &measured, NULL);
    kept_nbytes = pc_align_up(plan.num_kept * pc_part_values(&plan) * 4, 64);
    works_nbytes = pc_align_up(threads * (int64_t)sizeof(pc_work), 64);
    total = threads * work_nbytes + works_nbytes + kept_nbytes + plan.num_groups * 8;
    *wanted = total;
    at = pc_aligned_memory(total, &memory);
    if (at != NULL) {
        job.works = (pc_work *)(void *)(at + threads * work_nbytes);
        for (i = 0; i < threads; i++) {
            (void)pc_lay_out(&plan, &job.works[i], at + i * work_nbytes);
        }
        at += threads * work_nbytes + works_nbytes;
        plan.kept = (float *)(void *)at;
        plan.left = (volatile int64_t *)(void *)(at + kept_nbytes);
        pc_count_pieces(&plan);
        job.plan = &plan;
        job.isa = isa;
        run(threads, pc_attend_task, &job, plan.num_units);
        status = PC_OK;
    }
    free(memory);
    free(table_memory);
    return status;
}

#endif
