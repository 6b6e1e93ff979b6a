# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""Instruction sets and threads: what this build has, what the machine can run, what is in use.

The codecs of every instruction set and the only threads are compiled into this module; others take
them from here. What is in use is asked for once, when it is first needed (``when_needed``).
"""
from pagedcache.errors import InvalidArgumentError


cdef extern from "pagedcache/codecs.h" nogil:
    ctypedef struct pc_named_codec:
        const char *name
        const pc_codec *codec

    const pc_named_codec *pc_codecs(int *count)
    int pc_usable_isas()


cdef extern from "pagedcache/threads.h" nogil:
    void pc_start_threads()
    void pc_run_tasks(int threads, pc_task task, void *context, int64_t count)


pc_start_threads()

# Asked once: a virtual machine traps the instruction that asks.
cdef int usable = pc_usable_isas()

#: Threads of one call at most.
MOST_THREADS = PC_MOST_THREADS

cdef const pc_codec *codec = NULL  # NULL: not chosen yet
cdef int threads = 1
cdef int64_t least_shared = PC_LEAST_SHARED_NBYTES
cdef object ask = None


def instruction_sets():
    """Names of the instruction sets this build knows, best last, and how many of them, counted
    from the first, this machine can run."""
    cdef int i, count = 0
    cdef const pc_named_codec *known = pc_codecs(&count)
    return [known[i].name.decode() for i in range(count)], usable


def use(int isa, int num_threads):
    """Convert with codec ``isa`` of ``instruction_sets()`` on up to ``num_threads`` threads.

    Raises ``InvalidArgumentError`` for what this machine cannot run.
    """
    global codec, threads
    cdef int count = 0
    if not 0 <= isa < usable:
        raise InvalidArgumentError(f"isa {isa} cannot run on this machine")
    if not 1 <= num_threads <= PC_MOST_THREADS:
        raise InvalidArgumentError(f"threads must be 1…{PC_MOST_THREADS}, got {num_threads}")
    codec = pc_codecs(&count)[isa].codec
    threads = num_threads


def share_from(int64_t nbytes):
    """Give every thread at least so many bytes of an operation; 0: the default. For tests."""
    global least_shared
    least_shared = nbytes if nbytes > 0 else PC_LEAST_SHARED_NBYTES


def when_needed(question):
    """Call ``question()``, which calls :func:`use`, before the next conversion.

    Without it the best codec is used, on one thread.
    """
    global ask, codec
    ask = question
    codec = NULL


cdef int take_tools(pc_tools *tools) except -1:
    """Fill in all but the buffer."""
    if codec == NULL:
        if ask is not None:
            ask()
        if codec == NULL:
            use(usable - 1, 1)
    tools.codec = codec
    tools.run = pc_run_tasks
    tools.threads = threads
    tools.least_shared = least_shared
    tools.streams = 0
    tools.buffer = NULL
    return 0


cdef pc_runner runner() noexcept:
    return pc_run_tasks
