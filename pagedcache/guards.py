"""Small guards: objects that stand in for what is gone, refused copies, memory errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from pagedcache.errors import (
    CopyRefusedError,
    FormatError,
    FreedHandleError,
    PagedCacheError,
    StorageMemoryError,
)


class Gone:
    """Takes the place of an object that was freed, closed or never there.

    Every attribute of it raises the same typed error, so that callers need no test of their own
    before each use.
    """

    __slots__ = ("_make_error",)

    def __init__(self, make_error: Callable[[], PagedCacheError]) -> None:
        self._make_error = make_error

    def __getattr__(self, name: str) -> Any:
        raise self._make_error()


def freed(what: str) -> Gone:
    """The stand-in for ``what`` after free() or close()."""
    return Gone(lambda: FreedHandleError(what))


def _no_bytes() -> PagedCacheError:
    return FormatError(
        'a cache with its own bytes (storage="own" or adopted slabs)',
        "storage=None, which keeps ids, tables and prefixes only",
        "storage",
    )


#: The storage of a cache made with ``storage=None``.
NO_STORAGE = Gone(_no_bytes)


class NoCopy:
    """Mixin: copying, deep-copying and pickling are refused with ``CopyRefusedError``.

    Handles own references into a pool; a copy would give them back twice.
    """

    __slots__ = ()

    def __copy__(self) -> NoReturn:
        raise CopyRefusedError(type(self).__name__, "copied")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise CopyRefusedError(type(self).__name__, "copied")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise CopyRefusedError(type(self).__name__, "pickled")


@contextmanager
def taking(nbytes: int, what: str) -> Iterator[None]:
    """A block in which NumPy's or Python's own ``MemoryError`` becomes ``StorageMemoryError``."""
    try:
        yield
    except MemoryError as error:
        if isinstance(error, PagedCacheError):
            raise
        raise StorageMemoryError(nbytes, what) from None
