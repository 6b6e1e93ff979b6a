/* Status codes of the native functions. Native code returns a code and touches no Python or CUDA
 * error state; one function per language edge turns codes into exceptions.
 */
#ifndef PAGEDCACHE_STATUS_H
#define PAGEDCACHE_STATUS_H

/* X(code name, value, text for people) */
#define PC_STATUS_CODES(X)                                             \
    X(PC_OK, 0, "ok")                                                  \
    X(PC_E_NONFINITE, 1, "NaN or Inf was given to a quantised format") \
    X(PC_E_FORMAT, 2, "unknown format code")                           \
    X(PC_E_RANGE, 3, "offset or length outside the buffer")            \
    X(PC_E_MEMORY, 4, "memory could not be had")                       \
    X(PC_E_ARGUMENT, 5, "argument has a value that the call can't accept")

#define PC_STATUS_ENUM(name, value, text) name = value,
enum pc_status { PC_STATUS_CODES(PC_STATUS_ENUM) PC_STATUS_END };
#undef PC_STATUS_ENUM

#endif
