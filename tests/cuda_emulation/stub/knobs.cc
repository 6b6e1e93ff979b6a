/* What tests set and read: knobs, counters, injected failures, a broken context. */
#include "entry.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

namespace stub {

namespace {

struct Default {
    const char *name, *variable;
    long long value;
};
const Default defaults[] = {
    {"devices", "PC_STUB_DEVICES", 1},
    {"total_memory", "PC_STUB_TOTAL_MEMORY", 1ll << 30}, // of each device, bytes
    {"async", "PC_STUB_ASYNC", 0}, // 1: work waits until it is waited for; n > 1: at random
    {"free_waits", "PC_STUB_FREE_WAITS", 1}, // 0: memory goes although queued work may use it
    {"poison_max", "PC_STUB_POISON_MAX", 64ll << 20}, // larger allocations start as zeros
    {"queue_length", "PC_STUB_QUEUE_LENGTH", 1024},   // then the oldest work is done
};

// Never destroyed: calls come as late as the end of the process.
std::recursive_mutex &mutex = *new std::recursive_mutex;
auto &knobs = *new std::map<std::string, long long>;
auto &counters = *new std::map<std::string, long long>;
auto &calls = *new std::map<std::string, Call>;
bool forked = false;

void set_defaults() {
    for (const Default &each : defaults) {
        const char *text = getenv(each.variable);
        knobs[each.name] = text && *text ? strtoll(text, nullptr, 0) : each.value;
    }
}

[[maybe_unused]] const bool is_set_up = [] {
    set_defaults();
    return pthread_atfork(nullptr, nullptr, [] { forked = true; }) == 0;
}();

std::string without_version(const char *function) {
    std::string name = function;
    const size_t at = name.rfind("_v");
    if (at != std::string::npos && at + 3 == name.size())
        name.resize(at);
    return name;
}

} // namespace

bool initialised = false;

long long &knob(const std::string &name) {
    return knobs.at(name);
}

long long &counter(const std::string &name) {
    return counters[name];
}

Call &call_named(const char *function) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    const std::string name = without_version(function);
    return calls.try_emplace(name, Call{counter("calls:" + name)}).first->second;
}

Entry::Entry(Call &call, Needs needs) {
    if (forked) { // as a driver answers in the child of a process that used it
        refused = not_initialised;
        return;
    }
    lock_ = std::unique_lock<std::recursive_mutex>(mutex);
    call.count++;
    if (call.failing_in > 0 && --call.failing_in == 0) {
        refused = call.code;
        if (call.times == 0 || --call.times > 0)
            call.failing_in = 1;
        return;
    }
    if (needs == Needs::nothing)
        return;
    if (!initialised) {
        refused = not_initialised;
        return;
    }
    if (needs == Needs::initialisation)
        return;
    const Context *context = current_context();
    const bool releases = needs == Needs::release || needs == Needs::release_idle;
    if (!context)
        refused = invalid_context;
    else if (context->broken && !releases)
        refused = context->broken;
    else if (needs == Needs::context_idle || needs == Needs::release_idle)
        refused = forbidden_while_capturing() ? capture_unsupported : 0;
}

// ---- for tests
// ------------------------------------------------------------------------------------

STUB_API int pc_stub_set(const char *name, long long value) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    if (!knobs.count(name))
        return 1;
    knobs[name] = value;
    return 0;
}

// A knob, a counter, or "calls:cuMemAlloc"; 0 for what was never counted.
STUB_API long long pc_stub_get(const char *name) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    if (const auto found = knobs.find(name); found != knobs.end())
        return found->second;
    const auto found = counters.find(name);
    return found == counters.end() ? 0 : found->second;
}

// The nth call from now on (1: the next) of `function` gives `code`, `times` times; 0: for ever.
STUB_API void pc_stub_fail(const char *function, int nth, int code, int times) {
    Call &call = call_named(function);
    std::lock_guard<std::recursive_mutex> guard(mutex);
    call.failing_in = nth;
    call.code = code;
    call.times = times;
}

// As a failed kernel leaves a device: every call that needs its context gives `code`. 0: repaired.
STUB_API void pc_stub_break(int device, int code) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    primary_context(device).broken = code;
}

// Knobs as at the start, nothing fails, nothing is captured or queued, counts of events from zero.
STUB_API void pc_stub_reset(void) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    for (auto &[name, call] : calls)
        call.failing_in = 0;
    drop_captures();
    run_everything();
    for (int device = 0; device < max_devices; device++)
        primary_context(device).broken = 0;
    set_defaults();
    for (auto &[name, count] : counters)
        if (name.rfind("live_", 0) != 0)
            count = 0;
}

} // namespace stub
