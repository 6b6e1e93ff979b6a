"""Every error the library raises: typed, picklable, with its numbers as attributes.

All derive from :class:`PagedCacheError`. Where Python users expect a built-in
(``ValueError``, ``KeyError``, ``IndexError``, ``MemoryError``, ``RuntimeError``) an error is
that too, so ``except ValueError`` keeps working. The message says what was expected, what
came, and what to do; the state of the object is unchanged after the error.
"""

from __future__ import annotations

from typing import Any


def shown(value: Any) -> str:
    """``repr`` of a value for a message: short, and never an error of its own.

    Python refuses to write out integers of thousands of digits; such a one is told by its size.
    A value whose ``repr`` fails is told by its type.
    """
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception:  # code of the caller's own, or a huge integer inside a list
        return f"a value of type {type(value).__name__} that has no repr"
    return text if len(text) <= 80 else text[:77] + "..."


class PagedCacheError(Exception):
    """Base of all errors of this library.

    Subclasses keep their constructor arguments, so that an error survives pickling (process
    pools, RPC) with its attributes.
    """

    _init_args: tuple[Any, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        notes = getattr(self, "__notes__", None)
        state = {"__notes__": list(notes)} if notes else None
        return (type(self), self._init_args, state)


class InvalidArgumentError(PagedCacheError, ValueError):
    """An argument has a value that no call accepts (negative count, token outside uint32, …)."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self._init_args = (message,)


class OutOfBlocksError(PagedCacheError, MemoryError):
    """Not enough free blocks; nothing has changed.

    ``needed``: blocks to take beyond prefix hits. ``available``: free and cached-free blocks
    less this request's own hits. ``total``: blocks in the pool. ``fits_never`` is true when
    the request is larger than the whole pool, so that waiting cannot help; a prompt of which
    that is true is counted without its hits.
    """

    def __init__(self, needed: int, available: int, total: int) -> None:
        self.needed, self.available, self.total = int(needed), int(available), int(total)
        self.fits_never = self.needed > self.total
        cure = (
            "it can never fit this pool: shorten the request or make the pool larger"
            if self.fits_never
            else "free or truncate sequences and try again"
        )
        super().__init__(
            f"out of blocks: needed {self.needed}, available {self.available} "
            f"of {self.total}; {cure}"
        )
        self._init_args = (needed, available, total)


class OutOfOpenBlocksError(OutOfBlocksError):
    """All open slots hold blocks that are not full yet; nothing has changed.

    ``needed`` slots to take, ``available`` free ones of ``total``. Raised only by caches whose
    format keeps part-filled blocks open (``CacheSpec.open_blocks``).
    """

    def __init__(self, needed: int, available: int, total: int) -> None:
        super().__init__(needed, available, total)
        cure = (
            "make the cache with a larger num_open_blocks"
            if self.fits_never
            else "free or truncate sequences and try again, or make the cache with a larger "
            "num_open_blocks"
        )
        self.args = (
            f"out of open blocks: needed {self.needed}, available {self.available} "
            f"of {self.total}; {cure}",
        )


class StorageMemoryError(PagedCacheError, MemoryError):
    """Memory for storage or bookkeeping could not be had; nothing was taken.

    ``nbytes`` is 0 where CUDA ran out of memory in a call that does not say how much it wanted.
    """

    def __init__(self, nbytes: int, what: str) -> None:
        self.nbytes, self.what = int(nbytes), what
        amount = f"{self.nbytes:,} bytes" if self.nbytes else "memory"
        super().__init__(
            f"could not allocate {amount} for {what}; use fewer or smaller blocks, or free memory"
        )
        self._init_args = (nbytes, what)


class BlockError(PagedCacheError, ValueError):
    """A block id is out of range, not allocated, or freed twice; nothing has changed."""

    def __init__(self, block_id: int, reason: str) -> None:
        self.block_id, self.reason = int(block_id), reason
        super().__init__(f"block {self.block_id}: {reason}")
        self._init_args = (block_id, reason)


class SlotError(PagedCacheError, ValueError):
    """A slot of a slot mapping must not be written (range, duplicate, shared, cached, stale)."""

    def __init__(self, slot: int, reason: str) -> None:
        self.slot, self.reason = int(slot), reason
        super().__init__(f"slot {self.slot}: {reason}")
        self._init_args = (slot, reason)


class StaleMappingError(PagedCacheError, ValueError):
    """A slot mapping was made before its blocks moved, were freed, shared or cached."""

    def __init__(self, made: int, now: int, reason: str) -> None:
        self.made, self.now, self.reason = int(made), int(now), reason
        super().__init__(
            f"slot mapping of layout epoch {self.made} is stale at epoch {self.now}: {reason}; "
            "call prepare() again"
        )
        self._init_args = (made, now, reason)


class PendingCopyError(PagedCacheError, RuntimeError):
    """A block still waits for a block copy that the engine has taken or must take."""

    def __init__(self, block_id: int, operation: str) -> None:
        self.block_id, self.operation = int(block_id), operation
        super().__init__(
            f"{operation}: block {self.block_id} is an end of an unfinished block copy; run the "
            "copies of take_block_copies() and call copies_done(ticket) first"
        )
        self._init_args = (block_id, operation)


class SequenceNotFoundError(PagedCacheError, KeyError):
    """No live sequence has this id."""

    def __init__(self, seq_id: Any) -> None:
        self.seq_id = seq_id
        super().__init__(f"no live sequence has id {shown(seq_id)}; ids are never reused")
        self._init_args = (seq_id,)

    def __str__(self) -> str:  # KeyError would show repr(message)
        return str(self.args[0])


class PrefixNotFoundError(PagedCacheError, KeyError):
    """A ``PrefixCache`` has no entry for these tokens or this hash, or more than one."""

    def __init__(self, key: str, reason: str = "no entry has it") -> None:
        self.key, self.reason = key, reason
        super().__init__(f"prefix {key}: {reason}")
        self._init_args = (key, reason)

    def __str__(self) -> str:  # KeyError would show repr(message)
        return str(self.args[0])


class FreedHandleError(PagedCacheError, RuntimeError):
    """A handle is used after free() or close()."""

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(f"{what} was freed or closed and cannot be used any more; open a new one")
        self._init_args = (what,)


class ForkedProcessError(PagedCacheError, RuntimeError):
    """A cache is used from a process forked after it was made."""

    def __init__(self, what: str = "this cache") -> None:
        self.what = what
        super().__init__(
            f"{what} was made before this process was forked; its locks and blocks belong to the "
            "parent. Make a new cache in the child"
        )
        self._init_args = (what,)


class CopyRefusedError(PagedCacheError, TypeError):
    """A cache, a handle or a view cannot be copied or pickled."""

    def __init__(self, what: str, action: str) -> None:
        self.what, self.action = what, action
        super().__init__(
            f"{what} cannot be {action}: it owns references into its cache. Use fork() for a "
            "second sequence, gather() for the values"
        )
        self._init_args = (what, action)


class ReentrantCallError(PagedCacheError, RuntimeError):
    """A finalizer called into the cache while its own thread was inside a call on it."""

    def __init__(self) -> None:
        super().__init__(
            "called from a finalizer while this thread is inside a call on the same cache; there, "
            "only free() and release() work (they take effect with the next call)"
        )


class InvalidPositionError(PagedCacheError, IndexError):
    """A token position or count lies outside a sequence."""

    def __init__(self, position: int, length: int, reason: str = "") -> None:
        self.position, self.length, self.reason = int(position), int(length), reason
        text = f"position {shown(self.position)} is outside 0…{self.length}"
        super().__init__(f"{text}: {reason}" if reason else text)
        self._init_args = (position, length, reason)


class SequenceTooLongError(PagedCacheError, ValueError):
    """A sequence would pass ``max_seq_len``; nothing was written."""

    def __init__(self, needed: int, max_seq_len: int) -> None:
        self.needed, self.max_seq_len = int(needed), int(max_seq_len)
        super().__init__(
            f"{self.needed} tokens needed, max_seq_len is {self.max_seq_len}; "
            "raise max_seq_len in CacheSpec or truncate the sequence"
        )
        self._init_args = (needed, max_seq_len)


class CorruptionError(PagedCacheError, RuntimeError):
    """``check()`` found bookkeeping that disagrees with itself."""

    def __init__(self, detail: str, block_id: int = -1) -> None:
        self.detail, self.block_id = detail, int(block_id)
        where = f"block {self.block_id}: " if self.block_id >= 0 else ""
        super().__init__(f"corruption: {where}{detail}; please report this")
        self._init_args = (detail, block_id)


class _ExpectedGotError(PagedCacheError):
    """Shared form of errors that compare what was expected with what came."""

    def __init__(self, expected: Any, got: Any, what: str = "") -> None:
        self.expected, self.got, self.what = expected, got, what
        prefix = f"{what}: " if what else ""
        super().__init__(f"{prefix}expected {expected}, got {got}")
        self._init_args = (expected, got, what)


class ShapeError(_ExpectedGotError, ValueError):
    """An array has the wrong rank or shape."""


class FormatError(_ExpectedGotError, ValueError, TypeError):
    """A dtype or storage format is unknown, or not usable here."""


class DeviceError(_ExpectedGotError, RuntimeError):
    """An array or a layer is on another device than the call needs."""


# What to do about CUDA's own codes; a code without an entry gets the last words.
_BROKEN = (
    "no call on this device can succeed any more in this process: start a new one, and look for "
    "the kernel at fault with compute-sanitizer"
)
_CUDA_CURES = {
    1: "one of the arguments is not usable: a freed buffer, host memory, or too large a size",
    2: "free memory on the device, or use fewer or smaller blocks",
    35: "install an NVIDIA driver that is new enough for the CUDA version of the library",
    100: "make a GPU visible: see nvidia-smi and CUDA_VISIBLE_DEVICES",
    101: "ask for a device that is there: see nvidia-smi and CUDA_VISIBLE_DEVICES",
    201: "the context of the device is gone: do not reset the device or detach its context",
    209: "build the library for this GPU's architecture (PAGEDCACHE_CUDA=on)",
    222: "install a newer NVIDIA driver, or build the library with an older CUDA toolkit",
    400: "a stream or an event was destroyed, or belongs to another device: keep streams alive "
    "while a cache uses them",
    709: "a stream was destroyed, or the device was reset: keep both alive while a cache uses them",
    **dict.fromkeys((214, 220, 226, 700, 702, 710, 721, 810, 911), _BROKEN),
    **dict.fromkeys(range(714, 720), _BROKEN),
    **dict.fromkeys(range(900, 909), "make this call before or after the capture of the stream"),
}
_LAST_WORDS = "the documentation of CUDA says more about this code"


class CudaCallError(DeviceError):
    """A call of CUDA failed.

    ``call``: the function that reported it; work queued earlier may be at fault. ``code``,
    ``name`` and ``text``: CUDA's own words. ``cure``: what to do.
    """

    def __init__(self, call: str, code: int, name: str, text: str) -> None:
        self.call, self.code, self.name, self.text = call, int(code), name, text
        self.cure = _CUDA_CURES.get(self.code, _LAST_WORDS)
        super().__init__("success", f"{name} ({self.code}): {text}", call)
        self._init_args = (call, code, name, text)

    def __str__(self) -> str:
        return f"{self.call} failed with {self.got}; {self.cure}"


class NonFiniteError(PagedCacheError, ValueError):
    """NaN or Inf was given to a quantised format under ``on_nonfinite="raise"``."""

    def __init__(self, what: str, index: int, value: float) -> None:
        self.what, self.index, self.value = what, int(index), float(value)
        super().__init__(
            f"{what}: value {self.value} at flat index {self.index} is not finite; clean the input "
            'or pass on_nonfinite="saturate"'
        )
        self._init_args = (what, index, value)


class MissingPackageError(PagedCacheError, ImportError):
    """An integration needs a package that is absent or too old."""

    def __init__(self, package: str, least: str, purpose: str, found: str) -> None:
        self.package, self.least, self.purpose, self.found = package, least, purpose, found
        super().__init__(
            f"{purpose} needs {package} {least} or newer, found it {found}; "
            f'run: pip install "{package}>={least}"'
        )
        self._init_args = (package, least, purpose, found)


class CudaUnavailableError(PagedCacheError, RuntimeError):
    """CUDA was asked for and cannot be used; ``reason`` says what is missing and the cure."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"CUDA is not available: {reason}")
        self._init_args = (reason,)
