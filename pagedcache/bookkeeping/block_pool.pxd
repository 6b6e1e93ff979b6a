from pagedcache.bookkeeping.types cimport pool_t

cdef class BlockPool:
    cdef pool_t *p
    cdef object __weakref__
    cdef int _each(self, object ids, bint freeing) except -1
