import numpy as np
import numpy.typing as npt

from pagedcache.bookkeeping.handles import SeqState
from pagedcache.bookkeeping.ledger_base import LedgerBase

_Tokens = npt.NDArray[np.uint32]
_ExtraKeys = list[tuple[int, int, bytes]] | None

class LedgerOpen(LedgerBase):
    def open(
        self,
        tokens: _Tokens,
        root: bytes = b"",
        extra_keys: _ExtraKeys = None,
        allocate_upto: int = -1,
        resumed: bool = False,
        room: int = 0,
    ) -> SeqState: ...
    def open_many(
        self, prompts: list[tuple[_Tokens, bytes, _ExtraKeys, int, bool]], fitting: bool = False
    ) -> list[SeqState]: ...
    def allocate_tokens(
        self, seq: SeqState, tokens: _Tokens, allocate_upto: int = -1, resumed: bool = False
    ) -> None: ...
    def probe(self, tokens: _Tokens, root: bytes = b"", extra_keys: _ExtraKeys = None) -> int: ...
    def blocks_needed(
        self,
        tokens: _Tokens,
        root: bytes = b"",
        extra_keys: _ExtraKeys = None,
        allocate_upto: int = -1,
    ) -> int: ...
