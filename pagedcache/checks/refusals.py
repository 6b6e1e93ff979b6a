"""Checks of what is refused: the right error, and nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pagedcache.errors import (
    FormatError,
    FreedHandleError,
    InvalidArgumentError,
    InvalidPositionError,
    OutOfBlocksError,
    ShapeError,
    SlotError,
)

from .compare import equal, raises
from .registry import Context
from .stage import Stage


def errors_leave_state(context: Context) -> None:
    """Bad calls raise their typed error and leave tables, counters and bytes as they were."""
    with Stage(context, num_blocks=8) as stage:
        cache, size = stage.cache, stage.block_size
        seq = cache.open(stage.tokens(2 * size + 1))
        k, v = stage.fill(seq)
        gone = cache.open(stage.tokens(1))
        gone.free()
        k1, v1 = (rows[0] for rows in stage.rows(1))
        wide, small = k1.astype(np.float64), k1.astype(np.int8)
        full = cache.block_tables([seq])[0]
        shared_slot = np.array([int(full[0]) * size], np.int64)

        def append(handle: Any, k: Any, v: Any) -> Callable[[], Any]:
            given = stage.given(k), stage.given(v)
            return lambda: handle.append(0, *given)

        def store(slots: Any) -> Callable[[], Any]:
            given = stage.given(k1), stage.given(v1)
            return lambda: cache.store(0, *given, slots)

        cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
            (OutOfBlocksError, "open", lambda: cache.open(stage.tokens(6 * size))),
            (OutOfBlocksError, "prepare", lambda: cache.prepare([seq], [9 * size])),
            (ShapeError, "head_dim", append(seq, k1[:, :, 1:], v1[:, :, 1:])),
            (ShapeError, "rank", append(seq, k1[0, 0], v1[0, 0])),
            (ShapeError, "K and V", append(seq, np.concatenate((k1, k1)), v1)),
            (FormatError, "float64", append(seq, wide, v1)),
            (FormatError, "int8", append(seq, small, v1)),
            (InvalidPositionError, "truncate", lambda: seq.truncate(seq.num_tokens + 1)),
            (InvalidPositionError, "gather", lambda: seq.gather(0, 0, 4 * size)),
            (SlotError, "cached slot", store(shared_slot)),
            (SlotError, "slot range", store(np.array([8 * size]))),
            (FreedHandleError, "freed", append(gone, k1, v1)),
            (InvalidArgumentError, "token", lambda: cache.open([2**32])),
        ]
        before = _state(stage, seq)
        for error, what, call in cases:
            raises(error, call, what)
            equal(_state(stage, seq), before, f"state after {what} was refused")
        stage.expect(seq, k, v)
        seq.free()
        stage.unused()


def _state(stage: Stage, seq: Any) -> tuple[Any, ...]:
    stage.whole()
    stats = stage.cache.stats()
    return (
        seq.seq_len,
        seq.num_tokens,
        seq.block_table.tolist(),
        stage.cache.num_free_blocks,
        stage.cache.num_cached_blocks,
        stats.blocks_used,
        stats.blocks_allocated,
        stats.sequences_active,
        [part.tobytes() for layer in range(stage.num_layers) for part in stage.gather(seq, layer)],
    )
