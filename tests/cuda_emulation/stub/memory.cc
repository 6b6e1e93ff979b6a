/* Linear device memory. It belongs to the device of the context that was current. */
#include "entry.h"

#include <stdio.h>

namespace stub {

namespace {

constexpr size_t alignment = 256;

std::map<Address, Allocation> &allocations = *new std::map<Address, Allocation>;

Address start_of(const Allocation &allocation) {
    return reinterpret_cast<Address>(allocation.range.start);
}

long long &live_bytes_of(int device) {
    return counter("live_bytes:" + std::to_string(device));
}

int allocate(Address *address, size_t nbytes, bool managed) {
    Context *context = current_context();
    if (nbytes == 0)
        return invalid_value;
    long long &used = live_bytes_of(context->device);
    const long long total = knob("total_memory");
    if (nbytes > size_t(total) || used > total - (long long)nbytes)
        return out_of_memory;
    Allocation made = {{}, context, managed};
    if (!make_guarded(made.range, nbytes, alignment))
        return out_of_memory;
    *address = start_of(made);
    allocations[*address] = made;
    used += (long long)nbytes;
    counter("live_allocations")++;
    counter("live_bytes") += (long long)nbytes;
    counter("allocations")++;
    long long &peak = counter("peak_bytes");
    peak = std::max(peak, counter("live_bytes"));
    return success;
}

void give_back(const Allocation &allocation) {
    const Guarded &range = allocation.range;
    if (!is_intact(range)) {
        counter("overruns")++;
        fprintf(stderr, "stub driver: bytes beside the allocation %p + %zu were written\n",
                static_cast<void *>(range.start), range.nbytes);
    }
    live_bytes_of(allocation.context->device) -= (long long)range.nbytes;
    counter("live_allocations")--;
    counter("live_bytes") -= (long long)range.nbytes;
    counter("frees")++;
    retire(range);
    allocations.erase(start_of(allocation));
}

} // namespace

const Allocation *find_allocation(Address address) {
    auto after = allocations.upper_bound(address);
    if (after == allocations.begin())
        return nullptr;
    const Allocation &before = (--after)->second;
    return address - start_of(before) < before.range.nbytes ? &before : nullptr;
}

DRIVER_API cuMemAlloc_v2(Address *address, size_t nbytes) {
    ENTER(context_idle);
    return allocate(address, nbytes, false);
}

DRIVER_API cuMemAllocManaged(Address *address, size_t nbytes, unsigned) {
    ENTER(context_idle);
    return allocate(address, nbytes, true);
}

DRIVER_API cuMemFree_v2(Address address) {
    ENTER(release_idle);
    if (address == 0)
        return entry.answer();
    const Allocation *allocation = find_allocation(address);
    if (!allocation || start_of(*allocation) != address) {
        counter("bad_frees")++;
        return invalid_value;
    }
    // A driver waits here, and programs must not count on it: what was queued is counted.
    counter("freed_in_use") += queued_uses({address, allocation->range.nbytes});
    if (knob("free_waits"))
        run_everything();
    give_back(*allocation);
    return entry.answer();
}

DRIVER_API cuMemGetInfo_v2(size_t *free, size_t *total) {
    ENTER(context);
    *total = size_t(knob("total_memory"));
    const size_t used = size_t(live_bytes_of(current_context()->device));
    *free = *total > used ? *total - used : 0;
    return success;
}

DRIVER_API cuMemGetAddressRange_v2(Address *start, size_t *nbytes, Address address) {
    ENTER(context);
    const Allocation *allocation = find_allocation(address);
    if (!allocation)
        return not_found;
    if (start)
        *start = start_of(*allocation);
    if (nbytes)
        *nbytes = allocation->range.nbytes;
    return success;
}

// For messages about leaks: "0x… + nbytes" of every live allocation, as many as fit.
STUB_API void pc_stub_describe(char *text, size_t size) {
    size_t at = 0;
    text[0] = 0;
    for (const auto &[address, allocation] : allocations) {
        const int added = snprintf(text + at, size - at, "%s%#llx + %zu", at ? ", " : "",
                                   (unsigned long long)address, allocation.range.nbytes);
        if (added < 0 || size_t(added) >= size - at)
            return;
        at += size_t(added);
    }
}

} // namespace stub
