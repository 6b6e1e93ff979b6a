from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedcache.bookkeeping.block_pool import BlockPool

_Ids = npt.NDArray[np.int32]

class LedgerBase:
    pool: BlockPool
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_layers: int = 1,
        max_seq_len: int | None = None,
        partial_block_reuse: int = 0,
        mover: Callable[[_Ids, _Ids, _Ids], Any] | None = None,
        move_mover: Callable[[_Ids], Any] | None = None,
        deferred_copies: bool = False,
        queued: bool = False,
        num_open: int = 0,
        hash_mask: int = ...,
    ) -> None: ...
    def reset_prefix_cache(self) -> None: ...
    def check(self) -> None: ...
    @property
    def num_open(self) -> int: ...
    @property
    def open_in_use(self) -> int: ...
    @property
    def layout_epoch(self) -> int: ...
    def stats(self) -> dict[str, int]: ...
    def fragmentation(self) -> dict[str, Any]: ...
