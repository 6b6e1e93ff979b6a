/* All that is compiled once per instruction set, in the order in which it builds on itself. */
#ifdef PC_ISA

#if PC_WIDTH == 16
#define PC_COLUMNS 4
#else
#define PC_COLUMNS 2
#endif

#include "vector.h"

#include "attend_decode.h"

#include "attend_kernel.h"

#include "attend_rows.h"

#include "attend_scales.h"

#include "attend_run.h"

#include "attend_softmax.h"

#include "attend_slice.h"

#include "attend_unit.h"

#undef PC_COLUMNS
#undef PC_TURNS_PAIRS

#endif
