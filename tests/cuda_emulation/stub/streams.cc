/* Streams, and the place of emulated kernels in them. A destroyed stream finishes its work; its
 * handle is then given to the next one that is made, as a driver may do. */
#include "entry.h"

#include <algorithm>

namespace stub {

namespace {

std::vector<Stream *> &all_streams = *new std::vector<Stream *>; // never deleted

int create(void **handle, unsigned flags) {
    Stream *made = nullptr;
    for (Stream *stream : all_streams)
        if (!stream->live && stream->queue.empty())
            made = stream;
    if (!made)
        all_streams.push_back(made = new Stream);
    made->live = true;
    made->blocking = !(flags & 1);
    made->context = current_context();
    *handle = made;
    counter("live_streams")++;
    return success;
}

// What a kernel is to the stub: run, perhaps more than once, and in the end discard.
using Run = int (*)(void *);
using Discard = void (*)(void *);

} // namespace

Stream *stream_of(void *handle) {
    Context *context = current_context();
    const uintptr_t value = reinterpret_cast<uintptr_t>(handle);
    if (value <= 1) // none, or CU_STREAM_LEGACY
        return &context->legacy;
    if (value == 2) // CU_STREAM_PER_THREAD; one for all threads here
        return &context->per_thread;
    const auto found = std::find(all_streams.begin(), all_streams.end(), handle);
    return found != all_streams.end() && (*found)->live ? *found : nullptr;
}

std::vector<Stream *> streams_of(const Context &context) {
    auto &known = const_cast<Context &>(context);
    std::vector<Stream *> streams = {&known.legacy, &known.per_thread};
    for (Stream *stream : all_streams)
        if (stream->context == &context)
            streams.push_back(stream);
    return streams;
}

int queued_uses(Range range) {
    int uses = 0;
    std::vector<Stream *> streams = all_streams;
    for (int device = 0; device < max_devices; device++) {
        streams.push_back(&primary_context(device).legacy);
        streams.push_back(&primary_context(device).per_thread);
    }
    for (const Stream *stream : streams)
        for (const Operation &operation : stream->queue)
            for (const Range &touched : operation.touches)
                uses += touched.start < range.start + range.nbytes &&
                        range.start < touched.start + touched.nbytes;
    return uses;
}

DRIVER_API cuStreamCreate(void **stream, unsigned flags) {
    ENTER(context);
    return create(stream, flags);
}

DRIVER_API cuStreamCreateWithPriority(void **stream, unsigned flags, int) {
    ENTER(context);
    return create(stream, flags);
}

DRIVER_API cuStreamDestroy_v2(void *handle) {
    ENTER(release);
    Stream *stream = stream_of(handle);
    if (!stream || stream == stream_of(nullptr))
        return invalid_handle;
    if (stream->done < stream->submitted)
        counter("streams_destroyed_in_use")++;
    if (stream->capture)
        stream->capture->invalid = true;
    stream->live = false;
    counter("live_streams")--;
    return entry.answer();
}

DRIVER_API cuStreamSynchronize(void *handle) {
    ENTER(context_idle);
    Stream *stream = stream_of(handle);
    if (!stream)
        return invalid_handle;
    run_all(*stream);
    if (stream == stream_of(nullptr)) // the legacy stream stands for all blocking ones
        for (Stream *other : streams_of(*stream->context))
            if (other->blocking)
                run_all(*other);
    return entry.answer();
}

// A question makes progress: who asks in a loop gets an answer.
DRIVER_API cuStreamQuery(void *handle) {
    ENTER(context_idle);
    Stream *stream = stream_of(handle);
    if (!stream)
        return invalid_handle;
    return step(*stream) ? int(not_ready) : entry.answer();
}

DRIVER_API cuStreamGetCtx(void *handle, Context **context) {
    ENTER(context);
    Stream *stream = stream_of(handle);
    if (!stream)
        return invalid_handle;
    *context = stream->context;
    return success;
}

DRIVER_API cuStreamGetFlags(void *handle, unsigned *flags) {
    ENTER(context);
    Stream *stream = stream_of(handle);
    if (!stream)
        return invalid_handle;
    *flags = !stream->blocking;
    return success;
}

DRIVER_API cuStreamGetPriority(void *handle, int *priority) {
    ENTER(context);
    *priority = 0;
    return stream_of(handle) ? success : invalid_handle;
}

DRIVER_API pc_stub_enqueue(void *handle, Run run, Discard discard, void *argument) {
    ENTER(context);
    Stream *stream = stream_of(handle);
    if (!stream || stream->context != current_context())
        return invalid_handle;
    counter("launches")++;
    Operation operation;
    // Where this call fails the argument stays the caller's.
    auto owns = std::make_shared<bool>(true);
    std::shared_ptr<void> kernel(argument, [=](void *given) {
        if (*owns)
            discard(given);
    });
    operation.run = [run, kernel] { return run(kernel.get()); };
    const int code = submit(*stream, std::move(operation));
    *owns = code == success;
    return code;
}

} // namespace stub
