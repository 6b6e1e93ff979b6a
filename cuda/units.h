/* Accesses of 16, 8, 4, 2 or 1 bytes, and how large they may be where bytes are addressed by a base
 * and steps.
 */
#ifndef PAGEDCACHE_CUDA_UNITS_H
#define PAGEDCACHE_CUDA_UNITS_H

#include "device.h"
#include "pagedcache/config.h"

template <int NBYTES> struct pc_unit_type;
template <> struct pc_unit_type<16> {
    using type = uint4;
};
template <> struct pc_unit_type<8> {
    using type = uint2;
};
template <> struct pc_unit_type<4> {
    using type = uint32_t;
};
template <> struct pc_unit_type<2> {
    using type = uint16_t;
};
template <> struct pc_unit_type<1> {
    using type = uint8_t;
};

template <int NBYTES> using pc_unit = typename pc_unit_type<NBYTES>::type;

/* At a multiple of the size. memcpy assumes nothing about the type of what lies there, and the
 * stated alignment makes it one access. */
template <int NBYTES> PC_DEVICE pc_unit<NBYTES> pc_load_unit(const void *at) {
    pc_unit<NBYTES> unit;
    memcpy(&unit, __builtin_assume_aligned(at, NBYTES), NBYTES);
    return unit;
}

template <int NBYTES> PC_DEVICE void pc_store_unit(void *at, const pc_unit<NBYTES> &unit) {
    memcpy(__builtin_assume_aligned(at, NBYTES), &unit, NBYTES);
}

PC_INLINE int pc_is_aligned(const void *address, int nbytes) {
    return ((uintptr_t)address & (uintptr_t)(nbytes - 1)) == 0;
}

/* The same at any address: in one access where it is aligned, which it nearly always is, else in
 * words or bytes. */
template <int NBYTES> PC_DEVICE pc_unit<NBYTES> pc_load_bytes(const void *at) {
    if (pc_is_aligned(at, NBYTES)) {
        return pc_load_unit<NBYTES>(at);
    }
    pc_unit<NBYTES> unit;
    if (NBYTES > 4 && pc_is_aligned(at, 4)) {
        memcpy(&unit, __builtin_assume_aligned(at, 4), NBYTES);
    } else {
        memcpy(&unit, at, NBYTES);
    }
    return unit;
}

template <int NBYTES> PC_DEVICE void pc_store_bytes(void *at, const pc_unit<NBYTES> &unit) {
    if (pc_is_aligned(at, NBYTES)) {
        pc_store_unit<NBYTES>(at, unit);
    } else if (NBYTES > 4 && pc_is_aligned(at, 4)) {
        memcpy(__builtin_assume_aligned(at, 4), &unit, NBYTES);
    } else {
        memcpy(at, &unit, NBYTES);
    }
}

/* Largest of 16, 8, 4, 2, 1 that divides every bit pattern or'ed into `bits`. */
constexpr int pc_unit_nbytes(uint64_t bits) {
    const uint64_t lowest = bits & (~bits + 1);
    return lowest == 0 || lowest > 16 ? 16 : (int)lowest;
}

#endif
