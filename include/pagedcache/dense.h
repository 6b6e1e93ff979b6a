/* Float formats as groups of one value with no scale, so that the format table needs no special
 * rows for them. NaN and Inf are values like others here. */
#ifndef PAGEDCACHE_DENSE_H
#define PAGEDCACHE_DENSE_H

#include "round.h"

PC_INLINE void pc_encode_float32(const float *PC_RESTRICT x, uint8_t *PC_RESTRICT at,
                                 uint8_t *PC_RESTRICT scale_at) {
    (void)scale_at;
    memcpy(at, x, 4);
}

PC_INLINE void pc_decode_float32(const uint8_t *PC_RESTRICT at, const uint8_t *PC_RESTRICT scale_at,
                                 float *PC_RESTRICT x) {
    (void)scale_at;
    memcpy(x, at, 4);
}

PC_INLINE void pc_encode_float16(const float *PC_RESTRICT x, uint8_t *PC_RESTRICT at,
                                 uint8_t *PC_RESTRICT scale_at) {
    const uint16_t half = pc_float_to_half(*x);
    (void)scale_at;
    memcpy(at, &half, 2);
}

PC_INLINE void pc_decode_float16(const uint8_t *PC_RESTRICT at, const uint8_t *PC_RESTRICT scale_at,
                                 float *PC_RESTRICT x) {
    uint16_t half;
    (void)scale_at;
    memcpy(&half, at, 2);
    *x = pc_half_to_float(half);
}

PC_INLINE void pc_encode_bfloat16(const float *PC_RESTRICT x, uint8_t *PC_RESTRICT at,
                                  uint8_t *PC_RESTRICT scale_at) {
    const uint16_t bfloat = pc_float_to_bfloat(*x);
    (void)scale_at;
    memcpy(at, &bfloat, 2);
}

PC_INLINE void pc_decode_bfloat16(const uint8_t *PC_RESTRICT at,
                                  const uint8_t *PC_RESTRICT scale_at, float *PC_RESTRICT x) {
    uint16_t bfloat;
    (void)scale_at;
    memcpy(&bfloat, at, 2);
    *x = pc_bfloat_to_float(bfloat);
}

#endif
