/* A kernel that touches memory that is not mapped (a guard page, a freed range) ends with CUDA's
 * error 700 instead of the process. ThreadSanitizer cannot leave a signal handler by a jump. */
#pragma once

#include "machine.h"

#include <signal.h>

namespace pc_emulation {

#if defined(__SANITIZE_THREAD__)

struct FaultTrap {};

#else

class FaultTrap {
  public:
    FaultTrap() {
        struct sigaction action = {};
        action.sa_sigaction = &FaultTrap::on_fault;
        action.sa_flags = SA_SIGINFO | SA_NODEFER; // the handler does not return
        inside_ = true;
        sigaction(SIGSEGV, &action, &previous_[0]);
        sigaction(SIGBUS, &action, &previous_[1]);
    }
    ~FaultTrap() {
        inside_ = false;
        sigaction(SIGSEGV, &previous_[0], nullptr);
        sigaction(SIGBUS, &previous_[1], nullptr);
    }
    FaultTrap(const FaultTrap &) = delete;

  private:
    static void on_fault(int number, siginfo_t *info, void *) {
        Thread *thread = machine.current;
        if (!inside_ || !thread || thread->state != State::running) { // somebody else's fault
            sigaction(number, &previous_[number == SIGBUS], nullptr);
            return;
        }
        char what[128];
        const uint3 &at = thread->index;
        snprintf(what, sizeof what, "thread (%u,%u,%u): illegal access to address %p", at.x, at.y,
                 at.z, info->si_addr);
        fail_launch(illegal_address, what);
        for (;;)
            switch_fiber(thread->fiber, &host_fiber);
    }

    static inline thread_local bool inside_ = false; // launches exclude each other, threads do not
    static inline struct sigaction previous_[2] = {};
};

#endif

} // namespace pc_emulation
