"""The sequences of one batch: one per row, all of one length, written a step at a time.

A step is one forward pass: ``begin`` makes the next positions of every row writable (all or
nothing), each layer stores its K and V, and with the last layer the step is done. Nothing here
knows torch: K, V and queries are arrays of whatever kind the pool takes.

How far the rows go, in tokens from their start::

    0 … committed            valid; full blocks of known tokens are matchable by others
    … length                 written. A prompt's tokens are committed at once, others with the next
                             step, so that a draft that is rejected before never was
    … names.end              values known: may reach past ``length`` (a prompt) or end before it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pagedcache.errors import FreedHandleError, InvalidArgumentError
from pagedcache.integrations.transformers.names import Names
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


class Steps:
    """Rows of ``pool``, as far as forward passes see them.

    ``stream``: a function that gives the stream to work on (None on the CPU). ``hold``: tokens of
    unknown value stay uncommitted, so that ``record`` can name them later. ``exact_prompts``: as
    ``PagedCache`` has it.
    """

    #: Open rows, or make their number that of the batch; see ``Rows``.
    _fit: Callable[[int], None]

    def __init__(
        self,
        pool: Any,
        prompt: Prompt,
        *,
        hold: bool = False,
        stream: Callable[[], Any] = lambda: None,
        exact_prompts: bool = True,
    ) -> None:
        self.pool, self.stream, self.prompt = pool, stream, prompt
        self.exact_prompts = exact_prompts
        self.seqs: list[Sequence] = prompt.open(pool, stream())
        self.committed = self.num_cached_tokens = prompt.reused
        self.held = 0  # written and not committed
        self.names = Names(prompt.length)
        self.hold = hold and bool(self.seqs)
        self.step: Step | None = None
        self.plan: Any = None  # how attention reads the pages in this forward pass: masks.py
        self.epoch = 0  # changes whenever positions may mean other tokens
        self._next_tokens: Array | None = None
        self._freed = False

    @property
    def length(self) -> int:
        """Tokens written in every layer, of every row."""
        return self.committed + self.held

    def as_computed(self, count: int) -> bool:
        """Whether ``count`` tokens of one forward pass attend to each other's K and V as the model
        computed them. Fewer than a block do not: what they read of each other lies in the newest
        blocks, in 16 bits where blocks are kept open."""
        return self.exact_prompts and count >= int(self.pool.spec.block_size)

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
        self._settle()
        self.hold = False
        self._commit(self.length)
        if self.names.told > self.length:
            for seq in self.seqs:
                seq.truncate(self.length, stream=self.stream())
            self.names.crop(self.length)
        self.prompt = self.prompt.without_names()

    # ---- one step ------------------------------------------------------------------------

    def begin(self, batch: int, count: int) -> Step:
        """Make ``count`` positions of every row writable, all or nothing.

        Raises ``OutOfBlocksError`` or ``SequenceTooLongError``, and ``InvalidArgumentError`` for a
        batch of another size, for tokens that are not those the rows were opened with, or after a
        forward pass that did not write every layer.
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
        self._settle()
        tokens, self._next_tokens = self._next_tokens, None
        if tokens is not None and tokens.shape != (batch, count):
            tokens = None  # a model that feeds its layers other positions than it was given
        if tokens is not None:
            self.names.compare(self.seqs, tokens, self.length, "the model is fed")
        elif self.length == self.num_cached_tokens and 0 < self.prompt.length <= count:
            self._refuse_again(count)
        slots = self.pool.prepare(self.seqs, [self.held + count] * batch, stream=self.stream())
        if self.held:
            each = slots.slots.reshape(batch, self.held + count)
            slots = np.ascontiguousarray(each[:, self.held :]).reshape(-1)
        self.epoch += 1
        self.step = Step(self.length, count, slots, tokens, self.pool.spec.num_layers)
        return self.step

    def _refuse_again(self, count: int) -> None:
        """Refuse a first pass over as many tokens as the whole prompt, where a part is cached."""
        if self.length:
            raise InvalidArgumentError(
                f"the model is fed {count} tokens, though {self.length} of the {self.prompt.length}"
                " of its prompt are cached: assisted decoding of transformers 5.4 … 5.24 does not "
                "look at what a cache holds; give PagedCache the model="
            )

    def store(self, step: Step, layer: int, k: Any, v: Any) -> None:
        """Write one layer's K and V, ``[rows * count, num_kv_heads, head_dim]`` each, row by row.

        A failure ends the step: what it wrote is forgotten.
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
        self.held += step.count
        if self.prompt.named:
            self.names.feed(step.tokens, step.start)
        if self.names.told > self.committed:  # the prompt: nobody rejects it
            self._commit(min(self.names.told, self.length))

    def _settle(self) -> None:
        """Commit what was written, tokens to be named later excepted."""
        if self.held:
            self.names.tell(self.pool, self.seqs)
            named = max(min(self.names.told, self.length), self.committed)
            self._commit(named if self.hold else self.length)

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
        self._settle()
        if self.names.told < self.committed:
            raise InvalidArgumentError(
                "tokens of unknown value were committed already (no input_ids were given, rows "
                "were reordered, or the pool keeps open blocks): give PagedCache the model="
            )
        self.names.compare(self.seqs, tokens, 0, "expected the tokens of the rows, got")
        self.names.feed(tokens[:, : self.length], 0)
        self._settle()

    def _refuse_freed(self) -> None:
        if self._freed:
            raise FreedHandleError("this PagedCache")
