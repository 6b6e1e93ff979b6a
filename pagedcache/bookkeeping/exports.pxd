from libc.stdint cimport int64_t
from pagedcache.bookkeeping.block_pool cimport BlockPool
from pagedcache.bookkeeping.types cimport pool_t, result_t, seq_t

cdef seq_t **seq_pointers(BlockPool pool, list seqs) except NULL
cdef result_t unique_and_live(pool_t *p, seq_t **seqs, int64_t n, bint unique) noexcept nogil
cdef object export_tables(BlockPool pool, list seqs, object lengths)
cdef object export_pages(BlockPool pool, list seqs, object lengths, bint allow_empty)
