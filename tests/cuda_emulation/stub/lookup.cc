/* Entry points by name, for clients that do not link: the newest variant of each. */
#include "entry.h"

#include <dlfcn.h>

namespace stub {

namespace {

int find(const char *name, void **function) {
    static const char *const versions[] = {"_v4", "_v3", "_v2", ""};
    Dl_info self;
    *function = nullptr;
    if (!dladdr(reinterpret_cast<void *>(&find), &self))
        return unknown;
    void *library = dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    for (const char *version : versions)
        if ((*function = dlsym(library, (std::string(name) + version).c_str())))
            return success;
    return not_found;
}

} // namespace

DRIVER_API cuGetProcAddress_v2(const char *name, void **function, int, uint64_t, int *result) {
    ENTER(nothing);
    const int code = find(name, function);
    if (result)
        *result = code ? 1 : 0; // symbol not found
    return code;
}

DRIVER_API cuGetProcAddress(const char *name, void **function, int, uint64_t) {
    ENTER(nothing);
    return find(name, function);
}

} // namespace stub
