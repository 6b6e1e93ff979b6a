/* Stackful fibers. ucontext starts one; after that the compiler's own setjmp and longjmp switch,
 * which save three registers and call nothing of the system. */
#pragma once

#include "sanitizers.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>

namespace pc_emulation {

constexpr size_t stack_nbytes = 256 << 10, stack_guard_nbytes = 4096;

struct Fiber {
    void *registers[5] = {};
    ucontext_t context = {};
    bool started = false;
    const void *stack = nullptr; // lowest address; for AddressSanitizer
    size_t stack_size = 0;
    void *asan_stack = nullptr, *tsan_identity = nullptr;
};

// The host thread that runs a launch. Launches exclude each other, so there is one.
inline Fiber host_fiber = {};

inline void adopt_host_thread() {
    host_fiber.started = true;
#if defined(__SANITIZE_THREAD__)
    host_fiber.tsan_identity = __tsan_get_current_fiber();
#endif
}

// First act on a stack that was just switched to.
inline void arrived(Fiber *self) {
#if defined(__SANITIZE_ADDRESS__)
    const void *stack;
    size_t size;
    __sanitizer_finish_switch_fiber(self->asan_stack, &stack, &size);
    if (self != &host_fiber) { // fibers are entered from the host thread only
        host_fiber.stack = stack;
        host_fiber.stack_size = size;
    }
#endif
    (void)self;
}

// Not in switch_fiber: a function cannot jump to a setjmp of its own.
[[gnu::noinline, gnu::no_sanitize("thread"), noreturn]] inline void jump(void **registers) {
    __builtin_longjmp(registers, 1);
}

[[gnu::noinline]] inline void switch_fiber(Fiber *from, Fiber *to) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&from->asan_stack, to->stack, to->stack_size);
#endif
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(to->tsan_identity, __tsan_switch_to_fiber_no_sync);
#endif
    if (!__builtin_setjmp(from->registers)) {
        if (to->started)
            jump(to->registers);
        to->started = true;
        setcontext(&to->context);
    }
    arrived(from);
}

inline Fiber *new_fiber(void (*entry)()) {
    static size_t count = 0;
    void *memory = mmap(nullptr, stack_nbytes + stack_guard_nbytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        abort();
    mprotect(memory, stack_guard_nbytes, PROT_NONE);
    Fiber *fiber = new Fiber;
    fiber->stack = static_cast<char *>(memory) + stack_guard_nbytes;
    // Staggered, or the hot ends of all stacks would share one set of the processor's cache.
    fiber->stack_size = stack_nbytes - count++ % 16 * 256;
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = const_cast<void *>(fiber->stack);
    fiber->context.uc_stack.ss_size = fiber->stack_size;
    fiber->context.uc_link = nullptr;
    makecontext(&fiber->context, entry, 0);
#if defined(__SANITIZE_THREAD__)
    fiber->tsan_identity = __tsan_create_fiber(0);
#endif
    return fiber;
}

} // namespace pc_emulation
