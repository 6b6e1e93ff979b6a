"""Prompts as the pool sees them: token arrays, what padding does to their identity, and reuse.

Padding lives only in the attention mask. A masked position changes the positions and the values of
all tokens behind it, so each masked range enters the identity of its row as an extra key: a padded
row never meets the cached prefix of an unpadded one with the same ids, or of one padded elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from typing import Any

import numpy as np

from pagedcache.errors import InvalidArgumentError, ShapeError, shown
from pagedcache.hashing import validate_extra_keys
from pagedcache.sequence import Sequence

Array = np.ndarray[Any, Any]

_MASKED = b"pagedcache.integrations.transformers: masked"


class Prompt:
    """Who the rows of a batch are: their tokens, their masked positions, salt and adapter.

    ``tokens``: uint32 ``[rows, length]`` or None; ``mask``: bool of the same shape, None where
    nothing is masked; ``extras``: for each row the extra keys of ``pool.open``. ``reused`` tokens
    of every row were found in the pool by ``open``.
    """

    def __init__(
        self,
        tokens: Array | None = None,
        mask: Array | None = None,
        salt: bytes | str | None = b"",
        adapter: bytes | str | None = None,
        extras: list[Any] | None = None,
    ) -> None:
        self.tokens, self.salt, self.adapter, self.extras = tokens, salt, adapter, extras
        self.mask = None if mask is None else _padding(mask)
        self.rows: int = 0 if tokens is None else tokens.shape[0]
        self.length: int = 0 if tokens is None else tokens.shape[1]
        self.reused = 0
        self.named = tokens is not None  # whether tokens may get names: see Rows.see_mask
        self._covered = self.length  # columns whose mask is part of the identity
        self.checked = False  # whether the model was seen to use the same mask

    # ---- opening -------------------------------------------------------------------------

    def open(self, pool: Any, stream: Any = None) -> list[Sequence]:
        """One sequence per row, all reusing as many tokens as the row that finds fewest.

        All or nothing: raises what ``pool.open`` raises, with no row left open.
        """
        seqs: list[Sequence] = []
        try:
            for row in range(self.rows):
                tokens = () if self.tokens is None else self.tokens[row]
                extras = [] if self.mask is None else masked_ranges(self.mask[row])
                if self.extras is not None:
                    extras.extend(self.extras[row])
                seqs.append(self._open_one(pool, tokens, extras, stream))
            if self.tokens is not None:
                self._level(pool, self.tokens, seqs, stream)
        except BaseException:
            for seq in seqs:
                seq.free()
            raise
        return seqs

    def _level(self, pool: Any, tokens: Array, seqs: list[Sequence], stream: Any) -> None:
        """Rows share one length: those that found more give up what the others have not."""
        self.reused = min(seq.num_cached_tokens for seq in seqs)
        for row, seq in enumerate(seqs):
            if seq.num_cached_tokens > self.reused:
                seq.truncate(self.reused, stream=stream)
                seq.append_tokens(tokens[row, self.reused :])
                pool.extend(seq.seq_id, 0)  # room for all of them, as the other rows have it

    def blank(self, pool: Any, batch: int, stream: Any = None) -> list[Sequence]:
        """``batch`` sequences without tokens; nothing of theirs is ever named."""
        return [self._open_one(pool, (), (), stream) for _ in range(batch)]

    def _open_one(self, pool: Any, tokens: Any, extras: Any, stream: Any) -> Sequence:
        seq: Sequence = pool.open(
            tokens, self.salt, extra_keys=extras, adapter=self.adapter, stream=stream
        )
        return seq

    # ---- the same rows later -------------------------------------------------------------

    def agrees(self, mask: Array | None, rows: int) -> bool:
        """Whether tokens behind the prompt still have an identity under this mask (bool
        ``[rows, n]``): nothing is masked there.

        Raises ``InvalidArgumentError`` where it differs from the mask of the prompt itself.
        """
        if not self.named:
            return True
        covered = self._covered
        if not self.checked:
            shown, own = None, self.mask
            if mask is not None:
                shown = _padding(mask[:, :covered][:: max(len(mask) // rows, 1)])
                own = None if own is None else _padding(own[:, : mask.shape[1]])
            if not np.array_equal(np.asarray(shown), np.asarray(own)):
                raise InvalidArgumentError(
                    "the model masks other positions than PagedCache was opened with; give both "
                    "the same attention_mask"
                )
            self.checked = mask is None or mask.shape[1] >= covered  # else a chunk of the prompt
        return mask is None or bool(mask[:, covered:].all())

    def cropped(self, length: int) -> None:
        """The rows were rewound to ``length`` tokens: what follows may come under another mask."""
        if length < self._covered:
            self.checked = False

    def of_first(self, tokens: Array, mask: Array | None) -> Prompt:
        """The identity of rows that were opened without a prompt and are fed their first tokens."""
        known = None if mask is None or mask.shape != tokens.shape else mask
        first = Prompt(None, known, self.salt, self.adapter)
        first.rows, first._covered = tokens.shape
        first.named = True
        return first

    def select(self, sources: SequenceABC[int]) -> Prompt:
        """The same for rows that changed places."""
        chosen = Prompt(None, None, self.salt, self.adapter)
        chosen.mask = None if self.mask is None else _padding(self.mask[list(sources)])
        chosen.rows, chosen.length, chosen.reused = len(sources), self.length, self.reused
        chosen.named, chosen.extras = self.named, self.extras
        chosen._covered, chosen.checked = self._covered, self.checked
        return chosen

    def without_names(self) -> Prompt:
        """The same rows, whose further tokens are of unknown value."""
        chosen = self.select(range(self.rows))
        chosen.mask, chosen.named = None, False
        return chosen

    def nothing(self) -> Prompt:
        """No rows yet, of the same salt and adapter."""
        return Prompt(None, None, self.salt, self.adapter)


def _padding(mask: Array) -> Array | None:
    """A mask, or None where it masks nothing."""
    return None if mask.all() else mask


def masked_ranges(mask: Array) -> list[tuple[int, int, bytes]]:
    """Extra keys of one row: each run of positions that its mask (bool ``[n]``) leaves out."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=1, append=1))
    return [
        (int(start), int(stop), _MASKED)
        for start, stop in zip(edges[::2], edges[1::2], strict=True)
    ]


def as_ids(input_ids: Any, what: str = "input_ids") -> Array:
    """Token ids as uint32 ``[rows, n]``: a tensor or array of integers, or lists of them.

    Raises ``ShapeError`` or ``InvalidArgumentError``.
    """
    try:
        ids = np.asarray(_on_host(input_ids))
    except (TypeError, ValueError) as error:
        raise ShapeError("[rows, tokens] of integers", f"{error}", what) from None
    if ids.ndim == 1:
        ids = ids[None, :]
    if ids.ndim != 2 or not ids.size:
        raise ShapeError("[rows, tokens], one of each at least", list(ids.shape), what)
    if ids.dtype.kind not in "iu":
        raise InvalidArgumentError(f"{what}: expected integers, got dtype {ids.dtype}")
    if ids.dtype != np.uint32 and (int(ids.min()) < 0 or int(ids.max()) >= 2**32):
        raise InvalidArgumentError(f"{what}: token ids must be 0…4294967295")
    return np.ascontiguousarray(ids, np.uint32)


def as_mask(attention_mask: Any, shape: tuple[int, ...]) -> Array | None:
    """An attention mask as bool ``[rows, n]``, None for none. Raises ``ShapeError`` for another
    shape than that of the ids."""
    if attention_mask is None:
        return None
    mask = np.asarray(_on_host(attention_mask))
    if mask.ndim == 1:
        mask = mask[None, :]
    if mask.shape != shape:
        raise ShapeError(
            f"{list(shape)}, as input_ids have, 0 where a token is masked",
            list(mask.shape),
            "attention_mask",
        )
    return mask != 0


def as_extras(extra_keys: Any, rows: int) -> list[Any] | None:
    """Extra keys as one list per row; ``InvalidArgumentError`` for another number of them."""
    if extra_keys is None:
        return None
    if not isinstance(extra_keys, (list, tuple)) or len(extra_keys) != rows:
        raise InvalidArgumentError(
            f"extra_keys: expected a list of (start, stop, bytes) for each of {rows} rows, got "
            f"{shown(extra_keys)}"
        )
    return [list(validate_extra_keys(keys)) for keys in extra_keys]


def _on_host(x: Any) -> Any:
    """Tensors on their way to NumPy: of any device, without gradient."""
    return x.detach().cpu().numpy() if hasattr(x, "detach") else x
