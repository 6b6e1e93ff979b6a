/* A driver for machines without one: libcuda.so.1 on host memory. The state that its parts share.
 * Every exported call takes the one lock by entry.h; nothing here locks. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace stub {

using Address = uint64_t;

enum Code : int { // CUDA's
    success = 0,
    invalid_value = 1,
    out_of_memory = 2,
    not_initialised = 3,
    no_device = 100,
    invalid_device = 101,
    invalid_context = 201,
    already_registered = 712,
    invalid_handle = 400,
    not_found = 500,
    not_ready = 600,
    unsupported = 801,
    capture_unsupported = 900,
    capture_invalidated = 901,
    capture_unmatched = 903,
    capture_unjoined = 904,
    capture_isolation = 905,
    capture_implicit = 906,
    captured_event = 907,
    unknown = 999,
};

constexpr int max_devices = 16;

// ---- knobs and counters (knobs.cc)
// ----------------------------------------------------------------
long long &knob(const std::string &name);    // what a test may set
long long &counter(const std::string &name); // what a test may read; "live_…" are never reset

// ---- work in streams (queues.cc)
// ------------------------------------------------------------------
struct Stream;

struct Wait { // until the stream has done its operation of this number
    Stream *stream;
    uint64_t number;
};

struct Range {
    Address start;
    size_t nbytes;
};

struct Operation {
    std::function<int()> run; // 0, or the code that breaks the context
    std::vector<Wait> after;
    std::vector<Range> touches; // device memory, where it is known
    uint64_t number = 0;
};

struct Capture;
struct Context;

struct Stream {
    Context *context = nullptr;
    bool blocking = true; // waits for the legacy stream, and it for this one
    bool live = true;
    std::deque<Operation> queue;
    uint64_t submitted = 0, done = 0;
    std::shared_ptr<Capture> capture;
};

struct Context {
    int device = 0, references = 0;
    bool primary = false;
    int broken = 0; // the code of the failure that nothing repairs
    Stream legacy, per_thread;
};

int submit(Stream &stream, Operation operation); // queues it, runs it or captures it
void run_through(Stream &stream,
                 uint64_t number); // as far as this operation, and what it waits for
void run_all(Stream &stream);
void run_everything();
bool step(Stream &stream); // one operation; whether there was one
int queued_uses(Range range);

// ---- contexts and devices (contexts.cc, devices.cc)
// -----------------------------------------------
Context *current_context(); // of this thread
Context &primary_context(int device);
bool is_device(int device);

// ---- streams and events (streams.cc)
// --------------------------------------------------------------
Stream *stream_of(void *handle); // nullptr: no such stream
std::vector<Stream *> streams_of(const Context &context);

// ---- memory (guarded.cc, memory.cc, pinned.cc)
// -----------------------------------------------------
struct Guarded { // a range between pages that nobody may touch
    char *start = nullptr, *map = nullptr;
    size_t nbytes = 0, map_nbytes = 0;
};
bool make_guarded(Guarded &range, size_t nbytes, size_t alignment);
bool is_intact(const Guarded &range);     // nothing was written beside it
void retire(const Guarded &range);        // no access any more, for as long as we remember it
void forbid_access(const Guarded &range); // as after retire(), but it still exists
bool is_retired(Address address);

struct Allocation {
    Guarded range;
    Context *context;
    bool managed;
};
const Allocation *find_allocation(Address address);

struct Pinned {
    Guarded range; // map is nullptr where the memory is the caller's
    Context *context;
    unsigned flags;
};
const Pinned *find_pinned(Address address);

enum class Kind { device, pinned, pageable, invalid };
Kind kind_of(Address address, size_t nbytes);

// ---- stream capture (capture.cc)
// ------------------------------------------------------------------
struct Graph {
    std::vector<Operation> operations;
};

struct Capture {
    uint64_t id;
    int mode; // 0 global, 1 of this thread, 2 relaxed
    uint64_t thread;
    Stream *origin;
    bool invalid = false;
    Graph graph;
    uint64_t stamp = 0;
    // What each stream of the capture has seen of each: the stamp of the last operation.
    std::map<Stream *, std::map<Stream *, uint64_t>> seen;
};

void capture_operation(Stream &stream, Operation operation);
bool forbidden_while_capturing(); // counts, and spoils the captures that forbid it
bool implicit_while_capturing(const Stream &legacy);
void drop_captures();

} // namespace stub
