/*
 * Vectors of PC_WIDTH float32: the few operations in which instruction sets differ. Included once
 * per instruction set, by attend_all.h and codec_all.h; everything built on it is the same text for
 * all.
 *
 * PC_ISA: suffix of all names; PC_WIDTH: 16 (AVX-512), 8 (AVX2 with FMA and F16C), 4 (SSE2, NEON)
 * or 1 (any compiler); PC_TARGET: attribute of functions that may use the instructions.
 */
#ifdef PC_ISA

enum { V(width) = PC_WIDTH };

#if PC_WIDTH == 1
typedef float vf;
typedef uint32_t vi;
#else
typedef float vf __attribute__((vector_size(4 * PC_WIDTH)));
typedef uint32_t vi __attribute__((vector_size(4 * PC_WIDTH)));
#endif

PC_VECTOR vf V(load)(const float *from) {
    vf v;
    memcpy(&v, from, sizeof v);
    return v;
}

PC_VECTOR vi V(load_bits)(const uint8_t *from) {
    vi v;
    memcpy(&v, from, sizeof v);
    return v;
}

PC_VECTOR void V(store)(float *to, vf v) {
    memcpy(to, &v, sizeof v);
}

/* The same bits as the other type. */
PC_VECTOR vf V(as_float)(vi bits) {
    vf v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

PC_VECTOR vi V(as_bits)(vf value) {
    vi v;
    memcpy(&v, &value, sizeof v);
    return v;
}

#if PC_WIDTH == 16
#include "vector_avx512.h"
#elif PC_WIDTH == 8
#include "vector_avx2.h"
#elif PC_ON_NEON
#include "vector_neon.h"
#else
#include "vector_any.h"
#endif

#if PC_WIDTH != 16
/* The low and the high halves of PC_WIDTH bytes, less 8, times scale, plus offset. */
PC_VECTOR void V(scaled_nibbles)(const uint8_t *from, vf scale, vf offset, vf *low, vf *high) {
    V(nibbles)(from, low, high);
    *low = V(fma)(*low, scale, offset);
    *high = V(fma)(*high, scale, offset);
}

#define PC_TURNS_PAIRS 0
PC_VECTOR void V(turn_pairs)(const uint8_t *const *rows, int64_t skip, uint8_t *to,
                             int64_t stride) {
    (void)rows, (void)skip, (void)to, (void)stride;
}
#endif

#endif
