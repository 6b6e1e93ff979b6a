/* What AddressSanitizer and ThreadSanitizer must be told about fibers and shared memory.
 * Without a sanitizer every function here is empty. */
#pragma once

#include <stddef.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char *, int);
void AnnotateIgnoreReadsEnd(const char *, int);
void AnnotateIgnoreWritesBegin(const char *, int);
void AnnotateIgnoreWritesEnd(const char *, int);
}
#endif

namespace pc_emulation {

#if defined(__SANITIZE_THREAD__)
constexpr bool watches_races = true;
#else
constexpr bool watches_races = false;
#endif
#if defined(__SANITIZE_ADDRESS__)
constexpr bool watches_addresses = true;
#else
constexpr bool watches_addresses = false;
#endif

// Bytes that nothing may touch, and bytes that may be touched (again).
inline void forbid(void *address, size_t nbytes) {
#if defined(__SANITIZE_ADDRESS__)
    __asan_poison_memory_region(address, nbytes);
#else
    (void)address, (void)nbytes;
#endif
}
inline void allow(void *address, size_t nbytes) {
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(address, nbytes);
#else
    (void)address, (void)nbytes;
#endif
}

/* Passes on what is known at one address to another; it must not be learned by who asks for it: an
 * identity of the carrier's own does the work, and remembers it. */
class Carrier {
  public:
    void carry([[maybe_unused]] void *from, [[maybe_unused]] void *to) {
#if defined(__SANITIZE_THREAD__)
        void *self = __tsan_get_current_fiber();
        if (!identity_)
            identity_ = __tsan_create_fiber(0);
        __tsan_switch_to_fiber(identity_, __tsan_switch_to_fiber_no_sync);
        __tsan_acquire(from);
        __tsan_release(to);
        __tsan_switch_to_fiber(self, __tsan_switch_to_fiber_no_sync);
#endif
    }

  private:
#if defined(__SANITIZE_THREAD__)
    void *identity_ = nullptr;
#endif
};

/* A place where threads meet. What happened before arrive() of each happens before what comes after
 * leave() of each, once the scheduler has called open(). It must not learn the order itself, or it
 * would carry it to other warps and CTAs. */
class Meeting {
  public:
    void arrive() {
#if defined(__SANITIZE_THREAD__)
        __tsan_release(&arrived_);
#endif
    }
    void open() {
        carrier_.carry(&arrived_, &open_);
    }
    void leave() {
#if defined(__SANITIZE_THREAD__)
        __tsan_acquire(&open_);
#endif
    }
    // For the host thread: all that it did comes before, all that it will do comes after.
    void host_opens() {
#if defined(__SANITIZE_THREAD__)
        __tsan_release(&open_);
#endif
    }
    void host_closes() {
#if defined(__SANITIZE_THREAD__)
        __tsan_acquire(&arrived_);
#endif
    }

  private:
    char arrived_ = 0, open_ = 0;
    Carrier carrier_;
};

/* A thread's fences. Its atomics pass on what it did before its last fence, nothing that it did
 * since; and what they met is known to it from its next fence on. */
class Fences {
  public:
    void pass() {
#if defined(__SANITIZE_THREAD__)
        __tsan_release(&done_);
        __tsan_acquire(&met_);
        passed_ = true;
#endif
    }
    void at_atomic([[maybe_unused]] void *address) {
#if defined(__SANITIZE_THREAD__)
        in_.carry(address, &met_);
        if (passed_)
            out_.carry(&done_, address);
#endif
    }
    void begin_cta() {
        passed_ = false;
    }

  private:
    char done_ = 0, met_ = 0;
    bool passed_ = false;
    Carrier in_, out_;
};

// The emulation's own variables are no business of the race detector.
inline void begin_unwatched() {
#if defined(__SANITIZE_THREAD__)
    AnnotateIgnoreReadsBegin("", 0);
    AnnotateIgnoreWritesBegin("", 0);
#endif
}
inline void end_unwatched() {
#if defined(__SANITIZE_THREAD__)
    AnnotateIgnoreWritesEnd("", 0);
    AnnotateIgnoreReadsEnd("", 0);
#endif
}
struct Unwatched {
    Unwatched() {
        begin_unwatched();
    }
    ~Unwatched() {
        end_unwatched();
    }
    Unwatched(const Unwatched &) = delete;
};

} // namespace pc_emulation
