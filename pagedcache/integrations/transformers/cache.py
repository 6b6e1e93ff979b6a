"""``PagedCache``: a cache for ``model.generate`` whose keys and values lie in a shared pool."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from transformers.cache_utils import Cache

from pagedcache.cache import PagedKVCache
from pagedcache.errors import (
    CopyRefusedError,
    FreedHandleError,
    InvalidArgumentError,
    shown,
)
from pagedcache.integrations.transformers.geometry import check_model
from pagedcache.integrations.transformers.hooks import watch
from pagedcache.integrations.transformers.layers import PagedLayer
from pagedcache.integrations.transformers.prompts import Prompt, as_extras, as_ids, as_mask
from pagedcache.integrations.transformers.rows import Rows
from pagedcache.integrations.transformers.streams import stream_of
from pagedcache.sequence import Sequence


class PagedCache(Cache):
    """The cache of one ``generate`` call, or of one conversation, in the pages of ``pool``.

    Any number of them share one ``PagedKVCache`` (made with ``spec_for(model)``), and with it every
    prefix that one of them computed::

        inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
        with PagedCache(pool, inputs.input_ids, inputs.attention_mask, model=model) as past:
            output = model.generate(**inputs, past_key_values=past)   # cache=past from 5.24 on

    ``input_ids`` (``[rows, tokens]``, also lists) and ``attention_mask`` (same shape): the prompts,
    as ``generate`` gets them. The longest prefix that the pool holds of every row is reused:
    ``num_cached_tokens`` says how much, and only the rest is computed, the last token at least.
    Without them it is a drop-in for ``DynamicCache`` that finds nothing.

    ``model``: lets the cache see the tokens of each forward pass (a hook, removed by ``close``), so
    that generated text is reusable too, in the next turn or by others. Without it, tell them
    afterwards: ``record(output)`` or ``close(output)``; until then they stay uncommitted. A pool
    that keeps open blocks commits them as unknown instead: give ``model``. Tokens of unknown value
    are never found by others. With ``model``, layers and tokens are checked as well.

    ``salt`` and ``adapter`` isolate: give other weights, other position ids, or another tenant one
    of their own. ``extra_keys``: for each row a list of ``(start, stop, bytes)`` that names the
    content behind tokens (images). No gradient flows through the cache.

    ``exact_prompts``: tokens of one forward pass of ``block_size`` tokens or more attend to each
    other's keys and values as the model computed them, and to the stored form of all tokens before,
    so that a prompt never reads its own rounding (as in KIVI, and in transformers' quantised
    caches). Smaller passes read everything from the pages. With False every pass does, which is
    what a measurement of a format wants. A format that holds the model's dtype exactly gives the
    same either way.

    A context manager; ``close`` or the collection of the object gives the blocks back (those that
    are cached stay matchable). ``copy.deepcopy`` forks it: no byte is copied.

    Raises ``InvalidArgumentError``, ``ShapeError``, ``OutOfBlocksError`` or
    ``SequenceTooLongError``, with nothing left open.
    """

    def __init__(
        self,
        pool: PagedKVCache,
        input_ids: Any = None,
        attention_mask: Any = None,
        *,
        model: Any = None,
        salt: bytes | str | None = b"",
        adapter: bytes | str | None = None,
        extra_keys: Any = None,
        exact_prompts: bool = True,
    ) -> None:
        if not isinstance(pool, PagedKVCache):
            kind = type(pool).__name__
            raise InvalidArgumentError(f"pool must be a PagedKVCache, got {kind}")
        if not isinstance(exact_prompts, bool):
            raise InvalidArgumentError(
                f"exact_prompts must be True or False, got {shown(exact_prompts)}"
            )
        pool._storage.nbytes  # noqa: B018 - a closed pool, or one without bytes, refuses here
        if model is not None:
            if not hasattr(model, "register_forward_pre_hook"):
                kind = type(model).__name__
                raise InvalidArgumentError(f"model must be the model itself, got {kind}")
            check_model(model, pool.spec)
        ids = None if input_ids is None else as_ids(input_ids)
        if ids is None and (attention_mask is not None or extra_keys is not None):
            raise InvalidArgumentError("attention_mask and extra_keys belong to input_ids")
        mask = None if ids is None else as_mask(attention_mask, ids.shape)
        hold = model is None and getattr(pool.spec, "open_blocks", None) is None
        extras = as_extras(extra_keys, 0 if ids is None else len(ids))
        prompt = Prompt(ids, mask, salt, adapter, extras)
        stream = stream_of(pool)
        rows = Rows(pool, prompt, hold=hold, stream=stream, exact_prompts=exact_prompts)
        self._start(rows, model)

    def _start(self, rows: Rows, model: Any) -> None:
        self._rows, self._model = rows, model
        super().__init__(
            layers=[PagedLayer(rows, index) for index in range(rows.pool.spec.num_layers)]
        )
        hook = None if model is None else watch(model, weakref.ref(rows))
        self._close = weakref.finalize(self, _end, rows, hook)
        self._close.atexit = False

    # ---- life ----------------------------------------------------------------------------

    def close(self, token_ids: Any = None) -> None:
        """Give the blocks back; idempotent. ``token_ids``: as for ``record``, done before."""
        if token_ids is not None and self._close.alive:
            self.record(token_ids)
        self._close()

    @property
    def closed(self) -> bool:
        """Whether ``close()`` was called."""
        return not self._close.alive

    def __enter__(self) -> PagedCache:
        if self.closed:
            raise FreedHandleError("this PagedCache")
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def fork(self) -> PagedCache:
        """A second cache with the same rows and tokens that shares all blocks; no byte moves."""
        rows = self._rows.fork()
        twin = PagedCache.__new__(PagedCache)
        twin._start(rows, self._model)
        return twin

    def __copy__(self) -> PagedCache:
        return self.fork()

    def __deepcopy__(self, memo: Any) -> PagedCache:
        return self.fork()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise CopyRefusedError("PagedCache", "pickled")

    # ---- what it holds -------------------------------------------------------------------

    @property
    def pool(self) -> PagedKVCache:
        """The pool whose blocks it takes."""
        pool: PagedKVCache = self._rows.pool
        return pool

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """The handles of the rows, in order; they may be other ones after each call."""
        return tuple(self._rows.seqs)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of every row that were found in the pool when it was opened."""
        return self._rows.num_cached_tokens

    @property
    def batch_size(self) -> int:
        """Rows; -1 before there are any."""
        return len(self._rows.seqs) or -1

    def record(self, token_ids: Any) -> None:
        """Say which tokens the rows hold, from their start on: ``[rows, n]``, as ``generate``
        returns them. Blocks of them become reusable.

        For caches without ``model``; nothing is left to do with it. Tokens past what was written
        (the last one generated) are left out. Raises ``InvalidArgumentError`` where they are not
        the rows' tokens, where the number of rows is another, or where rows were reordered (beam
        search).
        """
        self._rows.record(as_ids(token_ids, "token_ids"))

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write K and V of new tokens of one layer; see ``PagedLayer.update``.

        Raises ``ShapeError`` for other heads or ``head_dim`` than the pool's, ``DeviceError``,
        ``FormatError``, ``NonFiniteError``, ``OutOfBlocksError`` or ``SequenceTooLongError`` before
        a byte of the layer is written; the rows are then as they were before the forward pass.
        """
        if not 0 <= layer_idx < len(self.layers):
            raise InvalidArgumentError(
                f"the model has a layer {layer_idx}, the pool's spec {len(self.layers)} layers; "
                "make it with spec_for(model)"
            )
        pair: tuple[torch.Tensor, torch.Tensor] = self.layers[layer_idx].update(
            key_states, value_states
        )
        return pair

    def __repr__(self) -> str:
        if self.closed:
            return "<PagedCache: closed>"
        rows = self._rows
        return (
            f"<PagedCache: {len(rows.seqs)} rows of {rows.length} tokens, "
            f"{rows.num_cached_tokens} reused, of {rows.pool!r}>"
        )


def _end(rows: Rows, hook: Any) -> None:
    if hook is not None:
        hook.remove()
    rows.free()
