"""Every error: its attributes, its built-in bases, its message, and pickling."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from pagedcache import errors
from pagedcache.errors import PagedCacheError

# Class name -> constructor arguments, attributes, built-in bases, words the message must hold.
TABLE: dict[str, tuple[tuple[object, ...], dict[str, object], tuple[type, ...], list[str]]] = {
    "PagedCacheError": ((), {}, (Exception,), []),
    "InvalidArgumentError": (("count is -1",), {}, (ValueError,), ["count is -1"]),
    "OutOfBlocksError": (
        (5, 2, 8),
        {"needed": 5, "available": 2, "total": 8, "fits_never": False},
        (MemoryError,),
        ["needed 5", "available 2", "of 8", "free or truncate"],
    ),
    "OutOfOpenBlocksError": (
        (3, 1, 8),
        {"needed": 3, "available": 1, "total": 8, "fits_never": False},
        (MemoryError,),
        ["out of open blocks: needed 3", "available 1", "of 8", "num_open_blocks"],
    ),
    "StorageMemoryError": (
        (1 << 40, "K slabs"),
        {"nbytes": 1 << 40, "what": "K slabs"},
        (MemoryError,),
        ["1,099,511,627,776 bytes", "K slabs"],
    ),
    "BlockError": (
        (7, "freed twice"),
        {"block_id": 7, "reason": "freed twice"},
        (ValueError,),
        ["block 7", "freed twice"],
    ),
    "SlotError": (
        (33, "given twice"),
        {"slot": 33, "reason": "given twice"},
        (ValueError,),
        ["slot 33", "given twice"],
    ),
    "StaleMappingError": (
        (3, 4, "blocks moved"),
        {"made": 3, "now": 4, "reason": "blocks moved"},
        (ValueError,),
        ["epoch 3", "epoch 4", "blocks moved", "prepare()"],
    ),
    "PendingCopyError": (
        (9, "commit"),
        {"block_id": 9, "operation": "commit"},
        (RuntimeError,),
        ["commit", "block 9", "copies_done"],
    ),
    "SequenceNotFoundError": (("r-17",), {"seq_id": "r-17"}, (KeyError,), ["'r-17'"]),
    "PrefixNotFoundError": (
        ("hash 0x2a", "2 entries share it"),
        {"key": "hash 0x2a", "reason": "2 entries share it"},
        (KeyError,),
        ["hash 0x2a", "2 entries share it"],
    ),
    "FreedHandleError": (("sequence 4",), {"what": "sequence 4"}, (RuntimeError,), ["sequence 4"]),
    "CopyRefusedError": (
        ("Sequence", "pickled"),
        {"what": "Sequence", "action": "pickled"},
        (TypeError,),
        ["Sequence", "pickled"],
    ),
    "ForkedProcessError": (("this pool",), {"what": "this pool"}, (RuntimeError,), ["this pool"]),
    "ReentrantCallError": ((), {}, (RuntimeError,), ["finalizer", "free()"]),
    "InvalidPositionError": (
        (12, 10, "past the end"),
        {"position": 12, "length": 10, "reason": "past the end"},
        (IndexError,),
        ["position 12", "10", "past the end"],
    ),
    "SequenceTooLongError": (
        (4097, 4096),
        {"needed": 4097, "max_seq_len": 4096},
        (ValueError,),
        ["4097", "4096"],
    ),
    "CorruptionError": (
        ("count is 2, two tables hold 3", 6),
        {"detail": "count is 2, two tables hold 3", "block_id": 6},
        (RuntimeError,),
        ["block 6", "count is 2"],
    ),
    "ShapeError": (
        ((4, 3, 64), (4, 64), "k"),
        {"expected": (4, 3, 64), "got": (4, 64), "what": "k"},
        (ValueError,),
        ["k: ", "expected (4, 3, 64)", "got (4, 64)"],
    ),
    "FormatError": (
        ("float32", "float64", "v"),
        {"expected": "float32", "got": "float64", "what": "v"},
        (ValueError, TypeError),
        ["v: ", "expected float32", "got float64"],
    ),
    "DeviceError": (
        ("cuda:0", "cpu"),
        {"expected": "cuda:0", "got": "cpu", "what": ""},
        (RuntimeError,),
        ["expected cuda:0", "got cpu"],
    ),
    "NonFiniteError": (
        ("k", 65, float("inf")),
        {"what": "k", "index": 65, "value": float("inf")},
        (ValueError,),
        ["k", "inf", "65", "saturate"],
    ),
    "CudaCallError": (
        ("cuMemAlloc", 999, "CUDA_ERROR_UNKNOWN", "unknown error"),
        {
            "call": "cuMemAlloc",
            "code": 999,
            "name": "CUDA_ERROR_UNKNOWN",
            "text": "unknown error",
            "cure": "the documentation of CUDA says more about this code",
            "expected": "success",
            "got": "CUDA_ERROR_UNKNOWN (999): unknown error",
            "what": "cuMemAlloc",
        },
        (RuntimeError,),
        ["cuMemAlloc failed with CUDA_ERROR_UNKNOWN (999): unknown error", "documentation"],
    ),
    "MissingPackageError": (
        ("transformers", "4.57", "PagedCache", "version 4.40.1"),
        {
            "package": "transformers",
            "least": "4.57",
            "purpose": "PagedCache",
            "found": "version 4.40.1",
        },
        (ImportError,),
        ["PagedCache needs transformers 4.57", "version 4.40.1", "pip install"],
    ),
    "CudaUnavailableError": (
        ("no driver: install one",),
        {"reason": "no driver: install one"},
        (RuntimeError,),
        ["no driver: install one"],
    ),
}


def make(name: str) -> PagedCacheError:
    return getattr(errors, name)(*TABLE[name][0])


def test_the_table_holds_every_error() -> None:  # SPEC 7
    public = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, BaseException) and name[0] != "_"
    }
    assert public == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_attributes_bases_and_message(name: str) -> None:  # SPEC 7
    _, attributes, bases, words = TABLE[name]
    error = make(name)
    assert isinstance(error, PagedCacheError)
    for base in bases:
        assert isinstance(error, base), base
    assert {key: getattr(error, key) for key in attributes} == attributes
    for word in words:
        assert word in str(error)
    assert type(error).__doc__


@pytest.mark.parametrize("name", TABLE)
def test_an_error_is_no_other_builtin(name: str) -> None:  # SPEC 7
    """``except KeyError`` must not catch what is no key error, and so on."""
    builtin = (
        ValueError, KeyError, IndexError, MemoryError, RuntimeError, TypeError, ImportError,
    )  # fmt: skip
    assert {b for b in builtin if isinstance(make(name), b)} == set(TABLE[name][2]) - {Exception}


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("name", TABLE)
def test_pickling_keeps_everything(name: str, protocol: int) -> None:  # SPEC 7
    error = make(name)
    error.add_note("seen while serving request 5")
    for twin in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error)):
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert twin.args == error.args
        assert vars(twin) == vars(error)
        assert twin.__notes__ == ["seen while serving request 5"]


def test_out_of_blocks_tells_never_from_not_now() -> None:  # SPEC F12, CASE C10
    later, never = errors.OutOfBlocksError(8, 0, 8), errors.OutOfBlocksError(9, 8, 8)
    assert (later.fits_never, never.fits_never) == (False, True)
    assert "never fit" in str(never)
    assert "never fit" not in str(later)


def test_key_errors_read_like_sentences() -> None:
    """A plain KeyError shows the repr of its message."""
    assert str(errors.SequenceNotFoundError(3)) == "no live sequence has id 3; ids are never reused"
    assert str(errors.PrefixNotFoundError("of 2 tokens")) == "prefix of 2 tokens: no entry has it"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (2, "free memory on the device"),
        (400, "keep streams alive"),
        (700, "start a new one"),
        (719, "compute-sanitizer"),
        (906, "before or after the capture"),
    ],
)
def test_a_failed_cuda_call_says_what_to_do(code: int, words: str) -> None:  # SPEC F46
    error = errors.CudaCallError("pc_cuda_store", code, "cudaErrorSomething", "something")
    assert words in error.cure
    assert str(error) == (
        f"pc_cuda_store failed with cudaErrorSomething ({code}): something; {error.cure}"
    )
    assert isinstance(error, errors.DeviceError)


def test_out_of_memory_without_a_size() -> None:  # SPEC F46
    error = errors.StorageMemoryError(0, "the work of pc_cuda_load on cuda:0")
    assert error.nbytes == 0
    assert str(error).startswith("could not allocate memory for the work of pc_cuda_load on cuda:0")


def test_optional_arguments() -> None:
    assert str(errors.InvalidPositionError(-1, 4)) == "position -1 is outside 0…4"
    assert errors.CorruptionError("free list is cut").block_id == -1
    assert "block" not in str(errors.CorruptionError("free list is cut"))
    assert errors.ForkedProcessError().what == "this cache"
