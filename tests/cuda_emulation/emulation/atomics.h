/* Atomics of device memory. Relaxed, as on a device: they order nothing else, but between fences.
 */
#pragma once

#include "machine.h"

#include <atomic>
#include <concepts>

namespace pc_emulation {

inline void between_fences([[maybe_unused]] void *address) {
#if defined(__SANITIZE_THREAD__)
    Unwatched unwatched;
    machine.current->fences.at_atomic(address);
#endif
}

template <class T>
concept Word =
    std::same_as<T, int> || std::same_as<T, unsigned> || std::same_as<T, unsigned long long>;

template <class T, class Change> T change_atomically(T *address, Change change) {
    std::atomic_ref<T> word(*address);
    T old = word.load(std::memory_order_relaxed);
    while (!word.compare_exchange_weak(old, change(old), std::memory_order_relaxed)) {
    }
    between_fences(address);
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
PC_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
#undef PC_ATOMIC

template <pc_emulation::Word T>
T atomicCAS(T *address, std::type_identity_t<T> expected, std::type_identity_t<T> desired) {
    std::atomic_ref<T>(*address).compare_exchange_strong(expected, desired,
                                                         std::memory_order_relaxed);
    pc_emulation::between_fences(address);
    return expected;
}

inline void __threadfence() {
#if defined(__SANITIZE_THREAD__)
    pc_emulation::Unwatched unwatched;
    pc_emulation::machine.current->fences.pass();
#endif
}
