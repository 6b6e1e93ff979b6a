/* pc_launch and the two ways to declare shared memory. With the stub driver loaded a launch keeps
 * its place in its stream; without a driver it runs at once. */
#pragma once

#include "driver.h"
#include "schedule.h"

#include <map>
#include <memory>
#include <stdlib.h>
#include <type_traits>

namespace pc_emulation {

// What the stub knows of an operation: run(argument) once or, replayed, more often; then discard.
using Enqueue = int(void *stream, int (*run)(void *), void (*discard)(void *), void *argument);

inline int run_queued(void *launch) {
    return run_launch(*static_cast<Launch *>(launch));
}
inline void discard_queued(void *launch) {
    delete static_cast<Launch *>(launch);
}

inline bool fits_a_device(const dim3 &grid, const dim3 &cta) {
    const uint64_t threads = uint64_t(cta.x) * cta.y * cta.z;
    return threads > 0 && cta.x <= 1024 && cta.y <= 1024 && cta.z <= 64 && threads <= 1024 &&
           grid.x > 0 && grid.y > 0 && grid.z > 0 && grid.x <= 0x7fffffffu && grid.y <= 65535 &&
           grid.z <= 65535;
}

// See cudaFuncSetAttribute.
inline std::mutex allowed_mutex;
inline std::map<const void *, size_t> allowed_shared;

inline size_t allowed_dynamic_shared(const void *kernel) {
    std::lock_guard<std::mutex> one_at_a_time(allowed_mutex);
    const auto found = allowed_shared.find(kernel);
    return found == allowed_shared.end() ? max_static_shared : found->second;
}

inline int enqueue(std::unique_ptr<Launch> launch, void *stream) {
    switch (loaded_driver()) {
    case Driver::none: return run_launch(*launch);
    case Driver::real: return not_supported;
    case Driver::stub: break;
    }
    auto *hand_over = driver_function<Enqueue>("pc_stub_enqueue");
    const int code = hand_over(stream, run_queued, discard_queued, launch.get());
    if (code == 0)
        (void)launch.release(); // discarded by the stub
    return code;
}

template <class T> T *shared_array(const void *tag, size_t count, const char *file, int line) {
    Unwatched unwatched;
    void *array = machine.side->shared.array(tag, sizeof(T) * count, alignof(T));
    if (!array)
        stop(file, line, "declares more static shared memory than a CTA has");
    return static_cast<T *>(array);
}

} // namespace pc_emulation

// Grid, CTA and shared bytes as for cudaLaunchKernel. Returns a code of the CUDA runtime.
template <class... P, class... A>
int pc_launch(void (*kernel)(P...), dim3 grid, dim3 cta, size_t shared_nbytes, void *stream,
              A... arguments) {
    using namespace pc_emulation;
    if (!fits_a_device(grid, cta))
        return 9; // cudaErrorInvalidConfiguration
    if (shared_nbytes > allowed_dynamic_shared(reinterpret_cast<const void *>(kernel)))
        return 1; // cudaErrorInvalidValue
    const char *order = getenv("PC_EMU_ORDER");
    auto call = [=] { kernel(static_cast<P>(arguments)...); };
    return enqueue(std::make_unique<Launch>(
                       Launch{call, grid, cta, shared_nbytes, order && *order ? order : "fwd"}),
                   stream);
}

// An array of the CTA: PC_SHARED(float, tile, 128). Its first element starts as NaN.
#define PC_SHARED(T, name, count)             \
    static char pc_shared_tag_##name;         \
    T(&name)                                  \
    [count] = *reinterpret_cast<T(*)[count]>( \
        pc_emulation::shared_array<T>(&pc_shared_tag_##name, count, __FILE__, __LINE__))

// The shared bytes that the launch asked for, as elements of T.
#define PC_DYN_SHARED(T, name) \
    T *name = reinterpret_cast<T *>(pc_emulation::machine.side->shared.dynamic())
