/* Stream capture, and the graphs that come of it: enough to see what a captured program may not do,
 * and to replay what it queued. */
#include "entry.h"

#include <pthread.h>

#include <set>

namespace stub {

namespace {

std::vector<std::shared_ptr<Capture>> &captures = *new std::vector<std::shared_ptr<Capture>>;
thread_local int thread_mode = 0; // cuThreadExchangeStreamCaptureMode

uint64_t this_thread() {
    return uint64_t(pthread_self());
}

bool forbids_waiting(const Capture &capture) {
    if (thread_mode == 2 || capture.mode == 2)
        return false;
    return capture.mode == 0 ? thread_mode == 0 || capture.thread == this_thread()
                             : capture.thread == this_thread();
}

void end(const std::shared_ptr<Capture> &capture) {
    for (const auto &[stream, seen] : capture->seen)
        if (stream->capture == capture)
            stream->capture = nullptr;
    std::erase(captures, capture);
}

bool has_unjoined_work(Capture &capture) {
    const auto &origin = capture.seen[capture.origin];
    for (const auto &[stream, seen] : capture.seen) {
        const auto own = seen.find(stream), joined = origin.find(stream);
        if (own != seen.end() && (joined == origin.end() || joined->second < own->second))
            return true;
    }
    return false;
}

std::set<Graph *> &graphs = *new std::set<Graph *>, &executables = *new std::set<Graph *>;

int instantiate(Graph **executable, Graph *graph) {
    if (!graphs.count(graph))
        return invalid_value;
    executables.insert(*executable = new Graph(*graph));
    counter("live_graphs")++;
    return success;
}

int destroy(std::set<Graph *> &known, Graph *graph) {
    if (!known.erase(graph))
        return invalid_value;
    delete graph;
    counter("live_graphs")--;
    return success;
}

int status_of(const Stream &stream) {
    return !stream.capture ? 0 : stream.capture->invalid ? 2 : 1;
}

} // namespace

void capture_operation(Stream &stream, Operation operation) {
    counter("captured")++;
    stream.capture->graph.operations.push_back(std::move(operation));
    stream.capture->seen[&stream][&stream] = ++stream.capture->stamp;
}

bool forbidden_while_capturing() {
    bool forbidden = false;
    for (const auto &capture : captures)
        if (forbids_waiting(*capture))
            forbidden = capture->invalid = true;
    counter("capture_violations") += forbidden;
    return forbidden;
}

bool blocking_stream_captures(const Stream &legacy) {
    if (&legacy != &legacy.context->legacy)
        return false;
    for (const auto &capture : captures)
        if (capture->origin->blocking && capture->origin->context == legacy.context)
            return true;
    return false;
}

// Work on the legacy stream would have to wait for a blocking stream that only takes notes.
bool implicit_while_capturing(const Stream &legacy) {
    if (!blocking_stream_captures(legacy))
        return false;
    for (const auto &capture : captures)
        if (capture->origin->blocking && capture->origin->context == legacy.context)
            capture->invalid = true;
    counter("capture_violations")++;
    return true;
}

void drop_captures() {
    while (!captures.empty())
        end(std::shared_ptr<Capture>(captures.back()));
    thread_mode = 0;
}

DRIVER_API cuStreamBeginCapture_v2(void *handle, int mode) {
    ENTER(context);
    static uint64_t last_id = 0;
    Stream *stream = stream_of(handle);
    if (!stream)
        return invalid_handle;
    if (stream == stream_of(nullptr))
        return capture_unsupported;
    if (stream->capture || mode < 0 || mode > 2)
        return invalid_value;
    auto capture = std::make_shared<Capture>();
    capture->id = ++last_id;
    capture->mode = mode;
    capture->thread = this_thread();
    capture->origin = stream;
    capture->seen[stream] = {};
    stream->capture = capture;
    captures.push_back(capture);
    return success;
}

DRIVER_API cuStreamEndCapture(void *handle, Graph **graph) {
    ENTER(context);
    *graph = nullptr;
    Stream *stream = stream_of(handle);
    if (!stream)
        return invalid_handle;
    const std::shared_ptr<Capture> capture = stream->capture;
    if (!capture || capture->origin != stream)
        return capture ? capture_unmatched : invalid_value;
    const bool unjoined = has_unjoined_work(*capture);
    end(capture);
    if (capture->invalid)
        return capture_invalidated;
    if (unjoined)
        return capture_unjoined;
    graphs.insert(*graph = new Graph(capture->graph));
    counter("live_graphs")++;
    return success;
}

DRIVER_API cuStreamIsCapturing(void *handle, int *status) {
    ENTER(context);
    const Stream *stream = stream_of(handle);
    if (!stream)
        return invalid_handle;
    if (blocking_stream_captures(*stream)) // asking spoils nothing
        return capture_implicit;
    *status = status_of(*stream);
    return success;
}

DRIVER_API cuStreamGetCaptureInfo_v2(void *handle, int *status, uint64_t *id, void **graph,
                                     const void **dependencies, size_t *count) {
    ENTER(context);
    const Stream *stream = stream_of(handle);
    if (!stream)
        return invalid_handle;
    *status = status_of(*stream);
    if (id && stream->capture)
        *id = stream->capture->id;
    if (graph)
        *graph = nullptr;
    if (dependencies)
        *dependencies = nullptr;
    if (count)
        *count = 0;
    return success;
}

DRIVER_API cuStreamGetCaptureInfo_v3(void *handle, int *status, uint64_t *id, void **graph,
                                     const void **dependencies, const void **edges, size_t *count) {
    if (edges)
        *edges = nullptr;
    return cuStreamGetCaptureInfo_v2(handle, status, id, graph, dependencies, count);
}

DRIVER_API cuThreadExchangeStreamCaptureMode(int *mode) {
    ENTER(initialisation);
    std::swap(*mode, thread_mode);
    return success;
}

// ---- graphs
// ---------------------------------------------------------------------------------------

DRIVER_API cuGraphInstantiateWithFlags(Graph **executable, Graph *graph, unsigned long long) {
    ENTER(context);
    return instantiate(executable, graph);
}

DRIVER_API cuGraphLaunch(Graph *executable, void *handle) {
    ENTER(context);
    Stream *stream = stream_of(handle);
    if (!stream || !executables.count(executable))
        return invalid_handle;
    counter("graph_launches")++;
    for (const Operation &operation : executable->operations)
        if (const int code = submit(*stream, operation))
            return code;
    return success;
}

DRIVER_API cuGraphDestroy(Graph *graph) {
    ENTER(release);
    return destroy(graphs, graph);
}

DRIVER_API cuGraphExecDestroy(Graph *executable) {
    ENTER(release);
    return destroy(executables, executable);
}

} // namespace stub
