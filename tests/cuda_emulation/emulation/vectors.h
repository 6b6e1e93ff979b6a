/* Function qualifiers and vector types under CUDA's names, with CUDA's sizes and alignments. */
#pragma once

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

struct uint3 {
    unsigned x, y, z;
};

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {
    }
};

#define PC_VECTOR_TYPES(name, type)                                     \
    struct alignas(2 * sizeof(type)) name##2 {                          \
        type x, y;                                                      \
    };                                                                  \
    struct alignas(sizeof(type) == 8 ? 16 : 4 * sizeof(type)) name##4 { \
        type x, y, z, w;                                                \
    };                                                                  \
    inline name##2 make_##name##2(type x, type y) {                     \
        return {x, y};                                                  \
    }                                                                   \
    inline name##4 make_##name##4(type x, type y, type z, type w) {     \
        return {x, y, z, w};                                            \
    }

PC_VECTOR_TYPES(char, signed char)
PC_VECTOR_TYPES(uchar, unsigned char)
PC_VECTOR_TYPES(short, short)
PC_VECTOR_TYPES(ushort, unsigned short)
PC_VECTOR_TYPES(int, int)
PC_VECTOR_TYPES(uint, unsigned)
PC_VECTOR_TYPES(longlong, long long)
PC_VECTOR_TYPES(ulonglong, unsigned long long)
PC_VECTOR_TYPES(float, float)
#undef PC_VECTOR_TYPES
