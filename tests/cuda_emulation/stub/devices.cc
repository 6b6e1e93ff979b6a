/* Devices and their attributes: as many as the knob says, each with compute capability 9.0. */
#include "entry.h"

#include <stdio.h>
#include <string.h>

namespace stub {

bool is_device(int device) {
    return device >= 0 && device < knob("devices") && device < max_devices;
}

namespace {

struct Attribute {
    int number, value;
};
const Attribute attributes[] = {
    {1, 1024},       // threads of a CTA
    {2, 1024},       // along x
    {3, 1024},       // along y
    {4, 64},         // along z
    {5, 0x7fffffff}, // CTAs along x
    {6, 65535},      // along y
    {7, 65535},      // along z
    {8, 48 << 10},   // shared memory of a CTA
    {10, 32},        // warp size
    {14, 512},       // alignment of textures
    {16, 8},         // multiprocessors
    {19, 1},         // maps host memory
    {39, 2048},      // threads of a multiprocessor
    {41, 1},         // unified addresses
    {75, 9},         // compute capability, major
    {76, 0},         // minor
    {97, 227 << 10}, // shared memory of a CTA that asks for more
};

} // namespace

DRIVER_API cuInit(unsigned) {
    ENTER(nothing);
    if (knob("devices") < 1)
        return no_device;
    initialised = true;
    return success;
}

DRIVER_API cuDeviceGetCount(int *count) {
    ENTER(initialisation);
    *count = int(knob("devices"));
    return success;
}

DRIVER_API cuDeviceGet(int *device, int ordinal) {
    ENTER(initialisation);
    if (!is_device(ordinal))
        return invalid_device;
    *device = ordinal;
    return success;
}

DRIVER_API cuDeviceGetName(char *name, int nbytes, int device) {
    ENTER(initialisation);
    if (!is_device(device))
        return invalid_device;
    snprintf(name, size_t(nbytes), "emulated CUDA device %d", device);
    return success;
}

DRIVER_API cuDeviceTotalMem_v2(size_t *nbytes, int device) {
    ENTER(initialisation);
    if (!is_device(device))
        return invalid_device;
    *nbytes = size_t(knob("total_memory"));
    return success;
}

DRIVER_API cuDeviceComputeCapability(int *major, int *minor, int device) {
    ENTER(initialisation);
    if (!is_device(device))
        return invalid_device;
    *major = 9;
    *minor = 0;
    return success;
}

DRIVER_API cuDeviceGetPCIBusId(char *text, int nbytes, int device) {
    ENTER(initialisation);
    if (!is_device(device))
        return invalid_device;
    snprintf(text, size_t(nbytes), "0000:%02x:00.0", device);
    return success;
}

DRIVER_API cuDeviceGetUuid_v2(void *uuid, int device) {
    ENTER(initialisation);
    if (!is_device(device))
        return invalid_device;
    memset(uuid, device + 1, 16);
    return success;
}

DRIVER_API cuDeviceGetUuid(void *uuid, int device) {
    return cuDeviceGetUuid_v2(uuid, device);
}

DRIVER_API cuDeviceCanAccessPeer(int *can, int device, int peer) {
    ENTER(initialisation);
    if (!is_device(device) || !is_device(peer))
        return invalid_device;
    *can = 0;
    return success;
}

DRIVER_API cuDeviceGetAttribute(int *value, int number, int device) {
    ENTER(initialisation);
    if (!is_device(device))
        return invalid_device;
    *value = 0;
    for (const Attribute &each : attributes)
        if (each.number == number)
            *value = each.value;
    return success;
}

} // namespace stub
