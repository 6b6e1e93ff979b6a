import numpy as np
import numpy.typing as npt

from pagedcache.bookkeeping.handles import SeqState
from pagedcache.bookkeeping.ledger_seal import LedgerSeal
from pagedcache.bookkeeping.mapping import SlotMapping

_Tokens = npt.NDArray[np.uint32]

class LedgerStep(LedgerSeal):
    def commit_many(self, seqs: list[SeqState], counts: list[int]) -> None: ...
    def append_many(
        self, seqs: list[SeqState], tokens: _Tokens, counts: list[int] | None = None
    ) -> None: ...
    def step(
        self, seqs: list[SeqState], tokens: _Tokens, counts: list[int] | None = None
    ) -> SlotMapping: ...
