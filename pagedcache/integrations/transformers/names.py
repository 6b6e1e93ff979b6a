"""Which tokens the rows of a batch hold: those the pool was told, and those fed since.

Tokens that a forward pass was fed are told to the pool when they are committed, one step later: a
draft that was rejected meanwhile was never named, and no block was cached for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedcache.errors import InvalidArgumentError
from pagedcache.sequence import Sequence

Array = np.ndarray[Any, Any]


class Names:
    """Tokens of known value, from the start of every row: ``told`` to the pool, ``end`` in all."""

    def __init__(self, told: int = 0, fed: Array | None = None) -> None:
        self.told = told
        self._fed = fed  # uint32 [rows, n], of the positions behind `told`

    @property
    def end(self) -> int:
        """Tokens known."""
        return self.told + (0 if self._fed is None else self._fed.shape[1])

    def feed(self, tokens: Array | None, start: int) -> None:
        """A forward pass wrote these tokens (uint32 ``[rows, n]``, None for unknown ones) from
        ``start`` on. Behind a token of unknown value the values no longer matter."""
        end = self.end
        if tokens is None or not start <= end < start + tokens.shape[1]:
            return
        new = tokens[:, end - start :]
        self._fed = new if self._fed is None else np.concatenate([self._fed, new], axis=1)

    def tell(self, pool: Any, seqs: list[Sequence]) -> None:
        """Tell the pool what was fed."""
        fed = self._fed
        if fed is not None:
            pool.append_tokens(seqs, fed.reshape(-1), [fed.shape[1]] * len(fed))
            self.told, self._fed = self.end, None

    def crop(self, length: int) -> None:
        """Forget tokens past ``length``; the pool's own are for the caller to truncate."""
        if length <= self.told:
            self.told, self._fed = length, None
        elif self._fed is not None:
            self._fed = self._fed[:, : length - self.told]

    def select(self, sources: list[int]) -> None:
        """Rows changed places."""
        if self._fed is not None:
            self._fed = self._fed[sources]

    def copy(self) -> Names:
        """The same for a fork."""
        return Names(self.told, self._fed)

    def compare(self, seqs: list[Sequence], tokens: Array, start: int, what: str) -> None:
        """Raise ``InvalidArgumentError`` where tokens (uint32 ``[rows, n]``, from ``start`` on)
        are not those the pool was told; ``what`` names them."""
        stop = min(self.told, start + tokens.shape[1])
        for row, seq in enumerate(seqs if stop > start else ()):
            own, given = seq.tokens[start:stop], tokens[row, : stop - start]
            wrong = np.flatnonzero(own != given)
            if len(wrong):
                at = int(wrong[0])
                raise InvalidArgumentError(
                    f"{what} token {int(given[at])} at position {start + at} of row {row}, where "
                    f"the cache holds {int(own[at])}: they must be the same input_ids"
                )
