"""Many prompts in one call: what a scheduler does with its waiting queue."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from pagedcache.arguments import as_count, as_flag
from pagedcache.arrays import as_tokens
from pagedcache.errors import InvalidArgumentError
from pagedcache.hashing import encode_root, validate_extra_keys
from pagedcache.sequence import Sequence

if TYPE_CHECKING:
    from pagedcache.handles import Handles


class BatchAdmission:
    """Mixin of ``PagedKVCache``: ``open`` for many prompts."""

    _handles: Handles
    _hand_over: Any
    _ledger: Any
    _movers: Any
    _queue: Any

    def open_many(
        self,
        prompts: Iterable[Any],
        salt: Any = b"",
        *,
        extra_keys: Any = None,
        adapter: Any = None,
        request_ids: Any = None,
        resumed: Any = False,
        allocate_upto: Any = None,
        as_many_as_fit: bool = False,
        stream: Any = None,
    ) -> list[Sequence]:
        """Open many prompts in one step, all or nothing; the handles, in the order of the prompts.

        ``prompts``: token arrays as ``open`` takes them. ``salt``, ``adapter``, ``resumed`` and
        ``allocate_upto``: one for all, or a list or tuple with one per prompt. ``extra_keys`` and
        ``request_ids``: a list with one per prompt (a list of keys each; None for no id).

        All prompts are matched against what is cached before the call, so they do not hit each
        other, and what one of them hits is not evicted for another. Where they do not all fit,
        ``OutOfBlocksError`` says how many blocks the prompts up to the first that does not fit
        would take, and nothing has changed.

        ``as_many_as_fit``: open the first of them, up to the one that does not fit, and return
        only those; the others are as if they had never been named. The error is raised only if
        even the first does not fit. So a scheduler hands over its queue, in the order of its
        policy, and goes on with what it gets.

        Other errors as for ``open``, whichever prompt they are about, with nothing changed.
        """
        items = _listed(prompts, "prompts")
        count = len(items)
        tokens = [as_tokens(item, f"prompts[{i}]") for i, item in enumerate(items)]
        salts, adapters = _spread(salt, count, "salt"), _spread(adapter, count, "adapter")
        roots = [encode_root(*pair) for pair in zip(salts, adapters, strict=True)]
        keys = [
            validate_extra_keys(() if each is None else each)
            for each in _per_prompt(extra_keys, count, "extra_keys")
        ]
        upto = [
            -1 if n is None else as_count(n, "allocate_upto")
            for n in _spread(allocate_upto, count, "allocate_upto")
        ]
        flags = [as_flag(flag, "resumed") for flag in _spread(resumed, count, "resumed")]
        ids = _per_prompt(request_ids, count, "request_ids")
        fitting = as_flag(as_many_as_fit, "as_many_as_fit")
        queue = self._queue(stream)
        ledger, run = self._ledger, self._movers.run
        plans = list(zip(tokens, roots, keys, upto, flags, strict=True))
        seqs = self._register(ids, lambda: run(queue, ledger.open_many, plans, fitting))
        if queue is not None:
            self._hand_over_all(seqs, queue)
        return seqs

    def _register(self, ids: list[Any], make: Callable[[], list[Any]]) -> list[Sequence]:
        """Handles of the states that ``make()`` returns, under the request ids that are not None:
        none of them is live, and none is named twice."""
        handles, claimed, seqs = self._handles, 0, list[Sequence]()
        try:
            for request_id in ids:
                if request_id is not None:
                    handles.claim(request_id)
                claimed += 1
            for state, request_id in zip(make(), ids, strict=False):
                seq = Sequence(self, state, request_id)  # type: ignore[arg-type]
                handles.add(seq)
                seqs.append(seq)
        finally:
            for request_id in ids[len(seqs) : claimed]:
                if request_id is not None:
                    handles.unclaim(request_id)
        return seqs

    def _hand_over_all(self, seqs: list[Sequence], queue: Any) -> None:
        try:
            for seq in seqs:
                self._hand_over(seq, queue)
        except BaseException:
            for seq in seqs:
                seq.free()
            raise


def _listed(values: Any, name: str) -> list[Any]:
    if not isinstance(values, (str, bytes, dict)):
        try:
            return list(values)
        except (TypeError, ValueError, RuntimeError, OverflowError, MemoryError):
            pass
    kind = type(values).__name__
    raise InvalidArgumentError(f"{name}: expected a list with one per prompt, got {kind}")


def _per_prompt(values: Any, count: int, name: str) -> list[Any]:
    """A list with one value per prompt; None stands for as many of it."""
    if values is None:
        return [None] * count
    each = _listed(values, name)
    if len(each) != count:
        raise InvalidArgumentError(f"{name}: expected one per prompt ({count}), got {len(each)}")
    return each


def _spread(value: Any, count: int, name: str) -> list[Any]:
    """One value for all prompts, or a list or tuple with one each."""
    if isinstance(value, (list, tuple)):
        return _per_prompt(value, count, name)
    return [value] * count
