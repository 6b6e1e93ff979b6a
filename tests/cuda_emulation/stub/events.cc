/* Events: a place in a stream. A destroyed event that is still waited for keeps its meaning. */
#include "entry.h"

#include <algorithm>
#include <time.h>

namespace stub {

namespace {

struct Event {
    bool live = true;
    Stream *stream = nullptr; // where it was recorded last
    uint64_t number = 0;
    Context *context = nullptr;
    std::shared_ptr<double> moment; // milliseconds
    std::weak_ptr<Capture> capture; // recorded in a stream that was being captured
    std::map<Stream *, uint64_t> seen;
};

std::vector<Event *> &all_events = *new std::vector<Event *>; // never deleted

Event *event_of(void *handle) {
    const auto found = std::find(all_events.begin(), all_events.end(), handle);
    return found != all_events.end() && (*found)->live ? *found : nullptr;
}

bool is_complete(const Event &event) {
    return !event.stream || event.stream->done >= event.number;
}

double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return double(time.tv_sec) * 1e3 + double(time.tv_nsec) * 1e-6;
}

int wait_under_capture(Stream &stream, const Event &event, std::shared_ptr<Capture> capture) {
    if (stream.capture && stream.capture != capture) {
        stream.capture->invalid = capture->invalid = true;
        return capture_isolation;
    }
    auto &seen = capture->seen[&stream];
    if (!stream.capture) { // joins; it must be joined again before the capture ends
        stream.capture = capture;
        seen[&stream] = ++capture->stamp;
    }
    for (const auto &[other, stamp] : event.seen)
        seen[other] = std::max(seen[other], stamp);
    return success;
}

} // namespace

DRIVER_API cuEventCreate(void **handle, unsigned) {
    ENTER(context);
    Event *made = nullptr;
    for (Event *event : all_events)
        if (!event->live)
            made = event;
    if (!made)
        all_events.push_back(made = new Event);
    *made = Event();
    made->context = current_context();
    *handle = made;
    counter("live_events")++;
    return success;
}

// An event knows its context: none need be current, nor is one for the runtime's cudaEventDestroy.
DRIVER_API cuEventDestroy_v2(void *handle) {
    ENTER(initialisation);
    Event *event = event_of(handle);
    if (!event)
        return invalid_handle;
    if (!is_complete(*event))
        counter("events_destroyed_in_use")++;
    event->live = false;
    counter("live_events")--;
    return entry.answer();
}

DRIVER_API cuEventRecord(void *handle, void *stream_handle) {
    ENTER(context);
    Event *event = event_of(handle);
    Stream *stream = stream_of(stream_handle);
    if (!event || !stream || event->context != stream->context)
        return invalid_handle;
    counter("event_records")++;
    event->capture = stream->capture;
    if (stream->capture) {
        event->seen = stream->capture->seen[stream];
        return success;
    }
    auto moment = std::make_shared<double>(0);
    Operation operation;
    operation.run = [moment] {
        *moment = now();
        return 0;
    };
    const uint64_t number = stream->submitted + 1;
    const int code = submit(*stream, std::move(operation));
    if (code == success) {
        event->stream = stream;
        event->number = number;
        event->moment = moment;
    }
    return code;
}

DRIVER_API cuEventRecordWithFlags(void *handle, void *stream, unsigned) {
    return cuEventRecord(handle, stream);
}

DRIVER_API cuEventSynchronize(void *handle) {
    ENTER(context_idle);
    Event *event = event_of(handle);
    if (!event)
        return invalid_handle;
    if (!event->capture.expired())
        return captured_event;
    if (event->stream)
        run_through(*event->stream, event->number);
    return entry.answer();
}

DRIVER_API cuEventQuery(void *handle) {
    ENTER(context_idle);
    Event *event = event_of(handle);
    if (!event)
        return invalid_handle;
    if (!event->capture.expired())
        return captured_event;
    if (is_complete(*event))
        return entry.answer();
    step(*event->stream); // a question makes progress
    return not_ready;
}

DRIVER_API cuEventElapsedTime_v2(float *milliseconds, void *from, void *to) {
    ENTER(context);
    const Event *first = event_of(from), *second = event_of(to);
    if (!first || !second || !first->moment || !second->moment)
        return invalid_handle;
    if (!is_complete(*first) || !is_complete(*second))
        return not_ready;
    *milliseconds = float(*second->moment - *first->moment);
    return success;
}

DRIVER_API cuEventElapsedTime(float *milliseconds, void *from, void *to) {
    return cuEventElapsedTime_v2(milliseconds, from, to);
}

DRIVER_API cuStreamWaitEvent(void *stream_handle, void *handle, unsigned) {
    ENTER(context);
    const Event *event = event_of(handle);
    Stream *stream = stream_of(stream_handle);
    if (!event || !stream)
        return invalid_handle;
    counter("stream_waits")++;
    if (auto capture = event->capture.lock())
        return wait_under_capture(*stream, *event, std::move(capture));
    if (!event->stream) // never recorded: nothing to wait for
        return success;
    if (stream->capture) {
        stream->capture->invalid = true;
        return capture_isolation;
    }
    Operation operation;
    operation.run = [] { return 0; };
    operation.after = {{event->stream, event->number}};
    return submit(*stream, std::move(operation));
}

} // namespace stub
