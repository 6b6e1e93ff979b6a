/* The library's version, error texts, geometry, and the few calls of the CUDA runtime that are made
 * for Python: events, copies, stream waits. Each is one runtime call. */
#include "abi.h"
#include "device.h"
#include "pagedcache/geometry.h"

namespace {

cudaStream_t as_stream(void *stream) {
    return static_cast<cudaStream_t>(stream);
}

cudaEvent_t as_event(void *event) {
    return static_cast<cudaEvent_t>(event);
}

} // namespace

int pc_cuda_abi(void) {
    return PC_CUDA_ABI;
}

const char *pc_cuda_error_name(int error) {
    return cudaGetErrorName(static_cast<cudaError_t>(error));
}

const char *pc_cuda_error_text(int error) {
    return cudaGetErrorString(static_cast<cudaError_t>(error));
}

int pc_cuda_device_count(int *count) {
    *count = 0;
    return cudaGetDeviceCount(count);
}

size_t pc_cuda_geometry_nbytes(void) {
    return sizeof(pc_geometry);
}

int pc_cuda_geometry(void *geometry, int code, int layout, int64_t num_heads, int64_t block_size,
                     int64_t head_dim) {
    if (pc_geometry_check(code, layout, num_heads, block_size, head_dim) != PC_OK) {
        return cudaErrorInvalidValue;
    }
    pc_geometry_init(static_cast<pc_geometry *>(geometry), code, layout, num_heads, block_size,
                     head_dim);
    return cudaSuccess;
}

int pc_cuda_clamp(void *geometry) {
    pc_geometry_clamp(static_cast<pc_geometry *>(geometry));
    return cudaSuccess;
}

int pc_cuda_copy(void *dst, const void *src, size_t nbytes, void *stream) {
    return cudaMemcpyAsync(dst, src, nbytes, cudaMemcpyDefault, as_stream(stream));
}

int pc_cuda_fill(void *dst, int byte, size_t nbytes, void *stream) {
    return cudaMemsetAsync(dst, byte, nbytes, as_stream(stream));
}

int pc_cuda_event_create(void **event) {
    cudaEvent_t made = nullptr;
    const int error = cudaEventCreateWithFlags(&made, cudaEventDisableTiming);
    *event = made;
    return error;
}

int pc_cuda_event_destroy(void *event) {
    return cudaEventDestroy(as_event(event));
}

int pc_cuda_event_record(void *event, void *stream) {
    return cudaEventRecord(as_event(event), as_stream(stream));
}

int pc_cuda_event_synchronize(void *event) {
    return cudaEventSynchronize(as_event(event));
}

int pc_cuda_stream_wait(void *event, void *stream) {
    return cudaStreamWaitEvent(as_stream(stream), as_event(event), 0);
}

int pc_cuda_stream_synchronize(void *stream) {
    return cudaStreamSynchronize(as_stream(stream));
}

int pc_cuda_stream_capturing(int *capturing, void *stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const int error = cudaStreamIsCapturing(as_stream(stream), &status);
    *capturing = status != cudaStreamCaptureStatusNone;
    return error;
}

int pc_cuda_pointer(int *kind, int *device, const void *address) {
    cudaPointerAttributes attributes = {};
    const int error = cudaPointerGetAttributes(&attributes, address);
    *kind = attributes.type; /* cudaMemoryTypeUnregistered … Managed are 0 … 3 */
    *device = attributes.device;
    return error;
}
