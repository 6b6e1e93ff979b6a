/*
 * Groups of PC_GROUP lanes narrowed and widened: the few operations in which instruction sets
 * differ, beside those of vector.h. Included once per instruction set; what is built on them
 * (convert.h, encode.h, decode.h, tiles.h) is the same text for all. There are none where PC_WIDTH
 * is 1.
 */
#if defined(PC_ISA) && PC_WIDTH > 1

enum { V(per_group) = PC_GROUP / PC_WIDTH, V(line) = 64 /* bytes of a cache line */ };

PC_VECTOR vi V(all_bits)(uint32_t bits) {
    vi v;
    const vf same = V(all)(pc_bits_float(bits));
    memcpy(&v, &same, sizeof v);
    return v;
}

/* Whether every bit of every lane is set. */
PC_VECTOR int V(every)(vi lanes) {
    uint64_t parts[PC_WIDTH / 2], all = UINT64_MAX;
    memcpy(parts, &lanes, sizeof parts);
    for (int i = 0; i < PC_WIDTH / 2; i++) {
        all &= parts[i];
    }
    return all == UINT64_MAX;
}

#if PC_WIDTH == 16
#include "pack_avx512.h"
#elif PC_WIDTH == 8
#include "pack_avx2.h"
#elif PC_ON_NEON
#include "pack_neon.h"
#else
#include "pack_any.h"
#endif

#if PC_WIDTH != 16
/* A group of numbers, plus offset, times scale, and plus *minimum where there is one. */
PC_VECTOR void V(number_values)(const vi *q, float offset, vf scale, const vf *minimum, vf *x) {
    for (int i = 0; i < V(per_group); i++) {
        x[i] = (V(to_floats)(q[i]) + V(all)(offset)) * scale;
        if (minimum != NULL) {
            x[i] = x[i] + *minimum;
        }
    }
}
#endif

#if !PC_ON_NEON
/* Whether a value of a group is NaN. */
PC_VECTOR int V(has_nan)(const vf *x) {
    int nan = 0;
    PC_UNROLL
    for (int i = 0; i < V(per_group); i += 2) {
        nan |= V(any_nan)(x[i], x[i + 1]);
    }
    return nan;
}
#endif

#endif
