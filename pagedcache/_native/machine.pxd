"""What compiled modules work with: a codec for this machine, and threads."""
from libc.stdint cimport int64_t

cdef extern from "pagedcache/tools.h" nogil:
    int PC_MOST_THREADS
    int PC_LEAST_SHARED_NBYTES

    ctypedef void (*pc_task)(void *context, int64_t index, int who)
    ctypedef void (*pc_runner)(int threads, pc_task task, void *context, int64_t count)

    ctypedef struct pc_codec:
        pass

    ctypedef struct pc_tools:
        const pc_codec *codec
        pc_runner run
        int threads
        int64_t least_shared
        int streams
        float *buffer

    int pc_useful_threads(const pc_tools *tools, int64_t nbytes)


cdef int take_tools(pc_tools *tools) except -1
cdef pc_runner runner() noexcept
