/* Page-locked host memory: allocated here, or the caller's and registered. */
#include "entry.h"

namespace stub {

namespace {

std::map<Address, Pinned> &all_pinned = *new std::map<Address, Pinned>;

Address start_of(const Pinned &pinned) {
    return reinterpret_cast<Address>(pinned.range.start);
}

int unpin(void *address, bool allocated) {
    const auto found = all_pinned.find(reinterpret_cast<Address>(address));
    if (found == all_pinned.end() || (found->second.range.map != nullptr) != allocated)
        return invalid_value;
    const Guarded range = found->second.range;
    counter("freed_in_use") += queued_uses({start_of(found->second), range.nbytes});
    run_everything();
    all_pinned.erase(found);
    counter(allocated ? "live_pinned" : "live_registered")--;
    if (!allocated)
        return success;
    if (!is_intact(range))
        counter("overruns")++;
    retire(range);
    return success;
}

} // namespace

const Pinned *find_pinned(Address address) {
    auto after = all_pinned.upper_bound(address);
    if (after == all_pinned.begin())
        return nullptr;
    const Pinned &before = (--after)->second;
    return address - start_of(before) < before.range.nbytes ? &before : nullptr;
}

DRIVER_API cuMemHostAlloc(void **address, size_t nbytes, unsigned flags) {
    ENTER(context_idle);
    Pinned made = {{}, current_context(), flags};
    if (nbytes == 0)
        return invalid_value;
    if (!make_guarded(made.range, nbytes, 64))
        return out_of_memory;
    *address = made.range.start;
    all_pinned[start_of(made)] = made;
    counter("live_pinned")++;
    return success;
}

DRIVER_API cuMemAllocHost_v2(void **address, size_t nbytes) {
    return cuMemHostAlloc(address, nbytes, 0);
}

DRIVER_API cuMemHostRegister_v2(void *address, size_t nbytes, unsigned flags) {
    ENTER(context_idle);
    const Address start = reinterpret_cast<Address>(address);
    if (nbytes == 0)
        return invalid_value;
    if (find_pinned(start) || find_pinned(start + nbytes - 1))
        return already_registered;
    Pinned made = {{}, current_context(), flags};
    made.range.start = static_cast<char *>(address);
    made.range.nbytes = nbytes;
    all_pinned[start] = made;
    counter("live_registered")++;
    return success;
}

DRIVER_API cuMemFreeHost(void *address) {
    ENTER(release_idle);
    const int code = unpin(address, true);
    return code ? code : entry.answer();
}

DRIVER_API cuMemHostUnregister(void *address) {
    ENTER(release_idle);
    const int code = unpin(address, false);
    return code ? code : entry.answer();
}

DRIVER_API cuMemHostGetFlags(unsigned *flags, void *address) {
    ENTER(context);
    const Pinned *pinned = find_pinned(reinterpret_cast<Address>(address));
    if (!pinned)
        return invalid_value;
    *flags = pinned->flags;
    return success;
}

DRIVER_API cuMemHostGetDevicePointer_v2(Address *device, void *address, unsigned) {
    ENTER(context);
    if (!find_pinned(reinterpret_cast<Address>(address)))
        return invalid_value;
    *device = reinterpret_cast<Address>(address);
    return success;
}

} // namespace stub
