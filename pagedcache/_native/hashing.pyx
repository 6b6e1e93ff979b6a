# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""Sequential hashes over token arrays: the public FNV identity and a keyed prefix hash.

No checks here: callers pass C-contiguous uint32 tokens (``pagedcache.arrays.as_tokens``).
"""

from libc.stdint cimport uint32_t, uint64_t

cdef extern from *:
    """
    #include <stdint.h>

    #define PC_P61 ((UINT64_C(1) << 61) - 1)

    /* (state + token + 1) * multiplier modulo the prime 2^61 - 1, for state, multiplier < p. */
    static inline uint64_t pc_keyed_step(uint64_t state, uint32_t token, uint64_t multiplier)
    {
        uint64_t sum = state + token + 1; /* < 2^62 */
        unsigned __int128 product = (unsigned __int128)sum * multiplier; /* < 2^123 */
        uint64_t folded = (uint64_t)(product & PC_P61) + (uint64_t)(product >> 61); /* < 2^63 */
        folded = (folded & PC_P61) + (folded >> 61);
        return folded >= PC_P61 ? folded - PC_P61 : folded;
    }
    """
    uint64_t pc_keyed_step(uint64_t state, uint32_t token, uint64_t multiplier) nogil

cdef enum:
    # Below this a loop is shorter than giving the GIL away and taking it back.
    LONG_ENOUGH = 4096

cdef uint64_t FNV_START = 0xcbf29ce484222325
cdef uint64_t FNV_PRIME = 0x100000001b3


cdef uint64_t _fnv(const uint32_t *tokens, Py_ssize_t num_tokens) noexcept nogil:
    cdef uint64_t state = FNV_START
    cdef Py_ssize_t i
    for i in range(num_tokens):
        state = (state ^ tokens[i]) * FNV_PRIME
    return state


cdef uint64_t _keyed(const uint32_t *tokens, Py_ssize_t num_tokens, uint64_t multiplier,
                     uint64_t state, uint64_t *prefixes) noexcept nogil:
    cdef Py_ssize_t i
    if prefixes != NULL:
        prefixes[0] = state
        for i in range(num_tokens):
            state = pc_keyed_step(state, tokens[i], multiplier)
            prefixes[i + 1] = state
    else:
        for i in range(num_tokens):
            state = pc_keyed_step(state, tokens[i], multiplier)
    return state


def fnv1a64(const uint32_t[::1] tokens):
    """64-bit FNV-1a over whole tokens."""
    cdef Py_ssize_t num_tokens = tokens.shape[0]
    cdef const uint32_t *first = &tokens[0] if num_tokens else NULL
    cdef uint64_t value
    if num_tokens < LONG_ENOUGH:
        return _fnv(first, num_tokens)
    with nogil:
        value = _fnv(first, num_tokens)
    return value


def keyed_hash(const uint32_t[::1] tokens, uint64_t multiplier, uint64_t start):
    """Keyed hash of all tokens; ``multiplier`` and ``start`` are secrets below 2^61 - 1."""
    cdef Py_ssize_t num_tokens = tokens.shape[0]
    cdef const uint32_t *first = &tokens[0] if num_tokens else NULL
    cdef uint64_t value
    if num_tokens < LONG_ENOUGH:
        return _keyed(first, num_tokens, multiplier, start, NULL)
    with nogil:
        value = _keyed(first, num_tokens, multiplier, start, NULL)
    return value


def keyed_prefix_hashes(const uint32_t[::1] tokens, uint64_t multiplier, uint64_t start,
                        uint64_t[::1] out):
    """Keyed hashes of every prefix: ``out[n]`` becomes that of the first n tokens, in one pass.

    ``out`` has one element more than ``tokens``.
    """
    cdef Py_ssize_t num_tokens = tokens.shape[0]
    cdef const uint32_t *first = &tokens[0] if num_tokens else NULL
    if out.shape[0] != num_tokens + 1:
        raise ValueError(f"out holds {out.shape[0]} values, needs {num_tokens + 1}")
    with nogil:
        _keyed(first, num_tokens, multiplier, start, &out[0])
