/* What PyCUDA links against and no test needs: textures, arrays, modules, peers, interprocess
 * handles. Each answers "operation not supported". */
#include "entry.h"

// clang-format off
#define UNSUPPORTED(X) \
    X(cuArray3DCreate_v2) X(cuArray3DGetDescriptor_v2) X(cuArrayCreate_v2) X(cuArrayDestroy) \
    X(cuArrayGetDescriptor_v2) X(cuCtxDisablePeerAccess) X(cuCtxEnablePeerAccess) \
    X(cuCtxGetCacheConfig) X(cuCtxGetLimit) X(cuCtxGetSharedMemConfig) X(cuCtxSetCacheConfig) \
    X(cuCtxSetLimit) X(cuCtxSetSharedMemConfig) X(cuDeviceGetByPCIBusId) X(cuFuncGetAttribute) \
    X(cuFuncSetAttribute) X(cuFuncSetBlockShape) X(cuFuncSetCacheConfig) \
    X(cuFuncSetSharedSize) X(cuIpcCloseMemHandle) X(cuIpcGetEventHandle) X(cuIpcGetMemHandle) \
    X(cuIpcOpenEventHandle) X(cuIpcOpenMemHandle_v2) X(cuLaunch) X(cuLaunchGrid) \
    X(cuLaunchGridAsync) X(cuLaunchKernel) X(cuLinkAddData_v2) X(cuLinkAddFile_v2) \
    X(cuLinkComplete) X(cuLinkCreate_v2) X(cuLinkDestroy) X(cuMemAllocPitch_v2) \
    X(cuMemcpy2DAsync_v2) X(cuMemcpy2DUnaligned_v2) X(cuMemcpy2D_v2) X(cuMemcpy3DAsync_v2) \
    X(cuMemcpy3DPeer) X(cuMemcpy3DPeerAsync) X(cuMemcpy3D_v2) X(cuMemcpyAtoA_v2) \
    X(cuMemcpyAtoD_v2) X(cuMemcpyAtoH_v2) X(cuMemcpyDtoA_v2) X(cuMemcpyHtoA_v2) \
    X(cuMemcpyPeer) X(cuMemcpyPeerAsync) X(cuMemsetD2D16Async) X(cuMemsetD2D16_v2) \
    X(cuMemsetD2D32Async) X(cuMemsetD2D32_v2) X(cuMemsetD2D8Async) X(cuMemsetD2D8_v2) \
    X(cuModuleGetFunction) X(cuModuleGetGlobal_v2) X(cuModuleGetSurfRef) X(cuModuleGetTexRef) \
    X(cuModuleLoad) X(cuModuleLoadData) X(cuModuleLoadDataEx) X(cuModuleUnload) \
    X(cuParamSetSize) X(cuParamSetTexRef) X(cuParamSetf) X(cuParamSeti) X(cuParamSetv) \
    X(cuProfilerInitialize) X(cuProfilerStart) X(cuProfilerStop) X(cuStreamAttachMemAsync) \
    X(cuSurfRefGetArray) X(cuSurfRefSetArray) X(cuTexRefCreate) X(cuTexRefDestroy) \
    X(cuTexRefGetAddressMode) X(cuTexRefGetAddress_v2) X(cuTexRefGetArray) \
    X(cuTexRefGetFilterMode) X(cuTexRefGetFlags) X(cuTexRefGetFormat) \
    X(cuTexRefSetAddress2D_v3) X(cuTexRefSetAddressMode) X(cuTexRefSetAddress_v2) \
    X(cuTexRefSetArray) X(cuTexRefSetFilterMode) X(cuTexRefSetFlags) X(cuTexRefSetFormat)
// clang-format on

namespace stub {

#define X(name)             \
    DRIVER_API name(void) { \
        ENTER(nothing);     \
        return unsupported; \
    }
UNSUPPORTED(X)
#undef X

} // namespace stub
