/* Atomics of device memory. Relaxed, as on a device: they order nothing else. */
#pragma once

#include <atomic>
#include <concepts>

namespace pc_emulation {

template <class T>
concept Word =
    std::same_as<T, int> || std::same_as<T, unsigned> || std::same_as<T, unsigned long long>;

template <class T, class Change> T change_atomically(T *address, Change change) {
    std::atomic_ref<T> word(*address);
    T old = word.load(std::memory_order_relaxed);
    while (!word.compare_exchange_weak(old, change(old), std::memory_order_relaxed)) {
    }
    return old;
}

} // namespace pc_emulation

#define PC_ATOMIC(name, expression)                                                              \
    template <pc_emulation::Word T> T name(T *address, std::type_identity_t<T> value) {          \
        return pc_emulation::change_atomically(address, [=](T old) -> T { return expression; }); \
    }
PC_ATOMIC(atomicAdd, old + value)
PC_ATOMIC(atomicMin, old < value ? old : value)
PC_ATOMIC(atomicMax, old > value ? old : value)
PC_ATOMIC(atomicAnd, old &value)
PC_ATOMIC(atomicOr, old | value)
PC_ATOMIC(atomicExch, (void(old), value))
#undef PC_ATOMIC

template <pc_emulation::Word T>
T atomicCAS(T *address, std::type_identity_t<T> expected, std::type_identity_t<T> desired) {
    std::atomic_ref<T>(*address).compare_exchange_strong(expected, desired,
                                                         std::memory_order_relaxed);
    return expected;
}
