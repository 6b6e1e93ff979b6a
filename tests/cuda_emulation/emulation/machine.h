/* The state of the launch that is running. Launches exclude each other: one CTA, one current
 * thread. The functions that work on it are in schedule.h, warp.h and barriers.h. */
#pragma once

#include "fiber.h"
#include "shared_memory.h"
#include "vectors.h"

#include <deque>
#include <functional>
#include <mutex>
#include <stdint.h>
#include <stdio.h>
#include <string>
#include <vector>

#define PC_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace pc_emulation {

enum class State { fresh, running, ready, at_barrier, at_warp_operation, done };
enum class WarpOperation { shuffle, ballot, sync, multiply };

struct PendingCopy {
    void *destination;
    const void *source;
    size_t nbytes;
};

struct Thread {
    unsigned number; // in its CTA
    uint3 index;
    State state;
    Fiber *fiber = nullptr;
    const char *file = ""; // where it waits
    int line = 0;
    WarpOperation operation;
    unsigned mask, source_lane;
    uint64_t value, result;
    unsigned products = 0; // of matrices that it took part in
    Fences fences;
    std::vector<PendingCopy> open_copies;
    std::deque<std::vector<PendingCopy>> committed_copies;

    unsigned lane() const {
        return number % 32;
    }
};

struct Launch {
    std::function<void()> kernel;
    dim3 grid, cta;
    size_t shared_nbytes;
    std::string order; // "fwd", "rev" or a seed
};

/* The race detector sees CTAs as concurrent that follow each other: they take turns with two sides,
 * each with fibers and shared memory of its own. Only a CTA and the one after the next are ordered.
 */
struct Side {
    std::deque<Thread> threads;
    SharedMemory shared;
    Meeting whole, warps[32];
};

struct Machine {
    std::mutex mutex;
    const Launch *launch = nullptr;
    dim3 grid, cta;
    uint3 cta_index = {0, 0, 0};
    Thread *current = nullptr;
    Side sides[2];
    Side *side = nullptr;
    std::vector<Thread *> order; // threads of the CTA, warp by warp
    size_t next = 0, warp_end = 0;
    std::vector<Fiber *> idle_fibers;
    bool failed = false;
    int failure_code = 0;
    std::string failure; // of the last launch that failed
};

inline Machine machine;

// Codes of the CUDA runtime that the emulation itself returns.
constexpr int launch_failure = 719, illegal_address = 700;

inline void fail_launch(int code, const std::string &what) {
    char cta[64];
    const uint3 &at = machine.cta_index;
    snprintf(cta, sizeof cta, "CTA (%u,%u,%u) ", at.x, at.y, at.z);
    machine.failed = true;
    machine.failure_code = code;
    machine.failure = cta + what;
    fprintf(stderr, "CUDA emulation: %s\n", machine.failure.c_str());
}

inline void fail_thread(const Thread &thread, const char *file, int line, const std::string &what) {
    char place[512];
    const uint3 &at = thread.index;
    snprintf(place, sizeof place, "thread (%u,%u,%u) at %s:%d: ", at.x, at.y, at.z, file, line);
    fail_launch(launch_failure, place + what);
}

// The running thread leaves the processor; comes back when the scheduler continues it.
inline void wait_as(State state, const char *file, int line) {
    Unwatched unwatched;
    Thread &self = *machine.current;
    machine.side->whole.arrive(); // orders nothing before the next barrier, or the host's clean-up
    self.state = state;
    self.file = file;
    self.line = line;
    switch_fiber(self.fiber, &host_fiber);
}

// Ends the launch from inside a thread. The fiber is never continued.
[[noreturn]] inline void stop(const char *file, int line, const char *what) {
    Unwatched unwatched;
    machine.side->whole.arrive();
    fail_thread(*machine.current, file, line, what);
    for (;;)
        switch_fiber(machine.current->fiber, &host_fiber);
}

} // namespace pc_emulation

#define threadIdx (::pc_emulation::machine.current->index)
#define blockIdx (::pc_emulation::machine.cta_index)
#define blockDim (::pc_emulation::machine.cta)
#define gridDim (::pc_emulation::machine.grid)
