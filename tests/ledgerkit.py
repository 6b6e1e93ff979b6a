"""A ledger whose bytes are numbers of a NumPy array, one per slot of every place."""

from __future__ import annotations

import numpy as np

from pagedcache import PagedCacheError
from pagedcache.bookkeeping import Ledger


class Places:
    """One number per slot of every place. Where there are open slots, other places take whole
    blocks only."""

    def __init__(self, num_blocks: int, block_size: int, num_open: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.whole = num_blocks if num_open else 0
        self.rows = np.full((num_blocks + num_open, block_size), -1)
        self.fail = False
        self.copies: list[tuple[int, int, int]] = []

    def copy(self, src, dst, rows) -> None:
        if self.fail:
            raise PagedCacheError("no bytes move today")
        for a, b, n in zip(src.tolist(), dst.tolist(), rows.tolist(), strict=True):
            assert b >= self.whole or n == self.block_size, "a sealed block takes whole blocks"
            self.rows[b, :n] = self.rows[a, :n]
            self.copies.append((a, b, n))

    def move(self, moves) -> None:
        spare = None
        for a, b in moves.tolist():
            row = spare if a == -1 else self.rows[a].copy()
            if b == -1:
                spare = row
            else:
                self.rows[b] = row

    def store(self, slots, values) -> None:
        size = self.block_size
        sealed = slots[slots < self.whole * size]
        for start in range(0, len(sealed), size):  # whole blocks, in order
            run = sealed[start : start + size]
            assert len(run) == size and run[0] % size == 0 and (np.diff(run) == 1).all()
        self.rows.reshape(-1)[slots] = values


class Kit:
    def __init__(self, num_blocks=32, block_size=4, num_open=8, **options) -> None:
        self.places = Places(num_blocks, block_size, num_open)
        self.ledger = Ledger(
            num_blocks, block_size, num_open=num_open, mover=self.places.copy,
            move_mover=self.places.move, **options,
        )
        self.block_size = block_size

    def open(self, tokens=(), **options):
        return self.ledger.open(np.asarray(tokens, np.uint32), b"", [], **options)

    def write(self, seq, values, commit=True, name=True) -> None:
        values = np.asarray(values)
        mapping = self.ledger.prepare([seq], [len(values)])
        with self.ledger.pin_mapping(mapping) as pin:
            self.places.store(pin.slots, values)
        if name:
            more = values[seq.num_known - seq.seq_len :] if seq.num_known >= seq.seq_len else []
            if len(more):
                self.ledger.append_tokens(seq, np.asarray(more, np.uint32))
        if commit:
            self.ledger.commit(seq, len(values))

    def read(self, seq, stop=None):
        stop = seq.seq_len if stop is None else stop
        with self.ledger.pin_range(seq, 0, stop) as pin:
            return self.places.rows[pin.places].reshape(-1)[:stop].tolist()

    def counts(self) -> dict[str, int]:
        """All figures but the work that was done."""
        return {k: n for k, n in self.ledger.stats().items() if k != "steps"}

    def is_open(self, seq) -> list[bool]:
        return (seq.places() >= self.places.num_blocks).tolist()
