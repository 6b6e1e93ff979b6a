/* Contexts: a stack for each thread, as in the driver. */
#include "entry.h"

#include <set>

namespace stub {

namespace {

constexpr int driver_version = 13000;

thread_local std::vector<Context *> stack;

std::set<Context *> &created() { // by cuCtxCreate
    static auto &contexts = *new std::set<Context *>;
    return contexts;
}

void begin(Context &context, int device) {
    context.device = device;
    context.legacy.context = context.per_thread.context = &context;
}

bool is_context(const Context *context) {
    if (created().count(const_cast<Context *>(context)))
        return true;
    for (int device = 0; device < max_devices; device++)
        if (context == &primary_context(device))
            return context->references > 0;
    return false;
}

int create(Context **context, int device) {
    if (!is_device(device))
        return invalid_device;
    *context = new Context;
    begin(**context, device);
    created().insert(*context);
    stack.push_back(*context);
    return success;
}

} // namespace

Context &primary_context(int device) {
    static Context *contexts = [] {
        auto *all = new Context[max_devices];
        for (int i = 0; i < max_devices; i++) {
            begin(all[i], i);
            all[i].primary = true;
        }
        return all;
    }();
    return contexts[device];
}

Context *current_context() {
    return stack.empty() ? nullptr : stack.back();
}

void run_everything() {
    std::vector<Context *> contexts(created().begin(), created().end());
    for (int device = 0; device < max_devices; device++)
        contexts.push_back(&primary_context(device));
    for (Context *context : contexts)
        for (Stream *stream : streams_of(*context))
            run_all(*stream);
}

// ---- primary contexts
// -----------------------------------------------------------------------------

DRIVER_API cuDevicePrimaryCtxRetain(Context **context, int device) {
    ENTER(initialisation);
    if (!is_device(device))
        return invalid_device;
    *context = &primary_context(device);
    (*context)->references++;
    counter("live_primary_contexts")++;
    return success;
}

DRIVER_API cuDevicePrimaryCtxRelease_v2(int device) {
    ENTER(initialisation);
    if (!is_device(device))
        return invalid_device;
    Context &context = primary_context(device);
    if (context.references < 1)
        return invalid_context;
    context.references--;
    counter("live_primary_contexts")--;
    return success;
}

DRIVER_API cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    ENTER(initialisation);
    if (!is_device(device))
        return invalid_device;
    *flags = 0;
    *active = primary_context(device).references > 0;
    return success;
}

DRIVER_API cuDevicePrimaryCtxSetFlags_v2(int device, unsigned) {
    ENTER(initialisation);
    return is_device(device) ? success : invalid_device;
}

// ---- other contexts
// -------------------------------------------------------------------------------

DRIVER_API cuCtxCreate_v2(Context **context, unsigned, int device) {
    ENTER(initialisation);
    return create(context, device);
}

DRIVER_API cuCtxCreate_v4(Context **context, void *, unsigned, int device) {
    ENTER(initialisation);
    return create(context, device);
}

DRIVER_API cuCtxDestroy_v2(Context *context) {
    ENTER(initialisation);
    if (!created().count(context))
        return invalid_context;
    for (Stream *stream : streams_of(*context))
        run_all(*stream);
    if (current_context() == context)
        stack.pop_back();
    created().erase(context); // memory and streams may still name it: not deleted
    return success;
}

DRIVER_API cuCtxAttach(Context **context, unsigned) {
    ENTER(context);
    *context = current_context();
    return success;
}

DRIVER_API cuCtxDetach(Context *context) {
    ENTER(initialisation);
    if (!is_context(context))
        return invalid_context;
    if (current_context() == context)
        stack.pop_back();
    created().erase(context);
    return success;
}

// ---- the stack
// ------------------------------------------------------------------------------------

DRIVER_API cuCtxPushCurrent_v2(Context *context) {
    ENTER(initialisation);
    if (!is_context(context))
        return invalid_context;
    stack.push_back(context);
    return success;
}

DRIVER_API cuCtxPopCurrent_v2(Context **context) {
    ENTER(initialisation);
    if (stack.empty())
        return invalid_context;
    if (context)
        *context = stack.back();
    stack.pop_back();
    return success;
}

DRIVER_API cuCtxSetCurrent(Context *context) {
    ENTER(initialisation);
    if (context && !is_context(context))
        return invalid_context;
    if (!stack.empty())
        stack.pop_back();
    if (context)
        stack.push_back(context);
    return success;
}

DRIVER_API cuCtxGetCurrent(Context **context) {
    ENTER(initialisation);
    *context = current_context();
    return success;
}

DRIVER_API cuCtxGetDevice(int *device) {
    ENTER(initialisation);
    if (!current_context())
        return invalid_context;
    *device = current_context()->device;
    return success;
}

DRIVER_API cuCtxGetDevice_v2(int *device, Context *context) {
    ENTER(initialisation);
    if (!is_context(context))
        return invalid_context;
    *device = context->device;
    return success;
}

DRIVER_API cuCtxGetId(Context *context, unsigned long long *id) {
    ENTER(initialisation);
    if (!context)
        context = current_context();
    if (!is_context(context))
        return invalid_context;
    *id = reinterpret_cast<uintptr_t>(context);
    return success;
}

DRIVER_API cuCtxGetApiVersion(Context *, unsigned *version) {
    ENTER(initialisation);
    *version = driver_version;
    return success;
}

DRIVER_API cuDriverGetVersion(int *version) {
    ENTER(nothing);
    *version = driver_version;
    return success;
}

DRIVER_API cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    ENTER(context);
    *least = *greatest = 0;
    return success;
}

DRIVER_API cuCtxSynchronize(void) {
    ENTER(context_idle);
    for (Stream *stream : streams_of(*current_context()))
        run_all(*stream);
    return entry.answer();
}

} // namespace stub
