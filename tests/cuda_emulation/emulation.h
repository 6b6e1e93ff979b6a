/* CUDA kernels on the host: what cuda/device.h includes where there is no CUDA compiler.
 *
 * One fiber per CUDA thread of a CTA, switched at barriers and warp operations; CTAs one after the
 * other. README.md in this folder says what this finds and what only a GPU can. Needs g++ with
 * C++20 and nothing of NVIDIA's. Compile with -ffp-contract=off -fno-strict-aliasing.
 */
#ifndef PC_EMULATION_H
#define PC_EMULATION_H

#if defined(__CUDACC__)
#error "the emulation is for host compilers; the CUDA compiler has the toolkit"
#endif

#include "emulation/async_copy.h"
#include "emulation/atomics.h"
#include "emulation/barriers.h"
#include "emulation/bits.h"
#include "emulation/launch.h"
#include "emulation/mma.h"
#include "emulation/runtime.h"
#include "emulation/vectors.h"
#include "emulation/warp.h"

#endif
