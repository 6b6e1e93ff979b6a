"""pagedcache: a paged KV cache for LLM inference.

>>> import pagedcache as pc
>>> spec = pc.CacheSpec(num_layers=2, num_kv_heads=2, head_dim=64, kv_format="q8")
>>> with pc.PagedKVCache(spec, num_blocks=64) as cache:
...     with cache.open(range(40)) as seq:
...         seq.num_blocks
3

Names are loaded when first used, so that importing the package costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagedcache._version import __version__ as __version__

if TYPE_CHECKING:
    from pagedcache._cuda.arrays import DeviceArray as DeviceArray
    from pagedcache.arithmetic import FlatQuantized as FlatQuantized
    from pagedcache.arithmetic import bfloat16_bits_to_float32 as bfloat16_bits_to_float32
    from pagedcache.arithmetic import dequantize as dequantize
    from pagedcache.arithmetic import float16_bits_to_float32 as float16_bits_to_float32
    from pagedcache.arithmetic import float32_to_bfloat16_bits as float32_to_bfloat16_bits
    from pagedcache.arithmetic import float32_to_float16_bits as float32_to_float16_bits
    from pagedcache.arithmetic import quantize as quantize
    from pagedcache.batches import PageTable as PageTable
    from pagedcache.bookkeeping import BlockPool as BlockPool
    from pagedcache.bookkeeping import SlotMapping as SlotMapping
    from pagedcache.cache import PagedKVCache as PagedKVCache
    from pagedcache.dlpack import Bfloat16Array as Bfloat16Array
    from pagedcache.errors import BlockError as BlockError
    from pagedcache.errors import CopyRefusedError as CopyRefusedError
    from pagedcache.errors import CorruptionError as CorruptionError
    from pagedcache.errors import CudaCallError as CudaCallError
    from pagedcache.errors import CudaUnavailableError as CudaUnavailableError
    from pagedcache.errors import DeviceError as DeviceError
    from pagedcache.errors import ForkedProcessError as ForkedProcessError
    from pagedcache.errors import FormatError as FormatError
    from pagedcache.errors import FreedHandleError as FreedHandleError
    from pagedcache.errors import InvalidArgumentError as InvalidArgumentError
    from pagedcache.errors import InvalidPositionError as InvalidPositionError
    from pagedcache.errors import MissingPackageError as MissingPackageError
    from pagedcache.errors import NonFiniteError as NonFiniteError
    from pagedcache.errors import OutOfBlocksError as OutOfBlocksError
    from pagedcache.errors import OutOfOpenBlocksError as OutOfOpenBlocksError
    from pagedcache.errors import PagedCacheError as PagedCacheError
    from pagedcache.errors import PendingCopyError as PendingCopyError
    from pagedcache.errors import PrefixNotFoundError as PrefixNotFoundError
    from pagedcache.errors import ReentrantCallError as ReentrantCallError
    from pagedcache.errors import SequenceNotFoundError as SequenceNotFoundError
    from pagedcache.errors import SequenceTooLongError as SequenceTooLongError
    from pagedcache.errors import ShapeError as ShapeError
    from pagedcache.errors import SlotError as SlotError
    from pagedcache.errors import StaleMappingError as StaleMappingError
    from pagedcache.errors import StorageMemoryError as StorageMemoryError
    from pagedcache.formats import FORMATS as FORMATS
    from pagedcache.formats import KVFormat as KVFormat
    from pagedcache.formats import get_format as get_format
    from pagedcache.hashing import compute_block_hash as compute_block_hash
    from pagedcache.hashing import compute_block_hashes as compute_block_hashes
    from pagedcache.hashing import compute_prefix_hash as compute_prefix_hash
    from pagedcache.machine import get_num_threads as get_num_threads
    from pagedcache.machine import set_num_threads as set_num_threads
    from pagedcache.pointers import PointerTables as PointerTables
    from pagedcache.prefix_cache import PrefixCache as PrefixCache
    from pagedcache.sequence import AppendResult as AppendResult
    from pagedcache.sequence import Sequence as Sequence
    from pagedcache.spec import CacheSpec as CacheSpec
    from pagedcache.stats import Fragmentation as Fragmentation
    from pagedcache.stats import Stats as Stats
    from pagedcache.views import BlockView as BlockView
    from pagedcache.views import PackedView as PackedView
    from pagedcache.views import ViewList as ViewList

# The same names for the running program: module -> names (tests compare the two lists).
_NAMES = {
    "_cuda.arrays": "DeviceArray",
    "arithmetic": "FlatQuantized bfloat16_bits_to_float32 dequantize float16_bits_to_float32 "
    "float32_to_bfloat16_bits float32_to_float16_bits quantize",
    "batches": "PageTable",
    "bookkeeping": "BlockPool SlotMapping",
    "cache": "PagedKVCache",
    "dlpack": "Bfloat16Array",
    "errors": "BlockError CopyRefusedError CorruptionError CudaCallError CudaUnavailableError "
    "DeviceError ForkedProcessError FormatError FreedHandleError InvalidArgumentError "
    "InvalidPositionError MissingPackageError NonFiniteError OutOfBlocksError OutOfOpenBlocksError "
    "PagedCacheError PendingCopyError PrefixNotFoundError ReentrantCallError SequenceNotFoundError "
    "SequenceTooLongError ShapeError SlotError StaleMappingError StorageMemoryError",
    "formats": "FORMATS KVFormat get_format",
    "hashing": "compute_block_hash compute_block_hashes compute_prefix_hash",
    "machine": "get_num_threads set_num_threads",
    "pointers": "PointerTables",
    "prefix_cache": "PrefixCache",
    "sequence": "AppendResult Sequence",
    "spec": "CacheSpec",
    "stats": "Fragmentation Stats",
    "views": "BlockView PackedView ViewList",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = ["__version__", *sorted(_HOMES)]


if not TYPE_CHECKING:  # a type checker must see that a name does not exist

    def __getattr__(name: str) -> Any:
        from importlib import import_module

        home = _HOMES.get(name)
        if home is not None:
            value = getattr(import_module(f"{__name__}.{home}"), name)
        elif name in _NAMES:
            value = import_module(f"{__name__}.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
