"""The sequences of one batch: one per row, all of one length, written a step at a time.

A step is one forward pass: ``begin`` makes the next positions of every row writable (all or
nothing), each layer stores its K and V, and with the last layer the tokens are committed. Nothing
here knows torch: K, V and queries are arrays of whatever kind the pool takes.

How far the rows go, in tokens from their start::

    0 … committed            valid; full blocks of known tokens are matchable by others
    … length                 written; held back, uncommitted, until somebody says what they are
    … known                  values named: may reach past ``length`` (a prompt) or end before it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pagedcache.errors import FreedHandleError, InvalidArgumentError, InvalidPositionError
from pagedcache.integrations.transformers.prompts import Prompt
from pagedcache.sequence import Sequence

Array = np.ndarray[Any, Any]


class Step:
    """One forward pass under way: ``count`` new tokens of every row, from ``start`` on."""

    __slots__ = ("count", "left", "slots", "start", "tokens", "written")

    def __init__(
        self, start: int, count: int, slots: Any, tokens: Array | None, layers: int
    ) -> None:
        self.start, self.count, self.slots, self.tokens = start, count, slots, tokens
        self.written = bytearray(layers)
        self.left = layers

    @property
    def end(self) -> int:
        """Length of every row once the step is done."""
        return self.start + self.count


class Rows:
    """Rows of ``pool``. ``stream``: a function that gives the stream to work on (None on the CPU).

    ``hold``: tokens of unknown value stay uncommitted, so that ``record`` can name them later.
    """

    def __init__(
        self,
        pool: Any,
        prompt: Prompt,
        *,
        hold: bool = False,
        stream: Callable[[], Any] = lambda: None,
    ) -> None:
        self.pool, self.stream = pool, stream
        self.prompt = prompt
        self.seqs: list[Sequence] = prompt.open(pool, stream())
        self.committed = self.num_cached_tokens = prompt.reused
        self.known = prompt.length
        self.held = 0
        self.hold = hold and bool(self.seqs)
        self.step: Step | None = None
        self.plan: Any = None  # how attention reads the pages in this forward pass: attention.py
        self.epoch = 0  # counts what makes positions mean other tokens
        self._next_tokens: Array | None = None
        self._freed = False

    @property
    def length(self) -> int:
        """Tokens written in every layer, of every row."""
        return self.committed + self.held

    # ---- what is known before a forward pass ---------------------------------------------

    def expect(self, tokens: Array | None, mask: Callable[[], Array | None]) -> None:
        """The next forward pass is going to see these tokens (uint32 ``[rows, new]``, None for
        unknown ones). ``mask()`` gives its mask (bool ``[rows, seen + new]``, None for no padding);
        it is not asked for single tokens, which extend a mask that was seen by ones."""
        self._refuse_freed()
        self.abandon()
        if tokens is None:
            self.unname()
            return
        if not self.seqs:
            self.prompt = self.prompt.of_first(tokens, mask())
            self.seqs = self.prompt.open(self.pool, self.stream())
        if tokens.shape[1] > 1 or not self.prompt.checked:
            self.see_mask(mask())
        self._next_tokens = tokens

    def see_mask(self, mask: Array | None) -> None:
        """Compare a mask (bool ``[rows, n]``, None for no padding) with that of the prompt.

        Raises ``InvalidArgumentError`` where it differs there: the rows' identity would be wrong.
        """
        if not self.prompt.agrees(mask, max(len(self.seqs), 1)):
            self.unname()

    def unname(self) -> None:
        """From here on tokens have no identity that others could find them by."""
        self.hold = False
        self._commit(self.length)
        if self.known > self.length:
            for seq in self.seqs:
                seq.truncate(self.length, stream=self.stream())
            self.known = self.length
        self.prompt = self.prompt.without_names()

    # ---- one step ------------------------------------------------------------------------

    def begin(self, batch: int, count: int) -> Step:
        """Make ``count`` positions of every row writable.

        Raises ``OutOfBlocksError`` or ``SequenceTooLongError`` with nothing changed, and
        ``InvalidArgumentError`` for a batch of another size, for tokens that are not those the
        rows were opened with, or after a forward pass that did not write every layer.
        """
        self._refuse_freed()
        step = self.step
        if step is not None:
            done = len(step.written) - step.left
            raise InvalidArgumentError(
                f"the last forward pass wrote {done} of {len(step.written)} layers: the model has "
                "fewer layers than the pool, or it was interrupted; call crop(0) to forget it"
            )
        self._fit(batch)
        tokens, self._next_tokens = self._next_tokens, None
        if tokens is not None and tokens.shape != (batch, count):
            tokens = None  # a model that feeds its layers other positions than it was given
        if tokens is not None:
            self._compare(tokens)
        slots = self.pool.prepare(self.seqs, [self.held + count] * batch, stream=self.stream())
        if self.held:
            each = slots.slots.reshape(batch, self.held + count)
            slots = np.ascontiguousarray(each[:, self.held :]).reshape(-1)
        self.epoch += 1
        self.step = Step(self.length, count, slots, tokens, self.pool.spec.num_layers)
        return self.step

    def store(self, step: Step, layer: int, k: Any, v: Any) -> None:
        """Write one layer's K and V, ``[rows * count, num_kv_heads, head_dim]`` each, row by row.

        A failure ends the step: what it wrote is forgotten. With the last layer it is committed.
        """
        try:
            self.pool.store(layer, k, v, step.slots, stream=self.stream())
        except BaseException:
            self.abandon()
            raise
        step.written[layer] = 1
        step.left -= 1
        if not step.left:
            self._finish(step)

    def _finish(self, step: Step) -> None:
        self.step = self.plan = None
        tokens, end = step.tokens, step.end
        if tokens is not None and step.start <= self.known < end and self.prompt.named:
            new = tokens[:, self.known - step.start :]
            self.pool.append_tokens(self.seqs, new.reshape(-1), [new.shape[1]] * len(new))
            self.known = end
        self.held = end - self.committed
        self._commit(max(min(self.known, end), self.committed) if self.hold else end)

    def _commit(self, end: int) -> None:
        """Commit up to ``end``, which was written."""
        count = end - self.committed
        if count:
            counts = [count] * len(self.seqs)
            self.pool.commit(self.seqs, counts, stream=self.stream())
            self.committed, self.held = end, self.held - count

    def abandon(self) -> None:
        """Forget a step that not every layer wrote; its positions are written again."""
        self.step = self.plan = self._next_tokens = None
        self.epoch += 1

    def _compare(self, tokens: Array) -> None:
        """Refuse tokens other than those that the prompt was opened with."""
        start = self.length
        stop = min(self.known, start + tokens.shape[1])
        for row, seq in enumerate(self.seqs if stop > start else ()):
            wrong = np.flatnonzero(seq.tokens[start:stop] != tokens[row, : stop - start])
            if len(wrong):
                raise InvalidArgumentError(
                    f"the model is fed token {int(tokens[row, wrong[0]])} at position "
                    f"{start + int(wrong[0])} of row {row}, PagedCache was opened with "
                    f"{int(seq.tokens[start + wrong[0]])}: give both the same input_ids"
                )

    # ---- names that come later -----------------------------------------------------------

    def record(self, tokens: Array) -> None:
        """Name the tokens of every row from its start on (uint32 ``[rows, n]``) and commit them.

        Raises ``InvalidArgumentError`` where they cannot be the rows' tokens, or where unknown
        tokens were committed already.
        """
        self._refuse_freed()
        if len(tokens) != len(self.seqs):
            raise InvalidArgumentError(
                f"expected the tokens of {len(self.seqs)} rows, got {len(tokens)}"
            )
        if self.known < self.committed:
            raise InvalidArgumentError(
                "tokens of unknown value were committed already (no input_ids were given, rows "
                "were reordered, or the pool keeps open blocks): give PagedCache the model="
            )
        shared = min(self.known, tokens.shape[1])
        for row, seq in enumerate(self.seqs):
            wrong = np.flatnonzero(seq.tokens[:shared] != tokens[row, :shared])
            if len(wrong):
                raise InvalidArgumentError(
                    f"row {row} holds token {int(seq.tokens[wrong[0]])} at position "
                    f"{int(wrong[0])}, not {int(tokens[row, wrong[0]])}"
                )
        end = min(tokens.shape[1], self.length)
        if end > self.known:
            new = tokens[:, self.known : end]
            self.pool.append_tokens(self.seqs, new.reshape(-1), [new.shape[1]] * len(new))
            self.known = end
        self._commit(max(min(self.known, self.length), self.committed))

    # ---- rows come, go and change places -------------------------------------------------

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
        if self.held:
            self._commit(self.length)  # which row is whose output nobody could say later
        self.hold = self.hold and not self.length > self.num_cached_tokens
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
        if length < self.committed:
            for seq in self.seqs:
                seq.truncate(length, stream=self.stream())
            self.committed = length
            self.known = min(self.known, length)
        self.held = length - self.committed
        self.prompt.cropped(length)

    def fork(self) -> Rows:
        """Rows of their own over the same blocks; nothing is copied."""
        self._refuse_freed()
        twin = Rows(self.pool, self.prompt.nothing(), stream=self.stream)
        twin.seqs = [seq.fork() for seq in self.seqs]
        twin.prompt, twin.hold = self.prompt, self.hold
        twin.committed, twin.held, twin.known = self.committed, self.held, self.known
        twin.num_cached_tokens = self.num_cached_tokens
        return twin

    def reset(self) -> None:
        """Forget every token and row; the next batch may have another size."""
        self._refuse_freed()
        self.abandon()
        self._free(self.seqs)
        self.seqs = []
        self.committed = self.held = self.known = self.num_cached_tokens = 0
        self.hold = False
        self.prompt = self.prompt.nothing()

    def free(self) -> None:
        """Give every block back; cached ones stay matchable. Idempotent."""
        if not self._freed:
            self.abandon()
            self._freed = True
            self._free(self.seqs)
            self.seqs = []

    def _free(self, seqs: list[Sequence]) -> None:
        stream = self.stream() if seqs and not self.pool.closed else None
        for seq in seqs:
            seq.free(stream=stream)

    def _refuse_freed(self) -> None:
        if self._freed:
            raise FreedHandleError("this PagedCache")
