"""Rows that come, go and change places: fork, free and truncate for a whole batch."""

from __future__ import annotations

from pagedcache.errors import (
    ForkedProcessError,
    InvalidArgumentError,
    InvalidPositionError,
    PagedCacheError,
)
from pagedcache.integrations.transformers.names import Names
from pagedcache.integrations.transformers.steps import Steps
from pagedcache.sequence import Sequence


class Rows(Steps):
    """The rows of one ``PagedCache``. Nothing here moves a byte."""

    def _fit(self, batch: int) -> None:
        """Open rows, or fork each as often as the batch asks for (beams, returned sequences)."""
        rows = len(self.seqs)
        if not rows:
            self.seqs = self.prompt.blank(self.pool, batch, self.stream())
        elif batch != rows:
            if batch % rows:
                raise InvalidArgumentError(
                    f"the model runs {batch} rows, this cache has {rows}; "
                    "choose rows with batch_select_indices, or make a cache for this batch"
                )
            coming = self._next_tokens, self.plan
            self.select([row for row in range(rows) for _ in range(batch // rows)])
            self._next_tokens, self.plan = coming

    def select(self, sources: list[int]) -> None:
        """Row i becomes what row ``sources[i]`` was: a table swap, no byte moves.

        A row named once keeps its handle; named again, it is forked; not named, it is freed.
        """
        self._refuse_freed()
        rows = len(self.seqs)
        for source in sources:
            if not -rows <= source < rows:
                raise InvalidPositionError(source, rows, "rows of the batch")
        sources = [source % rows for source in sources]
        self.abandon()
        if sources == list(range(rows)):
            return
        self._settle()
        if self.length > self.num_cached_tokens:
            self.hold = False  # which row is whose output nobody could say later
            self._commit(self.length)
        taken: dict[int, int] = {}
        for place, source in enumerate(sources):
            if source == place or source not in taken:
                taken[source] = place
        made: list[Sequence] = []
        try:
            for place, source in enumerate(sources):
                own = taken[source] == place
                made.append(self.seqs[source] if own else self.seqs[source].fork())
        except BaseException:
            for place, seq in enumerate(made):
                if taken[sources[place]] != place:
                    seq.free()
            raise
        dropped = [seq for row, seq in enumerate(self.seqs) if row not in taken]
        self.seqs = made
        self.names.select(sources)
        self.prompt = self.prompt.select(sources)
        self._free(dropped)

    def crop(self, length: int) -> None:
        """Keep the first ``length`` tokens of every row; more than there are changes nothing."""
        self._refuse_freed()
        self.abandon()
        if length < 0:
            raise InvalidPositionError(length, self.length, "tokens to keep")
        if length >= self.length:
            return
        if length < max(self.committed, self.names.told):
            for seq in self.seqs:
                seq.truncate(length, stream=self.stream())
        self.committed, self.held = min(self.committed, length), max(length - self.committed, 0)
        self.names.crop(length)
        self.prompt.cropped(length)

    def fork(self) -> Rows:
        """Rows of their own over the same blocks; nothing is copied."""
        self._refuse_freed()
        twin = Rows(
            self.pool,
            self.prompt.nothing(),
            stream=self.stream,
            exact_prompts=self.exact_prompts,
        )
        twin.seqs = [seq.fork() for seq in self.seqs]
        twin.prompt, twin.hold, twin.names = self.prompt, self.hold, self.names.copy()
        twin.committed, twin.held = self.committed, self.held
        twin.num_cached_tokens = self.num_cached_tokens
        return twin

    def reset(self) -> None:
        """Forget every token and row; the next batch may have another size."""
        self._refuse_freed()
        self.abandon()
        self._free(self.seqs)
        self.seqs, self.names = [], Names()
        self.committed = self.held = self.num_cached_tokens = 0
        self.hold = False
        self.prompt = self.prompt.nothing()

    def free(self) -> None:
        """Give every block back; cached ones stay matchable. Idempotent."""
        if not self._freed:
            self.abandon()
            self._freed = True
            try:
                self._settle()
            except PagedCacheError:
                pass  # the pool was closed, or collection runs inside a call: cached less
            try:
                self._free(self.seqs)
            except ForkedProcessError:
                pass  # they are the parent's to give back
            self.seqs = []

    def _free(self, seqs: list[Sequence]) -> None:
        stream = self.stream() if seqs and not self.pool.closed else None
        for seq in seqs:
            seq.free(stream=stream)
