/* The driver that the process has loaded: our stub, somebody's real one, or none. */
#pragma once

#include <dlfcn.h>

namespace pc_emulation {

enum class Driver { none, stub, real };

constexpr int not_supported = 801;

inline void *driver_handle() {
    static void *handle = nullptr; // a driver stays loaded
    if (!handle)
        handle = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    return handle;
}

inline Driver loaded_driver() {
    void *handle = driver_handle();
    if (!handle)
        return Driver::none;
    return dlsym(handle, "pc_stub_enqueue") ? Driver::stub : Driver::real;
}

// A function of the stub, by name and type.
template <class Function> Function *driver_function(const char *name) {
    return reinterpret_cast<Function *>(dlsym(driver_handle(), name));
}

/* Calls the stub, or gives `without` where no driver is loaded: then memory is the host's and all
 * work is done at once. The pointers of a real driver are not for the host: refused. */
template <class... P> int call_driver(const char *name, int without, P... arguments) {
    switch (loaded_driver()) {
    case Driver::none: return without;
    case Driver::real: return not_supported;
    case Driver::stub: break;
    }
    auto *function = driver_function<int(P...)>(name);
    return function ? function(arguments...) : not_supported;
}

} // namespace pc_emulation
