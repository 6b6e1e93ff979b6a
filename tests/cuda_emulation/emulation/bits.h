/* Loads through the read-only cache, bit counts and casts, min and max, under CUDA's names. */
#pragma once

#include <bit>
#include <stdint.h>
#include <type_traits>

template <class T> T __ldg(const T *address) {
    return *address;
}
template <class T> T __ldcg(const T *address) {
    return *address;
}
template <class T> T __ldcs(const T *address) {
    return *address;
}
template <class T> void __stcs(T *address, T value) {
    *address = value;
}
template <class T> void __stcg(T *address, T value) {
    *address = value;
}

inline int __popc(unsigned x) {
    return std::popcount(x);
}
inline int __popcll(unsigned long long x) {
    return std::popcount(x);
}
inline int __clz(int x) {
    return std::countl_zero(unsigned(x));
}
inline int __ffs(int x) {
    return __builtin_ffs(x);
}
inline int __ffsll(long long x) {
    return __builtin_ffsll(x);
}
inline unsigned __float_as_uint(float x) {
    return std::bit_cast<unsigned>(x);
}
inline float __uint_as_float(unsigned x) {
    return std::bit_cast<float>(x);
}

template <class A, class B>
    requires std::is_arithmetic_v<A> && std::is_arithmetic_v<B>
constexpr std::common_type_t<A, B> min(A a, B b) {
    return std::common_type_t<A, B>(b) < std::common_type_t<A, B>(a) ? b : a;
}
template <class A, class B>
    requires std::is_arithmetic_v<A> && std::is_arithmetic_v<B>
constexpr std::common_type_t<A, B> max(A a, B b) {
    return std::common_type_t<A, B>(a) < std::common_type_t<A, B>(b) ? b : a;
}
