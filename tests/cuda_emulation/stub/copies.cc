/* Copies and fills of linear memory. */
#include "entry.h"

#include <string.h>

namespace stub {

namespace {

void *pointer(Address address) {
    return reinterpret_cast<void *>(address);
}

Address address_of(const void *memory) {
    return reinterpret_cast<Address>(memory);
}

void count_copy(Kind to, Kind from, size_t nbytes) {
    counter("copies")++;
    if (to == Kind::device)
        counter(from == Kind::device ? "d2d_bytes" : "h2d_bytes") += (long long)nbytes;
    else if (from == Kind::device)
        counter("d2h_bytes") += (long long)nbytes;
}

/* Pageable memory is read before the call returns, and written before it returns; pinned memory
 * only when the stream gets there. */
int copy(Address to, Address from, size_t nbytes, Stream *stream) {
    if (!stream)
        return invalid_handle;
    if (nbytes == 0)
        return success;
    const Kind target = kind_of(to, nbytes), source = kind_of(from, nbytes);
    if (target == Kind::invalid || source == Kind::invalid)
        return invalid_value;
    count_copy(target, source, nbytes);
    Operation operation;
    operation.touches = {{to, nbytes}, {from, nbytes}};
    const bool captured = stream->capture != nullptr;
    if (source == Kind::pageable && !captured) {
        const auto *bytes = static_cast<const char *>(pointer(from));
        auto staged = std::make_shared<std::vector<char>>(bytes, bytes + nbytes);
        operation.run = [=] {
            memcpy(pointer(to), staged->data(), nbytes);
            return 0;
        };
    } else {
        operation.run = [=] {
            if (kind_of(to, nbytes) == Kind::invalid || kind_of(from, nbytes) == Kind::invalid)
                return 700; // given back although the copy was still queued
            memmove(pointer(to), pointer(from), nbytes);
            return 0;
        };
    }
    const int code = submit(*stream, std::move(operation));
    if (code == success && target == Kind::pageable && !captured)
        run_all(*stream);
    return code;
}

// Between the host and a device, the caller waiting.
int copy_and_wait(Address to, Address from, size_t nbytes) {
    Stream *legacy = stream_of(nullptr);
    const int code = copy(to, from, nbytes, legacy);
    if (code == success)
        run_all(*legacy);
    return code;
}

bool is_device_memory(Address address, size_t nbytes) {
    return nbytes == 0 || kind_of(address, nbytes) == Kind::device;
}

template <class Unit> int fill(Address to, Unit value, size_t count, Stream *stream) {
    const size_t nbytes = count * sizeof(Unit);
    if (!stream)
        return invalid_handle;
    if (count == 0)
        return success;
    if (!is_device_memory(to, nbytes) || to % sizeof(Unit))
        return invalid_value;
    counter("fills")++;
    Operation operation;
    operation.touches = {{to, nbytes}};
    operation.run = [=] {
        if (kind_of(to, nbytes) == Kind::invalid)
            return 700;
        for (size_t i = 0; i < count; i++)
            memcpy(pointer(to + i * sizeof(Unit)), &value, sizeof(Unit));
        return 0;
    };
    return submit(*stream, std::move(operation));
}

} // namespace

DRIVER_API cuMemcpyHtoD_v2(Address to, const void *from, size_t nbytes) {
    ENTER(context_idle);
    if (!is_device_memory(to, nbytes))
        return invalid_value;
    return copy_and_wait(to, address_of(from), nbytes);
}

DRIVER_API cuMemcpyDtoH_v2(void *to, Address from, size_t nbytes) {
    ENTER(context_idle);
    if (!is_device_memory(from, nbytes))
        return invalid_value;
    const int code = copy_and_wait(address_of(to), from, nbytes);
    return code ? code : entry.answer();
}

// Inside a device the caller does not wait.
DRIVER_API cuMemcpyDtoD_v2(Address to, Address from, size_t nbytes) {
    ENTER(context_idle);
    if (!is_device_memory(to, nbytes) || !is_device_memory(from, nbytes))
        return invalid_value;
    return copy(to, from, nbytes, stream_of(nullptr));
}

DRIVER_API cuMemcpy(Address to, Address from, size_t nbytes) {
    ENTER(context_idle);
    const int code = copy_and_wait(to, from, nbytes);
    return code ? code : entry.answer();
}

DRIVER_API cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t nbytes, void *stream) {
    ENTER(context);
    if (!is_device_memory(to, nbytes))
        return invalid_value;
    return copy(to, address_of(from), nbytes, stream_of(stream));
}

DRIVER_API cuMemcpyDtoHAsync_v2(void *to, Address from, size_t nbytes, void *stream) {
    ENTER(context);
    if (!is_device_memory(from, nbytes))
        return invalid_value;
    return copy(address_of(to), from, nbytes, stream_of(stream));
}

DRIVER_API cuMemcpyDtoDAsync_v2(Address to, Address from, size_t nbytes, void *stream) {
    ENTER(context);
    if (!is_device_memory(to, nbytes) || !is_device_memory(from, nbytes))
        return invalid_value;
    return copy(to, from, nbytes, stream_of(stream));
}

DRIVER_API cuMemcpyAsync(Address to, Address from, size_t nbytes, void *stream) {
    ENTER(context);
    return copy(to, from, nbytes, stream_of(stream));
}

DRIVER_API cuMemsetD8_v2(Address to, uint8_t value, size_t count) {
    ENTER(context_idle);
    return fill(to, value, count, stream_of(nullptr));
}

DRIVER_API cuMemsetD16_v2(Address to, uint16_t value, size_t count) {
    ENTER(context_idle);
    return fill(to, value, count, stream_of(nullptr));
}

DRIVER_API cuMemsetD32_v2(Address to, uint32_t value, size_t count) {
    ENTER(context_idle);
    return fill(to, value, count, stream_of(nullptr));
}

DRIVER_API cuMemsetD8Async(Address to, uint8_t value, size_t count, void *stream) {
    ENTER(context);
    return fill(to, value, count, stream_of(stream));
}

DRIVER_API cuMemsetD16Async(Address to, uint16_t value, size_t count, void *stream) {
    ENTER(context);
    return fill(to, value, count, stream_of(stream));
}

DRIVER_API cuMemsetD32Async(Address to, uint32_t value, size_t count, void *stream) {
    ENTER(context);
    return fill(to, value, count, stream_of(stream));
}

} // namespace stub
