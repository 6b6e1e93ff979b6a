from pagedcache.bookkeeping.ledger_write cimport LedgerWrite

cdef class LedgerPin(LedgerWrite):
    pass
