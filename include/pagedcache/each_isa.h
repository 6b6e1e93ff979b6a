/* Includes the file that PC_PER_ISA names once for every instruction set of this build. There,
 * V(name) is name with the set's suffix, and vf and vi are its vectors of float and uint32_t. */
#ifdef PC_PER_ISA

#define V(name) PC_JOIN(name, PC_ISA)
#define vf PC_JOIN(vf, PC_ISA)
#define vi PC_JOIN(vi, PC_ISA)

#if PC_ON_NEON
#define PC_ISA neon
#else
#define PC_ISA baseline
#endif
#define PC_TARGET
#define PC_WIDTH PC_BASELINE_WIDTH
#include PC_PER_ISA
#undef PC_ISA
#undef PC_TARGET
#undef PC_WIDTH

#if PC_ON_X86
#define PC_ISA avx2
#define PC_TARGET PC_TARGET_AVX2
#define PC_WIDTH 8
#include PC_PER_ISA
#undef PC_ISA
#undef PC_TARGET
#undef PC_WIDTH

#define PC_ISA avx512
#define PC_TARGET PC_TARGET_AVX512
#define PC_WIDTH 16
#include PC_PER_ISA
#undef PC_ISA
#undef PC_TARGET
#undef PC_WIDTH
#endif

#undef V
#undef vf
#undef vi
#undef PC_PER_ISA

#endif
