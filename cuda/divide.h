/* Division of 64-bit indices by a number that the host knows: one multiplication instead of about
 * a hundred instructions, exact for every index from 0 to 2^63 - 1.
 */
#ifndef PAGEDCACHE_CUDA_DIVIDE_H
#define PAGEDCACHE_CUDA_DIVIDE_H

#include "device.h"

__extension__ typedef unsigned __int128 pc_uint128;

/* With 2^(shift + 1) >= divisor > 2^shift, magic = ceil(2^(64 + shift) / divisor) fits 64 bits and
 * is too large by less than 1, which changes no quotient below 2^63. A divisor of 1 has magic 0. */
struct pc_divisor {
    int64_t divisor;
    uint64_t magic;
    int shift;
};

inline pc_divisor pc_make_divisor(int64_t divisor) {
    pc_divisor made = {divisor, 0, 0};
    if (divisor > 1) {
        while ((int64_t)1 << made.shift < divisor - ((int64_t)1 << made.shift)) {
            made.shift++;
        }
        const pc_uint128 power = (pc_uint128)1 << (64 + made.shift);
        made.magic = (uint64_t)((power + (pc_uint128)divisor - 1) / (pc_uint128)divisor);
    }
    return made;
}

PC_DEVICE int64_t pc_divide(int64_t value, const pc_divisor &by) {
    const uint64_t high = (uint64_t)(((pc_uint128)(uint64_t)value * by.magic) >> 64);
    return by.magic ? (int64_t)(high >> by.shift) : value;
}

#endif
