import numpy as np
import numpy.typing as npt

from pagedcache.bookkeeping.handles import Pin, SeqState
from pagedcache.bookkeeping.ledger_write import LedgerWrite
from pagedcache.bookkeeping.mapping import SlotMapping

_Numbers = npt.NDArray[np.int64]

class LedgerPin(LedgerWrite):
    def pin_range(self, seq: SeqState, start: int, stop: int, layer: int = -1) -> Pin: ...
    def read_ends(
        self, seqs: list[SeqState], given: _Numbers | None, counts: _Numbers, layer: int
    ) -> _Numbers: ...
    def pin_reads(
        self, seqs: list[SeqState], ends: _Numbers | list[int], layer: int = -1
    ) -> tuple[Pin, _Numbers]: ...
    def pin_mapping(self, mapping: SlotMapping) -> Pin: ...
    def pin_slots(self, slots: npt.NDArray[np.int64]) -> Pin: ...
