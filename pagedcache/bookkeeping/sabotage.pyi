from pagedcache.bookkeeping.block_pool import BlockPool
from pagedcache.bookkeeping.handles import SeqState

KINDS: tuple[str, ...]

def spoil(pool: BlockPool, kind: str, block: int) -> None: ...
def spoil_sequence(seq: SeqState, kind: str) -> None: ...
