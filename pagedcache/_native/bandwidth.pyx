# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""Plain copies and a plain read: the limits that ``pagedcache bench`` compares with.

Each works on as many threads as it is told, in equal parts of whole cache lines, with the GIL
released. ``ShapeError`` for arrays of unequal length, ``InvalidArgumentError`` for other numbers of
threads than 1…1024.
"""

from libc.stdint cimport int64_t, uint8_t, uint64_t

from pagedcache._native.machine cimport PC_MOST_THREADS, pc_runner, pc_task, runner
from pagedcache.errors import InvalidArgumentError, ShapeError

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>

    #include "pagedcache/tasks.h"
    #if defined(__SSE2__) || defined(_M_X64)
    #include <emmintrin.h>
    #define PC_STREAMS 1
    #else
    #define PC_STREAMS 0
    #endif

    typedef struct {
        const uint8_t *source;
        uint8_t *target; /* unused where bytes are only read */
        int64_t nbytes, part;
        uint64_t sums[PC_MOST_THREADS];
    } pc_traffic;

    /* Bytes of turn i, which begin at i * part; below 1 behind the end. */
    static inline int64_t pc_part_nbytes(const pc_traffic *job, int64_t i) {
        int64_t left = job->nbytes - i * job->part;
        return left < job->part ? left : job->part;
    }

    static void pc_copy_part(void *context, int64_t i, int who) {
        const pc_traffic *job = (const pc_traffic *)context;
        int64_t nbytes = pc_part_nbytes(job, i);
        (void)who;
        if (nbytes > 0) {
            memcpy(job->target + i * job->part, job->source + i * job->part, (size_t)nbytes);
        }
    }

    /* Stores go past the caches: the lines written are not read before. */
    static void pc_stream_part(void *context, int64_t i, int who) {
    #if PC_STREAMS
        const pc_traffic *job = (const pc_traffic *)context;
        int64_t nbytes = pc_part_nbytes(job, i), k, head;
        const uint8_t *source = job->source + i * job->part;
        uint8_t *target = job->target + i * job->part;
        (void)who;
        if (nbytes <= 0) {
            return;
        }
        head = (int64_t)(-(uintptr_t)target & 15);
        head = head < nbytes ? head : nbytes;
        memcpy(target, source, (size_t)head);
        for (k = head; k + 64 <= nbytes; k += 64) {
            __m128i a = _mm_loadu_si128((const __m128i *)(source + k));
            __m128i b = _mm_loadu_si128((const __m128i *)(source + k + 16));
            __m128i c = _mm_loadu_si128((const __m128i *)(source + k + 32));
            __m128i d = _mm_loadu_si128((const __m128i *)(source + k + 48));
            _mm_stream_si128((__m128i *)(target + k), a);
            _mm_stream_si128((__m128i *)(target + k + 16), b);
            _mm_stream_si128((__m128i *)(target + k + 32), c);
            _mm_stream_si128((__m128i *)(target + k + 48), d);
        }
        memcpy(target + k, source + k, (size_t)(nbytes - k));
        _mm_sfence();
    #else
        pc_copy_part(context, i, who);
    #endif
    }

    /* The sum modulo 2^64 of the 64-bit words, an incomplete last one filled with zeros. */
    static void pc_read_part(void *context, int64_t i, int who) {
        pc_traffic *job = (pc_traffic *)context;
        int64_t nbytes = pc_part_nbytes(job, i), k = 0, lane;
        const uint8_t *source = job->source + i * job->part;
        uint64_t sum = 0, words[8] = {0}, word;
        (void)who;
        if (nbytes <= 0) {
            return;
        }
    #if PC_STREAMS
        {
            __m128i a = _mm_setzero_si128(), b = a, c = a, d = a;
            for (; k + 64 <= nbytes; k += 64) {
                a = _mm_add_epi64(a, _mm_loadu_si128((const __m128i *)(source + k)));
                b = _mm_add_epi64(b, _mm_loadu_si128((const __m128i *)(source + k + 16)));
                c = _mm_add_epi64(c, _mm_loadu_si128((const __m128i *)(source + k + 32)));
                d = _mm_add_epi64(d, _mm_loadu_si128((const __m128i *)(source + k + 48)));
            }
            _mm_storeu_si128((__m128i *)words, a);
            _mm_storeu_si128((__m128i *)(words + 2), b);
            _mm_storeu_si128((__m128i *)(words + 4), c);
            _mm_storeu_si128((__m128i *)(words + 6), d);
        }
    #else
        for (; k + 64 <= nbytes; k += 64) {
            uint64_t line[8];
            memcpy(line, source + k, 64);
            for (lane = 0; lane < 8; lane++) {
                words[lane] += line[lane];
            }
        }
    #endif
        for (lane = 0; lane < 8; lane++) {
            sum += words[lane];
        }
        for (; k < nbytes; k += 8) {
            word = 0;
            memcpy(&word, source + k, (size_t)(nbytes - k < 8 ? nbytes - k : 8));
            sum += word;
        }
        job->sums[i] = sum;
    }

    static uint64_t pc_move(pc_runner run, pc_task task, const uint8_t *source, uint8_t *target,
                            int64_t nbytes, int threads) {
        pc_traffic job;
        uint64_t sum = 0;
        int i;
        job.source = source;
        job.target = target;
        job.nbytes = nbytes;
        job.part = (nbytes / threads + 64) / 64 * 64;
        memset(job.sums, 0, (size_t)threads * sizeof *job.sums);
        run(threads, task, &job, threads);
        for (i = 0; i < threads; i++) {
            sum += job.sums[i];
        }
        return sum;
    }
    """
    int PC_STREAMS

    void pc_copy_part(void *context, int64_t i, int who) noexcept nogil
    void pc_stream_part(void *context, int64_t i, int who) noexcept nogil
    void pc_read_part(void *context, int64_t i, int who) noexcept nogil
    uint64_t pc_move(pc_runner run, pc_task task, const uint8_t *source, uint8_t *target,
                     int64_t nbytes, int threads) nogil

#: Whether ``stream`` bypasses the caches here; where it cannot it is ``copy``.
STREAMS = bool(PC_STREAMS)


cdef int check_threads(int threads) except -1:
    if not 1 <= threads <= PC_MOST_THREADS:
        raise InvalidArgumentError(f"threads must be 1…{PC_MOST_THREADS}, got {threads}")
    return 0


cdef int move(pc_task task, const uint8_t[::1] source, uint8_t[::1] target,
              int threads) except -1:
    cdef pc_runner run = runner()
    check_threads(threads)
    if source.shape[0] != target.shape[0]:
        raise ShapeError(f"({source.shape[0]},)", f"({target.shape[0]},)", "target")
    if source.shape[0]:
        with nogil:
            pc_move(run, task, &source[0], &target[0], source.shape[0], threads)
    return 0


def copy(const uint8_t[::1] source, uint8_t[::1] target, int threads=1):
    """``memcpy``. The arrays must not overlap."""
    move(pc_copy_part, source, target, threads)


def stream(const uint8_t[::1] source, uint8_t[::1] target, int threads=1):
    """A copy by non-temporal stores. The arrays must not overlap."""
    move(pc_stream_part, source, target, threads)


def read(const uint8_t[::1] source, int threads=1):
    """The sum of all 64-bit words modulo 2^64, one word after another of every thread's part.

    Parts begin at multiples of 64 bytes, so the number of threads does not change it; an
    incomplete last word counts as if zeros followed.
    """
    cdef uint64_t total = 0
    cdef pc_runner run = runner()
    check_threads(threads)
    if source.shape[0]:
        with nogil:
            total = pc_move(run, pc_read_part, &source[0], NULL, source.shape[0], threads)
    return total
