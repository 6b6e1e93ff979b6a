from libc.stdint cimport int64_t
from pagedcache.bookkeeping.types cimport result_t

cdef int64_t int_argument(object x, str name, int64_t lo, int64_t hi) except? -9
cdef object raise_result(result_t r)
