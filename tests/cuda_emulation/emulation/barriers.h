/* __syncthreads, and __syncwarp, which orders memory between the lanes of a warp. */
#pragma once

#include "warp.h"

inline void __syncthreads(PC_HERE) {
    using namespace pc_emulation;
    wait_as(State::at_barrier, file, line);
    machine.side->whole.leave();
}

inline void __syncwarp(unsigned mask = ~0u, PC_HERE) {
    using namespace pc_emulation;
    Meeting &meeting = machine.side->warps[machine.current->number / 32];
    meeting.arrive();
    wait_for_warp(WarpOperation::sync, mask, 0, machine.current->lane(), file, line);
    meeting.leave();
}

[[noreturn]] inline void __trap(PC_HERE) {
    pc_emulation::stop(file, line, "trapped");
}
