/* The codecs of this build, one for each instruction set, from one text. */
#ifndef PAGEDCACHE_CODECS_H
#define PAGEDCACHE_CODECS_H

#include "codec_plain.h"
#include "isa.h"

#if defined(__GNUC__)
typedef float pc_4f __attribute__((vector_size(16)));
typedef int32_t pc_4i __attribute__((vector_size(16)));
#endif

enum { PC_NUM_DTYPES = 3 };

#define PC_PER_ISA "codec_all.h"
#include "each_isa.h"

typedef struct {
    const char *name;
    const pc_codec *codec;
} pc_named_codec;

/* What this build knows, the best one last. */
PC_INLINE const pc_named_codec *pc_codecs(int *count) {
#define PC_CODEC_ROW(name) {#name, &pc_codec_##name},
    static const pc_named_codec known[] = {PC_ISAS(PC_CODEC_ROW)};
#undef PC_CODEC_ROW
    *count = (int)(sizeof known / sizeof known[0]);
    return known;
}

#endif
