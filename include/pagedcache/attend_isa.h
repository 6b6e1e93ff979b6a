/*
 * The attention kernels, once per instruction set, from one text.
 */
#ifndef PAGEDCACHE_ATTEND_ISA_H
#define PAGEDCACHE_ATTEND_ISA_H

#include "attend_work.h"
#include "isa.h"
#include "sync.h"
#include "tasks.h"

#define PC_PER_ISA "attend_all.h"
#include "each_isa.h"

/* ---- choice ------------------------------------------------------------------------------ */

typedef struct {
    const char *name;
    int width;
    void (*attend_unit)(const pc_attend_plan *plan, int64_t number, pc_work *work);
    int64_t (*padded)(int64_t values);
    int64_t (*value_at)(int reading, int64_t i, int64_t whole);
} pc_isa;

/* What this build knows, the best one last. */
PC_INLINE const pc_isa *pc_isas(int *count) {
#define PC_ISA_ROW(name) \
    {#name, pc_width_##name, pc_attend_unit_##name, pc_padded_##name, pc_value_at_##name},
    static const pc_isa known[] = {PC_ISAS(PC_ISA_ROW)};
#undef PC_ISA_ROW
    *count = (int)(sizeof known / sizeof known[0]);
    return known;
}

#endif
