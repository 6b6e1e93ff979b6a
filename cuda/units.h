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

/* At a multiple of the size, in one access.
 *
 * nvcc learns the alignment from the type. It must not be told by __builtin_assume_aligned(): nvcc
 * joins the loads of the branches below, and then uses the alignment that one branch assumes in all
 * of them (13.0: addresses that are not aligned fault), or the least one, byte by byte. The host,
 * where types may not be mixed like this, gets memcpy(). */
template <int NBYTES> PC_DEVICE pc_unit<NBYTES> pc_load_unit(const void *at) {
#if defined(__CUDACC__)
    return *(const pc_unit<NBYTES> *)at;
#else
    pc_unit<NBYTES> unit;
    memcpy(&unit, __builtin_assume_aligned(at, NBYTES), NBYTES);
    return unit;
#endif
}

template <int NBYTES> PC_DEVICE void pc_store_unit(void *at, const pc_unit<NBYTES> &unit) {
#if defined(__CUDACC__)
    *(pc_unit<NBYTES> *)at = unit;
#else
    memcpy(__builtin_assume_aligned(at, NBYTES), &unit, NBYTES);
#endif
}

PC_INLINE int pc_is_aligned(const void *address, int nbytes) {
    return ((uintptr_t)address & (uintptr_t)(nbytes - 1)) == 0;
}

/* NBYTES at a multiple of PIECE, in as many accesses as that takes. */
template <int NBYTES, int PIECE> PC_DEVICE pc_unit<NBYTES> pc_load_pieces(const void *at) {
    pc_unit<PIECE> pieces[NBYTES / PIECE];
    PC_UNROLL
    for (int i = 0; i < NBYTES / PIECE; i++) {
        pieces[i] = pc_load_unit<PIECE>((const uint8_t *)at + i * PIECE);
    }
    pc_unit<NBYTES> unit;
    memcpy(&unit, pieces, NBYTES);
    return unit;
}

template <int NBYTES, int PIECE>
PC_DEVICE void pc_store_pieces(void *at, const pc_unit<NBYTES> &unit) {
    pc_unit<PIECE> pieces[NBYTES / PIECE];
    memcpy(pieces, &unit, NBYTES);
    PC_UNROLL
    for (int i = 0; i < NBYTES / PIECE; i++) {
        pc_store_unit<PIECE>((uint8_t *)at + i * PIECE, pieces[i]);
    }
}

/* NBYTES at any address: in one access where it is aligned, which it nearly always is, else in
 * words or bytes. */
template <int NBYTES> PC_DEVICE pc_unit<NBYTES> pc_load_bytes(const void *at) {
    if (pc_is_aligned(at, NBYTES)) {
        return pc_load_unit<NBYTES>(at);
    }
    if constexpr (NBYTES > 4) {
        if (pc_is_aligned(at, 4)) {
            return pc_load_pieces<NBYTES, 4>(at);
        }
    }
    return pc_load_pieces<NBYTES, 1>(at);
}

template <int NBYTES> PC_DEVICE void pc_store_bytes(void *at, const pc_unit<NBYTES> &unit) {
    if (pc_is_aligned(at, NBYTES)) {
        pc_store_unit<NBYTES>(at, unit);
        return;
    }
    if constexpr (NBYTES > 4) {
        if (pc_is_aligned(at, 4)) {
            pc_store_pieces<NBYTES, 4>(at, unit);
            return;
        }
    }
    pc_store_pieces<NBYTES, 1>(at, unit);
}

/* Largest of 16, 8, 4, 2, 1 that divides every bit pattern or'ed into `bits`. */
constexpr int pc_unit_nbytes(uint64_t bits) {
    const uint64_t lowest = bits & (~bits + 1);
    return lowest == 0 || lowest > 16 ? 16 : (int)lowest;
}

/* Start the kernel of a family of five, KERNEL<16> to KERNEL<1>. */
#define PC_LAUNCH_WIDTH(kernel, width, grid, stream, ...) \
    pc_launch((width) == 16  ? kernel<16>                 \
              : (width) == 8 ? kernel<8>                  \
              : (width) == 4 ? kernel<4>                  \
              : (width) == 2 ? kernel<2>                  \
                             : kernel<1>,                 \
              grid, PC_CTA, 0, stream, __VA_ARGS__)

#endif
