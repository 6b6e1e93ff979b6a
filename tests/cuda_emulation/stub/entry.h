/* How every call of the driver begins: the lock, its count, an injected failure, and the checks
 * that most calls share. */
#pragma once

#include "state.h"

#include <mutex>

#define DRIVER_API extern "C" __attribute__((visibility("default"))) int
#define STUB_API extern "C" __attribute__((visibility("default")))

namespace stub {

struct Call { // by name, without its version
    long long &count;
    int failing_in = 0, code = 0, times = 0; // times 0: from then on
};
Call &call_named(const char *function);

enum class Needs {
    nothing,
    initialisation,
    context,      // a current one that works
    release,      // a current one, broken or not: what is given back must not stay
    context_idle, // a working one, and no capture that forbids waiting or allocating
    release_idle,
};

class Entry {
  public:
    Entry(Call &call, Needs needs);
    int refused = 0;

    // The result of a call that worked: in a broken context the failure comes back all the same.
    int answer() const {
        const Context *context = current_context();
        return context ? context->broken : success;
    }

  private:
    std::unique_lock<std::recursive_mutex> lock_;
};

extern bool initialised;

} // namespace stub

#define ENTER(needs)                                                         \
    static stub::Call &this_call = stub::call_named(__func__);               \
    [[maybe_unused]] const stub::Entry entry(this_call, stub::Needs::needs); \
    if (entry.refused)                                                       \
    return entry.refused
