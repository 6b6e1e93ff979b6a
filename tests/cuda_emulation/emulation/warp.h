/* Warp operations that exchange values. They order no memory: only __syncwarp does. */
#pragma once

#include "machine.h"

#include <string.h>

namespace pc_emulation {

inline uint64_t wait_for_warp(WarpOperation operation, unsigned mask, uint64_t value,
                              unsigned source_lane, const char *file, int line) {
    {
        Unwatched unwatched;
        Thread &self = *machine.current;
        if (!(mask >> self.lane() & 1))
            stop(file, line, "calls a warp operation without being in its mask");
        self.operation = operation;
        self.mask = mask;
        self.value = value;
        self.source_lane = source_lane;
    }
    wait_as(State::at_warp_operation, file, line);
    return machine.current->result;
}

template <class T>
T shuffle(unsigned mask, T value, unsigned source_lane, const char *file, int line) {
    static_assert(sizeof(T) <= 8, "shuffles exchange at most 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = wait_for_warp(WarpOperation::shuffle, mask, bits, source_lane, file, line);
    memcpy(&value, &bits, sizeof value);
    return value;
}

} // namespace pc_emulation

template <class T> T __shfl_sync(unsigned mask, T value, int source, int width = 32, PC_HERE) {
    const unsigned lane = pc_emulation::machine.current->lane(), w = unsigned(width);
    return pc_emulation::shuffle(mask, value, (lane & ~(w - 1)) + (unsigned(source) & (w - 1)),
                                 file, line);
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32, PC_HERE) {
    const unsigned lane = pc_emulation::machine.current->lane(), w = unsigned(width);
    const unsigned other = lane ^ unsigned(flip);
    return pc_emulation::shuffle(mask, value, other <= (lane | (w - 1)) ? other : lane, file, line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, PC_HERE) {
    const unsigned lane = pc_emulation::machine.current->lane(), w = unsigned(width);
    const bool inside = (lane & (w - 1)) + delta < w;
    return pc_emulation::shuffle(mask, value, inside ? lane + delta : lane, file, line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, PC_HERE) {
    const unsigned lane = pc_emulation::machine.current->lane(), w = unsigned(width);
    const bool inside = (lane & (w - 1)) >= delta;
    return pc_emulation::shuffle(mask, value, inside ? lane - delta : lane, file, line);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, PC_HERE) {
    using namespace pc_emulation;
    return unsigned(wait_for_warp(WarpOperation::ballot, mask, predicate != 0, 0, file, line));
}
inline int __any_sync(unsigned mask, int predicate, PC_HERE) {
    return __ballot_sync(mask, predicate, file, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, PC_HERE) {
    return __ballot_sync(mask, !predicate, file, line) == 0;
}
