from pagedcache.bookkeeping.types cimport pool_t

cdef class BlockPool:
    cdef pool_t *p
    cdef object __weakref__
