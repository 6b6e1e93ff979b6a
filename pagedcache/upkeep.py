"""Figures, checks and housekeeping of a whole cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagedcache.errors import CorruptionError, InvalidArgumentError, shown
from pagedcache.guards import NO_STORAGE
from pagedcache.sequence import Sequence, states_of
from pagedcache.stats import Fragmentation, Stats

if TYPE_CHECKING:
    from pagedcache.bookkeeping import BlockPool
    from pagedcache.spec import CacheSpec


class Upkeep:
    """Mixin of ``PagedKVCache``: memory figures, statistics, defragmentation, ``check()``."""

    spec: CacheSpec
    num_blocks: int
    _ledger: Any
    _storage: Any
    _movers: Any
    _queue: Any

    # ---- figures -------------------------------------------------------------------------

    @property
    def pool(self) -> BlockPool:
        """The pool of block ids under this cache."""
        pool: BlockPool = self._ledger.pool
        return pool

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken: free and cached-free."""
        return int(self._ledger.pool.num_free_blocks)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that somebody holds."""
        return int(self._ledger.pool.num_used_blocks)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks registered in the prefix index, used or free."""
        return int(self._ledger.pool.num_cached_blocks)

    @property
    def utilization(self) -> float:
        """Used blocks / num_blocks, 0…1."""
        return self.num_used_blocks / self.num_blocks

    @property
    def memory_usage(self) -> int:
        """Bytes of the used blocks: all layers, K and V, padding included, and the open slots that
        they have (``CacheSpec.open_blocks``)."""
        opened = self._ledger.open_in_use * self.spec.open_block_nbytes
        return int(self.num_used_blocks * self.spec.block_nbytes + opened)

    @property
    def total_capacity(self) -> int:
        """Bytes of all blocks and open slots."""
        return self.spec.storage_nbytes(self.num_blocks, self.num_open_blocks)

    @property
    def num_open_blocks(self) -> int:
        """Open slots: blocks that may be open at once; 0 where no format needs them."""
        return int(self._ledger.num_open)

    @property
    def fp32_equivalent_memory(self) -> int:
        """Bytes that the used blocks would take in float32."""
        return self.num_used_blocks * self.spec.fp32_block_nbytes

    @property
    def memory_savings(self) -> float:
        """Bytes used / their float32 equivalent; 1.0 when nothing is used. At most 1, but for a
        cache of which most used blocks are open: those take a slot beside their own bytes."""
        used = self.num_used_blocks
        if not used:
            return 1.0
        if not self.spec.has_open_blocks:
            return self.spec.block_nbytes / self.spec.fp32_block_nbytes
        return self.memory_usage / (used * self.spec.fp32_block_nbytes)

    def stats(self) -> Stats:
        """Counters since the cache was made, all from one moment."""
        return Stats.from_dict(self._ledger.stats())

    # ---- layout --------------------------------------------------------------------------

    @property
    def layout_epoch(self) -> int:
        """Number that changes whenever blocks move; slot mappings made before are refused."""
        return int(self._ledger.layout_epoch)

    def fragmentation(self) -> Fragmentation:
        """How scattered the used blocks lie, and how much of them is empty."""
        return Fragmentation.from_dict(self._ledger.fragmentation())

    def should_defragment(self, threshold: float = 0.3) -> bool:
        """Whether ``defragment()`` is worth its copies; the rule is ``Fragmentation``'s."""
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)):
            raise InvalidArgumentError(f"threshold must be a number, got {shown(threshold)}")
        return self.fragmentation().should_defragment(threshold)

    def defragment(self, *, stream: Any = None) -> int:
        """Pack used and cached-free blocks into the lowest ids; returns the blocks moved.

        Sequences that share no block become contiguous. Values never change. Blocks that are
        pinned (by views, calls in flight, copies the engine owes) stay where they are; a sequence
        that is laid around one, or holds one, may then be in two parts. Moves make slot mappings
        and exported tables stale (``layout_epoch``). Never runs by itself. On a GPU the moves are
        queued on ``stream``, after the work of all other streams on the blocks that move.
        """
        return int(self._movers.run(self._queue(stream), self._ledger.defragment))

    def compact_sequence(self, seq: Sequence, *, stream: Any = None) -> int:
        """Make one sequence's blocks contiguous where free ids allow; returns the blocks moved."""
        state = states_of((seq,))[0]
        queue = self._queue(stream)
        return int(self._movers.run(queue, self._ledger.compact_sequence, state))

    def sequence_contiguity(self, seq: Sequence) -> float:
        """Share of neighbouring blocks with adjacent ids, 0…1; 1.0 for none or one block."""
        return float(self._ledger.contiguity(states_of((seq,))[0]))

    # ---- prefix cache and checks ---------------------------------------------------------

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks.

        Blocks in use stay valid for their holders; what was committed before does not become
        cached again.
        """
        self._ledger.reset_prefix_cache()

    def check(self) -> None:
        """Verify that every block is exactly one of free, cached-free or used, and that counts,
        tables, index, free list and storage agree.

        Raises ``CorruptionError`` that names the block. Cheap enough for tests after every step.
        """
        self._ledger.check()
        storage = self._storage
        if storage is NO_STORAGE:
            return
        for what, has, wants in (
            ("blocks", storage.num_blocks, self.num_blocks),
            ("open slots", storage.num_open, self.num_open_blocks),
        ):
            if has != wants:
                raise CorruptionError(f"storage has {has} {what}, the cache {wants}")
