/* Work in the order CUDA promises and no other: with the knob `async` an operation is done when
 * something waits for it, so that a wait that the program forgot shows as a wrong result. */
#include "state.h"

#include <random>

namespace stub {

namespace {

std::minstd_rand &random_numbers = *new std::minstd_rand(1);

// Work of the legacy stream and work of blocking streams follow each other as they were queued.
void add_implicit_waits(const Stream &stream, Operation &operation) {
    Context &context = *stream.context;
    if (&stream == &context.legacy) {
        for (Stream *other : streams_of(context))
            if (other->blocking && other != &stream && other->done < other->submitted)
                operation.after.push_back({other, other->submitted});
    } else if (stream.blocking && context.legacy.done < context.legacy.submitted) {
        operation.after.push_back({&context.legacy, context.legacy.submitted});
    }
}

void progress_at_random(const Context &context) {
    const std::vector<Stream *> streams = streams_of(context);
    for (int i = int(random_numbers() % 3); i > 0; i--)
        step(*streams[random_numbers() % streams.size()]);
}

} // namespace

bool step(Stream &stream) {
    if (stream.queue.empty())
        return false;
    const Operation operation = std::move(stream.queue.front());
    stream.queue.pop_front();
    for (const Wait &wait : operation.after)
        run_through(*wait.stream, wait.number);
    Context &context = *stream.context;
    if (!context.broken)
        context.broken = operation.run();
    stream.done = operation.number;
    counter("pending")--;
    return true;
}

void run_through(Stream &stream, uint64_t number) {
    while (stream.done < number && step(stream)) {
    }
}

void run_all(Stream &stream) {
    run_through(stream, stream.submitted);
}

int submit(Stream &stream, Operation operation) {
    if (stream.capture) {
        capture_operation(stream, std::move(operation));
        return success;
    }
    if (implicit_while_capturing(stream))
        return capture_implicit;
    operation.number = ++stream.submitted;
    add_implicit_waits(stream, operation);
    stream.queue.push_back(std::move(operation));
    counter("pending")++;
    const long long async = knob("async"), length = knob("queue_length");
    if (!async)
        run_all(stream);
    else if (stream.queue.size() > size_t(length))
        run_through(stream, stream.submitted - uint64_t(length));
    else if (async > 1)
        progress_at_random(*stream.context);
    return success;
}

} // namespace stub
