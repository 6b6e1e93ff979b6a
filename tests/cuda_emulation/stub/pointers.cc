/* What an address is. */
#include "entry.h"

namespace stub {

namespace {

enum Attribute {
    attribute_context = 1,
    attribute_memory_type = 2, // 1 host, 2 device
    attribute_device_pointer = 3,
    attribute_host_pointer = 4,
    attribute_sync_memops = 6,
    attribute_buffer_id = 7,
    attribute_is_managed = 8,
    attribute_device_ordinal = 9,
    attribute_range_start = 11,
    attribute_range_size = 12,
    attribute_mapped = 13,
};

template <class T> int give(void *out, T value) {
    *static_cast<T *>(out) = value;
    return success;
}

int attribute_of(void *out, int attribute, Address address) {
    const Allocation *allocation = find_allocation(address);
    const Pinned *pinned = find_pinned(address);
    if (!allocation && !pinned)
        return invalid_value;
    const Guarded &range = allocation ? allocation->range : pinned->range;
    Context *context = allocation ? allocation->context : pinned->context;
    const bool host = !allocation || allocation->managed;
    switch (attribute) {
    case attribute_context: return give(out, context);
    case attribute_memory_type: return give(out, allocation ? 2u : 1u);
    case attribute_device_pointer: return give(out, address);
    case attribute_host_pointer: return host ? give(out, address) : int(invalid_value);
    case attribute_sync_memops: return give(out, 0u);
    case attribute_buffer_id: return give(out, reinterpret_cast<unsigned long long>(range.start));
    case attribute_is_managed: return give(out, allocation && allocation->managed);
    case attribute_device_ordinal: return give(out, context->device);
    case attribute_range_start: return give(out, reinterpret_cast<Address>(range.start));
    case attribute_range_size: return give(out, range.nbytes);
    case attribute_mapped: return give(out, true);
    default: return unsupported;
    }
}

void give_nothing(void *out, int attribute) {
    switch (attribute) {
    case attribute_memory_type:
    case attribute_sync_memops: give(out, 0u); break;
    case attribute_device_ordinal: give(out, -2); break;
    case attribute_is_managed:
    case attribute_mapped: give(out, false); break;
    default: give(out, uint64_t(0)); break;
    }
}

} // namespace

Kind kind_of(Address address, size_t nbytes) {
    const Allocation *allocation = find_allocation(address);
    const Pinned *pinned = allocation ? nullptr : find_pinned(address);
    if (!allocation && !pinned)
        return address == 0 || is_retired(address) ? Kind::invalid : Kind::pageable;
    const Guarded &range = allocation ? allocation->range : pinned->range;
    if (nbytes > range.nbytes - (address - reinterpret_cast<Address>(range.start)))
        return Kind::invalid;
    return allocation ? Kind::device : Kind::pinned;
}

DRIVER_API cuPointerGetAttribute(void *out, int attribute, Address address) {
    ENTER(initialisation);
    return attribute_of(out, attribute, address);
}

// Unknown addresses are no error here: their attributes are zero.
DRIVER_API cuPointerGetAttributes(unsigned count, int *attributes, void **out, Address address) {
    ENTER(initialisation);
    for (unsigned i = 0; i < count; i++)
        if (attribute_of(out[i], attributes[i], address))
            give_nothing(out[i], attributes[i]);
    return success;
}

} // namespace stub
