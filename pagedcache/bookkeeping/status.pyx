# cython: language_level=3
"""The one place where the bookkeeping's answers become exceptions."""
from libc.stdint cimport int64_t

import operator

from pagedcache.bookkeeping.types cimport *

from pagedcache import errors

cdef extern from "Python.h":
    bint PyLong_CheckExact(object x)
    long long PyLong_AsLongLongAndOverflow(object x, int *overflow) except? -1

_BLOCK = (
    "the id is out of range",
    "the id was never allocated",
    "freed more often than it was allocated or shared (double free)",
    "the block is free and holds nothing cached; allocate() it instead",
    "too many references",
    "only sequences hold it; free() or truncate() them instead",
)
_POSITION = (
    "positions count from 0 to the sequence's length",
    "the commit goes past the end of the block table; prepare() or extend() first",
    "the commit goes past what append() wrote in every layer; append the missing layers first",
    "append_kv writes without a gap: at or before the layer's written end",
    "the block table does not reach that far; prepare() or extend() first",
    "the length is past the end of the block table",
    "only what was written can be read",
)
_STALE = (
    "blocks were moved by a defragmentation",
    "a block of it was freed, shared, cached, opened or sealed since",
)
_SLOT = (
    "out of range",
    "named twice in one mapping",
    "its block is shared with another sequence; prepare() copies it first",
    "its block is cached; prepare() copies it first",
    "its block is free; it belongs to no sequence",
    "its block is sealed: write all of it, in order, or prepare() it",
)
_PENDING = ("commit", "store")
_ARGUMENT = (
    "commit of {0} token(s) at position {1}: the block is shared or cached and was not prepared by "
    "this sequence; call prepare() (or append) before writing and committing",
    "the same sequence is named twice in one call",
    "allocate_for_tokens needs an empty sequence, this one holds {0} block(s) and {1} token(s)",
    "page_table: sequence {0} has length 0; leave it out or pass allow_empty=True",
    "allocate_upto={0} is outside 1…{1}, the number of tokens",
    "ticket {0} is unknown or was finished before",
    "the sequence or mapping belongs to another cache",
)
_CORRUPT = (
    "reference count differs from the holders found",
    "free and in use at once",
    "in the recency list but not idle",
    "the recency list is broken",
    "the free list is broken",
    "counts of free, idle and used blocks do not add up",
    "the index names a block that does not name it back",
    "a cached block's parent is gone while it is idle",
    "cached in the index but not counted",
    "a sequence's table names a block that is free",
    "lengths of a sequence contradict each other",
    "a negative count",
    "a cached block's tokens differ from those of a sequence that holds it",
    "an idle block has another resident copy",
    "the list of sequences is broken",
    "the prefix index does not lead to its node, or miscounts what is behind it",
    "it has an open slot that is another's, or is cached or free and has one",
    "the free list of open slots is broken",
    "it counts as sealed and is open",
    "more open slots are promised than are free, or not to the sequences there are",
)


cdef int64_t int_argument(object x, str name, int64_t lo, int64_t hi) except? -9:
    """An integer (not a bool) between lo and hi, or InvalidArgumentError."""
    cdef int overflow = 0
    cdef long long value
    if PyLong_CheckExact(x):
        value = PyLong_AsLongLongAndOverflow(x, &overflow)
        if overflow == 0 and lo <= value <= hi:
            return value
    return any_integer(x, name, lo, hi)


cdef int64_t any_integer(object x, str name, object lo, object hi) except? -9:
    """The same for every other type, and with the words for what is refused."""
    # A NumPy bool has no __index__, one of torch has.
    cdef bint is_bool = isinstance(x, bool) or str(getattr(x, "dtype", "")) == "torch.bool"
    try:
        value = None if is_bool else operator.index(x)
    except (TypeError, ValueError, RuntimeError):  # an array of several, a tensor without values
        value = None
    if value is None:
        raise errors.InvalidArgumentError(
            f"{name}: expected an integer, got {type(x).__name__} {errors.shown(x)}")
    if value < lo or value > hi:
        raise errors.InvalidArgumentError(
            f"{name}: expected {lo} to {hi}, got {errors.shown(value)}")
    return value


cdef object raise_result(result_t r):
    """Raise the exception of an answer other than OK."""
    if r.code == E_MEMORY:
        raise errors.StorageMemoryError(r.a, "bookkeeping")
    if r.code == E_BLOCKS:
        raise errors.OutOfBlocksError(r.a, r.b, r.c)
    if r.code == E_OPEN:
        raise errors.OutOfOpenBlocksError(r.a, r.b, r.c)
    if r.code == E_BLOCK:
        raise errors.BlockError(r.a, _BLOCK[r.b])
    if r.code == E_FREED:
        raise errors.FreedHandleError(f"sequence {r.a}")
    if r.code == E_REENTRANT:
        raise errors.ReentrantCallError()
    if r.code == E_FORKED:
        raise errors.ForkedProcessError()
    if r.code == E_POSITION:
        raise errors.InvalidPositionError(r.a, r.b, _POSITION[r.c])
    if r.code == E_TOO_LONG:
        raise errors.SequenceTooLongError(r.a, r.b)
    if r.code == E_PENDING:
        raise errors.PendingCopyError(r.a, _PENDING[r.b])
    if r.code == E_STALE:
        raise errors.StaleMappingError(r.a, r.b, _STALE[r.c])
    if r.code == E_SLOT:
        raise errors.SlotError(r.a, _SLOT[r.b])
    if r.code == E_ARGUMENT:
        raise errors.InvalidArgumentError(_ARGUMENT[r.a].format(r.b, r.c))
    if r.code == E_CORRUPT:
        raise errors.CorruptionError(_CORRUPT[r.b], r.a)
    raise errors.PagedCacheError(f"unknown status {r.code}")
