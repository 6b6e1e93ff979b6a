/* The functions of the CUDA runtime that the host code of cuda/ calls, on the stub driver, or on
 * host memory at once where no driver is loaded. Codes and values are CUDA's. */
#pragma once

#include "driver.h"
#include "launch.h"

#include <mutex>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define PC_CUDA_ERRORS(X)                                                                          \
    X(cudaSuccess, 0, "no error")                                                                  \
    X(cudaErrorInvalidValue, 1, "invalid argument")                                                \
    X(cudaErrorMemoryAllocation, 2, "out of memory")                                               \
    X(cudaErrorInitializationError, 3, "initialization error")                                     \
    X(cudaErrorInvalidConfiguration, 9, "invalid configuration argument")                          \
    X(cudaErrorInsufficientDriver, 35,                                                             \
      "CUDA driver version is insufficient for CUDA runtime version")                              \
    X(cudaErrorNoDevice, 100, "no CUDA-capable device is detected")                                \
    X(cudaErrorInvalidDevice, 101, "invalid device ordinal")                                       \
    X(cudaErrorDeviceUninitialized, 201, "invalid device context")                                 \
    X(cudaErrorECCUncorrectable, 214, "uncorrectable ECC error encountered")                       \
    X(cudaErrorInvalidResourceHandle, 400, "invalid resource handle")                              \
    X(cudaErrorNotReady, 600, "device not ready")                                                  \
    X(cudaErrorIllegalAddress, 700, "an illegal memory access was encountered")                    \
    X(cudaErrorLaunchTimeout, 702, "the launch timed out and was terminated")                      \
    X(cudaErrorAssert, 710, "device-side assert triggered")                                        \
    X(cudaErrorHardwareStackError, 714, "hardware stack error")                                    \
    X(cudaErrorIllegalInstruction, 715, "an illegal instruction was encountered")                  \
    X(cudaErrorMisalignedAddress, 716, "misaligned address")                                       \
    X(cudaErrorInvalidAddressSpace, 717, "operation not supported on global/shared address space") \
    X(cudaErrorInvalidPc, 718, "invalid program counter")                                          \
    X(cudaErrorLaunchFailure, 719, "unspecified launch failure")                                   \
    X(cudaErrorNotSupported, 801, "operation not supported")                                       \
    X(cudaErrorStreamCaptureUnsupported, 900, "operation not permitted when stream is capturing")  \
    X(cudaErrorStreamCaptureInvalidated, 901,                                                      \
      "operation failed due to a previous error during capture")                                   \
    X(cudaErrorUnknown, 999, "unknown error")

enum cudaError : int {
#define X(name, value, text) name = value,
    PC_CUDA_ERRORS(X)
#undef X
};
using cudaError_t = cudaError;
using cudaStream_t = struct CUstream_st *;
using cudaEvent_t = struct CUevent_st *;

enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
enum cudaStreamCaptureStatus {
    cudaStreamCaptureStatusNone,
    cudaStreamCaptureStatusActive,
    cudaStreamCaptureStatusInvalidated
};
enum cudaMemoryType {
    cudaMemoryTypeUnregistered,
    cudaMemoryTypeHost,
    cudaMemoryTypeDevice,
    cudaMemoryTypeManaged
};
enum cudaDeviceAttr {
    cudaDevAttrWarpSize = 10,
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrMaxThreadsPerMultiProcessor = 39,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};
struct cudaPointerAttributes {
    cudaMemoryType type;
    int device;
    void *devicePointer, *hostPointer;
};

constexpr unsigned cudaEventDefault = 0, cudaEventDisableTiming = 2;
constexpr unsigned cudaEventRecordDefault = 0, cudaEventWaitDefault = 0;

namespace pc_emulation {

template <class... P> cudaError_t runtime_call(const char *name, P... arguments) {
    return cudaError_t(call_driver(name, cudaSuccess, arguments...));
}

inline uint64_t as_address(const void *pointer) {
    return uint64_t(reinterpret_cast<uintptr_t>(pointer));
}

} // namespace pc_emulation

inline cudaError_t cudaGetDeviceCount(int *count) {
    *count = 1;
    cudaError_t code = pc_emulation::runtime_call("cuInit", 0u);
    if (code == cudaSuccess)
        code = pc_emulation::runtime_call("cuDeviceGetCount", count);
    if (code != cudaSuccess)
        *count = 0;
    return code;
}
inline cudaError_t cudaGetDevice(int *device) {
    *device = 0;
    return pc_emulation::runtime_call("cuCtxGetDevice", device);
}
inline cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    *value = attribute == cudaDevAttrWarpSize                       ? 32
             : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? int(pc_emulation::max_shared)
                                                                    : 1;
    return pc_emulation::runtime_call("cuDeviceGetAttribute", value, int(attribute), device);
}

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

// How much dynamic shared memory CTAs of a kernel may have, where that is more than 48 KiB.
inline cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute, int nbytes) {
    if (nbytes < 0 || size_t(nbytes) > pc_emulation::max_shared)
        return cudaErrorInvalidValue;
    std::lock_guard<std::mutex> one_at_a_time(pc_emulation::allowed_mutex);
    pc_emulation::allowed_shared[kernel] = size_t(nbytes);
    return cudaSuccess;
}

inline cudaError_t cudaMemcpyAsync(void *destination, const void *source, size_t nbytes,
                                   cudaMemcpyKind, cudaStream_t stream = nullptr) {
    using namespace pc_emulation;
    if (nbytes == 0)
        return cudaSuccess;
    if (loaded_driver() == Driver::none) {
        memmove(destination, source, nbytes);
        return cudaSuccess;
    }
    return runtime_call("cuMemcpyAsync", as_address(destination), as_address(source), nbytes,
                        stream);
}
inline cudaError_t cudaMemsetAsync(void *address, int byte, size_t nbytes,
                                   cudaStream_t stream = nullptr) {
    using namespace pc_emulation;
    if (nbytes == 0)
        return cudaSuccess;
    if (loaded_driver() == Driver::none) {
        memset(address, byte, nbytes);
        return cudaSuccess;
    }
    // Promoted to int: how a call passes what the driver declares as a byte.
    return runtime_call("cuMemsetD8Async", as_address(address), int(uint8_t(byte)), nbytes, stream);
}

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    static char at_once;
    *event = reinterpret_cast<cudaEvent_t>(&at_once);
    return pc_emulation::runtime_call("cuEventCreate", event, flags);
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
    return pc_emulation::runtime_call("cuEventDestroy_v2", event);
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr) {
    return pc_emulation::runtime_call("cuEventRecord", event, stream);
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    return pc_emulation::runtime_call("cuEventSynchronize", event);
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0) {
    return pc_emulation::runtime_call("cuStreamWaitEvent", stream, event, flags);
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    return pc_emulation::runtime_call("cuStreamSynchronize", stream);
}
inline cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
    int value = 0;
    const cudaError_t code = pc_emulation::runtime_call("cuStreamIsCapturing", stream, &value);
    *status = cudaStreamCaptureStatus(value);
    return code;
}

// Memory that no driver knows is no error: type Unregistered, as CUDA says since version 11.
inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes,
                                            const void *pointer) {
    using namespace pc_emulation;
    *attributes = {cudaMemoryTypeUnregistered, -2, nullptr, const_cast<void *>(pointer)};
    if (loaded_driver() == Driver::none)
        return cudaSuccess;
    const uint64_t address = as_address(pointer);
    unsigned type = 0; // of the driver: 1 host, 2 device
    unsigned char managed = 0;
    int code = runtime_call("cuPointerGetAttribute", static_cast<void *>(&type), 2, address);
    if (code == cudaErrorInvalidValue)
        return cudaSuccess;
    if (code == cudaSuccess)
        code = runtime_call("cuPointerGetAttribute", static_cast<void *>(&managed), 8, address);
    if (code == cudaSuccess)
        code = runtime_call("cuPointerGetAttribute", static_cast<void *>(&attributes->device), 9,
                            address);
    if (code != cudaSuccess)
        return cudaError_t(code);
    attributes->type = managed ? cudaMemoryTypeManaged : cudaMemoryType(type);
    attributes->devicePointer = const_cast<void *>(pointer);
    attributes->hostPointer = type == 1 || managed ? const_cast<void *>(pointer) : nullptr;
    return cudaSuccess;
}

inline const char *cudaGetErrorName(cudaError_t code) {
    switch (int(code)) {
#define X(name, value, text) \
    case value: return #name;
        PC_CUDA_ERRORS(X)
#undef X
    default: return "unrecognized error code";
    }
}
// A failed launch says what the emulation saw.
inline const char *cudaGetErrorString(cudaError_t code) {
    static thread_local char text[1024];
    const char *plain = "unrecognized error code";
    switch (int(code)) {
#define X(name, value, text) \
    case value: plain = text; break;
        PC_CUDA_ERRORS(X)
#undef X
    }
    std::lock_guard<std::mutex> no_launch_runs(pc_emulation::machine.mutex);
    if (code != pc_emulation::machine.failure_code || pc_emulation::machine.failure.empty())
        return plain;
    snprintf(text, sizeof text, "%s (%s)", plain, pc_emulation::machine.failure.c_str());
    return text;
}
inline cudaError_t cudaGetLastError() { // every call here returns its own error
    return cudaSuccess;
}
