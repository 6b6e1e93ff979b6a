/* All that is compiled once per instruction set, in the order in which it builds on itself. */
#ifdef PC_ISA

#include "attend_vector.h"

#include "attend_decode.h"

#include "attend_kernel.h"

#include "attend_rows.h"

#include "attend_scales.h"

#include "attend_run.h"

#include "attend_softmax.h"

#include "attend_slice.h"

#include "attend_unit.h"

#undef PC_TURNS_PAIRS

#endif
