"""Attention over the pages of a cache: the door of ``PagedKVCache.attend``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedcache.arguments import as_count, as_flag, as_integer, as_layer
from pagedcache.arrays import as_amounts
from pagedcache.errors import InvalidArgumentError, InvalidPositionError, shown
from pagedcache.sequence import Sequence, listed, states_of
from pagedcache.storage.attention import AttentionBatch, AttentionOptions

if TYPE_CHECKING:
    from pagedcache.door import Door
    from pagedcache.spec import CacheSpec

Array = np.ndarray[Any, Any]

_LIMIT = 2**63
_MOST, _LEAST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)


class Attention:
    """Mixin of ``PagedKVCache``: attention of queries to what sequences store."""

    spec: CacheSpec
    _ledger: Any
    _storage: Any
    _door: Door | None
    _queue: Any
    _only_ours: Any

    def attend(
        self,
        layer: int,
        q: Any,
        seqs: Sequence | Iterable[Sequence],
        *,
        q_lens: Any = None,
        lengths: Any = None,
        starts: Any = None,
        scale: float | None = None,
        causal: bool = True,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Any = None,
        out: Any = None,
        return_lse: bool = False,
        stream: Any = None,
    ) -> Any:
        """Attention of queries to the keys and values of one layer, read from the pages.

        Per query head ``softmax(scale * q · k) · v``, with K and V as they are stored: in any
        format, in sealed and in open blocks, without gathering them and without a dequantised
        copy. Sums and softmax are float32, and online over the keys. Decoding, chunked prefill
        and both in one batch are the same call.

        ``q``: ``[total_q, num_q_heads, head_dim]`` (or ``[total_q, num_q_heads * head_dim]``) of
        float32, float16 or bfloat16, any strides: the queries of all sequences, one after the
        other. ``num_q_heads`` is a multiple of ``num_kv_heads``; query head h reads KV head
        ``h // (num_q_heads // num_kv_heads)``.
        ``seqs``: one ``Sequence`` or several; one may come more than once.
        ``q_lens``: queries of each, which are its last positions, ``length - q_len … length - 1``.
        By default one each, or all of them for a single sequence.
        ``lengths``: keys of each, from position 0 on; by default the layer's written end. Where
        tokens were prepared for ``store`` and are not committed yet, nobody but you knows how many
        are written, and lengths must be given; beside an ``append`` in another thread too.
        ``starts``: first position of each that exists (behind left padding); by default 0.
        ``scale``: by default ``1 / sqrt(head_dim)``. ``causal``: a query sees keys up to its own
        position only. ``window``: and only those with ``position - key < window``.
        ``soft_cap``: scores become ``soft_cap * tanh(score / soft_cap)``.
        ``sinks``: ``[num_q_heads]``, one more score per head that takes part in the softmax and
        has no value.

        Returns an array of q's shape and dtype: ``out`` if it was given (of that shape and dtype,
        apart from ``q`` and the cache's memory), a torch tensor where ``q`` is one, a NumPy array,
        or on a GPU a ``DeviceArray``. With ``return_lse`` a pair of it and the log-sum-exp of the
        scores, sinks included, natural, float32 ``[total_q, num_q_heads]``. A query that sees no
        key gives zeros, and -inf (or its sink).

        On the CPU up to ``pagedcache.get_num_threads()`` threads share the work, of one sequence
        too; neither their number nor the rest of the batch changes a bit of a result. The GIL is
        released. On a GPU the work is queued on ``stream``.

        Raises, before anything is written, ``ShapeError``, ``FormatError`` (also with
        ``storage=None``), ``DeviceError``, ``InvalidArgumentError`` (a sequence of another cache,
        counts that do not match, a scale that is not finite, a window below 1, …),
        ``InvalidPositionError`` (a length past what is there, more queries than keys),
        ``FreedHandleError`` or ``StorageMemoryError``.
        """
        door = self._door
        if door is not None and starts is None and sinks is None:
            if return_lse is False and stream is None:
                result = door.attend(
                    self, layer, q, seqs, q_lens, lengths, out, scale, causal, window, soft_cap
                )
                if result is not None:
                    return result
        storage = self._storage
        storage.nbytes  # noqa: B018 - a cache without bytes refuses here, before anything else
        queue = self._queue(stream)
        layer = as_layer(layer, self.spec.num_layers)
        one = isinstance(seqs, Sequence)
        batch = [seqs] if one else listed(seqs)
        states = states_of(batch)
        self._only_ours(batch)
        options = self._options(scale, causal, window, soft_cap)
        wants_lse = as_flag(return_lse, "return_lse")
        arrays = storage.attention_arrays(layer, q, out, sinks, wants_lse, queue)
        counts = _q_lens(q_lens, len(arrays.q), len(states))
        ledger = self._ledger
        given = None if lengths is None else _lengths(lengths, states, layer)
        ends = ledger.read_ends(states, given, counts, layer)
        firsts = _starts(starts, ends)
        pin, indptr = ledger.pin_reads(states, ends, layer)
        with pin:
            table = AttentionBatch(pin.places, indptr, ends, counts, firsts)
            storage.attend(layer, arrays, table, options, queue)
        return (arrays.result, arrays.result_lse) if wants_lse else arrays.result

    def _options(
        self, scale: Any, causal: Any, window: Any, soft_cap: Any
    ) -> AttentionOptions:
        return AttentionOptions(
            1 / math.sqrt(self.spec.head_dim) if scale is None else _number(scale, "scale"),
            as_flag(causal, "causal"),
            None if window is None else as_count(window, "window", least=1),
            None if soft_cap is None else _above_zero(soft_cap, "soft_cap"),
        )


def _number(value: Any, name: str) -> float:
    """A number that is finite as a float32."""
    if not isinstance(value, (bool, str, bytes)):
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            pass
        else:
            if abs(number) <= _MOST:
                return number
    raise InvalidArgumentError(f"{name} must be a number finite in float32, got {shown(value)}")


def _above_zero(value: Any, name: str) -> float:
    number = _number(value, name)
    if number < _LEAST:
        raise InvalidArgumentError(f"{name} must be above 0, got {shown(value)}")
    return number


def _amounts(values: Any, name: str, num_seqs: int) -> list[int]:
    numbers = [as_integer(value, name) for value in as_amounts(values, name)]
    if len(numbers) != num_seqs:
        raise InvalidArgumentError(
            f"{name}: expected one per sequence ({num_seqs}), got {len(numbers)}"
        )
    return numbers


def _q_lens(q_lens: Any, total: int, num_seqs: int) -> Array:
    if q_lens is None:
        if num_seqs == 1:
            return np.array((total,), np.int64)
        if total == num_seqs:
            return np.ones(num_seqs, np.int64)
        raise InvalidArgumentError(
            f"q has {total} queries for {num_seqs} sequences: give q_lens, how many are whose"
        )
    counts = _amounts(q_lens, "q_lens", num_seqs)
    for i, count in enumerate(counts):
        if count < 0:
            raise InvalidArgumentError(f"q_lens[{i}] must not be negative, got {count}")
    if sum(counts) != total:
        raise InvalidArgumentError(f"q_lens add up to {sum(counts)}, but q has {total} queries")
    return np.array(counts, np.int64)


def _lengths(lengths: Any, states: list[Any], layer: int) -> Array:
    ends = _amounts(lengths, "lengths", len(states))
    try:
        return np.array(ends, np.int64)
    except OverflowError:
        i = next(i for i, end in enumerate(ends) if not -_LIMIT <= end < _LIMIT)
        raise InvalidPositionError(
            ends[i],
            int(states[i].readable(layer)),
            f"lengths[{i}]: only what was written can be attended to",
        ) from None


def _starts(starts: Any, ends: Array) -> Array:
    if starts is None:
        return np.zeros(len(ends), np.int64)
    firsts = _amounts(starts, "starts", len(ends))
    for i, (first, end) in enumerate(zip(firsts, ends.tolist(), strict=True)):
        if not 0 <= first <= end:
            raise InvalidPositionError(first, end, f"starts[{i}]")
    return np.array(firsts, np.int64)
